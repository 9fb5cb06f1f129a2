"""What evaluating tokens takes beside weights and caches, freed again afterwards.

The shapes are mlx-lm's; the factors are calibration. One layer is evaluated at a time, so nothing here grows with
depth.
"""

from weighbridge_fit.calibration import WorkspaceFactors
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws.gated_delta import convolution_size, recurrent_bytes

FLOAT32_BYTES = 4
# Mamba 2 as published: a convolution of width 4, 8,192 state elements per head, prompts in pieces of 256 tokens.
STATE_SPACE_KEPT_COLUMNS = 3
STATE_ELEMENTS_PER_HEAD = 8192
STATE_SPACE_PIECE = 256
PER_LAYER_INPUT_COPIES = 3


def activation_bytes(geometry: ModelGeometry, chunk: int, factors: WorkspaceFactors) -> float:
    """Activations of one layer while a chunk of tokens passes: counted in elements per token by width, each in the
    activation type."""
    experts = max(1, geometry.experts_per_token) if geometry.experts else 0
    hidden = factors.hidden * geometry.hidden_size + factors.expert_output * experts * geometry.hidden_size
    inner = max(geometry.intermediate_size, experts * geometry.expert_intermediate_size)
    head = max((measure.key_size for measure in geometry.measures), default=0) or geometry.head_size
    query = geometry.attention_heads * head
    keys = geometry.kv_heads * head
    if LayerKind.GATED_DELTA in geometry.layers:
        query = max(2 * query, convolution_size(geometry))
    # A state-space layer's input projection is as wide as its gate and its convolution.
    kept = max((measure.convolution_elements for measure in geometry.measures), default=0)
    query = max(query, 2 * kept // STATE_SPACE_KEPT_COLUMNS)
    elements = hidden + factors.query * query + factors.key_value * keys + factors.intermediate * inner
    # Half-precision arithmetic keeps float32 copies on the CPU; in float32 there is nothing to copy.
    copies = factors.float32_share if geometry.activation_bytes >= FLOAT32_BYTES else 1.0
    return chunk * elements * geometry.activation_bytes * copies


def per_layer_input_bytes(geometry: ModelGeometry, chunk: int, width: int, factors: WorkspaceFactors) -> float:
    """Embeddings that every layer gets a share of (Gemma 3n and 4): looked up, projected and added up for the whole
    chunk before the first layer, and held until the last. Three tensors of `width` per token."""
    copies = factors.float32_share if geometry.activation_bytes >= FLOAT32_BYTES else 1.0
    return PER_LAYER_INPUT_COPIES * chunk * width * geometry.activation_bytes * copies


def score_bytes(
    geometry: ModelGeometry,
    chunk: int,
    keys: int,
    factors: WorkspaceFactors,
    head_size: int = 0,
    *,
    unfused: bool = False,
) -> float:
    """Attention scores of one layer: heads x chunk x keys, unless a fused kernel for this head size keeps them on
    chip.

    `head_size` 0: the geometry's. `unfused`: no kernel is used at all, because keys and values are quantised or the
    model attends by hand.
    """
    if not unfused and (head_size or geometry.head_size) in factors.fused_head_sizes:
        return 0.0
    return geometry.attention_heads * chunk * keys * geometry.activation_bytes * factors.score_copies


def latent_bytes(geometry: ModelGeometry, chunk: int, keys: int, factors: WorkspaceFactors) -> float:
    """One layer of latent attention while a chunk of two tokens or more is read: keys and values of all heads unpacked
    from the compressed rows, and the rotary part of the scores, which is always materialised (it is the mask).

    Source: `DeepseekV3Attention` of mlx-lm 0.32.2.
    """
    if LayerKind.LATENT_ATTENTION not in geometry.layers or chunk < 2:
        return 0.0
    key = geometry.head_size - geometry.latent_rope_size
    unpacked = keys * (key + (geometry.value_head_size or key))
    scores = chunk * keys * factors.latent_score_copies
    return geometry.attention_heads * (unpacked + scores) * geometry.activation_bytes


def state_space_bytes(geometry: ModelGeometry, chunk: int, factors: WorkspaceFactors) -> float:
    """One state-space layer (Mamba 2) while a chunk is read: for each piece of 256 tokens, squares of heads x piece x
    piece in float32, and the inputs times their steps. Source: `ssm_attn` of mlx-lm 0.32.2."""
    states = [
        measure.state_elements
        for kind, measure in zip(geometry.layers, geometry.measures, strict=False)
        if kind is LayerKind.STATE_SPACE
    ]
    if not states:
        return 0.0
    heads = -(-max(states) // STATE_ELEMENTS_PER_HEAD)
    pieces = -(-chunk // STATE_SPACE_PIECE)
    square = heads * min(chunk, STATE_SPACE_PIECE) ** 2
    return FLOAT32_BYTES * factors.state_space_copies * square * pieces


def growth_bytes(row_bytes: int, slots: int, factors: WorkspaceFactors) -> float:
    """Old and new slab beside each other while one layer's cache grows."""
    return factors.growth_copies * row_bytes * slots


def delta_bytes(geometry: ModelGeometry, chunk: int, factors: WorkspaceFactors) -> float:
    """Gated-delta prefill without a kernel: the lazy graph keeps one state for each token of the chunk, and its
    nodes."""
    layers = geometry.count(LayerKind.GATED_DELTA)
    if not layers or not factors.delta_states_per_token:
        return 0.0
    states = chunk * recurrent_bytes(geometry) * factors.delta_states_per_token
    return states + chunk * layers * factors.delta_graph_bytes


def output_bytes(geometry: ModelGeometry, rows: int, factors: WorkspaceFactors) -> float:
    """Logits, their normalised copies and the sampler's, in float32."""
    return rows * geometry.vocab_size * FLOAT32_BYTES * factors.logit_copies


def widened_bytes(geometry: ModelGeometry, half_elements: int) -> int:
    """Weights of the largest product widened to the activation type for a moment, where they are stored narrower.

    `half_elements` is the number of elements that the model stores in half precision: no more can be widened. Quantised
    weights stay packed: only their scales and zero points are widened. Zero in half precision, and where the weights
    are float32 themselves.
    """
    if geometry.activation_bytes < FLOAT32_BYTES:
        return 0
    elements = geometry.vocab_size * geometry.hidden_size
    if geometry.quantization_bits and geometry.quantization_group_size:
        elements = 2 * elements // geometry.quantization_group_size
    return min(elements, half_elements) * geometry.activation_bytes
