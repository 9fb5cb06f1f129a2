"""The accuracy of plans: what was planned, claimed and granted for a launch, and what it took, whoever could say it."""

import pytest
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.service.sweep import sweep
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB, MIB = 2**30, 2**20

PURPOSE = {
    "engine_kind": "mlx",
    "model_name": "Qwen3",
    "model_digest": "digest",
    "engine_build": "build",
    "shape": "context=8192",
    "planned_peak_bytes": 5 * GIB,
}
PEAKS = {"host_bytes": 3 * GIB, "host_peak_bytes": 4 * GIB, "device_peaks": [{"device_id": "0", "bytes": 2 * GIB}]}


def process(pid: int) -> ProcessIdentity:
    """As the ledger of these tests names its processes."""
    return ProcessIdentity(pid, 100 + pid, "boot-1", "pid:[1]")


class Launch:
    """A launch of 6 GiB that was planned as 5, by the holder 7 with the engine 71."""

    def __init__(self, ledger, lease_id: str, secret: str, stream) -> None:
        self._ledger, self.lease_id, self.secret, self._stream = ledger, lease_id, secret, stream

    async def beat(self, **more) -> None:
        await self._stream.write(pb.KeepAliveRequest(lease_id=self.lease_id, secret=self.secret, **more))
        assert (await self._stream.read()).HasField("renewed")

    async def crash(self) -> None:
        """The holder and its engine are killed, and it is seen."""
        self._ledger.dead |= {process(7), process(71)}
        await sweep(self._ledger.servicer._keeper, self._ledger._is_alive)
        await self._ledger.servicer._keeper.settled()
        lease = (await self._ledger.stub.GetLease(pb.GetLeaseRequest(lease_id=self.lease_id))).lease
        assert lease.state == lease_pb2.LEASE_STATE_RELEASED

    async def record(self, **figures) -> lease_pb2.Observation:
        message = {"model_digest": "digest", "engine_build": "build", "shape": "context=8192", **figures}
        return (
            await self._ledger.stub.RecordObservation(
                pb.RecordObservationRequest(observation={"lease_id": self.lease_id, **message})
            )
        ).observation


async def launch(ledger, **purpose) -> Launch:
    lease_id, secret = await ledger.active(6, 7, 71, purpose={**PURPOSE, **purpose})
    return Launch(ledger, lease_id, secret, ledger.stub.KeepAlive())


async def kept(ledger) -> list[lease_pb2.Observation]:
    await ledger.servicer._keeper.settled()
    return list((await ledger.stub.ListObservations(pb.ListObservationsRequest())).observations)


def figures(one: lease_pb2.Observation) -> tuple[float, ...]:
    return tuple(size / GIB for size in (one.planned_bytes, one.claimed_bytes, one.granted_bytes, one.peak_bytes))


async def test_what_a_holder_leaves_out_of_its_own_lease_is_added_from_the_book(ledger) -> None:
    one = await launch(ledger)
    await ledger.pass_time(4)
    await one.beat(load_complete=True)
    recorded = await one.record(peak_bytes=4 * GIB)
    assert figures(recorded) == (5, 6, 6, 4)
    assert recorded.load_time.seconds == 4
    assert await kept(ledger) == [recorded]


async def test_what_a_holder_says_itself_stays(ledger) -> None:
    one = await launch(ledger)
    said = {"planned_bytes": GIB, "claimed_bytes": 2 * GIB, "granted_bytes": 3 * GIB, "peak_bytes": 4 * GIB}
    recorded = await one.record(**said, load_time={"seconds": 9})
    assert figures(recorded) == (1, 2, 3, 4)
    assert recorded.load_time.seconds == 9


async def test_a_lease_that_has_just_ended_is_in_the_book_too(ledger) -> None:
    one = await launch(ledger)
    ledger.dead.add(process(71))
    await ledger.release(one.lease_id, one.secret)
    assert figures(await one.record(peak_bytes=4 * GIB)) == (5, 6, 6, 4)


async def test_an_unknown_lease_adds_nothing(ledger) -> None:
    recorded = await ledger.stub.RecordObservation(
        pb.RecordObservationRequest(observation={"model_digest": "digest", "peak_bytes": GIB, "lease_id": "unknown"})
    )
    assert figures(recorded.observation) == (0, 0, 0, 1)


async def test_a_holder_that_crashed_leaves_the_peak_that_it_last_reported(ledger) -> None:
    one = await launch(ledger)
    await ledger.pass_time(4)
    await one.beat(load_complete=True, observed={"host_bytes": GIB, "host_peak_bytes": GIB})
    await one.beat(observed=PEAKS)
    await one.crash()
    (left,) = await kept(ledger)
    assert figures(left) == (5, 6, 6, 4 + 2)
    assert (left.model_digest, left.engine_build, left.shape) == ("digest", "build", "context=8192")
    assert (left.lease_id, left.node_id, left.load_time.seconds) == (one.lease_id, "node", 4)
    assert left.observe_time.seconds == 1_000_004


async def test_so_does_one_that_released_without_a_word(ledger) -> None:
    one = await launch(ledger)
    await one.beat(load_complete=True, observed=PEAKS)
    ledger.dead.add(process(71))
    await ledger.release(one.lease_id, one.secret)
    assert [figures(left) for left in await kept(ledger)] == [(5, 6, 6, 6)]


async def test_what_is_in_use_counts_where_no_peak_was_told(ledger) -> None:
    one = await launch(ledger)
    await one.beat(
        load_complete=True, observed={"host_bytes": 3 * GIB, "devices": [{"device_id": "0", "bytes": 512 * MIB}]}
    )
    await one.crash()
    assert [left.peak_bytes for left in await kept(ledger)] == [3 * GIB + 512 * MIB]


async def test_a_holder_that_had_recorded_its_peak_is_not_corrected(ledger) -> None:
    one = await launch(ledger)
    await one.beat(load_complete=True, observed=PEAKS)
    recorded = await one.record(peak_bytes=4 * GIB)
    await one.crash()
    assert await kept(ledger) == [recorded]


async def test_the_word_of_a_holder_that_comes_late_takes_the_place_of_the_ledgers(ledger) -> None:
    """An engine's host releases first and records then, or is answered the second time it records."""
    one = await launch(ledger)
    await one.beat(load_complete=True, observed=PEAKS)
    await one.crash()
    for _ in range(2):
        recorded = await one.record(peak_bytes=4 * GIB)
    assert await kept(ledger) == [recorded]


@pytest.mark.parametrize(
    ("beats", "purpose"),
    [
        ([{"observed": PEAKS}], {}),  # never came to its peak
        ([{"load_complete": True}], {}),  # nobody knows its peak
        ([{"load_complete": True, "observed": {}}], {}),
        ([{"load_complete": True, "observed": PEAKS}], {"model_digest": ""}),  # nobody knows of what
    ],
)
async def test_a_launch_that_nothing_can_be_learnt_from_leaves_nothing(ledger, beats, purpose) -> None:
    one = await launch(ledger, **purpose)
    for beat in beats:
        await one.beat(**beat)
    await one.crash()
    assert await kept(ledger) == []


async def test_a_negative_figure_is_refused(ledger) -> None:
    request = pb.RecordObservationRequest(observation={"model_digest": "d", "peak_bytes": 1, "claimed_bytes": -1})
    failure = await ledger.failure(ledger.stub.RecordObservation(request))
    assert failure.field_violations[0][0] == "observation.claimed_bytes"


async def test_pages_go_on_where_the_last_one_ended_whatever_is_recorded_meanwhile(ledger) -> None:
    async def record(count: int) -> None:
        for peak in range(1, count + 1):
            await ledger.stub.RecordObservation(
                pb.RecordObservationRequest(observation={"model_digest": "digest", "peak_bytes": peak})
            )

    await record(5)
    peaks, token = [], ""
    while True:
        page = await ledger.stub.ListObservations(pb.ListObservationsRequest(page_size=2, page_token=token))
        peaks += [one.peak_bytes for one in page.observations]
        token = page.next_page_token
        if not token:
            break
        await record(1)
    assert peaks == [5, 4, 3, 2, 1]
