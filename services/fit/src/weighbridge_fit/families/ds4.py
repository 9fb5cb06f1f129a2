"""ds4: the family's plan between its messages."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from weighbridge_common.sizes import format_gib
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.facts import WeightFormat
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.off_loop import stop_if_abandoned
from weighbridge_fit.plans.ds4.companions import DRAFTER, VISION
from weighbridge_fit.plans.ds4.options import Ds4Request, Ds4Shape
from weighbridge_fit.plans.ds4.plan import Ds4Plan, plan
from weighbridge_fit.plans.ds4.shape import ARCHITECTURES, LONGEST_CONTEXT, architecture_of, has_routed_experts
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine, Plan
from weighbridge_fit.solving import context_help
from weighbridge_fit.verdict import Verdict, judge

# Options that name companions, by role: they are read before a request is made.
_FILES = {DRAFTER: "drafter_file", VISION: "vision_file"}


class Ds4Family:
    """See `families.Family` and `families.ChatFamily`."""

    engine = Engine.DS4
    options_name = "ds4"
    workload_name = "chat"

    def recognises(self, model: Model) -> bool:
        """One whole GGUF file of an architecture that ds4 loads, with the experts of a layer stacked."""
        facts = model.facts
        return (
            facts.format is WeightFormat.GGUF
            and len(facts.files) <= 1
            and architecture_of(model) in ARCHITECTURES
            and has_routed_experts(facts)
        )

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """The drafter and the vision companion, where the options name them."""
        given = _set_options(options)
        named = {role: given[field] for role, field in _FILES.items() if field in given}
        for role, reference in named.items():
            if not reference:
                raise PlanError("INVALID_OPTION", f"options.ds4.{_FILES[role]}", "An empty name is no file.")
        return named

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> Ds4Request:
        """What is asked for."""
        chat, given = workload.chat, _set_options(options)
        asked = {name: value for name, value in given.items() if name not in _FILES.values()}
        return Ds4Request(context_tokens=chat.context_tokens, slots=chat.slots, **asked)

    def plan(self, model: Model, request: Ds4Request, capacity: Capacity) -> Plan:
        """Plans one model. Raises PlanError."""
        stop_if_abandoned()
        return plan(model, request, capacity)

    def advise(
        self, model: Model, request: Ds4Request, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS."""
        savings = tuple(self._savings(model, request, capacity, plan))
        smaller, shorter = context_help(self, model, request, capacity, plan, requirement)
        return savings if savings and not smaller else (*savings, *shorter)

    def _savings(self, model: Model, request: Ds4Request, capacity: Capacity, made: Plan) -> Iterator[str]:
        """Other options under which it runs, and how much each saves at most."""
        shape, high = _shape(made), made.requirement.total.high
        tried: list[tuple[Ds4Request, str]] = []
        if shape.streams:
            cache = self._largest_cache(model, request, capacity, shape.expert_cache_gib)
            if cache:
                what = f"An expert cache of {cache} GiB (expert_cache_gib={cache})"
                tried.append((replace(request, expert_cache_gib=cache), what))
        elif request.stream_experts is False:
            tried.append((replace(request, stream_experts=True), "Streaming experts from disk (stream_experts=true)"))
        if shape.sessions > 1:
            tried.append((replace(request, sessions=1, slots=0), "One session (sessions=1)"))
        if shape.vision:
            tried.append((replace(request, vision=False), "No vision companion (vision=false)"))
        for other, what in tried:
            needed = self._needed(model, other, capacity)
            if needed is not None and judge(needed, capacity).verdict is Verdict.RUNS:
                saved = max(0, high - needed.total.high)
                yield f"{what} saves up to {format_gib(saved)}, and it runs."

    def _largest_cache(self, model: Model, request: Ds4Request, capacity: Capacity, below: int) -> int:
        """The largest smaller expert cache in GiB that runs, 0 if none does: memory grows with it, so bisection finds
        it."""
        low, high = 0, below
        while high - low > 1:
            middle = (low + high) // 2
            needed = self._needed(model, replace(request, expert_cache_gib=middle), capacity)
            if needed is None:
                # Too small for the engine: whether a larger one runs decides.
                low = middle
            elif judge(needed, capacity).verdict is Verdict.RUNS:
                low = middle
            else:
                high = middle
        runs = self._needed(model, replace(request, expert_cache_gib=low), capacity) if low else None
        return low if runs is not None and judge(runs, capacity).verdict is Verdict.RUNS else 0

    def _needed(self, model: Model, request: Ds4Request, capacity: Capacity) -> Requirement | None:
        try:
            return self.plan(model, request, capacity).requirement
        except PlanError:
            return None

    def longest_context(self, model: Model) -> int:
        """What the model was made for, in tokens."""
        geometry = model.facts.geometry
        listed = model.entry.max_context_tokens if model.entry else 0
        return (geometry.max_context_tokens if geometry else 0) or listed or LONGEST_CONTEXT

    def with_context(self, request: Ds4Request, context_tokens: int) -> Ds4Request:
        """The same request at another context."""
        return replace(request, context_tokens=context_tokens)

    def context_of(self, plan: Plan) -> int:
        """The context that was planned."""
        return _shape(plan).context_tokens

    def workload(self, plan: Plan) -> plan_pb2.Workload:
        """The workload as planned."""
        shape = _shape(plan)
        chat = plan_pb2.ChatWorkload(context_tokens=shape.context_tokens, slots=shape.sessions)
        return plan_pb2.Workload(chat=chat)

    def options(self, plan: Plan) -> plan_pb2.EngineOptions:
        """The options as planned. Asking for them again gives the same plan."""
        shape = _shape(plan)
        options = plan_pb2.Ds4Options(
            stream_experts=shape.streams,
            draft_policy=shape.policy.value,
            vision=shape.vision,
            sessions=shape.sessions,
            disk_kv=shape.disk_kv,
            power=str(shape.power),
            engine_layout=shape.layout.value,
            compute=shape.compute.value,
            prefill_chunk_tokens=shape.chunk_tokens,
        )
        if shape.streams:
            options.expert_cache_gib = shape.expert_cache_gib
        return plan_pb2.EngineOptions(ds4=options)

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """How ds4 is started, and what its supervisor must know of it without reading flags."""
        assert isinstance(plan, Ds4Plan)
        shape = _shape(plan)
        return plan_pb2.Launch(
            ds4=plan_pb2.Ds4Launch(
                arguments=plan.arguments,
                context_tokens=shape.context_tokens,
                sessions=shape.sessions,
                prefill_chunk_tokens=shape.chunk_tokens,
                compute=shape.compute.value,
                vision=shape.vision,
                planned_bytes=plan.printed_bytes,
                loaded_bytes=plan.weight_bytes,
            )
        )


def _set_options(options: plan_pb2.EngineOptions) -> dict[str, Any]:
    """The ds4 options that the caller has set, by name; a set zero is set."""
    return {field.name: value for field, value in options.ds4.ListFields()}


def _shape(plan: Plan) -> Ds4Shape:
    assert isinstance(plan.shape, Ds4Shape)
    return plan.shape
