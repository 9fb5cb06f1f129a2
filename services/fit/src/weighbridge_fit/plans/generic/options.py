"""What can be asked of a GENERIC plan, checked and with every default filled in."""

import math
from dataclasses import dataclass

from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import kv, kv_llama_cpp, kv_mlx
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.laws.kv_types import LLAMA_CPP_TYPES, VLLM_TYPES, KvType, mlx_quantised, plain
from weighbridge_fit.plans.errors import PlanError

DEFAULT_CONTEXT_TOKENS = 4096
# Beyond what any published model claims.
LONGEST_CONTEXT = 1 << 24
MAX_SLOTS = 1024
MAX_MICRO_BATCH = 65_536
# vLLM's max_num_batched_tokens where it serves on large cards, which its published measurements were made with.
VLLM_BATCH_TOKENS = 8192
# vLLM's --gpu-memory-utilization.
VLLM_DEVICE_SHARE = 0.9
MLX_BITS = {"2": 2, "4": 4, "8": 8}
MLX_GROUP_SIZE = 64
_DEFAULT_TYPES = {KvLaw.LLAMA_CPP: "f16", KvLaw.MLX: "auto", KvLaw.VLLM: "auto"}


@dataclass(frozen=True, slots=True)
class GenericRequest:
    """A workload and options as asked; None, zero and "" are defaults."""

    context_tokens: int = 0
    slots: int = 0
    law: str = ""
    kv_type: str | None = None
    micro_batch_tokens: int | None = None
    device_share: float | None = None


@dataclass(frozen=True, slots=True)
class GenericShape:
    """A workload and options as planned. `device_share` 0: the law takes no share of a card. `on_card`: weights and
    caches lie on a card."""

    law: KvLaw
    context_tokens: int
    slots: int
    kv_type: KvType
    kv_type_name: str
    micro_batch_tokens: int
    device_share: float
    on_card: bool

    def text(self) -> str:
        """Canonical text: launches with the same text cost the same."""
        share = f";share={self.device_share:g}" if self.device_share else ""
        return (
            f"generic;law={self.law.value};context={self.context_tokens};slots={self.slots};"
            f"kv={self.kv_type_name};batch={self.micro_batch_tokens}{share};"
            f"on={'card' if self.on_card else 'host'}"
        )


def settle(request: GenericRequest, facts: WeightFacts, geometry: ModelGeometry, capacity: Capacity) -> GenericShape:
    """Fills defaults in and refuses what cannot be. Raises PlanError: CONTEXT_TOO_LONG, INVALID_OPTION."""
    law = _law(request, facts, capacity)
    slots = request.slots or 1
    if not 1 <= slots <= MAX_SLOTS:
        message = f"Between 1 and {MAX_SLOTS:,} conversations can be held at once, {slots:,} were asked for."
        raise PlanError("INVALID_OPTION", "workload.chat.slots", message)
    name, stored = _kv_type(request, law, geometry)
    on_card = capacity.pool is Pool.DISCRETE and bool(capacity.devices) and law is not KvLaw.MLX
    return GenericShape(
        law=law,
        context_tokens=_context(request, geometry),
        slots=slots,
        kv_type=stored,
        kv_type_name=name,
        micro_batch_tokens=_micro_batch(request, law),
        device_share=_device_share(request, law) if on_card else 0.0,
        on_card=on_card,
    )


def _law(request: GenericRequest, facts: WeightFacts, capacity: Capacity) -> KvLaw:
    """GGUF files are llama.cpp's; safetensors are MLX's where memory is unified, and vLLM's elsewhere."""
    if request.law:
        try:
            return KvLaw(request.law)
        except ValueError:
            names = ", ".join(law.value for law in KvLaw)
            message = f"There is no law {request.law[:40]!r} for language models; there are {names}."
            raise PlanError("INVALID_OPTION", "options.generic.law", message) from None
    if facts.format is WeightFormat.GGUF:
        return KvLaw.LLAMA_CPP
    return KvLaw.MLX if capacity.pool is Pool.UNIFIED else KvLaw.VLLM


def _context(request: GenericRequest, geometry: ModelGeometry) -> int:
    field = "workload.chat.context_tokens"
    longest = geometry.max_context_tokens
    context = request.context_tokens or min(DEFAULT_CONTEXT_TOKENS, longest or DEFAULT_CONTEXT_TOKENS)
    if context < 1:
        raise PlanError("INVALID_OPTION", field, "A context needs at least one token.")
    if context > LONGEST_CONTEXT:
        message = f"No model reads {context:,} tokens; at most {LONGEST_CONTEXT:,} can be asked for."
        raise PlanError("CONTEXT_TOO_LONG", field, message)
    if longest and context > longest:
        message = f"The model was made for at most {longest:,} tokens, a context of {context:,} was asked for."
        raise PlanError("CONTEXT_TOO_LONG", field, message)
    return context


def _micro_batch(request: GenericRequest, law: KvLaw) -> int:
    asked = request.micro_batch_tokens
    if asked is None:
        return {
            KvLaw.LLAMA_CPP: kv_llama_cpp.DEFAULT_MICRO_BATCH,
            KvLaw.VLLM: VLLM_BATCH_TOKENS,
            KvLaw.MLX: kv.MLX_PREFILL_STEP,
        }[law]
    if not 1 <= asked <= MAX_MICRO_BATCH:
        message = f"Between 1 and {MAX_MICRO_BATCH:,} tokens can be computed at once, {asked:,} were asked for."
        raise PlanError("INVALID_OPTION", "options.generic.micro_batch_tokens", message)
    return asked


def _device_share(request: GenericRequest, law: KvLaw) -> float:
    share = request.device_share
    if share is None:
        return VLLM_DEVICE_SHARE if law is KvLaw.VLLM else 0.0
    field = "options.generic.device_share"
    if law is not KvLaw.VLLM:
        raise PlanError("INVALID_OPTION", field, f"Only vLLM takes a share of a card for itself, {law.value} does not.")
    if not math.isfinite(share) or not 0 < share <= 1:
        raise PlanError("INVALID_OPTION", field, "The share of a card must be above 0 and at most 1.")
    return share


def _kv_type(request: GenericRequest, law: KvLaw, geometry: ModelGeometry) -> tuple[str, KvType]:
    name = request.kv_type or _DEFAULT_TYPES[law]
    field = "options.generic.kv_type"
    width = geometry.activation_bytes or 2
    if law is KvLaw.LLAMA_CPP:
        known = LLAMA_CPP_TYPES
    elif law is KvLaw.VLLM:
        # vLLM loads float32 models in half precision.
        known = {"auto": plain(min(width, 2)), **VLLM_TYPES}
    else:
        quantised = {bits: mlx_quantised(count, MLX_GROUP_SIZE, width) for bits, count in MLX_BITS.items()}
        known = {"auto": plain(width), **quantised}
    stored = known.get(name)
    if stored is None:
        message = f"{law.value} stores keys and values as {', '.join(known)}, not as {name[:40]!r}."
        raise PlanError("INVALID_OPTION", field, message)
    wrong = next((size for size in _row_sizes(geometry) if not stored.divides(size)), None)
    if wrong is not None:
        message = f"A head of {wrong} elements is no whole number of {name} blocks of {stored.block_elements}."
        raise PlanError("INVALID_OPTION", field, message)
    if (
        law is KvLaw.MLX
        and name in MLX_BITS
        and any(row.window_tokens or row.latent for row in kv_mlx.held_rows(geometry))
    ):
        message = "mlx-lm cannot quantise the caches of this model: it has windows or latent rows."
        raise PlanError("INVALID_OPTION", field, message)
    return name, stored


def _row_sizes(geometry: ModelGeometry) -> set[int]:
    """Sizes of rows that are quantised one by one: heads, and latent rows."""
    sizes = {geometry.head_size, geometry.value_head_size}
    sizes |= {size for measure in geometry.measures for size in (measure.key_size, measure.value_size)}
    if LayerKind.LATENT_ATTENTION in geometry.layers:
        sizes = {geometry.latent_rank + geometry.latent_rope_size}
    return sizes - {0}
