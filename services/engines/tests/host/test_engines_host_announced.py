"""What an engine says, while it loads, that it will hold: its lease is raised to that, or it ends. And how long engines
may take to start and to end."""

import grpc
import pytest
from chat_fakes import ChatSuite, FakeChatKind
from host_fakes import CLAIM_BYTES, eventually, failure_of, kinds
from weighbridge_common.settings import load
from weighbridge_engines.host.footprint import raised
from weighbridge_engines.host.kind import MemoryAnnounced
from weighbridge_engines.host.service import policy_of
from weighbridge_engines.settings import EngineSettings
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

S = grpc.StatusCode
GIB = 2**30


async def test_a_lease_is_raised_to_what_the_engine_announces_before_the_load_goes_on(run_dir):
    async with ChatSuite(run_dir) as suite:
        suite.kind.announces = [MemoryAnnounced(2 * CLAIM_BYTES)]
        assert kinds(await suite.load_all())[-2:] == ["starting", "ready"]
        [lease] = suite.ledger.active
        assert (lease.charge.host_bytes, lease.claim.host_bytes) == (2 * CLAIM_BYTES, 2 * CLAIM_BYTES)
        await suite.unload()
        await suite.nothing_left()
        assert suite.ledger.observations[0].granted_bytes == 2 * CLAIM_BYTES


@pytest.mark.parametrize("announced", [0, CLAIM_BYTES - 1, CLAIM_BYTES])
async def test_what_is_covered_changes_nothing(run_dir, announced):
    async with ChatSuite(run_dir) as suite:
        suite.kind.announces = [MemoryAnnounced(announced)]
        await suite.load_all()
        assert suite.ledger.active[0].charge.host_bytes == CLAIM_BYTES
        assert not suite.ledger.resizes


async def test_the_footprint_is_judged_by_the_raised_lease(run_dir):
    """Held: 150 % of what was granted first, three quarters of what was granted then."""
    held = [CLAIM_BYTES // 2]
    async with ChatSuite(run_dir, held_bytes=lambda: held[0]) as suite:
        suite.ledger.refuse_growth = True
        suite.kind.announces = [MemoryAnnounced(2 * CLAIM_BYTES)]
        await suite.load_all()
        held[0] = CLAIM_BYTES * 3 // 2
        await eventually(lambda: suite.host.current.footprint.now_bytes == held[0])
        assert not suite.host.current.over_grant
        assert kinds(await suite.chat_all())[-1] == "finished"
        held[0] = CLAIM_BYTES * 5 // 2 + 1  # above 125 %
        await suite.nothing_left()
        assert suite.ledger.released == ["OUT_OF_GRANT"]


async def test_an_engine_that_announces_more_than_can_be_granted_is_ended(run_dir):
    async with ChatSuite(run_dir) as suite:
        suite.kind.announces = [MemoryAnnounced(3 * GIB)]
        suite.ledger.refuse_resize = RequestError(S.RESOURCE_EXHAUSTED, "CANNOT_GROW", "Only 0.5 GiB are free.")
        for _ in range(4):  # the engine itself is well: that does not count against it
            failure = await failure_of(suite.load())
            assert (failure.code, failure.reason) == (S.RESOURCE_EXHAUSTED, "OUT_OF_GRANT")
            await suite.nothing_left()
        assert suite.ledger.released == 4 * ["OUT_OF_GRANT"]
        # 10**9 bytes are 0.93 GiB.
        for told in ("3.00 GiB", "0.93 GiB", "Only 0.5 GiB are free.", "smaller context"):
            assert told in failure.message
        assert failure.metadata["announced_bytes"] == str(3 * GIB)
        assert failure.metadata["grant_bytes"] == str(CLAIM_BYTES)


async def test_a_ledger_that_is_silent_is_not_taken_for_a_full_one(run_dir):
    async with ChatSuite(run_dir, ledger_patience_s=0.1) as suite:
        suite.kind.announces = [MemoryAnnounced(3 * GIB)]
        suite.ledger.refuse_resize = RequestError(S.UNAVAILABLE, "LEDGER_STOPPING", "Stopping.")
        assert (await failure_of(suite.load())).reason == "LEDGER_UNREACHABLE"
        await suite.nothing_left()


def lease_of(*, host=0, optional=0, card=0, spilled=0):
    claim = requirement_pb2.Claim(host_bytes=host, optional_host_bytes=optional)
    charge = requirement_pb2.Charge(
        host_bytes=host + optional + spilled, optional_bytes=optional, spilled_bytes=spilled
    )
    if card:
        claim.devices.add(required_bytes=card + spilled)  # any card will do
        charge.devices.add(device_id="card-1", bytes=card)
    return lease_pb2.Lease(claim=claim, charge=charge)


def test_the_model_is_where_the_lease_has_it():
    on_host = lease_of(host=80 * GIB, optional=10 * GIB)
    assert raised(on_host, 90 * GIB) is None
    # All of the charge is required then: the engine fills its cache whether or not others would like the bytes.
    assert raised(on_host, 92 * GIB) == requirement_pb2.Claim(host_bytes=92 * GIB)
    on_card = lease_of(host=2 * GIB, card=100 * GIB)
    assert raised(on_card, 100 * GIB) is None
    more = requirement_pb2.Claim(host_bytes=2 * GIB)
    more.devices.add(device_id="card-1", required_bytes=101 * GIB)
    assert raised(on_card, 101 * GIB) == more
    spilled = lease_of(host=2 * GIB, card=60 * GIB, spilled=40 * GIB)
    assert raised(spilled, 100 * GIB) is None


# -- times --


def test_a_kind_may_need_longer_than_the_default():
    kind = FakeChatKind()
    needed = policy_of(load(EngineSettings, {}), kind)
    assert (needed.start_timeout_s, needed.stop_grace_s) == (900.0, 30.0)
    kind.least_start_timeout_s = kind.least_stop_grace_s = 0.0
    default = policy_of(load(EngineSettings, {}), kind)
    assert (default.start_timeout_s, default.stop_grace_s) == (600.0, 3.0)


def test_a_time_that_somebody_has_set_stands():
    environ = {"WEIGHBRIDGE_ENGINES_START_TIMEOUT_S": "20", "WEIGHBRIDGE_ENGINES_STOP_GRACE_S": "1"}
    told = policy_of(load(EngineSettings, environ), FakeChatKind())
    assert (told.start_timeout_s, told.stop_grace_s) == (20.0, 1.0)
