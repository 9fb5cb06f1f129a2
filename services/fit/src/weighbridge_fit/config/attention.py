"""Which layers attend to what, by architecture: full, sliding and shared layers, latent rows, encoders.

Where a config leaves a field out, its architecture's own default holds (transformers 5.24). Layer names, where a config
gives them, go before any pattern.
"""

from dataclasses import replace
from enum import Enum

from weighbridge_fit.config.fields import Fields, Unsaid, invalid
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry

FULL, SLIDING = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": SLIDING,
    "sliding": SLIDING,
    "local": SLIDING,
}


class Pattern(Enum):
    """Where full layers stand among sliding ones."""

    LAST_OF_GROUP = "last of each group"
    FIRST_OF_GROUP = "first of each group"


def named_layers(fields: Fields, count: int, name: str = "layer_types") -> tuple[LayerKind, ...] | None:
    """Kinds as the config names them, None where it names none. Raises CONFIG_INVALID."""
    names = fields.names(name)
    if names is None:
        return None
    if len(names) != count:
        raise invalid(name, f"must name {count} layers", names)
    unknown = [given for given in names if given not in _KINDS]
    if unknown:
        raise invalid(name, "names a kind of layer that is not known", unknown[0])
    return tuple(_KINDS[given] for given in names)


def grouped(count: int, group: int, pattern: Pattern = Pattern.LAST_OF_GROUP) -> tuple[LayerKind, ...]:
    """One full layer in each group, the others sliding."""
    place = 0 if pattern is Pattern.FIRST_OF_GROUP else group - 1
    return tuple(FULL if index % group == place else SLIDING for index in range(count))


def uniform(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Every layer alike, unless the config names layers.

    A window that every layer has (mistral, phi3, starcoder2) bounds nothing: mlx-lm, llama.cpp and vLLM hold the whole
    context of these models.
    """
    count = fields.layer_count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = named_layers(fields, count) or (FULL,) * count
    return windowed(fields, base, layers)


def windowed(fields: Fields, base: ModelGeometry, layers: tuple[LayerKind, ...]) -> ModelGeometry:
    """With the window of its sliding layers; without one they hold the whole context."""
    if SLIDING not in layers:
        return replace(base, layers=layers)
    window = fields.optional("sliding_window", "attention_chunk_size", "sliding_window_size", "window_size")
    if not window:
        layers = tuple(FULL if kind is SLIDING else kind for kind in layers)
    return replace(base, layers=layers, sliding_window_tokens=window)


def alternating(fields: Fields, base: ModelGeometry, group: int) -> ModelGeometry:
    """One full layer in each group of sliding ones: gemma, gpt-oss, command-a, olmo 3, exaone 4, llama 4."""
    count = fields.layer_count()
    layers = named_layers(fields, count)
    if layers is None:
        layers = grouped(count, fields.optional("sliding_window_pattern", "_sliding_window_pattern") or group)
    return windowed(fields, base, layers)


def gemma(fields: Fields, base: ModelGeometry, group: int) -> ModelGeometry:
    """Gemma 2 and 3. A model that reads in both directions is an encoder: it remembers nothing between calls."""
    if fields.has("use_bidirectional_attention") and fields.flag("use_bidirectional_attention"):
        return encoder(fields, base)
    return alternating(fields, base, group)


def sharing(fields: Fields, base: ModelGeometry, group: int, shared: int) -> ModelGeometry:
    """Gemma 3n: the last layers read the keys and values of the last layer of their kind before them."""
    made = alternating(fields, base, group)
    kept = len(made.layers) - fields.size("num_kv_shared_layers", shared)
    if kept < 1:
        raise invalid("num_kv_shared_layers", f"must be below {len(made.layers)}", len(made.layers) - kept)
    return replace(made, layers=made.layers[:kept] + (LayerKind.SHARED,) * (len(made.layers) - kept))


def gemma4(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Gemma 4: full layers have wider and fewer heads, and the last layers may share.

    `attention_k_eq_v` drops the projection of values, not the values: keys are rotated and values are not, so caches
    hold both (mlx-lm 0.32, gemma4_text).
    """
    count = fields.layer_count()
    layers = list(named_layers(fields, count) or grouped(count, 6))
    layers[-1] = FULL
    wide = fields.size("global_head_dim", base.head_size) or base.head_size
    wide_heads = base.kv_heads
    if fields.flag("attention_k_eq_v"):
        wide_heads = fields.optional("num_global_key_value_heads") or base.kv_heads
    kept = count - fields.size("num_kv_shared_layers", 0)
    if kept < 1:
        raise invalid("num_kv_shared_layers", f"must be below {count}", count - kept)
    full = LayerMeasure(kv_heads=wide_heads, key_size=wide, value_size=wide)
    local = LayerMeasure(kv_heads=base.kv_heads, key_size=base.head_size, value_size=base.head_size)
    kinds = tuple(kind if index < kept else LayerKind.SHARED for index, kind in enumerate(layers))
    measures = tuple(full if kind is FULL else local if kind is SLIDING else LayerMeasure() for kind in kinds)
    return replace(base, layers=kinds, measures=measures, sliding_window_tokens=fields.first("sliding_window"))


def llama4(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Llama 4: three layers in four attend within chunks."""
    count = fields.layer_count()
    named = named_layers(fields, count)
    return windowed(fields, base, named or grouped(count, 4))


def mimo(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """MiMo V2: sliding layers have head counts and widths of their own."""
    count = fields.layer_count()
    pattern = fields.sizes("hybrid_layer_pattern")
    if pattern is None or len(pattern) != count:
        raise Unsaid
    layers = tuple(SLIDING if sliding else FULL for sliding in pattern)
    key, value = fields.first("head_dim"), fields.first("v_head_dim")
    full = LayerMeasure(kv_heads=base.kv_heads, key_size=key, value_size=value)
    local = LayerMeasure(
        kv_heads=fields.first("swa_num_key_value_heads"),
        key_size=fields.first("swa_head_dim"),
        value_size=fields.first("swa_v_head_dim"),
    )
    measures = tuple(local if kind is SLIDING else full for kind in layers)
    window = fields.first("sliding_window_size", "sliding_window")
    return replace(base, layers=layers, measures=measures, sliding_window_tokens=window, value_head_size=value)


def latent(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash and 5, Mistral 4, MiniCPM 3.

    Head sizes are those of unpacked keys and values, which some engines hold instead. Layers of the draft head come on
    top of `num_hidden_layers` in all of these.
    """
    return latent_rows(fields, base, fields.layer_count())


def latent_rows(fields: Fields, base: ModelGeometry, count: int) -> ModelGeometry:
    """So many layers of latent attention."""
    return replace(
        base,
        layers=(LayerKind.LATENT_ATTENTION,) * count,
        kv_heads=base.attention_heads,
        head_size=fields.first("qk_nope_head_dim") + fields.first("qk_rope_head_dim"),
        value_head_size=fields.optional("v_head_dim") or base.hidden_size // max(1, base.attention_heads),
        latent_rank=fields.first("kv_lora_rank"),
        latent_rope_size=fields.first("qk_rope_head_dim"),
    )


def indexed(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Sparse latent attention (DeepSeek V3.2, GLM 5): an indexer chooses what is attended to, by keys of its own."""
    return replace(latent(fields, base), indexer_key_size=fields.first("index_head_dim"))


def twice_latent(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """LongCat Flash: each of `num_layers` attends twice, which transformers' `num_hidden_layers` counts."""
    count = 2 * fields.layer_count("num_layers") if fields.has("num_layers") else fields.layer_count()
    return latent_rows(fields, base, count)


def compressed(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """DeepSeek V4: a window of raw rows that are key and value at once. What its compressed rows take is a law of the
    engine that runs it, and not in here."""
    count = fields.layer_count()
    row = LayerMeasure(kv_heads=1, key_size=base.head_size, value_size=0)
    return replace(
        base,
        layers=(SLIDING,) * count,
        measures=(row,) * count,
        sliding_window_tokens=fields.first("sliding_window"),
        indexer_key_size=fields.optional("index_head_dim"),
    )


def encoder(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Embedding and ranking models: every token at once, nothing kept."""
    count = fields.layer_count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    return replace(base, layers=(LayerKind.MEMORYLESS,) * count)


def transcriber(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Whisper: each decoder layer attends to its own past and to the encoder's frames. Two layers for each, because
    they remember apart."""
    heads = fields.first("decoder_attention_heads")
    size = base.hidden_size // heads
    cross = LayerMeasure(
        kv_heads=heads, key_size=size, value_size=size, window_tokens=fields.first("max_source_positions")
    )
    count = fields.layer_count("decoder_layers")
    return replace(
        base,
        attention_heads=heads,
        kv_heads=heads,
        head_size=size,
        layers=(FULL, LayerKind.CROSS_ATTENTION) * count,
        measures=(LayerMeasure(), cross) * count,
        max_context_tokens=fields.optional("max_target_positions"),
    )
