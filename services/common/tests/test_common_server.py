"""A service process from its start to its end: sockets, signals, exit codes, health, and the last trace sent."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from weighbridge_common import listening, server
from weighbridge_common.listening import StartError
from weighbridge_common.server import ServerContext, start_server
from weighbridge_common.settings import ServiceSettings, SettingsError
from weighbridge_proto.channel import open_channel
from weighbridge_proto.errors import RpcFailure

# A service of one method without messages of its own: Echo answers its request; Hang answers after the server stops.
PROGRAM = """
import asyncio, sys
import grpc
from pydantic_settings import SettingsConfigDict
from weighbridge_common.server import run_service
from weighbridge_common.settings import ServiceSettings, load

class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="WEIGHBRIDGE_FIT_")
    build: str = "quick"

class Built:
    async def aclose(self):
        if settings.build == "stuck":
            try:
                await asyncio.Event().wait()
            finally:
                print("cut", file=sys.stderr)
        print("closed", file=sys.stderr)

async def echo(request, context):
    return request

async def hang(request, context):
    await asyncio.Event().wait()

def add(servicer, server):
    handlers = {m.__name__: grpc.unary_unary_rpc_method_handler(m) for m in (echo, hang)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))

async def build(context):
    if settings.build == "slow":
        print("building", file=sys.stderr)
        await asyncio.Event().wait()
    if settings.build == "broken":
        raise RuntimeError("no store")
    context.add(add, None)
    return Built()

settings = load(Settings)
run_service(settings, "fit", build)
"""


class Service:
    """One service process under test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.errors: list[str] = []

    @property
    def target(self) -> str:
        return f"unix:{self.run_dir}/fit.sock"

    async def start(self, until: str = '"event": "serving"', **variables: str) -> "Service":
        own = {f"WEIGHBRIDGE_{name}": value for name, value in variables.items()}
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHBRIDGE_")}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            env={**environ, "WEIGHBRIDGE_RUN_DIR": str(self.run_dir), **own},
            stderr=asyncio.subprocess.PIPE,
        )
        await self.read_until(until)
        return self

    async def read_until(self, text: str) -> None:
        assert self.process.stderr
        while line := (await self.process.stderr.readline()).decode():
            self.errors.append(line.rstrip())
            if text in line:
                return

    async def end(self) -> int:
        await self.read_until("\0 never said")
        return await self.process.wait()

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.errors if line.startswith("{")]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Callable[[], Service]]:
    made: list[Service] = []

    def make() -> Service:
        made.append(Service(tmp_path / "run"))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        await one.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_service_cleanly(service: Any, number: signal.Signals) -> None:
    running = await service().start()
    path = running.run_dir / "fit.sock"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(running.run_dir.stat().st_mode) == 0o700
    async with open_channel(running.target) as channel:
        assert await channel.unary_unary("/test.Service/echo")(b"hello") == b"hello"
    running.process.send_signal(number)
    assert await running.end() == 0
    assert not path.exists()
    assert running.events() == ["serving", "stopping", "stopped"]
    assert "closed" in running.errors


async def test_a_call_in_flight_has_the_grace_and_a_second_signal_cuts_it(service: Any) -> None:
    running = await service().start(FIT_GRACE_S="500")
    async with open_channel(running.target) as channel:
        call = channel.unary_unary("/test.Service/hang")(b"")
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="test.Service"))
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        running.process.terminate()
        # Whoever watches learns at once; the call goes on.
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not call.done()
        running.process.terminate()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
        assert await running.end() == 0
    assert running.events()[-1] == "stopped_at_once"
    assert "closed" in running.errors, "what was built is given back even so"


async def test_a_third_signal_cuts_what_closes_too_slowly(service: Any) -> None:
    running = await service().start(FIT_BUILD="stuck")
    running.process.terminate()
    await running.read_until('"event": "stopping"')
    while running.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            running.process.terminate()
        await asyncio.sleep(0.05)
    assert await running.end() == 0
    assert "cut" in running.errors


async def test_a_signal_while_starting_ends_it(service: Any) -> None:
    running = await service().start(until="building", FIT_BUILD="slow")
    running.process.terminate()
    assert await running.end() == 0
    assert not (running.run_dir / "fit.sock").exists()


async def test_a_signal_at_the_moment_the_start_ends_is_not_lost() -> None:
    async def start() -> None:
        pass

    signals = asyncio.Queue[signal.Signals]()
    signals.put_nowait(signal.SIGTERM)
    assert await server._before_signal(asyncio.create_task(start()), signals)
    assert signals.get_nowait() is signal.SIGTERM


async def test_the_socket_of_a_killed_service_is_replaced(service: Any) -> None:
    first = await service().start()
    first.process.kill()
    await first.end()
    assert (first.run_dir / "fit.sock").exists()
    second = await service().start()
    async with open_channel(second.target) as channel:
        assert await channel.unary_unary("/test.Service/echo")(b"x") == b"x"
    second.process.terminate()
    assert await second.end() == 0


async def test_a_living_services_place_is_not_taken(service: Any) -> None:
    first = await service().start()
    second = await service().start()
    assert await second.end() == 1
    assert second.errors == [
        f"weighbridge-fit cannot start: Another process already serves {first.run_dir}/fit.sock. "
        "Stop it first, or listen elsewhere."
    ]
    async with open_channel(first.target) as channel:
        assert await channel.unary_unary("/test.Service/echo")(b"x") == b"x"


async def test_a_service_that_cannot_be_built_fails_with_one_line(service: Any) -> None:
    running = await service().start(FIT_BUILD="broken")
    assert await running.end() == 1
    assert running.errors[-1] == "weighbridge-fit failed: no store"
    assert not (running.run_dir / "fit.sock").exists()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FIT_GRACE_S", "soon"),
        ("FIT_LISTEN", "0.0.0.0:0"),
        ("FIT_LISTEN", "nonsense"),
        ("FIT_LISTEN", "unix:relative.sock"),
        ("FIT_LISTEN", "unix:/" + "x" * 100),
        ("FIT_LISTNE", "127.0.0.1:0"),
        ("OTLP_ENDPOINT", "collector"),
    ],
)
async def test_a_wrong_setting_is_named_and_ends_with_code_2(service: Any, variable: str, value: str) -> None:
    running = await service().start(**{variable: value})
    assert await running.end() == 2
    assert any(line.startswith(f"WEIGHBRIDGE_{variable}: ") for line in running.errors), running.errors


async def test_a_port_in_use_is_told(service: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        running = await service().start(FIT_LISTEN=f"127.0.0.1:{taken.getsockname()[1]}")
        assert await running.end() == 1
    assert running.errors[-1].startswith("weighbridge-fit cannot start: Cannot listen on 127.0.0.1:")


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []
        self.metrics: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            for group in request.resource_metrics:
                self.metrics |= {metric.name for scope in group.scope_metrics for metric in scope.metrics}
            return metrics_service_pb2.ExportMetricsServiceResponse()
        for group in request.resource_spans:
            name = next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
            self.spans += [(name, span) for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_traces_and_metrics_reach_the_collector_before_the_process_ends(service: Any) -> None:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = await service().start(OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
    metadata = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    async with open_channel(running.target) as channel:
        await channel.unary_unary("/test.Service/echo")(b"x", metadata=metadata)
    running.process.terminate()
    assert await running.end() == 0
    await server.stop(None)
    # One span: the exporter's own calls are not traced.
    ((name, span),) = collector.spans
    assert (name, span.name) == ("weighbridge-fit", "test.Service/echo")
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert "rpc.server.call.duration" in collector.metrics


async def test_a_collector_that_is_gone_stops_neither_calls_nor_the_end(service: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        running = await service().start(OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with open_channel(running.target) as channel:
            assert await channel.unary_unary("/test.Service/echo")(b"x") == b"x"
        running.process.terminate()
        assert await running.end() == 0


async def nothing(context: ServerContext) -> None:
    return None


def echo_service(servicer: None, server: Any) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    handlers = {"echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


async def test_a_server_in_this_process_knows_its_services() -> None:
    async def build(context: ServerContext) -> None:
        context.add(echo_service, None)

    async with await start_server(ServiceSettings(listen="127.0.0.1:0"), "fit", build) as running:
        assert running.target.startswith("127.0.0.1:") and not running.target.endswith(":0")
        async with open_channel(running.target) as channel:
            assert await channel.unary_unary("/test.Service/echo")(b"x") == b"x"
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "test.Service"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            names = {service.name for service in (await listing.read()).list_services_response.service}
            assert {"test.Service", "grpc.health.v1.Health"} <= names
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test.Service/echo")(b"x" * (32 * 2**20 + 1))
            assert RpcFailure.from_rpc_error(caught.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert len(await channel.unary_unary("/test.Service/echo")(b"x" * (32 * 2**20 - 64))) == 32 * 2**20 - 64


async def test_more_calls_than_the_bound_are_refused() -> None:
    started = asyncio.Semaphore(0)

    def add(servicer: None, server: Any) -> None:
        async def hang(request: bytes, context: Any) -> bytes:
            started.release()
            await asyncio.Event().wait()
            return b""

        handlers = {"hang": grpc.unary_unary_rpc_method_handler(hang)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))

    async def build(context: ServerContext) -> None:
        context.add(add, None)

    settings = ServiceSettings(listen="127.0.0.1:0", max_concurrent_calls=8, grace_s=0)
    async with (
        await start_server(settings, "fit", build) as running,
        open_channel(running.target) as channel,
    ):
        calls = [channel.unary_unary("/test.Service/hang")(b"") for _ in range(8)]
        for _ in calls:
            await started.acquire()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/hang")(b"")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_a_build_that_fails_leaves_no_socket(tmp_path: Path) -> None:
    async def build(context: ServerContext) -> None:
        raise RuntimeError("no store")

    path = tmp_path / "run" / "x.sock"
    with pytest.raises(RuntimeError, match="no store"):
        await start_server(ServiceSettings(listen=f"unix:{path}"), "fit", build)
    first = await start_server(ServiceSettings(listen=f"unix:{path}"), "fit", nothing)
    assert path.exists()
    await first.stop()
    assert not path.exists()
    # The place is free as soon as the server has stopped, not when its object is forgotten.
    async with await start_server(ServiceSettings(listen=f"unix:{path}"), "fit", nothing):
        assert path.exists()
    await first.stop()


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "fit:5051"])
def test_an_address_that_others_can_reach_needs_leave(listen: str) -> None:
    with pytest.raises(SettingsError, match=r"LISTEN: .*TLS and a token"):
        listening.choose_address(ServiceSettings(listen=listen), "fit")
    allowed = listening.choose_address(ServiceSettings(listen=listen, allow_insecure_remote=True), "fit")
    assert allowed.bind_to() == listen


@pytest.mark.parametrize(
    ("listen", "target"),
    [
        ("127.0.0.1:0", "127.0.0.1:7"),
        ("localhost:0", "localhost:7"),
        ("[::1]:0", "[::1]:7"),
        ("unix:/r/a.sock", "unix:/r/a.sock"),
        ("unix:///r/a.sock", "unix:/r/a.sock"),
    ],
)
def test_a_private_address_is_taken_and_dialled_as_bound(listen: str, target: str) -> None:
    assert listening.choose_address(ServiceSettings(listen=listen), "fit").target(7) == target


def test_a_server_bound_everywhere_is_dialled_on_loopback() -> None:
    settings = ServiceSettings(listen="0.0.0.0:0", allow_insecure_remote=True)
    assert listening.choose_address(settings, "fit").target(7) == "127.0.0.1:7"


def test_a_socket_someone_accepts_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        # A server that knows nothing of our lock file still counts.
        with pytest.raises(StartError, match="already serves"), listening.own_socket(path):
            pass
    assert path.exists()
    with listening.own_socket(path):
        assert not path.exists()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "x.sock"
    path.write_text("somebody's notes")
    with pytest.raises(StartError, match="not a socket"), listening.own_socket(path):
        pass
    assert path.read_text() == "somebody's notes"


def test_a_folder_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(StartError, match="chmod 700"), listening.own_socket(folder / "x.sock"):
        pass
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="Cannot make the folder"), listening.own_socket(tmp_path / "file/run/x.sock"):
        pass


def test_one_place_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "x.sock"
    with (
        listening.own_socket(path),
        pytest.raises(StartError, match="already serves"),
        listening.own_socket(path),
    ):
        pass
    with listening.own_socket(path):
        pass


async def test_a_start_cancelled_at_any_step_leaves_no_socket_and_fails_with_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "run" / "s.sock"
    completed = False
    for steps in range(100):
        starting = asyncio.create_task(start_server(ServiceSettings(listen=f"unix:{place}"), "fit", nothing))
        for _ in range(steps):
            await asyncio.sleep(0)
        completed = starting.done()
        starting.cancel()
        if completed:
            await starting.result().stop(grace_s=0)
            break
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not place.exists()
    assert completed, "as many steps as it takes were tried"


async def test_a_service_that_does_not_get_on_says_so_to_health_checks_and_stays_stopped_once_it_stops() -> None:
    async def build(context: ServerContext) -> None:
        context.add(echo_service, None)

    serving, stalled = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with await start_server(ServiceSettings(listen="127.0.0.1:0"), "fit", build) as running:
        async with open_channel(running.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for well in (False, True):
                await running.context.set_serving(well)
                for name in ("", "test.Service"):
                    answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                    assert answer.status == (serving if well else stalled)
                assert await channel.unary_unary("/test.Service/echo")(b"x") == b"x", "nothing is refused by it"
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == serving
            stopping = asyncio.create_task(running.stop())
            assert (await watch.read()).status == stalled
            await running.context.set_serving(True)
            watch.cancel()
            await stopping
        assert (await running.context.health.Check(health_pb2.HealthCheckRequest(), None)).status == stalled
