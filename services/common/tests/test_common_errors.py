"""Failures survive every crossing: wire, event message, another service, and limits."""

import asyncio
import concurrent.futures
import json
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_common import errors as server_errors
from weighbridge_common import logs
from weighbridge_proto import channel, errors
from weighbridge_proto.errors import RequestError, RpcFailure

METHOD = "/test.Service/Call"

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_pairs = st.lists(st.tuples(_texts, _texts), max_size=3).map(tuple)
failures = st.builds(
    RpcFailure,
    code=st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]),
    reason=st.from_regex(r"[A-Z][A-Z_]{0,40}[A-Z]", fullmatch=True),
    message=_texts,
    metadata=st.dictionaries(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), _texts, max_size=5),
    # Whole milliseconds: the wire has nanoseconds, and a float must come back as itself.
    retry_after_s=st.none() | st.integers(0, 10**7).map(lambda ms: ms / 1000),
    field_violations=_pairs,
    quota_violations=_pairs,
)


@given(failures)
def test_a_failure_comes_back_from_the_wire_as_it_went(failure: RpcFailure) -> None:
    packed = failure.to_status().SerializeToString()
    assert RpcFailure.from_status(status_pb2.Status.FromString(packed)) == failure


@given(failures)
def test_a_failure_comes_back_from_an_event_without_its_violations(failure: RpcFailure) -> None:
    back = RpcFailure.from_message(failure.to_message())
    assert (back.code, back.reason, back.message) == (failure.code, failure.reason, failure.message)
    assert (dict(back.metadata), back.retry_after_s) == (dict(failure.metadata), failure.retry_after_s)


@given(
    message=st.text(st.characters(exclude_categories=["Cs"]), max_size=5000),
    metadata=st.dictionaries(st.text(max_size=50), st.text(max_size=3000), max_size=30),
    violations=st.lists(st.tuples(st.text(max_size=100), st.text(max_size=3000)), max_size=30).map(tuple),
)
def test_a_status_never_outgrows_the_trailers_and_keeps_its_reason(
    message: str, metadata: dict[str, str], violations: tuple[tuple[str, str], ...]
) -> None:
    failure = RpcFailure(grpc.StatusCode.INTERNAL, "REASON", message, metadata, 1.5, quota_violations=violations)
    status = failure.to_status()
    assert status.ByteSize() <= errors.MAX_STATUS_BYTES
    back = RpcFailure.from_status(status)
    assert back.reason == "REASON" and back.retry_after_s == 1.5
    assert set(back.metadata.items()) <= set(metadata.items())


async def raised(serve: Any, error: BaseException, service: str = "test.Service") -> RpcFailure:
    async def handler(request: bytes, context: Any) -> bytes:
        raise error

    opened = await serve(service=service, Call=grpc.unary_unary_rpc_method_handler(handler))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await opened.unary_unary(f"/{service}/Call")(b"")
    return RpcFailure.from_rpc_error(caught.value)


FULL = RpcFailure(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "CLAIM_EXCEEDS_CAPACITY",
    "Needs 12.00 GiB, and this machine gives engines 8.00 GiB – at most.",
    {"required_bytes": "12884901888"},
    2.5,
    (("claim.required", "too large"),),
    (("host", "4.00 GiB short"),),
)


async def test_what_a_handler_raises_is_what_the_caller_reads(serve: Any) -> None:
    assert await raised(serve, RequestError.from_failure(FULL)) == FULL


async def test_the_largest_failure_arrives_over_a_real_channel(serve: Any) -> None:
    long = "ü" * 5000
    failure = RpcFailure(grpc.StatusCode.ABORTED, "LONG", long, {"a": long, "b": "1"}, None, ((long, long),) * 9)
    seen = await raised(serve, RequestError.from_failure(failure))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ABORTED, "LONG")
    assert seen.message == "ü" * (errors.MAX_MESSAGE_CHARS - 1) + "…"


async def test_a_refusal_inside_a_task_group_is_still_that_refusal(serve: Any) -> None:
    seen = await raised(serve, ExceptionGroup("tasks", [ExceptionGroup("more", [RequestError.from_failure(FULL)])]))
    assert seen == FULL


async def test_a_refusal_after_part_of_a_stream_ends_the_stream(serve: Any) -> None:
    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"part"
        raise RequestError.from_failure(FULL)

    opened = await serve(Call=grpc.unary_stream_rpc_method_handler(handler))
    call, seen = opened.unary_stream(METHOD)(b""), []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for part in call:
            seen.append(part)  # noqa: PERF401 # what came before the error counts
    assert seen == [b"part"]
    assert RpcFailure.from_rpc_error(caught.value) == FULL


@pytest.mark.parametrize(("service", "told"), [("test.Service", True), ("weighbridge.engines.v1.Chat", False)])
async def test_an_unexpected_error_tells_the_log_and_not_the_caller(serve: Any, service: str, told: bool) -> None:
    out = StringIO()
    logs.configure("test", stream=out)
    seen = await raised(serve, KeyError("the words of a prompt"), service)
    assert (seen.code, seen.reason) == (grpc.StatusCode.INTERNAL, server_errors.INTERNAL_ERROR)
    assert "words" not in seen.message and "KeyError" not in seen.message
    (line,) = [json.loads(text) for text in out.getvalue().splitlines() if "unexpected_error" in text]
    assert (line["error"], line["method"], line["level"]) == ("KeyError", f"{service}/Call", "error")
    assert "test_common_errors.py" in line["stack"]
    assert ("the words of a prompt" in out.getvalue()) is told


async def test_a_caller_that_goes_while_an_answer_waits_to_be_sent_is_no_unexpected_error(serve: Any) -> None:
    """A picture is many times what the connection takes before its reader reads."""
    out = StringIO()
    logs.configure("test", stream=out)
    sending, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            sending.set()
            while True:
                yield bytes(16 << 20)
        finally:
            ended.set()

    opened = await serve(Call=grpc.unary_stream_rpc_method_handler(handler))
    call = opened.unary_stream(METHOD)(b"")
    assert await call.read() == b"begun"
    await sending.wait()
    await asyncio.sleep(0)  # the handler is written from its own task, which is in the midst of it by now
    call.cancel()
    await ended.wait()
    assert "unexpected_error" not in out.getvalue()


async def test_an_unwritten_method_of_a_generated_servicer_is_unimplemented(serve: Any) -> None:
    def generated(request: bytes, context: Any) -> bytes:
        # What protoc writes for each method of a servicer's base class.
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("Method not implemented!")
        raise NotImplementedError("Method not implemented!")

    opened = await serve(Call=grpc.unary_unary_rpc_method_handler(generated))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await opened.unary_unary(METHOD)(b"")
    failure = RpcFailure.from_rpc_error(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, server_errors.NOT_IMPLEMENTED)


async def test_an_abort_by_the_handler_stays_as_it_is(serve: Any) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")
        return b""

    opened = await serve(Call=grpc.unary_unary_rpc_method_handler(handler))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await opened.unary_unary(METHOD)(b"")
    failure = RpcFailure.from_rpc_error(caught.value)
    assert (failure.code, failure.reason, failure.message) == (grpc.StatusCode.DATA_LOSS, "DATA_LOSS", "gone")
    assert not failure.is_ours


async def test_the_failure_of_a_service_behind_is_passed_on_where_it_explains_ours(serve: Any) -> None:
    async def refuse(request: bytes, context: Any) -> bytes:
        raise RequestError.from_failure(FULL)

    async def bare(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "our own mistake")
        return b""

    behind = await serve(
        service="test.Behind",
        Refuse=grpc.unary_unary_rpc_method_handler(refuse),
        Bare=grpc.unary_unary_rpc_method_handler(bare),
    )
    gone = channel.open_channel("unix:/nowhere/at/all.sock")

    async def handler(request: bytes, context: Any) -> bytes:
        opened = gone if request == b"Gone" else behind
        return bytes(await opened.unary_unary(f"/test.Behind/{request.decode()}")(b""))

    front = await serve(Call=grpc.unary_unary_rpc_method_handler(handler))

    async def ask(which: bytes) -> RpcFailure:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await front.unary_unary(METHOD)(which)
        return RpcFailure.from_rpc_error(caught.value)

    assert await ask(b"Refuse") == FULL
    unreachable = await ask(b"Gone")
    assert (unreachable.code, unreachable.reason) == (grpc.StatusCode.UNAVAILABLE, errors.UNREACHABLE)
    # A bad request that we made is not our caller's bad request.
    assert (await ask(b"Bare")).reason == server_errors.INTERNAL_ERROR
    await gone.close()


async def test_a_call_to_nobody_is_unreachable_in_both_worlds() -> None:
    async with channel.open_channel("unix:/nowhere/at/all.sock") as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened.unary_unary(METHOD)(b"")
    failure = RpcFailure.from_rpc_error(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, errors.UNREACHABLE)
    assert "`weighbridge doctor`" in failure.message
    told = caught.value.details()
    assert told and told not in failure.message, "gRPC's words are not for people"
    assert failure.metadata[errors.TRANSPORT_ERROR] == told

    def call() -> None:
        with grpc.insecure_channel("unix:/nowhere/at/all.sock") as plain:
            plain.unary_unary(METHOD)(b"")

    with pytest.raises(grpc.RpcError) as synchronous, concurrent.futures.ThreadPoolExecutor() as pool:
        await asyncio.get_running_loop().run_in_executor(pool, call)
    assert RpcFailure.from_rpc_error(synchronous.value).reason == errors.UNREACHABLE


def test_an_error_that_says_nothing_is_unknown() -> None:
    failure = RpcFailure.from_rpc_error(grpc.RpcError())
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNKNOWN, "UNKNOWN")


def test_details_that_cannot_be_read_do_not_hide_the_status() -> None:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailers, "why")
    assert RpcFailure.from_rpc_error(error).message == "why"
    status = FULL.to_status()
    status.details[0].value = b"\xff\xff\xff"
    assert RpcFailure.from_status(status).reason == "RESOURCE_EXHAUSTED"


def test_a_bad_field_is_named() -> None:
    failure = errors.invalid_argument("claim.required", "must be positive", "BAD_CLAIM", {"given": -1}).failure
    assert failure == RpcFailure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BAD_CLAIM",
        "claim.required: must be positive",
        {"given": "-1"},
        None,
        (("claim.required", "must be positive"),),
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.not_found("NO_LEASE", "m"), grpc.StatusCode.NOT_FOUND),
        (errors.failed_precondition("BUSY", "m"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.unavailable("LATER", "m", 3), grpc.StatusCode.UNAVAILABLE),
        (errors.resource_exhausted("FULL", "m", [("host", "1.00 GiB")], 3), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_each_kind_of_error_has_its_canonical_code(error: RequestError, code: grpc.StatusCode) -> None:
    assert error.failure.code is code
    assert str(error) == f"{error.failure.reason}: m"
