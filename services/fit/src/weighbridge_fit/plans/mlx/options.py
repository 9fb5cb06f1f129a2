"""What can be asked of an MLX plan, checked and with every default filled in."""

from collections.abc import Sequence
from dataclasses import dataclass

from weighbridge_fit.calibration import Calibration, ComputeDevice
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import mlx_caches
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.architectures import attends_fused

DEFAULT_CONTEXT_TOKENS = 4096
# Beyond what any published model claims.
LONGEST_CONTEXT = 1 << 24
MAX_SLOTS = 256
# More than any machine's memory.
MAX_SIZE_BYTES = 1 << 50
MAX_PREFILL_STEP = 65_536
# What mlx-lm's QuantizedKVCache packs without a remainder, and what MLX quantises in.
KV_BITS = (2, 4, 8)
KV_GROUP_SIZES = (32, 64, 128)
DEFAULT_KV_GROUP_SIZE = 64
# mlx_lm.generate's --num-draft-tokens.
DEFAULT_DRAFT_TOKENS = 3
MAX_DRAFT_TOKENS = 32
MAX_ADAPTERS = 64
SPLIT_LANES = ("none", "cpu", "ane")
# Stacked adapters are written a+b and a,b; the shape's text is cut at semicolons.
_NOT_IN_ADAPTER_NAMES = "+,;"
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
    adapters: tuple[str, ...] = ()
    draft_model: str = ""
    draft_head: bool = False
    draft_tokens: int | None = None
    prompt_cache_bytes: int | None = None
    expert_slab_bytes: int | None = None
    split_lane: str = ""


@dataclass(frozen=True, slots=True)
class MlxShape:
    """A workload and options as planned. `kv_bits` 0: keys and values are not quantised; `draft_tokens` 0: nothing is
    drafted; `expert_slab_bytes` 0: all experts are held; `split_lane` "": nothing is shared with a second device.

    `launched`: the MLX engine of this version can be started like this.
    """

    context_tokens: int
    slots: int
    prefill_step_tokens: int
    kv_bits: int
    kv_group_size: int
    allocator_cache_bytes: int
    device: ComputeDevice
    adapters: tuple[str, ...] = ()
    draft_model: str = ""
    draft_head: bool = False
    draft_tokens: int = 0
    prompt_cache_bytes: int = 0
    expert_slab_bytes: int = 0
    split_lane: str = ""
    launched: bool = True

    @property
    def verify_rows(self) -> int:
        """Rows that one conversation computes at once while decoding: one, and those that are verified with it."""
        return self.draft_tokens + 1

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the options that are planned and that no engine of this version has."""
        given = {
            "adapters": self.adapters,
            "draft_model": self.draft_model,
            "draft_head": self.draft_head,
            "prompt_cache_bytes": self.prompt_cache_bytes,
            "expert_slab_bytes": self.expert_slab_bytes,
            "split_lane": self.split_lane,
        }
        return tuple(name for name, value in given.items() if value)

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""
        kv = f"{self.kv_bits}/{self.kv_group_size}" if self.kv_bits else "plain"
        parts = [
            f"mlx;device={self.device.value};context={self.context_tokens};slots={self.slots}",
            f"prefill={self.prefill_step_tokens};kv={kv};cache={self.allocator_cache_bytes}",
        ]
        if self.adapters:
            parts.append(f"adapters={'+'.join(self.adapters)}")
        if self.draft_tokens:
            parts.append(f"draft={'head' if self.draft_head else self.draft_model}/{self.draft_tokens}")
        if self.prompt_cache_bytes:
            parts.append(f"prompts={self.prompt_cache_bytes}")
        if self.expert_slab_bytes:
            parts.append(f"slab={self.expert_slab_bytes}")
        if self.split_lane:
            parts.append(f"lane={self.split_lane}")
        return ";".join(parts)


def settle(
    request: MlxRequest,
    geometry: ModelGeometry,
    weight_bytes: int,
    device: ComputeDevice,
    calibration: Calibration,
    longest_drafted: int = 0,
) -> MlxShape:
    """Fills defaults in and refuses what cannot be. `longest_drafted` bounds the context that is taken where none is
    asked for. Raises PlanError: CONTEXT_TOO_LONG, INVALID_OPTION."""
    longest = geometry.max_context_tokens
    usual = min(bound for bound in (DEFAULT_CONTEXT_TOKENS, longest, longest_drafted) if bound)
    context = request.context_tokens or usual
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
    check_adapters(request.adapters)
    return MlxShape(
        context,
        slots,
        _prefill_step(request, geometry, context, calibration),
        bits,
        group_size,
        _allocator_cache(request, weight_bytes, calibration),
        device,
        adapters=request.adapters,
        draft_model=request.draft_model,
        draft_head=request.draft_head,
        draft_tokens=_draft_tokens(request, geometry, context),
        prompt_cache_bytes=_size("prompt_cache_bytes", request.prompt_cache_bytes),
        expert_slab_bytes=_size("expert_slab_bytes", request.expert_slab_bytes),
        split_lane=_split_lane(request, device),
    )


def check_adapters(names: Sequence[str]) -> None:
    """Raises PlanError INVALID_OPTION for names that cannot be adapters', or too many of them."""
    field = "options.mlx.adapters"
    if len(names) > MAX_ADAPTERS:
        message = f"At most {MAX_ADAPTERS} adapters can be mounted, {len(names)} were asked for."
        raise PlanError("INVALID_OPTION", field, message)
    for name in names:
        if not name or not name.isprintable() or any(mark in name for mark in _NOT_IN_ADAPTER_NAMES):
            raise PlanError("INVALID_OPTION", field, "An adapter's name is printable, without plus, comma, semicolon.")
    if len(set(names)) != len(names):
        raise PlanError("INVALID_OPTION", field, "An adapter is mounted once: its name is given twice.")


def _draft_tokens(request: MlxRequest, geometry: ModelGeometry, context: int) -> int:
    if request.draft_model and request.draft_head:
        message = "Tokens are drafted by a drafter or by the model's own draft head, not by both."
        raise PlanError("INVALID_OPTION", "options.mlx.draft_head", message)
    drafts = bool(request.draft_model) or request.draft_head
    if request.draft_tokens is None:
        tokens = DEFAULT_DRAFT_TOKENS
    elif not drafts:
        message = "A number of drafted tokens needs a drafter or the model's draft head."
        raise PlanError("INVALID_OPTION", "options.mlx.draft_tokens", message)
    elif not 1 <= request.draft_tokens <= MAX_DRAFT_TOKENS:
        message = f"Between 1 and {MAX_DRAFT_TOKENS} tokens are drafted at a time, not {request.draft_tokens}."
        raise PlanError("INVALID_OPTION", "options.mlx.draft_tokens", message)
    else:
        tokens = request.draft_tokens
    if request.draft_model and not mlx_caches.trimmable(geometry, context):
        message = (
            "A drafter needs caches that can be cut back to what was accepted; this model keeps states, or windows "
            "that a context of this length fills, and mlx-lm refuses it."
        )
        raise PlanError("INVALID_OPTION", "options.mlx.draft_model", message)
    return tokens if drafts else 0


def _split_lane(request: MlxRequest, device: ComputeDevice) -> str:
    field = "options.mlx.split_lane"
    if request.split_lane and request.split_lane not in SPLIT_LANES:
        raise PlanError("INVALID_OPTION", field, f"A second device is one of {', '.join(SPLIT_LANES)}.")
    if request.split_lane == "ane" and device is not ComputeDevice.METAL:
        raise PlanError("INVALID_OPTION", field, "A neural engine is there on Apple silicon only.")
    return "" if request.split_lane == "none" else request.split_lane


def _size(name: str, value: int | None) -> int:
    if value is None:
        return 0
    if not 0 <= value <= MAX_SIZE_BYTES:
        message = "A size from zero to that of a machine is needed."
        raise PlanError("INVALID_OPTION", f"options.mlx.{name}", message)
    return value


def _allocator_cache(request: MlxRequest, weight_bytes: int, calibration: Calibration) -> int:
    """Freed buffers that MLX may keep: a share of the weights within bounds, unless somebody chose."""
    if request.allocator_cache_bytes is None:
        least, most = calibration["allocator_cache_floor_bytes"], calibration["allocator_cache_cap_bytes"]
        return int(min(max(weight_bytes // CACHE_SHARE, least.expected), most.expected))
    if not 0 <= request.allocator_cache_bytes <= MAX_SIZE_BYTES:
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
    if not (mlx_caches.quantisable(geometry) and attends_fused(geometry)):
        message = (
            "mlx-lm cannot quantise this model's caches: some are of a sliding window or of latent attention, or it "
            "attends without MLX's kernel."
        )
        raise PlanError("INVALID_OPTION", "options.mlx.kv_bits", message)
    group_size = DEFAULT_KV_GROUP_SIZE if request.kv_group_size is None else request.kv_group_size
    sizes = mlx_caches.head_sizes(geometry)
    if group_size not in KV_GROUP_SIZES or any(size % group_size for size in sizes):
        message = (
            f"Groups of {group_size} do not divide this model's head size of {' and '.join(map(str, sorted(sizes)))}; "
            "MLX quantises in groups of 32, 64 or 128."
        )
        raise PlanError("INVALID_OPTION", "options.mlx.kv_group_size", message)
    return request.kv_bits, group_size
