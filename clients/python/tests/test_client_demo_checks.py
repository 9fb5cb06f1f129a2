"""The demo notices when something does not hold."""

from weighbridge.demo import checks
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2


def capacity(committed: int) -> machine_pb2.Capacity:
    return machine_pb2.Capacity(total=machine_pb2.Ceiling(committed_bytes=committed))


def active(charged: int) -> lease_pb2.Lease:
    lease = lease_pb2.Lease(state=lease_pb2.LEASE_STATE_ACTIVE)
    lease.charge.host_bytes = charged
    return lease


def test_a_total_that_is_not_the_sum_of_the_lines() -> None:
    line = requirement_pb2.RequirementLine(phase="resident", low_bytes=1, expected_bytes=2, high_bytes=3)
    right = requirement_pb2.ByteRange(low_bytes=1, expected_bytes=2, high_bytes=3)
    assert checks.check_sums(requirement_pb2.Requirement(lines=[line], total=right)) == []
    wrong = requirement_pb2.ByteRange(low_bytes=1, expected_bytes=2, high_bytes=4)
    assert checks.check_sums(requirement_pb2.Requirement(lines=[line], total=wrong)) != []


def test_a_verdict_that_is_no_yes() -> None:
    for verdict, fine in [
        (requirement_pb2.VERDICT_RUNS, True),
        (requirement_pb2.VERDICT_TIGHT, True),
        (requirement_pb2.VERDICT_WONT_RUN, False),
        (requirement_pb2.VERDICT_UNKNOWN, False),
    ]:
        assert (checks.check_verdict(requirement_pb2.Assessment(verdict=verdict)) == []) is fine


def test_an_answer_without_paris() -> None:
    assert checks.check_answer("The capital of France is Paris.", "Paris") == []
    assert checks.check_answer("The capital of France is Lyon.", "Paris") != []


def test_bytes_committed_must_be_those_of_the_one_lease() -> None:
    assert checks.check_held(capacity(7), [active(7)]) == []
    assert checks.check_held(capacity(8), [active(7)]) != []
    assert checks.check_held(capacity(0), []) != []
    assert checks.check_held(capacity(0), [active(0)]) != []


def test_nothing_may_be_left() -> None:
    assert checks.check_given_back(capacity(0), []) == []
    assert checks.check_given_back(capacity(1), []) != []
    assert checks.check_given_back(capacity(0), [active(0)]) != []
