"""Layers that keep a state of constant size instead of, or beside, keys and values.

Sizes are elements for each sequence: a state-space layer keeps heads x head size x state size and the last (width - 1)
inputs of its convolution over the inner width and the groups' B and C (Mamba 2; Mamba 1 convolves the inner width
alone). Sources: the cache classes of transformers 5.24 and mlx-lm 0.32.2, which agree.
"""

from dataclasses import replace

from weighbridge_fit.config.attention import latent_rows
from weighbridge_fit.config.fields import MAX_LAYERS, Fields, Unsaid, invalid
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry

NOTHING = LayerMeasure()
_HYBRID_KINDS = {
    "attention": LayerKind.FULL_ATTENTION,
    "full_attention": LayerKind.FULL_ATTENTION,
    "mamba": LayerKind.STATE_SPACE,
    "linear_attention": LayerKind.STATE_SPACE,
    "moe": LayerKind.MEMORYLESS,
    "mlp": LayerKind.MEMORYLESS,
}
_PATTERN_NAMES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def gated_delta(fields: Fields, base: ModelGeometry, layers: tuple[LayerKind, ...]) -> ModelGeometry:
    """Qwen 3.5 and Next, OLMo hybrid. Raises CONFIG_INVALID."""
    return replace(
        base,
        layers=layers,
        delta_key_heads=fields.size("linear_num_key_heads"),
        delta_value_heads=fields.size("linear_num_value_heads"),
        delta_key_size=fields.size("linear_key_head_dim"),
        delta_value_size=fields.size("linear_value_head_dim"),
        delta_conv_width=fields.size("linear_conv_kernel_dim", 4),
    )


def named_delta(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Gated-delta layers where the config names them (OLMo hybrid)."""
    kinds = {"full_attention": LayerKind.FULL_ATTENTION, "linear_attention": LayerKind.GATED_DELTA}
    return gated_delta(fields, base, _named(fields, kinds, fields.layer_count()))


def state_space_2(inner: int, groups: int, state_size: int, width: int) -> LayerMeasure:
    """A Mamba 2 layer."""
    channels = inner + 2 * groups * state_size
    return LayerMeasure(state_elements=inner * state_size, convolution_elements=max(0, width - 1) * channels)


def state_space_1(inner: int, state_size: int, width: int) -> LayerMeasure:
    """A Mamba 1 layer."""
    return LayerMeasure(state_elements=inner * state_size, convolution_elements=max(0, width - 1) * inner)


def nemotron_h(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Nemotron-H: each layer is one of attention, Mamba 2, feed-forward or experts, by letter or by name."""
    pattern = fields.text("hybrid_override_pattern")
    if pattern:
        unknown = sorted(set(pattern) - _PATTERN_NAMES.keys())
        if unknown:
            raise invalid("hybrid_override_pattern", "names a kind of layer that is not known", unknown[0])
        if len(pattern) > MAX_LAYERS:
            raise invalid("hybrid_override_pattern", f"must name at most {MAX_LAYERS} layers", len(pattern))
        kinds = tuple(_HYBRID_KINDS[_PATTERN_NAMES[letter]] for letter in pattern)
    else:
        kinds = _named(fields, _HYBRID_KINDS)
    inner = fields.first("mamba_num_heads") * fields.first("mamba_head_dim")
    mamba = state_space_2(inner, fields.first("n_groups"), fields.first("ssm_state_size"), fields.first("conv_kernel"))
    return _hybrid(base, kinds, mamba)


def granite_hybrid(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Granite 4 and Bamba: Mamba 2 layers with a few of attention between."""
    count = fields.layer_count()
    attention = fields.sizes("attn_layer_indices")
    if attention is not None:
        kinds = tuple(
            LayerKind.FULL_ATTENTION if index in set(attention) else LayerKind.STATE_SPACE for index in range(count)
        )
    else:
        kinds = _named(fields, _HYBRID_KINDS, count)
    return _hybrid(base, kinds, _mamba_section(fields, base))


def falcon_h1(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Falcon-H1: attention and Mamba 2 side by side in every layer."""
    count = fields.layer_count()
    return replace(base, layers=(LayerKind.FULL_ATTENTION,) * count, measures=(_mamba_section(fields, base),) * count)


def jamba(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Jamba: one layer of attention in each period, the others Mamba 1."""
    period, offset = fields.first("attn_layer_period"), fields.size("attn_layer_offset", 0)
    kinds = tuple(
        LayerKind.FULL_ATTENTION if index % period == offset else LayerKind.STATE_SPACE
        for index in range(fields.layer_count())
    )
    inner = fields.first("mamba_expand") * base.hidden_size
    mamba = state_space_1(inner, fields.first("mamba_d_state"), fields.first("mamba_d_conv"))
    return _hybrid(base, kinds, mamba)


def mamba(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Mamba and Falcon-Mamba."""
    count = fields.layer_count("num_hidden_layers", "n_layer")
    inner = fields.optional("intermediate_size", "d_inner") or fields.first("expand") * base.hidden_size
    measure = state_space_1(inner, fields.first("state_size", "d_state"), fields.first("conv_kernel", "d_conv"))
    return _hybrid(base, (LayerKind.STATE_SPACE,) * count, measure)


def mamba2(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Mamba 2."""
    count = fields.layer_count("num_hidden_layers", "n_layer")
    inner = fields.first("num_heads") * fields.first("head_dim")
    measure = state_space_2(inner, fields.first("n_groups"), fields.first("state_size"), fields.first("conv_kernel"))
    return _hybrid(base, (LayerKind.STATE_SPACE,) * count, measure)


def short_convolution(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """LFM2: short gated convolutions with layers of attention between."""
    count = fields.layer_count()
    attention = fields.sizes("full_attn_idxs")
    if attention is not None:
        chosen = set(attention)
        kinds = tuple(
            LayerKind.FULL_ATTENTION if index in chosen else LayerKind.SHORT_CONVOLUTION for index in range(count)
        )
    else:
        named = {"full_attention": LayerKind.FULL_ATTENTION, "conv": LayerKind.SHORT_CONVOLUTION}
        kinds = _named(fields, named, count)
    kept = max(0, fields.first("conv_L_cache") - 1) * base.hidden_size
    return _hybrid(base, kinds, LayerMeasure(convolution_elements=kept))


def kimi_linear(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Kimi Linear: gated-delta layers with convolutions over queries, keys and values, and latent attention between.

    The config counts layers from one.
    """
    if not fields.has("linear_attn_config"):
        raise Unsaid
    linear = fields.section("linear_attn_config")
    delta = set(linear.sizes("kda_layers") or ())
    count = fields.layer_count()
    kinds = tuple(LayerKind.GATED_DELTA if index + 1 in delta else LayerKind.LATENT_ATTENTION for index in range(count))
    heads, size = linear.first("num_heads"), linear.first("head_dim")
    kept = 3 * max(0, linear.size("short_conv_kernel_size", 4) - 1) * heads * size
    measure = LayerMeasure(state_elements=heads * size * size, convolution_elements=kept)
    measures = tuple(measure if kind is LayerKind.GATED_DELTA else NOTHING for kind in kinds)
    return replace(latent_rows(fields, base, count), layers=kinds, measures=measures)


def recurrent_gemma(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """RecurrentGemma: gated linear recurrences of one state element for each channel, and sliding attention."""
    names = fields.names("block_types") or ["recurrent", "recurrent", "attention"]
    count = fields.layer_count()
    kinds = tuple(
        LayerKind.SLIDING_ATTENTION if names[index % len(names)] == "attention" else LayerKind.STATE_SPACE
        for index in range(count)
    )
    width = fields.optional("lru_width") or base.hidden_size
    kept = max(0, fields.size("conv1d_width", 4) - 1) * width
    measure = LayerMeasure(state_elements=width, convolution_elements=kept)
    made = _hybrid(base, kinds, measure)
    return replace(made, sliding_window_tokens=fields.first("attention_window_size"))


def rwkv(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """RWKV 6 and 7: one matrix for each head, and the last input of each of two token shifts."""
    count = fields.layer_count()
    head = fields.first("head_dim", "head_size")
    measure = LayerMeasure(state_elements=base.hidden_size * head, convolution_elements=2 * base.hidden_size)
    return replace(base, layers=(LayerKind.LINEAR_ATTENTION,) * count, measures=(measure,) * count)


def _named(fields: Fields, kinds: dict[str, LayerKind], count: int = 0) -> tuple[LayerKind, ...]:
    """Kinds by the names that the config gives. Raises Unsaid where it gives none, CONFIG_INVALID."""
    for name in ("layer_types", "layers_block_type"):
        names = fields.names(name)
        if names is None:
            continue
        if len(names) > MAX_LAYERS or (count and len(names) != count):
            raise invalid(name, f"must name {count or 'fewer'} layers", len(names))
        unknown = [given for given in names if given not in kinds]
        if unknown:
            raise invalid(name, "names a kind of layer that is not known", unknown[0])
        return tuple(kinds[given] for given in names)
    raise Unsaid


def _mamba_section(fields: Fields, base: ModelGeometry) -> LayerMeasure:
    heads, head = fields.lenient("mamba_n_heads"), fields.lenient("mamba_d_head")
    inner = fields.optional("mamba_d_ssm") or heads * head or fields.first("mamba_expand") * base.hidden_size
    groups, state = fields.first("mamba_n_groups"), fields.first("mamba_d_state")
    return state_space_2(inner, groups, state, fields.first("mamba_d_conv"))


def _hybrid(base: ModelGeometry, kinds: tuple[LayerKind, ...], recurrent: LayerMeasure) -> ModelGeometry:
    """With the same measure for every recurrent layer."""
    constant = {LayerKind.STATE_SPACE, LayerKind.SHORT_CONVOLUTION}
    return replace(base, layers=kinds, measures=tuple(recurrent if kind in constant else NOTHING for kind in kinds))
