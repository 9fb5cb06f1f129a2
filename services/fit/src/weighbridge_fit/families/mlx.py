"""MLX language models: the family's plan between its messages."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.facts import WeightFormat
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.model_config import QWEN_TYPES
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import LONGEST_CONTEXT, MlxRequest, MlxShape
from weighbridge_fit.plans.mlx.plan import memory_limit_bytes, plan
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.solving import solve_context
from weighbridge_fit.verdict import help_for


def compute_device(capacity: Capacity) -> ComputeDevice:
    """What MLX computes on: Metal where memory is unified, else the CPU (cards are not used by this engine)."""
    return ComputeDevice.METAL if capacity.pool is Pool.UNIFIED else ComputeDevice.CPU


_UNPLANNED = frozenset({"adapters", "draft_model", "prompt_cache_bytes", "split_lane"})


class MlxFamily:
    """See `families.Family`."""

    engine = Engine.MLX
    options_name = "mlx"
    workload_name = "chat"

    def recognises(self, model: Model) -> bool:
        """Whether a model whose engine nobody named is this family's."""
        geometry = model.facts.geometry
        stored = model.facts.format is WeightFormat.SAFETENSORS
        return stored and geometry is not None and geometry.model_type in QWEN_TYPES

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> MlxRequest:
        """What is asked for."""
        chat, given = workload.chat, set_options(options)
        unplanned = sorted(_UNPLANNED & given.keys())
        if unplanned:
            raise PlanError("INVALID_OPTION", f"options.mlx.{unplanned[0]}", f"{unplanned[0]} is not planned yet.")
        return MlxRequest(
            context_tokens=chat.context_tokens,
            slots=chat.slots,
            prefill_step_tokens=given.get("prefill_step_tokens"),
            kv_bits=given.get("kv_bits"),
            kv_group_size=given.get("kv_group_size"),
            allocator_cache_bytes=given.get("allocator_cache_bytes"),
        )

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """Further files that the options name, by role."""
        return {}

    def plan(self, model: Model, request: MlxRequest, capacity: Capacity) -> Plan:
        """Plans one model. Raises PlanError."""
        return plan(model.facts, request, compute_device(capacity))

    def advise(
        self, model: Model, request: MlxRequest, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS."""
        smaller = solve_context(self, model, request, capacity, below=self.context_of(plan))
        return help_for(requirement, capacity, plan.weight_bytes, smaller)

    def longest_context(self, model: Model) -> int:
        """What the model was made for, in tokens."""
        return (model.facts.geometry.max_context_tokens if model.facts.geometry else 0) or LONGEST_CONTEXT

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
        return plan_pb2.EngineOptions(mlx=options)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """How the runtime is started."""
        shape = _shape(plan)
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
