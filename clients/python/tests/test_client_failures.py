"""Failures as exit codes (design: 0 done, 1 failed, 2 usage, 3 refused, 4 unreachable)."""

import grpc
import pytest
from weighbridge.failures import exit_code, unreachable, verdict_exit_code
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.memory.v1 import requirement_pb2

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (CODE.FAILED_PRECONDITION, "MODEL_WONT_RUN", 3),
        (CODE.FAILED_PRECONDITION, "CLAIM_EXCEEDS_CAPACITY", 3),
        (CODE.RESOURCE_EXHAUSTED, "QUEUE_FULL", 3),
        (CODE.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT", 3),
        (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", 3),
        (CODE.UNAVAILABLE, "UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "LEDGER_UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "FIT_UNREACHABLE", 4),
        (CODE.UNAVAILABLE, "ENGINE_DIED", 1),
        (CODE.NOT_FOUND, "MODEL_NOT_FOUND", 1),
        (CODE.INVALID_ARGUMENT, "MALFORMED_WEIGHTS", 1),
        (CODE.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", 1),
        (CODE.RESOURCE_EXHAUSTED, "ENGINE_OUT_OF_MEMORY", 1),
        (CODE.UNIMPLEMENTED, "UNIMPLEMENTED", 1),
    ],
)
def test_each_reason_has_its_exit_code(code: grpc.StatusCode, reason: str, expected: int) -> None:
    assert exit_code(RpcFailure(code, reason, "")) == expected


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (requirement_pb2.VERDICT_RUNS, 0),
        (requirement_pb2.VERDICT_TIGHT, 0),
        (requirement_pb2.VERDICT_UNKNOWN, 0),
        (requirement_pb2.VERDICT_WONT_RUN, 3),
    ],
)
def test_only_wont_run_is_a_refusal(verdict: "requirement_pb2.Verdict.ValueType", expected: int) -> None:
    assert verdict_exit_code(verdict) == expected


def test_unreachable_says_who_where_and_what_to_do() -> None:
    failure = unreachable("ledger", "unix:/run/ledger.sock").failure
    assert exit_code(failure) == 4
    assert "ledger" in failure.message
    assert "unix:/run/ledger.sock" in failure.message
    assert "weighbridge up" in failure.message
