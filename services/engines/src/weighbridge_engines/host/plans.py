"""Asking fit how a model would be loaded here."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from weighbridge_proto.errors import RequestError, RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.failures import fit_unreachable
from weighbridge_engines.host.ledger import RETRY_S

PLAN_TIMEOUT_S = 30.0
"""Headers are read within a budget of seconds; a slow disk takes a few times that."""


@dataclass(frozen=True)
class PlanKey:
    """Two loads with the same key are the same load."""

    model_digest: str
    resolved_path: str
    shape: str

    def is_same_model(self, other: "PlanKey") -> bool:
        """Whether the other load is of the same weights in the same place, in whatever shape."""
        return (self.model_digest, self.resolved_path) == (other.model_digest, other.resolved_path)


def key_of(plan: fit_pb.PlanModelResponse) -> PlanKey:
    """What makes a planned load the same as another."""
    return PlanKey(plan.model_digest, plan.resolved_path, plan.shape)


@dataclass(frozen=True)
class RequestKey:
    """A load as it was asked for, before it is planned: the same words mean the same load."""

    model: bytes
    details: bytes


def request_key(
    model: weights_pb2.ModelRef, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions
) -> RequestKey:
    """The key of a request."""
    details = workload.SerializeToString(deterministic=True) + b"\0" + options.SerializeToString(deterministic=True)
    return RequestKey(model.SerializeToString(deterministic=True), details)


def planned_bytes(plan: fit_pb.PlanModelResponse) -> int:
    """What the plan expects at the peak."""
    return plan.requirement.total.expected_bytes


def claimed_bytes(plan: fit_pb.PlanModelResponse) -> int:
    """What the plan claims as required, wherever it lives."""
    return plan.claim.host_bytes + sum(device.required_bytes for device in plan.claim.devices)


def purpose_of(plan: fit_pb.PlanModelResponse, kind: str, engine_build: str) -> lease_pb2.Purpose:
    """What the lease of this plan is for."""
    return lease_pb2.Purpose(
        engine_kind=kind,
        model_name=plan.model_name,
        model_digest=plan.model_digest,
        engine_build=engine_build,
        shape=plan.shape,
        planned_peak_bytes=planned_bytes(plan),
    )


class Planner:
    """fit, as an engine host uses it.

    Args:
        complete: adds to options what the engine knows of itself, such as what its binary was built for.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        engine_kind: "plan_pb2.EngineKind.ValueType",
        patience_s: float,
        clock: Clock,
        complete: Callable[[plan_pb2.EngineOptions], None] = lambda options: None,
    ) -> None:
        self._complete = complete
        self._stub = fit_service_pb2_grpc.FitServiceStub(channel)
        self._engine_kind = engine_kind
        self._patience_s = patience_s
        self._clock = clock

    async def plan(
        self,
        model: weights_pb2.ModelRef,
        workload: plan_pb2.Workload,
        options: plan_pb2.EngineOptions,
        engine_build: str,
    ) -> fit_pb.PlanModelResponse:
        """The plan for this engine on this machine.

        Raises:
            RequestError: fit's refusal; UNAVAILABLE FIT_UNREACHABLE.
        """
        request = fit_pb.PlanModelRequest(
            model=model, engine_kind=self._engine_kind, workload=workload, options=options, engine_build=engine_build
        )
        self._complete(request.options)
        deadline = self._clock.monotonic() + self._patience_s
        while True:
            try:
                return await self._stub.PlanModel(request, timeout=PLAN_TIMEOUT_S)
            except grpc.RpcError as error:
                failure = RpcFailure.from_rpc_error(error)
                if failure.is_ours or failure.code is not grpc.StatusCode.UNAVAILABLE:
                    raise RequestError.from_failure(failure) from error
            if self._clock.monotonic() >= deadline:
                raise fit_unreachable()
            await self._clock.sleep(RETRY_S)
