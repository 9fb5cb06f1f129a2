"""What can be asked of the ledger over a real channel: machine, limit, leases, observations."""

import grpc
import pytest
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 2**30
Code = grpc.StatusCode


async def test_the_limit_counts_at_once_and_evicts_nobody(ledger) -> None:
    await ledger.active(20)
    capacity = (await ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=10 * GIB))).capacity
    assert (capacity.total.effective_bytes, capacity.total.committed_bytes) == (10 * GIB, 20 * GIB)
    assert (await ledger.failure(ledger.admit(11, 2).read())).reason == "CLAIM_EXCEEDS_CAPACITY"
    assert (await ledger.admit(1, 3).read()).HasField("queued")
    failure = await ledger.failure(ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=0)))
    assert failure.field_violations[0][0] == "limit_bytes"
    capacity = (await ledger.stub.SetLimit(pb.SetLimitRequest())).capacity
    assert not capacity.total.HasField("limit_bytes")


@pytest.mark.parametrize(
    "ask",
    [
        lambda stub, node: stub.GetCapacity(pb.GetCapacityRequest(node_id=node)),
        lambda stub, node: stub.SetLimit(pb.SetLimitRequest(node_id=node, limit_bytes=1)),
        lambda stub, node: stub.ListLeases(pb.ListLeasesRequest(node_id=node)),
        lambda stub, node: stub.ListObservations(pb.ListObservationsRequest(node_id=node)),
        lambda stub, node: stub.Watch(pb.WatchRequest(node_id=node)).read(),
    ],
)
async def test_what_is_asked_of_another_machine_does_not_happen_on_this_one(ledger, ask) -> None:
    capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
    failure = await ledger.failure(ask(ledger.stub, "elsewhere"))
    assert (failure.code, failure.reason) == (Code.NOT_FOUND, "NODE_NOT_FOUND")
    assert (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity.total == capacity.total
    await ask(ledger.stub, capacity.node_id)


async def test_a_claim_on_another_machine_is_refused(ledger) -> None:
    request = ledger.request(1)
    request.node_id = "elsewhere"
    failure = await ledger.failure(ledger.stub.Admit(request).read())
    assert (failure.code, failure.reason) == (Code.NOT_FOUND, "NODE_NOT_FOUND")
    assert await ledger.leases() == []


async def test_a_what_if_machine_needs_no_such_machine(ledger) -> None:
    machine = {"pool": machine_pb2.POOL_KIND_UNIFIED, "ram_bytes": 64 * GIB}
    capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest(machine=machine))).capacity
    assert (capacity.total.effective_bytes, capacity.epoch) == (48 * GIB, "")
    failure = await ledger.failure(ledger.stub.GetCapacity(pb.GetCapacityRequest(machine={"ram_bytes": -1})))
    assert (failure.code, failure.field_violations[0][0]) == (Code.INVALID_ARGUMENT, "machine.ram_bytes")


async def test_lists_come_in_pages_oldest_first(ledger) -> None:
    ids = [(await ledger.active(1, pid))[0] for pid in range(1, 6)]
    token, seen = "", []
    while True:
        page = await ledger.stub.ListLeases(pb.ListLeasesRequest(page_size=2, page_token=token))
        seen += [lease.lease_id for lease in page.leases]
        token = page.next_page_token
        if not token:
            break
    assert seen == ids
    failure = await ledger.failure(ledger.stub.ListLeases(pb.ListLeasesRequest(page_token="x")))
    assert failure.code is Code.INVALID_ARGUMENT


async def test_nobody_is_shown_a_secret(ledger) -> None:
    watch = ledger.stub.Watch(pb.WatchRequest())
    seen = [await watch.read()]
    lease_id, secret = await ledger.active(1)
    seen += [await watch.read() for _ in range(2)]
    seen += [
        await ledger.stub.ListLeases(pb.ListLeasesRequest(include_released=True)),
        await ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=lease_id)),
    ]
    for message in seen:
        assert secret.encode() not in message.SerializeToString()
    watch.cancel()


async def test_released_leases_are_remembered_with_their_reason(ledger) -> None:
    lease_id, secret = await ledger.active(1)
    await ledger.release(lease_id, secret)
    assert await ledger.leases() == []
    listed = await ledger.stub.ListLeases(pb.ListLeasesRequest(include_released=True))
    assert [(lease.lease_id, lease.end_reason.reason) for lease in listed.leases] == [(lease_id, "HOLDER")]


async def test_observations_are_kept_and_found(ledger) -> None:
    for peak in (5, 6, 7):
        recorded = await ledger.stub.RecordObservation(
            pb.RecordObservationRequest(observation={"model_digest": "m", "engine_build": "b", "peak_bytes": peak})
        )
    assert recorded.observation.node_id == "node"
    page = await ledger.stub.ListObservations(pb.ListObservationsRequest(model_digest="m", page_size=2))
    assert [one.peak_bytes for one in page.observations] == [7, 6]
    rest = await ledger.stub.ListObservations(
        pb.ListObservationsRequest(model_digest="m", page_size=2, page_token=page.next_page_token)
    )
    assert ([one.peak_bytes for one in rest.observations], rest.next_page_token) == ([5], "")
    failure = await ledger.failure(ledger.stub.RecordObservation(pb.RecordObservationRequest()))
    assert failure.field_violations[0][0] == "observation.model_digest"
