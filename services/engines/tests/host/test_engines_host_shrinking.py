"""Optional bytes: given back as far as they are free when they are asked for, and the watchdog goes by what is left."""

import pytest
from host_fakes import CLAIM_BYTES, Suite, eventually, failure_of
from weighbridge_engines.host.footprint import FootprintVerdict, judge, shrunk
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

OPTIONAL_BYTES = 400_000_000


def granted(required, optional):
    charge = requirement_pb2.Charge(host_bytes=required + optional, optional_bytes=optional)
    claim = requirement_pb2.Claim(
        host_bytes=required,
        optional_host_bytes=optional,
        source=requirement_pb2.FIGURE_SOURCE_DERIVED,
        cpu_only=True,
    )
    return lease_pb2.Lease(claim=claim, charge=charge)


@pytest.mark.parametrize(
    ("held", "asked", "kept"),
    [
        (0, 400, 0),  # nothing but what is required
        (900, 400, 0),  # 990 are beneath the 1000 that are required
        (1000, 400, 101),  # from 110 % of the charge on no new work is taken: 1100 would be too little
        (1000, 50, 350),  # more than was asked for is kept
    ],
)
def test_what_a_lease_of_1000_and_400_optional_bytes_shrinks_to(held, asked, kept):
    claim = shrunk(granted(1000, 400), held, asked)
    assert claim == requirement_pb2.Claim(
        host_bytes=1000, optional_host_bytes=kept, source=requirement_pb2.FIGURE_SOURCE_DERIVED, cpu_only=True
    )
    assert judge(held, claim.host_bytes + claim.optional_host_bytes) is FootprintVerdict.WITHIN


def test_what_is_in_use_is_not_given_back():
    assert shrunk(granted(1000, 400), 1273, 400) is None  # 1401 would have to stay
    assert shrunk(granted(1000, 0), 0, 400) is None
    on_a_card = granted(1000, 400)
    on_a_card.charge.devices.append(process_pb2.DeviceBytes(device_id="card", bytes=1))
    assert shrunk(on_a_card, 0, 400) is None  # what is held there is not measured


async def test_optional_bytes_that_are_free_are_given_back_when_asked_for(run_dir):
    async with Suite(run_dir) as suite:
        suite.fit.optional_bytes = OPTIONAL_BYTES
        await suite.load_all()
        [lease] = suite.ledger.active
        assert lease.charge.host_bytes == CLAIM_BYTES + OPTIONAL_BYTES
        await eventually(lambda: suite.ledger.streams)
        suite.ledger.shrink(lease.lease_id, OPTIONAL_BYTES)
        await eventually(lambda: lease.charge.host_bytes == CLAIM_BYTES)
        assert [claim.optional_host_bytes for claim in suite.ledger.resizes] == [0]


async def test_the_watchdog_goes_by_what_is_charged_after_shrinking(run_dir):
    held = CLAIM_BYTES // 2
    async with Suite(run_dir, held_bytes=lambda: held) as suite:
        suite.fit.optional_bytes = OPTIONAL_BYTES
        await suite.load_all()
        [lease] = suite.ledger.active
        await eventually(lambda: suite.ledger.streams)
        suite.ledger.refuse_growth = True
        suite.ledger.shrink(lease.lease_id, OPTIONAL_BYTES)
        await eventually(lambda: suite.host.current.hold.charged_host_bytes == CLAIM_BYTES)
        held = 112 * CLAIM_BYTES // 100  # 80 % of what was granted
        await eventually(lambda: suite.host.current.over_grant)
        failure = await failure_of(suite.chat())
        assert (failure.reason, failure.metadata["grant_bytes"]) == ("OUT_OF_GRANT", str(CLAIM_BYTES))


async def test_what_was_claimed_and_granted_is_kept_beside_the_peak(run_dir):
    async with Suite(run_dir) as suite:
        suite.fit.optional_bytes = OPTIONAL_BYTES
        await suite.load_all()
        [lease] = suite.ledger.active
        await eventually(lambda: suite.ledger.streams)
        suite.ledger.shrink(lease.lease_id, OPTIONAL_BYTES)
        await eventually(lambda: suite.ledger.resizes)
        await suite.unload()
        [observation] = suite.ledger.observations
        assert observation.claimed_bytes == CLAIM_BYTES
        assert observation.granted_bytes == CLAIM_BYTES + OPTIONAL_BYTES  # at the grant, whatever was given back later
