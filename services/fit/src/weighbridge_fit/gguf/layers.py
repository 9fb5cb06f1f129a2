"""Which layers of a GGUF model keep what, by architecture.

The rules are llama.cpp's (`load_hparams` of each architecture, November 2026): where a file leaves a pattern out, the
loader's own holds. Each function fills layers and measures in; None where the file does not say what they need.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from weighbridge_fit.config.attention import FULL, SLIDING, Pattern, grouped
from weighbridge_fit.config.recurrent import state_space_1, state_space_2
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.gguf.metadata import Metadata

Reader = Callable[[Metadata, ModelGeometry, int], ModelGeometry | None]

NOTHING = LayerMeasure()
# qwen35, qwen3next: layer i is full attention iff (i + 1) % interval == 0, where the file does not say.
DEFAULT_FULL_ATTENTION_INTERVAL = 4
DEFAULT_TOKEN_SHIFTS = 2


def attention(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """Full attention in every layer that has key and value heads."""
    heads = _kv_heads(data, base, count)
    if not any(heads):
        return None
    layers = tuple(FULL if kv else LayerKind.MEMORYLESS for kv in heads)
    if len(set(heads)) == 1:
        return replace(base, layers=layers, kv_heads=heads[0])
    return replace(base, layers=layers, measures=tuple(_with_heads(base, kv) for kv in heads))


def windows(
    data: Metadata, base: ModelGeometry, count: int, group: int, pattern: Pattern = Pattern.LAST_OF_GROUP
) -> ModelGeometry | None:
    """Sliding layers among full ones: as the file's pattern says, else one full layer in each group."""
    made = attention(data, base, count)
    window = data.size("attention.sliding_window")
    if made is None or not window:
        return made
    sliding = data.flags("attention.sliding_window_pattern", count)
    if sliding:
        layers = tuple(SLIDING if local else FULL for local in sliding)
    else:
        # Newer files give the group's length instead of a flag for each layer.
        single = data.value("attention.sliding_window_pattern")
        layers = grouped(count, single if type(single) is int and single > 0 else group, pattern)
    kinds = tuple(local if kind is FULL else kind for local, kind in zip(layers, made.layers, strict=True))
    return replace(made, layers=kinds, sliding_window_tokens=window)


def chunks(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """Llama 4: three layers in four attend within chunks of 8,192 tokens."""
    made = attention(data, base, count)
    if made is None:
        return None
    chunk = data.size("attention.chunk_size", 8192)
    return replace(made, layers=grouped(count, 4), sliding_window_tokens=chunk)


def shared_windows(data: Metadata, base: ModelGeometry, count: int, group: int, held: int = 0) -> ModelGeometry | None:
    """Gemma 3n and 4: the last layers read others' keys and values, and sliding layers have widths of their own.

    `held`: layers that hold a cache where the file does not say.
    """
    made = windows(data, base, count, group)
    if made is None:
        return None
    shared = data.size("attention.shared_kv_layers")
    kept = count - shared if shared else min(held or count, count)
    if kept < 1:
        return None
    layers = made.layers[:kept] + (LayerKind.SHARED,) * (count - kept)
    local_key = data.size("attention.key_length_swa", base.head_size)
    local_value = data.size("attention.value_length_swa", local_key)
    heads = _kv_heads(data, base, count)
    if not heads:
        return None
    measures = tuple(
        LayerMeasure(kv, local_key, local_value)
        if kind is SLIDING
        else LayerMeasure(kv, base.head_size, base.value_head_size or base.head_size)
        if kind is FULL
        else NOTHING
        for kind, kv in zip(layers, heads, strict=True)
    )
    return replace(made, layers=layers, measures=measures)


def latent(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """DeepSeek, Kimi K2, GLM: latent rows. Files of before April 2025 lack the sizes that this needs, and llama.cpp
    holds unpacked keys and values for them."""
    rank = data.size("attention.kv_lora_rank")
    if not rank:
        return attention(data, base, count)
    unpacked = data.size("attention.key_length_mla")
    if not unpacked:
        return attention(data, base, count)
    rope = data.size("rope.dimension_count") or max(0, data.size("attention.key_length") - rank)
    if not rope:
        return None
    return replace(
        base,
        layers=(LayerKind.LATENT_ATTENTION,) * count,
        kv_heads=base.attention_heads,
        head_size=unpacked,
        value_head_size=data.size("attention.value_length_mla"),
        latent_rank=rank,
        latent_rope_size=rope,
        indexer_key_size=data.size("attention.indexer.key_length"),
    )


def compressed(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """DeepSeek V4: a window of raw rows that are key and value at once; the compressed rows are a law of ds4."""
    window = data.size("attention.sliding_window")
    if not window:
        return None
    row = LayerMeasure(kv_heads=1, key_size=base.head_size, value_size=0)
    key = data.size("attention.indexer.key_length")
    layers = (SLIDING,) * count
    return replace(base, layers=layers, measures=(row,) * count, sliding_window_tokens=window, indexer_key_size=key)


def gated_delta(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """Qwen 3.5 and Next: full attention in one layer of each interval."""
    heads, inner = data.size("ssm.time_step_rank"), data.size("ssm.inner_size")
    groups, state = data.size("ssm.group_count"), data.size("ssm.state_size")
    if not (heads and inner and groups and state) or inner % heads:
        return None
    interval = data.size("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
    layers = tuple(FULL if (index + 1) % interval == 0 else LayerKind.GATED_DELTA for index in range(count))
    kv = [heads for heads in data.sizes("attention.head_count_kv") if heads]
    return replace(
        base,
        layers=layers,
        kv_heads=kv[0] if kv else base.kv_heads,
        delta_key_heads=groups,
        delta_value_heads=heads,
        delta_key_size=state,
        delta_value_size=inner // heads,
        delta_conv_width=data.size("ssm.conv_kernel", 4),
    )


def state_space(
    data: Metadata, base: ModelGeometry, count: int, beside: LayerKind | None = None
) -> ModelGeometry | None:
    """Mamba, and its hybrids: layers without key and value heads are recurrent, unless they are feed-forward alone.

    `beside`: attention stands in the same layer (Falcon-H1).
    """
    inner, state, width = data.size("ssm.inner_size"), data.size("ssm.state_size"), data.size("ssm.conv_kernel")
    if not (inner and state and width):
        return None
    groups = data.size("ssm.group_count")
    mamba = state_space_2(inner, groups, state, width) if groups else state_space_1(inner, state, width)
    if beside is not None:
        return replace(base, layers=(beside,) * count, measures=(mamba,) * count)
    heads = _kv_heads(data, base, count)
    if not heads:
        return None
    forward = data.value("feed_forward_length")
    widths = data.per_layer("feed_forward_length", count) if isinstance(forward, list) else ()
    layers = []
    for index, kv in enumerate(heads):
        alone = bool(widths) and widths[index] > 0 and len(set(widths)) > 1
        layers.append(FULL if kv else LayerKind.MEMORYLESS if alone else LayerKind.STATE_SPACE)
    measures = tuple(
        mamba if kind is LayerKind.STATE_SPACE else _with_heads(base, kv) if kind is FULL else NOTHING
        for kind, kv in zip(layers, heads, strict=True)
    )
    return replace(base, layers=tuple(layers), measures=measures)


def short_convolution(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """LFM2: layers without key and value heads are short convolutions."""
    heads, kept = data.per_layer("attention.head_count_kv", count), data.size("shortconv.l_cache")
    if not heads or not kept:
        return None
    convolution = LayerMeasure(convolution_elements=(kept - 1) * base.hidden_size)
    layers = tuple(FULL if kv else LayerKind.SHORT_CONVOLUTION for kv in heads)
    measures = tuple(_with_heads(base, kv) if kv else convolution for kv in heads)
    return replace(base, layers=layers, measures=measures)


def kimi_linear(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """Kimi Linear: latent attention where there are key and value heads, gated-delta layers elsewhere."""
    heads, size = data.per_layer("attention.head_count_kv", count), data.size("kda.head_dim")
    rows = latent(data, base, count)
    if not heads or not size or rows is None or LayerKind.LATENT_ATTENTION not in rows.layers:
        return None
    inner = base.attention_heads * size
    kept = 3 * max(0, data.size("ssm.conv_kernel", 4) - 1) * inner
    delta = LayerMeasure(state_elements=inner * size, convolution_elements=kept)
    layers = tuple(LayerKind.LATENT_ATTENTION if kv else LayerKind.GATED_DELTA for kv in heads)
    return replace(rows, layers=layers, measures=tuple(NOTHING if kv else delta for kv in heads))


def rwkv(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """RWKV 6 and 7: one matrix for each head, and the last inputs of its token shifts."""
    head = data.size("wkv.head_size")
    if not head:
        return None
    shifts = data.size("token_shift_count", DEFAULT_TOKEN_SHIFTS)
    measure = LayerMeasure(state_elements=base.hidden_size * head, convolution_elements=shifts * base.hidden_size)
    return replace(base, layers=(LayerKind.LINEAR_ATTENTION,) * count, measures=(measure,) * count)


def encoder(data: Metadata, base: ModelGeometry, count: int) -> ModelGeometry | None:
    """Embedding and ranking models: llama.cpp makes no memory for them."""
    return replace(base, layers=(LayerKind.MEMORYLESS,) * count)


def _kv_heads(data: Metadata, base: ModelGeometry, count: int) -> tuple[int, ...]:
    """Key and value heads of each layer, as many as query heads where the file does not say. Empty for an array that is
    not one number for each layer: llama.cpp refuses such a file, and what its layers keep is not known."""
    heads = data.per_layer("attention.head_count_kv", count)
    if heads or isinstance(data.value("attention.head_count_kv"), list):
        return heads
    return (base.kv_heads,) * count


def _with_heads(base: ModelGeometry, kv_heads: int) -> LayerMeasure:
    """A layer with its own number of key and value heads."""
    return LayerMeasure(kv_heads, base.head_size, base.value_head_size or base.head_size) if kv_heads else NOTHING


_PLAIN = (
    *("apertus", "arcee", "arctic", "baichuan", "bailingmoe", "bailingmoe2", "bitnet", "bloom", "chameleon", "chatglm"),
    *("codeshell", "command-r", "dbrx", "deci", "deepseek", "dots1", "ernie4_5", "ernie4_5-moe", "exaone", "falcon"),
    *("gemma", "glm4", "glm4moe", "gpt2", "gptj", "gptneox", "granite", "granitemoe", "grok", "grovemoe"),
    *("hunyuan-dense", "hunyuan-moe", "internlm2", "jais", "llama", "maincoder", "minicpm", "minimax-m2", "mistral3"),
    *("mpt", "nemotron", "olmo", "olmoe", "openelm", "orion", "pangu-embedded", "phi2", "phi3", "phimoe", "plamo"),
    *("qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "refact", "seed_oss"),
    *("smollm3", "stablelm", "starcoder", "starcoder2", "xverse"),
)
_ENCODERS = (
    *("bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe"),
    *("llama-embed", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5encoder"),
)

READERS: dict[str, Reader] = {
    **dict.fromkeys(_PLAIN, attention),
    **dict.fromkeys(_ENCODERS, encoder),
    **dict.fromkeys(("deepseek2", "deepseek2-ocr", "deepseek32", "glm-dsa", "minicpm3", "mistral4", "plm"), latent),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), gated_delta),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid"), state_space),
    **dict.fromkeys(("rwkv6", "rwkv7"), rwkv),
    **dict.fromkeys(("lfm2", "lfm2moe"), short_convolution),
    "falcon-h1": partial(state_space, beside=FULL),
    "kimi-linear": kimi_linear,
    "deepseek4": compressed,
    "gemma2": partial(windows, group=2),
    "gemma3": partial(windows, group=6),
    "gemma3n": partial(shared_windows, group=5, held=20),
    "gemma4": partial(shared_windows, group=6),
    "gpt-oss": partial(windows, group=2),
    "cohere2": partial(windows, group=4),
    "olmo2": partial(windows, group=4),
    "exaone4": partial(windows, group=4),
    "exaone-moe": partial(windows, group=4),
    "afmoe": partial(windows, group=4),
    "smallthinker": partial(windows, group=4, pattern=Pattern.FIRST_OF_GROUP),
    "llama4": chunks,
    "mimo2": partial(shared_windows, group=6),
    "step35": partial(shared_windows, group=4),
}
"""By general.architecture."""
