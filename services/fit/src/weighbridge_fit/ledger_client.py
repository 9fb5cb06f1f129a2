"""What fit asks the ledger: the machine's ceilings, what was measured before, and how a claim would fare now."""

import grpc
from weighbridge_common import processes
from weighbridge_proto.errors import RequestError, RpcFailure, unavailable
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

LEDGER_UNREACHABLE = "LEDGER_UNREACHABLE"
# Enough for a percentile; the ledger answers the latest ones first.
MAX_OBSERVATIONS = 200
RETRY_AFTER_S = 1.0


class LedgerClient:
    """The ledger over a channel that somebody else owns."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        self._timeout_s = timeout_s

    async def capacity(self, machine: machine_pb2.Machine | None) -> machine_pb2.Capacity:
        """The ceilings of a what-if machine, or of the ledger's own. Raises RequestError (LEDGER_UNREACHABLE, or what
        the ledger says about the machine)."""
        request = ledger_service_pb2.GetCapacityRequest(machine=machine)
        try:
            response = await self._stub.GetCapacity(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _explained(error) from error
        return response.capacity

    async def observations(self, digest: str, build: str, shape: str) -> list[lease_pb2.Observation]:
        """Measured peaks of the same weights, build and shape, latest first. Raises RequestError."""
        request = ledger_service_pb2.ListObservationsRequest(
            model_digest=digest, engine_build=build, shape=shape, page_size=MAX_OBSERVATIONS
        )
        try:
            response = await self._stub.ListObservations(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _explained(error) from error
        return list(response.observations)

    async def preview(
        self, claim: requirement_pb2.Claim, purpose: lease_pb2.Purpose
    ) -> ledger_service_pb2.AdmitPreview:
        """How a claim would fare against the leases of this moment. Raises RequestError."""
        holder = lease_pb2.Holder(name="fit", process=processes.current().to_message())
        request = ledger_service_pb2.AdmitRequest(holder=holder, purpose=purpose, claim=claim, validate_only=True)
        call = self._stub.Admit(request, timeout=self._timeout_s)
        try:
            async for response in call:
                return response.preview
        except grpc.RpcError as error:
            raise _explained(error) from error
        finally:
            call.cancel()
        raise unavailable(LEDGER_UNREACHABLE, "The ledger ended the preview without an answer.", RETRY_AFTER_S)


def _explained(error: grpc.RpcError) -> RequestError:
    """The ledger's own refusal as it is; anything that is no answer of a ledger becomes LEDGER_UNREACHABLE."""
    failure = RpcFailure.from_rpc_error(error)
    if failure.is_ours:
        return RequestError.from_failure(failure)
    # Naming a machine would not help: the ledger knows the ceilings of those, too.
    message = (
        "The ledger does not answer, so it is not known what this machine has room for. Start it, or see what "
        "`weighbridge doctor` says of it; then try again."
    )
    return unavailable(LEDGER_UNREACHABLE, message, RETRY_AFTER_S)
