"""What can be asked of an MLX plan, checked and with every default filled in."""

from dataclasses import dataclass

from weighbridge_fit.calibration import Calibration, ComputeDevice
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.plans.errors import PlanError

DEFAULT_CONTEXT_TOKENS = 4096
# Beyond what any published model claims.
LONGEST_CONTEXT = 1 << 24
MAX_SLOTS = 256
# More than any machine's memory.
MAX_ALLOCATOR_CACHE_BYTES = 1 << 50
MAX_PREFILL_STEP = 65_536
# What mlx-lm's QuantizedKVCache packs without a remainder, and what MLX quantises in.
KV_BITS = (2, 4, 8)
KV_GROUP_SIZES = (32, 64, 128)
DEFAULT_KV_GROUP_SIZE = 64
# Freed buffers kept are at most this part of the weights (the rule of another MLX server, August 2026).
CACHE_SHARE = 16


@dataclass(frozen=True, slots=True)
class MlxRequest:
    """A workload and options as asked; None and zero are defaults."""

    context_tokens: int = 0
    slots: int = 0
    prefill_step_tokens: int | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    allocator_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MlxShape:
    """A workload and options as planned. `kv_bits` 0: keys and values are not quantised."""

    context_tokens: int
    slots: int
    prefill_step_tokens: int
    kv_bits: int
    kv_group_size: int
    allocator_cache_bytes: int
    device: ComputeDevice

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""
        kv = f"{self.kv_bits}/{self.kv_group_size}" if self.kv_bits else "plain"
        return (
            f"mlx;device={self.device.value};context={self.context_tokens};slots={self.slots};"
            f"prefill={self.prefill_step_tokens};kv={kv};cache={self.allocator_cache_bytes}"
        )


def settle(
    request: MlxRequest, geometry: ModelGeometry, weight_bytes: int, device: ComputeDevice, calibration: Calibration
) -> MlxShape:
    """Fills defaults in and refuses what cannot be. Raises PlanError: CONTEXT_TOO_LONG, INVALID_OPTION."""
    longest = geometry.max_context_tokens
    context = request.context_tokens or min(DEFAULT_CONTEXT_TOKENS, longest or DEFAULT_CONTEXT_TOKENS)
    if context < 1:
        raise PlanError("INVALID_OPTION", "workload.chat.context_tokens", "A context needs at least one token.")
    if context > LONGEST_CONTEXT:
        message = f"No model reads {context:,} tokens; at most {LONGEST_CONTEXT:,} can be asked for."
        raise PlanError("CONTEXT_TOO_LONG", "workload.chat.context_tokens", message)
    if longest and context > longest:
        message = f"The model was made for at most {longest:,} tokens, a context of {context:,} was asked for."
        raise PlanError("CONTEXT_TOO_LONG", "workload.chat.context_tokens", message)
    slots = request.slots or 1
    if not 1 <= slots <= MAX_SLOTS:
        message = f"Between 1 and {MAX_SLOTS} conversations can be held at once, {slots} were asked for."
        raise PlanError("INVALID_OPTION", "workload.chat.slots", message)
    bits, group_size = _kv_quantization(request, geometry)
    cache = _allocator_cache(request, weight_bytes, calibration)
    return MlxShape(
        context, slots, _prefill_step(request, geometry, context, calibration), bits, group_size, cache, device
    )


def _allocator_cache(request: MlxRequest, weight_bytes: int, calibration: Calibration) -> int:
    """Freed buffers that MLX may keep: a share of the weights within bounds, unless somebody chose."""
    if request.allocator_cache_bytes is None:
        least, most = calibration["allocator_cache_floor_bytes"], calibration["allocator_cache_cap_bytes"]
        return int(min(max(weight_bytes // CACHE_SHARE, least.expected), most.expected))
    if not 0 <= request.allocator_cache_bytes <= MAX_ALLOCATOR_CACHE_BYTES:
        message = "The allocator cannot keep that much: a size from zero to that of a machine is needed."
        raise PlanError("INVALID_OPTION", "options.mlx.allocator_cache_bytes", message)
    return request.allocator_cache_bytes


def _prefill_step(request: MlxRequest, geometry: ModelGeometry, context: int, calibration: Calibration) -> int:
    step = request.prefill_step_tokens
    if step is None:
        delta = LayerKind.GATED_DELTA in geometry.layers
        step = int(calibration["delta_prefill_step_tokens" if delta else "prefill_step_tokens"].expected)
    elif not 1 <= step <= MAX_PREFILL_STEP:
        message = f"A prefill step has between 1 and {MAX_PREFILL_STEP:,} tokens, {step:,} were asked for."
        raise PlanError("INVALID_OPTION", "options.mlx.prefill_step_tokens", message)
    return step


def _kv_quantization(request: MlxRequest, geometry: ModelGeometry) -> tuple[int, int]:
    if request.kv_bits is None:
        if request.kv_group_size is not None:
            message = "A group size needs kv_bits: keys and values are not quantised without them."
            raise PlanError("INVALID_OPTION", "options.mlx.kv_group_size", message)
        return 0, 0
    if request.kv_bits not in KV_BITS:
        message = f"Keys and values can be stored in 2, 4 or 8 bits, {request.kv_bits} were asked for."
        raise PlanError("INVALID_OPTION", "options.mlx.kv_bits", message)
    group_size = DEFAULT_KV_GROUP_SIZE if request.kv_group_size is None else request.kv_group_size
    if group_size not in KV_GROUP_SIZES or geometry.head_size % group_size:
        message = (
            f"Groups of {group_size} do not divide this model's head size of {geometry.head_size}; "
            "MLX quantises in groups of 32, 64 or 128."
        )
        raise PlanError("INVALID_OPTION", "options.mlx.kv_group_size", message)
    return request.kv_bits, group_size
