"""What a person and a program say of a claim, and what they are told while it waits."""

from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from weighbridge import CallError, Suite, SyncSuite, admit
from weighbridge.cli import main
from weighbridge_proto.engines.v1 import chat_service_pb2, engine_service_pb2
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

HOLDER = lease_pb2.Holder(name="mine")
CLAIM = requirement_pb2.Claim(host_bytes=7)
HELD = ledger_service_pb2.LeaseCredential(lease_id="held", secret="h")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def queued(*lease_ids: str) -> engine_service_pb2.LoadModelResponse:
    reason = lease_pb2.WaitReason(code="BYTES_HELD", message="1 GiB must be given back.", lease_ids=lease_ids)
    return engine_service_pb2.LoadModelResponse(queued=engine_service_pb2.LoadQueued(position=1, reasons=[reason]))


def reclaiming(*lease_ids: str) -> engine_service_pb2.LoadModelResponse:
    return engine_service_pb2.LoadModelResponse(
        reclaiming=engine_service_pb2.LoadReclaiming(victim_lease_ids=lease_ids)
    )


@pytest.mark.parametrize(
    ("options", "priority", "pinned", "exclusive"),
    [
        ((), lease_pb2.PRIORITY_UNSPECIFIED, False, None),
        (("--priority", "interactive", "--pin", "--exclusive"), lease_pb2.PRIORITY_INTERACTIVE, True, True),
        (("--priority", "background", "--pinned", "--not-exclusive"), lease_pb2.PRIORITY_BACKGROUND, True, False),
    ],
)
def test_load_passes_on_what_is_said_of_its_claim(
    fake_suite: Any,
    options: tuple[str, ...],
    priority: "lease_pb2.Priority.ValueType",
    pinned: bool,
    exclusive: bool | None,
) -> None:
    assert run("load", "/m", *options).exit_code == 0
    [request] = fake_suite.state.asked(engine_service_pb2.LoadModelRequest)
    assert (request.priority, request.pinned) == (priority, pinned)
    assert (request.exclusive if request.HasField("exclusive") else None) is exclusive


def test_a_priority_that_there_is_not_is_a_usage_error(fake_suite: Any) -> None:
    assert run("load", "/m", "--priority", "urgent").exit_code == 2


def test_a_load_that_waits_says_for_whom(fake_suite: Any) -> None:
    other = lease_pb2.Lease(lease_id="lease-2", holder={"name": "engine-sd"}, purpose={"model_name": "flux"})
    fake_suite.state.leases.append(other)
    fake_suite.state.waits = [queued("lease-1", "lease-2"), reclaiming("lease-2")]
    told = run("load", "/m").stderr.splitlines()
    assert "QUEUED    place 1: 1 GiB must be given back. (engine-mlx tiny, engine-sd flux)" in told
    assert "RECLAIMING  asked engine-sd flux to make room" in told


def test_holders_that_the_ledger_does_not_name_are_counted(fake_suite: Any) -> None:
    fake_suite.state.failures["ListLeases"] = RequestError(grpc.StatusCode.UNAVAILABLE, "LEDGER_STOPPING", "Stopping.")
    fake_suite.state.waits = [queued("lease-1"), reclaiming("lease-1", "lease-2")]
    result = run("load", "/m")
    assert result.exit_code == 0
    assert "QUEUED    place 1: 1 GiB must be given back.\n" in result.stderr
    assert "RECLAIMING  asked 2 holders to make room\n" in result.stderr


def test_an_answer_that_waits_for_its_device_says_so_once(fake_suite: Any) -> None:
    reason = lease_pb2.WaitReason(code="DEVICE_UNHEALTHY", message="The device is 84 °C warm and rests.")
    fake_suite.state.rests = 3 * [chat_service_pb2.ChatWaiting(reasons=[reason])]
    result = run("chat", "/m", "hello")
    assert result.exit_code == 0
    assert result.stderr.count("WAITING   The device is 84 °C warm and rests.\n") == 1


async def test_a_claim_of_the_callers_own_says_all_that_a_claim_can_say(fake_suite: Any) -> None:
    async with Suite(fake_suite.environ) as suite:
        claiming = admit(
            suite,
            HOLDER,
            CLAIM,
            purpose=lease_pb2.Purpose(model_name="m"),
            request_id="once",
            priority=lease_pb2.PRIORITY_BACKGROUND,
            pinned=True,
            exclusive=True,
            replaces=ledger_service_pb2.LeaseCredential(lease_id="old", secret="o"),
            while_holding=[HELD],
            max_wait_s=2.5,
        )
        assert (await anext(claiming)).queued.position == 1
        assert (await anext(claiming)).granted.secret == "s"
        await claiming.aclose()
    [request] = fake_suite.state.asked(ledger_service_pb2.AdmitRequest)
    assert (request.holder, request.claim, request.purpose.model_name) == (HOLDER, CLAIM, "m")
    assert (request.request_id, request.priority) == ("once", lease_pb2.PRIORITY_BACKGROUND)
    assert (request.pinned, request.exclusive, request.replaces_lease.lease_id) == (True, True, "old")
    assert list(request.while_holding) == [HELD]
    assert request.max_wait.ToMilliseconds() == 2500
    assert fake_suite.state.cancelled.wait(10), "closing the iterator gives the grant back"


async def test_a_claim_that_would_wait_for_somebody_busy_is_refused_with_its_reason(fake_suite: Any) -> None:
    fake_suite.state.failures["Admit"] = RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "WAIT_WHILE_HOLDING", "It would wait for one that is in use."
    )
    async with Suite(fake_suite.environ) as suite:
        with pytest.raises(CallError, match="WAIT_WHILE_HOLDING"):
            await anext(admit(suite, HOLDER, CLAIM, while_holding=[HELD]))


def test_a_claim_without_asyncio(fake_suite: Any) -> None:
    with SyncSuite(fake_suite.environ) as suite:
        claiming = suite.admit(HOLDER, CLAIM, while_holding=[HELD])
        assert [next(claiming).WhichOneof("event") for _ in range(2)] == ["queued", "granted"]
        claiming.close()
    assert fake_suite.state.cancelled.wait(10)
