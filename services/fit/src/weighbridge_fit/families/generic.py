"""Language models priced by other engines' laws: the family's plan between its messages."""

from collections.abc import Mapping
from dataclasses import replace

from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import stop_if_abandoned
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.generic.options import LONGEST_CONTEXT, GenericRequest, GenericShape
from weighbridge_fit.plans.generic.plan import plan, priceable
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.solving import context_help

# Options of the same message that are for diffusers.
_FOR_IMAGES = frozenset({"offload", "load_dtype", "tiled_decode"})


class GenericChatFamily:
    """See `families.Family`."""

    engine = Engine.GENERIC
    options_name = "generic"
    workload_name = "chat"

    def recognises(self, model: Model) -> bool:
        """Any language model whose geometry is known."""
        return priceable(model.facts) is not None

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """Further files that the options name: none."""
        return {}

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> GenericRequest:
        """What is asked for. Raises PlanError INVALID_OPTION."""
        chat = workload.chat
        given = {field.name: value for field, value in options.generic.ListFields()}
        unknown = sorted(_FOR_IMAGES & given.keys())
        if unknown:
            message = f"{unknown[0]} is for images and videos, not for language models."
            raise PlanError("INVALID_OPTION", f"options.generic.{unknown[0]}", message)
        return GenericRequest(
            context_tokens=chat.context_tokens,
            slots=chat.slots,
            law=given.get("law", ""),
            kv_type=given.get("kv_type"),
            micro_batch_tokens=given.get("micro_batch_tokens"),
            device_share=given.get("device_share"),
        )

    def plan(self, model: Model, request: GenericRequest, capacity: Capacity) -> Plan:
        """Plans one model. Raises PlanError."""
        stop_if_abandoned()
        return plan(model.facts, request, capacity)

    def advise(
        self, model: Model, request: GenericRequest, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS."""
        return context_help(self, model, request, capacity, plan, requirement)[1]

    def longest_context(self, model: Model) -> int:
        """What the model was made for, in tokens."""
        return (model.facts.geometry.max_context_tokens if model.facts.geometry else 0) or LONGEST_CONTEXT

    def with_context(self, request: GenericRequest, context_tokens: int) -> GenericRequest:
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
        options = plan_pb2.GenericOptions(
            law=shape.law.value, kv_type=shape.kv_type_name, micro_batch_tokens=shape.micro_batch_tokens
        )
        if shape.device_share:
            options.device_share = shape.device_share
        return plan_pb2.EngineOptions(generic=options)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """Never started."""
        return None


def _shape(plan: Plan) -> GenericShape:
    assert isinstance(plan.shape, GenericShape)
    return plan.shape
