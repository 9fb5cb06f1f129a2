"""MLX language models: the family's plan between its messages."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from weighbridge_common.sizes import format_gib
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import WeightFormat
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import stop_if_abandoned
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx import adapters, drafting
from weighbridge_fit.plans.mlx.architectures import architecture_of
from weighbridge_fit.plans.mlx.options import LONGEST_CONTEXT, MlxRequest, MlxShape, check_adapters
from weighbridge_fit.plans.mlx.plan import memory_limit_bytes, plan
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.solving import context_help
from weighbridge_fit.verdict import Verdict, judge


def compute_device(capacity: Capacity) -> ComputeDevice:
    """What MLX computes on: Metal where memory is unified, else the CPU (cards are not used by this engine)."""
    return ComputeDevice.METAL if capacity.pool is Pool.UNIFIED else ComputeDevice.CPU


# Chunks that an advice tries, in tokens: each halves the scores and the activations of the one before.
_SMALLER_CHUNKS = (1024, 512, 256)


class MlxFamily:
    """See `families.Family`."""

    engine = Engine.MLX
    options_name = "mlx"
    workload_name = "chat"

    def recognises(self, model: Model) -> bool:
        """Whether a model whose engine nobody named is this family's."""
        geometry = model.facts.geometry
        stored = model.facts.format is WeightFormat.SAFETENSORS
        return stored and geometry is not None and architecture_of(geometry) is not None

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> MlxRequest:
        """What is asked for."""
        chat, given = workload.chat, set_options(options)
        return MlxRequest(
            context_tokens=chat.context_tokens,
            slots=chat.slots,
            prefill_step_tokens=given.get("prefill_step_tokens"),
            kv_bits=given.get("kv_bits"),
            kv_group_size=given.get("kv_group_size"),
            allocator_cache_bytes=given.get("allocator_cache_bytes"),
            adapters=tuple(given.get("adapters", ())),
            draft_model=given.get("draft_model", ""),
            draft_head=given.get("draft_head", False),
            draft_tokens=given.get("draft_tokens"),
            prompt_cache_bytes=given.get("prompt_cache_bytes"),
            expert_slab_bytes=given.get("expert_slab_bytes"),
            split_lane=given.get("split_lane", ""),
        )

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """Adapters and the drafter, which are named by where they lie under the models root. Raises PlanError."""
        # Before any of them is read.
        check_adapters(options.mlx.adapters)
        named = {f"{adapters.ROLE}{name}": name for name in options.mlx.adapters}
        if options.mlx.draft_model:
            named[drafting.ROLE] = options.mlx.draft_model
        return named

    def plan(self, model: Model, request: MlxRequest, capacity: Capacity) -> Plan:
        """Plans one model. Raises PlanError."""
        stop_if_abandoned()
        return plan(model.facts, request, compute_device(capacity), model.companions)

    def advise(
        self, model: Model, request: MlxRequest, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS."""
        _, shorter = context_help(self, model, request, capacity, plan, requirement)
        return (*shorter, *self._savings(model, request, capacity, plan))

    def _savings(self, model: Model, request: MlxRequest, capacity: Capacity, made: Plan) -> Iterator[str]:
        """Other options under which it runs, and how much each saves at most."""
        shape, high = _shape(made), made.requirement.total.high
        tried: list[tuple[MlxRequest, str]] = []
        # What changes no answer comes first.
        for tokens in _SMALLER_CHUNKS:
            if tokens < shape.prefill_step_tokens:
                smaller = replace(request, prefill_step_tokens=tokens)
                tried.append((smaller, f"Reading prompts in chunks of {tokens} tokens (prefill_step_tokens={tokens})"))
        if not shape.kv_bits:
            tried.append((replace(request, kv_bits=8), "Keys and values in 8 bits (kv_bits=8)"))
            # Quantised keys are read without a fused kernel, so that scores of whole chunks take back what is saved.
            both = replace(request, kv_bits=8, prefill_step_tokens=min(_SMALLER_CHUNKS))
            chunk = f"prefill_step_tokens={min(_SMALLER_CHUNKS)}"
            tried.append((both, f"Keys and values in 8 bits, read in small chunks (kv_bits=8, {chunk}),"))
        for other, what in tried:
            try:
                needed = self.plan(model, other, capacity).requirement
            except PlanError:
                continue
            saved = high - needed.total.high
            if saved > 0 and judge(needed, capacity).verdict is Verdict.RUNS:
                yield f"{what} saves up to {format_gib(saved)}, and it runs."
                return

    def longest_context(self, model: Model) -> int:
        """What the model was made for, in tokens, and its drafter where there is one."""
        geometry = model.facts.geometry
        if geometry is None:
            return LONGEST_CONTEXT
        bounds = (geometry.max_context_tokens, drafting.longest_drafted(geometry, model.companions), LONGEST_CONTEXT)
        return min(bound for bound in bounds if bound)

    def with_context(self, request: MlxRequest, context_tokens: int) -> MlxRequest:
        """The same request at another context."""
        return replace(request, context_tokens=context_tokens)

    def context_of(self, plan: Plan) -> int:
        """The context that was planned."""
        return _shape(plan).context_tokens

    def workload(self, plan: Plan) -> plan_pb2.Workload:
        """The workload as planned."""
        shape = _shape(plan)
        chat = plan_pb2.ChatWorkload(context_tokens=shape.context_tokens, slots=shape.slots)
        return plan_pb2.Workload(chat=chat)

    def options(self, plan: Plan) -> plan_pb2.EngineOptions:
        """The options as planned."""
        shape = _shape(plan)
        options = plan_pb2.MlxOptions(
            prefill_step_tokens=shape.prefill_step_tokens, allocator_cache_bytes=shape.allocator_cache_bytes
        )
        if shape.kv_bits:
            options.kv_bits, options.kv_group_size = shape.kv_bits, shape.kv_group_size
        options.adapters.extend(shape.adapters)
        for name in ("draft_model", "draft_head", "draft_tokens", "prompt_cache_bytes", "expert_slab_bytes"):
            value = getattr(shape, name)
            if value:
                setattr(options, name, value)
        if shape.split_lane:
            options.split_lane = shape.split_lane
        return plan_pb2.EngineOptions(mlx=options)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """How the runtime is started; None for what the MLX engine of this version does not run."""
        shape = _shape(plan)
        if not shape.launched:
            return None
        return plan_pb2.Launch(
            mlx=plan_pb2.MlxLaunch(
                context_tokens=shape.context_tokens,
                slots=shape.slots,
                prefill_step_tokens=shape.prefill_step_tokens,
                allocator_cache_bytes=shape.allocator_cache_bytes,
                memory_limit_bytes=memory_limit_bytes(plan),
                kv_bits=shape.kv_bits,
                kv_group_size=shape.kv_group_size,
                weight_bytes=plan.weight_bytes,
            )
        )


def set_options(options: plan_pb2.EngineOptions) -> dict[str, Any]:
    """The MLX options that the caller has set, by name; a set zero is set."""
    return {field.name: value for field, value in options.mlx.ListFields()}


def _shape(plan: Plan) -> MlxShape:
    assert isinstance(plan.shape, MlxShape)
    return plan.shape
