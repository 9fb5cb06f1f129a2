"""Spans and durations of real calls: right codes, one tree, and cancellation that reaches the other side."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from weighbridge_proto import channel, telemetry
from weighbridge_proto.errors import RequestError

METHOD = "/test.Service/Call"


def unary(handler: Callable[..., Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(handler)


def stream(handler: Callable[..., Any]) -> Any:
    return grpc.unary_stream_rpc_method_handler(handler)


class Waiting:
    """A handler that never answers, and what happened to it."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.ended_by: BaseException | None = None
        self.task_started: Any = None
        self.task_ended: Any = None

    async def __call__(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            self.ended_by = error
            raise
        finally:
            self.ended.set()
        return b""

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.task_started = asyncio.current_task()
        self.started.set()
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0)
        finally:
            self.task_ended = asyncio.current_task()
            self.ended.set()


@pytest.mark.parametrize("how", ["call", "task"])
async def test_cancelling_a_unary_call_ends_the_handler_and_both_spans(serve: Any, recorder: Any, how: str) -> None:
    handler = Waiting()
    opened = await serve(Call=unary(handler))
    call = opened.unary_unary(METHOD)(b"")

    async def wait() -> bytes:
        return await call

    task = asyncio.create_task(wait())
    await handler.started.wait()
    call.cancel() if how == "call" else task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(10):
        await handler.ended.wait()
    assert isinstance(handler.ended_by, asyncio.CancelledError)
    client, server = await recorder.both()
    assert client.attributes["rpc.status_code"] == server.attributes["rpc.status_code"] == "CANCELLED"
    assert client.status.status_code is StatusCode.ERROR
    assert server.status.status_code is StatusCode.UNSET


async def test_a_stream_left_by_its_reader_ends_in_its_own_task(serve: Any, recorder: Any) -> None:
    handler = Waiting()
    opened = await serve(Call=stream(handler.stream))
    call = opened.unary_stream(METHOD)(b"")
    async for _ in call:
        break
    call.cancel()
    async with asyncio.timeout(10):
        await handler.ended.wait()
    assert handler.task_ended is handler.task_started
    for span in await recorder.both():
        assert span.attributes["rpc.status_code"] == "CANCELLED"


async def test_a_span_held_across_yields_is_detached_without_complaint(
    serve: Any, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            with recorder.tracer.start_as_current_span("held"):
                while True:
                    yield b"x" * 65536  # fills the flow-control window, so that the cancel meets a write
        finally:
            ended.set()

    opened = await serve(Call=stream(handler))
    with caplog.at_level(logging.DEBUG):
        call = opened.unary_stream(METHOD)(b"")
        async for _ in call:
            break
        call.cancel()
        async with asyncio.timeout(10):
            await ended.wait()
        await recorder.spans(3)
    assert "detach" not in caplog.text


async def test_a_refusal_is_an_answer_of_the_server_and_an_error_of_the_client(serve: Any, recorder: Any) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLAIM_EXCEEDS_CAPACITY", "Too large.")

    opened = await serve(Call=unary(handler))
    with pytest.raises(grpc.aio.AioRpcError):
        await opened.unary_unary(METHOD)(b"")
    client, server = await recorder.both()
    assert server.attributes["rpc.status_code"] == client.attributes["rpc.status_code"] == "RESOURCE_EXHAUSTED"
    assert server.status.status_code is StatusCode.UNSET and "error.type" not in server.attributes
    assert client.status.status_code is StatusCode.ERROR and client.attributes["error.type"] == "RESOURCE_EXHAUSTED"
    assert not server.events


@pytest.mark.parametrize(("service", "told"), [("test.Service", True), ("weighbridge.engines.v1.Chat", False)])
async def test_an_unexpected_error_is_recorded_once_and_never_quotes_a_prompt(
    serve: Any, recorder: Any, service: str, told: bool
) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        raise KeyError("the words of a prompt")

    opened = await serve(service=service, Call=unary(handler))
    with pytest.raises(grpc.aio.AioRpcError):
        await opened.unary_unary(f"/{service}/Call")(b"")
    client, server = await recorder.both()
    assert server.attributes["rpc.status_code"] == client.attributes["rpc.status_code"] == "INTERNAL"
    assert server.status.status_code is StatusCode.ERROR
    (event,) = server.events
    assert event.attributes["exception.type"] == "builtins.KeyError"
    assert ("the words" in str(event.attributes.get("exception.message"))) is told
    assert "the words" not in str(client.attributes) + str(client.status.description) + str(server.status.description)


async def test_a_deadline_ends_both_spans_as_one(serve: Any, recorder: Any) -> None:
    handler = Waiting()
    opened = await serve(Call=unary(handler))
    with pytest.raises(grpc.aio.AioRpcError):
        await opened.unary_unary(METHOD)(b"", timeout=0.3)
    client, server = await recorder.both()
    assert client.attributes["rpc.status_code"] == server.attributes["rpc.status_code"] == "DEADLINE_EXCEEDED"


async def test_an_unknown_method_is_unimplemented_for_every_kind_of_call(serve: Any, recorder: Any) -> None:
    opened = await serve(Call=unary(Waiting()))

    async def requests() -> AsyncIterator[bytes]:
        # Nothing is sent: a message that meets a call already refused makes grpc.aio itself say INTERNAL instead.
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(grpc.aio.AioRpcError):
        await opened.unary_unary("/test.Service/None")(b"")
    with pytest.raises(grpc.aio.AioRpcError):
        await opened.stream_unary("/test.Service/None")(requests())
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in opened.unary_stream("/test.Service/None")(b""):
            pass
    spans = await recorder.spans(3)
    assert {span.attributes["rpc.status_code"] for span in spans} == {"UNIMPLEMENTED"}


async def test_streams_of_every_kind_work_through_the_wrappers(serve: Any, recorder: Any) -> None:
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def join(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def writer(request: bytes, context: Any) -> None:
        for _ in range(3):
            await context.write(request)

    opened = await serve(
        Echo=grpc.stream_stream_rpc_method_handler(echo),
        Join=grpc.stream_unary_rpc_method_handler(join),
        Write=stream(writer),
    )
    call = opened.stream_stream("/test.Service/Echo")()
    for word in (b"a", b"b"):
        await call.write(word)
        assert await call.read() == word
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await opened.stream_unary("/test.Service/Join")(iter([b"a", b"b"])) == b"ab"
    assert [r async for r in opened.unary_stream("/test.Service/Write")(b"c")] == [b"c"] * 3
    spans = await recorder.spans(6)
    assert {span.attributes["rpc.status_code"] for span in spans} == {"OK"}


async def test_one_trace_follows_a_request_over_three_hops(serve: Any, recorder: Any) -> None:
    async def last(request: bytes, context: Any) -> bytes:
        return b"done"

    third = await serve(service="hop.Three", Call=unary(last))

    async def pass_on(request: bytes, context: Any) -> bytes:
        with recorder.tracer.start_as_current_span("work"):
            return bytes(await third.unary_unary("/hop.Three/Call")(request))

    second = await serve(service="hop.Two", Call=unary(pass_on))

    async def first(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await second.unary_unary("/hop.Two/Call")(request)

    opened = await serve(service="hop.One", Call=stream(first))
    with recorder.tracer.start_as_current_span("request"):
        assert [r async for r in opened.unary_stream("/hop.One/Call")(b"")] == [b"done"]

    spans = {span.context.span_id: span for span in await recorder.spans(8)}
    (leaf,) = [s for s in spans.values() if s.name == "hop.Three/Call" and s.kind is SpanKind.SERVER]
    chain = [(leaf.name, leaf.kind)]
    while leaf.parent is not None:
        leaf = spans[leaf.parent.span_id]
        chain.append((leaf.name, leaf.kind))
    server, client, internal = SpanKind.SERVER, SpanKind.CLIENT, SpanKind.INTERNAL
    assert chain == [
        ("hop.Three/Call", server),
        ("hop.Three/Call", client),
        ("work", internal),
        ("hop.Two/Call", server),
        ("hop.Two/Call", client),
        ("hop.One/Call", server),
        ("hop.One/Call", client),
        ("request", internal),
    ]
    assert len({span.context.trace_id for span in spans.values()}) == 1


async def test_a_long_stream_is_a_trace_of_its_own_linked_to_the_request(serve: Any, recorder: Any) -> None:
    async def beat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    opened = await serve(KeepAlive=grpc.stream_stream_rpc_method_handler(beat))
    with recorder.tracer.start_as_current_span("request") as request:
        call = opened.stream_stream("/test.Service/KeepAlive")()
        await call.write(b"x")
        assert await call.read() == b"x"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
    spans = {span.kind: span for span in await recorder.spans(3)}
    client, server = spans[SpanKind.CLIENT], spans[SpanKind.SERVER]
    assert client.parent is None
    assert [link.context for link in client.links] == [request.get_span_context()]
    assert client.context.trace_id != request.get_span_context().trace_id
    # The server joins the stream's own trace rather than start a third one.
    assert server.parent is not None and server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id


async def test_the_server_cuts_long_streams_for_clients_that_do_not(serve: Any, recorder: Any) -> None:
    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""

    opened = await serve(traced_client=False, Watch=stream(watch))
    metadata = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    assert [r async for r in opened.unary_stream("/test.Service/Watch")(b"", metadata=metadata)] == [b""]
    (server,) = await recorder.spans(1)
    assert server.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in server.links] == [
        (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    ]


async def test_spans_and_durations_carry_the_names_of_the_rpc_conventions(serve: Any, recorder: Any) -> None:
    seen: dict[str, str] = {}

    async def handler(request: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        return request

    opened = await serve(Call=unary(handler))
    await opened.unary_unary(METHOD)(b"", metadata=(("own", "kept"),))
    assert seen["own"] == "kept"
    client, server = await recorder.both()
    common = {"rpc.system.name": "grpc", "rpc.method": "test.Service/Call", "rpc.status_code": "OK"}
    assert dict(server.attributes) == common
    port = client.attributes["server.port"]
    assert dict(client.attributes) == {**common, "server.address": "127.0.0.1", "server.port": port}
    assert client.name == server.name == "test.Service/Call"
    assert recorder.measured() == {
        "rpc.client.call.duration": [dict(client.attributes)],
        "rpc.server.call.duration": [common],
    }


async def test_probes_are_not_traced(serve: Any, recorder: Any) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        return request

    opened = await serve(service="grpc.health.v1.Health", Check=unary(handler))
    assert await opened.unary_unary("/grpc.health.v1.Health/Check")(b"x") == b"x"
    await recorder.spans(0)


@pytest.mark.parametrize(
    ("target", "attributes"),
    [
        ("unix:/run/x/fit.sock", {"server.address": "/run/x/fit.sock"}),
        ("unix:///run/x/fit.sock", {"server.address": "/run/x/fit.sock"}),
        ("ledger:5051", {"server.address": "ledger", "server.port": 5051}),
        ("dns:///ledger:5051", {"server.address": "ledger", "server.port": 5051}),
        ("[::1]:5051", {"server.address": "::1", "server.port": 5051}),
    ],
)
async def test_the_server_is_named_by_its_target(recorder: Any, target: str, attributes: dict[str, Any]) -> None:
    traced = telemetry.trace_channel(grpc.aio.insecure_channel(target), target, **recorder.options)
    call = traced.unary_unary(METHOD)(b"")
    call.cancel()
    (span,) = await recorder.spans(1)
    assert {k: v for k, v in span.attributes.items() if k.startswith("server.")} == attributes
    await traced.close()


async def test_without_an_sdk_the_channel_is_the_plain_one() -> None:
    assert not telemetry.recording()
    opened = channel.open_channel("unix:/nowhere.sock")
    assert not isinstance(opened, telemetry.TracedChannel)
    await opened.close()


def test_a_client_needs_no_sdk() -> None:
    program = """
import asyncio, sys
sys.modules["opentelemetry.sdk"] = None  # importing it fails from here on
import grpc
from weighbridge_proto import channel, telemetry
async def main():
    opened = telemetry.trace_channel(channel.open_channel("unix:/nowhere.sock"), "unix:/nowhere.sock")
    try:
        await opened.unary_unary("/a.B/C")(b"")
    except grpc.aio.AioRpcError as error:
        print(error.code().name)
    await opened.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "UNAVAILABLE", done.stderr


def test_the_current_trace_goes_into_the_headers_of_other_protocols(recorder: Any) -> None:
    assert telemetry.trace_headers() == {}
    with recorder.tracer.start_as_current_span("request") as span:
        context = span.get_span_context()
        headers = telemetry.trace_headers()
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    assert headers["traceparent"].startswith(f"00-{trace_id}-{span_id}-")
