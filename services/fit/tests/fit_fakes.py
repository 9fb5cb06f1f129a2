"""What the tests of the service share: a ledger that knows what it is told, and words for requests."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 1 << 30

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class FakeLedger(ledger_service_pb2_grpc.LedgerServiceServicer):
    """A ledger that owns a CPU machine of 4 GiB and knows what it is told. A what-if machine's ceiling is its RAM."""

    def __init__(self) -> None:
        self.observations: list[lease_pb2.Observation] = []
        self.asked: list[Any] = []
        self.outcome = lease_pb2.OUTCOME_NOW

    async def GetCapacity(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        what_if = request.HasField("machine")
        size = request.machine.ram_bytes if what_if else 4 * GIB
        ceiling = machine_pb2.Ceiling(automatic_bytes=size, effective_bytes=size)
        pool = request.machine.pool or machine_pb2.POOL_KIND_CPU
        capacity = machine_pb2.Capacity(pool=pool, total_ram_bytes=size, host=ceiling, total=ceiling)
        return ledger_service_pb2.GetCapacityResponse(capacity=capacity)

    async def ListObservations(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.append(request)
        return ledger_service_pb2.ListObservationsResponse(observations=self.observations)

    async def Admit(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        assert request.validate_only
        self.asked.append(request)
        preview = ledger_service_pb2.AdmitPreview(outcome=self.outcome, would_evict_lease_ids=["l1"])
        yield ledger_service_pb2.AdmitResponse(preview=preview)


def at(path: str) -> weights_pb2.ModelRef:
    return weights_pb2.ModelRef(path=path)


def named(catalog_id: str) -> weights_pb2.ModelRef:
    return weights_pb2.ModelRef(catalog_id=catalog_id)


def chat(context: int = 0, slots: int = 0) -> plan_pb2.Workload:
    return plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=context, slots=slots))


def cpu(size: int) -> machine_pb2.Machine:
    return machine_pb2.Machine(pool=machine_pb2.POOL_KIND_CPU, ram_bytes=size)


def unified(size: int) -> machine_pb2.Machine:
    return machine_pb2.Machine(pool=machine_pb2.POOL_KIND_UNIFIED, ram_bytes=size, platform="darwin/arm64")


async def refusal(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return RpcFailure.from_rpc_error(caught.value)
