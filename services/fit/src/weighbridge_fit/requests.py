"""What a request names beside its model: an engine, a machine, a workload that goes with them."""

from collections.abc import Mapping
from typing import Any, Protocol

import grpc
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_fit.facts import Role
from weighbridge_fit.families.diffusers import LAW, DiffusersFamily
from weighbridge_fit.families.family import Family
from weighbridge_fit.families.generic import GenericChatFamily
from weighbridge_fit.families.registry import Families, recognise
from weighbridge_fit.model import Model
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.wire.catalog import ENGINE_KINDS

INVALID_OPTION = "INVALID_OPTION"
# What is no model of its own, and the options that give it to one.
_NO_MODELS: Mapping[Role, str] = {
    Role.ADAPTER: "an adapter (option adapters of mlx, parts of sd)",
    Role.DRAFTER: "a drafter (option draft_model of mlx, drafter_file of ds4)",
    Role.PROJECTOR: "a projector (option vision_file of ds4, parts of sd)",
}
OF_ANOTHER_KIND: Mapping[str, str] = {
    "chat": "A context is a chat's, and this is a model of pictures.",
    "image": "A size is a picture's, and this is a model for chat.",
}
"""Why nothing is solved for, by the kind of workload that the solver is for."""
_WAY_OUT: Mapping[str, str] = {
    "chat": "This model is for chat: use `weighbridge chat`",
    "image": "This model makes images: use `weighbridge image`",
}
_ENGINES: Mapping[int, Engine] = {number: engine for engine, number in ENGINE_KINDS.items()}


class HasMachine(Protocol):
    """A request about a machine."""

    @property
    def machine(self) -> machine_pb2.Machine:
        """A what-if."""

    def HasField(self, field_name: Any) -> bool:  # noqa: N802 - protobuf's own name
        """Whether it is set."""


def what_if(request: HasMachine) -> machine_pb2.Machine | None:
    """The machine that a request asks about, None for the ledger's own."""
    return request.machine if request.HasField("machine") else None


def named_engine(kind: int, options: plan_pb2.EngineOptions) -> Engine | None:
    """The engine that the caller means by kind or options, None if by neither. Raises RequestError INVALID_OPTION."""
    member = options.WhichOneof("engine")
    engine = _ENGINES.get(kind) if kind else None if member is None else Engine(member)
    if engine is None:
        if kind:
            raise invalid_argument("engine_kind", "is no engine that fit knows", INVALID_OPTION)
        return None
    if member is not None and member != engine.value:
        raise invalid_argument("options", f"are for {member}, the plan is for {engine.value}", INVALID_OPTION)
    return engine


def workload_kind(workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> str:
    """The kind of workload that is asked for, "" where nothing says: a law of the generic engine prices one kind."""
    named = workload.WhichOneof("kind")
    if named is None and options.generic.law:
        return DiffusersFamily.workload_name if options.generic.law == LAW else GenericChatFamily.workload_name
    return named or ""


def check_workload(family: Family, workload: plan_pb2.Workload) -> None:
    """Raises RequestError INVALID_OPTION for a workload of another kind than the family does."""
    asked = workload.WhichOneof("kind")
    if asked is not None and asked != family.workload_name:
        described = f"is for {asked}, and {family.options_name} does {family.workload_name} with this model"
        raise invalid_argument("workload", described, INVALID_OPTION)


def unrecognised(model: Model) -> str:
    """That nobody prices a model."""
    role = _NO_MODELS.get(model.facts.role)
    if role is not None:
        return f"This is {role}: it is priced together with the model that it belongs to, and not alone."
    named = f"of type {model.facts.architecture!r}" if model.facts.architecture else "whose type is not known"
    return f"No engine's law prices a model {named}."


def with_way_out(error: PlanError, model: Model, engine: Engine | None, among: Families) -> PlanError:
    """``error`` of the plan for ``engine``, and which command and engine the model is for, if it is for another one."""
    other = recognise(model, among) if error.reason == UNSUPPORTED_ARCHITECTURE and engine is not None else None
    if other is None or other.engine in (engine, Engine.GENERIC):
        return error
    does = _WAY_OUT[other.workload_name]
    return PlanError(error.reason, error.field, f"{error.message} {does}, with the engine {other.engine.value}.")


def plan_refused(error: PlanError) -> RequestError:
    """A plan that cannot be made, with the field that is to blame."""
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        error.reason,
        error.message,
        field_violations=[(error.field, error.message)],
    )
