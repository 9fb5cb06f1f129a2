"""The main of every service process, and the same server for use inside another process.

A service's ``__main__`` is::

    async def build(context: ServerContext) -> AsyncClosable | None:
        servicer = FitServicer(...)
        context.add(fit_service_pb2_grpc.add_FitServiceServicer_to_server, servicer)
        return servicer                       # its aclose() is called after the last call has ended

    run_service(load(FitSettings), "fit", build)
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from weighbridge_proto import telemetry as rpc_telemetry
from weighbridge_proto.channel import MESSAGE_OPTIONS

from weighbridge_common import logs, telemetry
from weighbridge_common.errors import ErrorInterceptor
from weighbridge_common.handlers import AnyHandler
from weighbridge_common.listening import Address, StartError, choose_address, own_socket
from weighbridge_common.settings import USAGE_EXIT_CODE, ServiceSettings, SettingsError
from weighbridge_common.tasks import to_its_end

START_FAILED_EXIT_CODE = 1

MAX_STREAMS_PER_CONNECTION = 256

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # A second server on the same port must fail, not share its calls.
    ("grpc.so_reuseport", 0),
    # Clients ping every 30 s (channel.KEEPALIVE_PERIOD_MS); gRPC's default would cut them off as a nuisance.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

NEW_OBJECTS_PER_COLLECTION = 10_000
"""Python's own 700 are a dozen calls."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class AsyncClosable(Protocol):
    """What a service built and must give back when it stops."""

    async def aclose(self) -> None:
        """Release everything. May be cancelled when a second signal demands to stop at once."""


class ServerContext:
    """What a service needs from its process while it is built and while it runs.

    Attributes:
        server: the gRPC server; use :meth:`add` to register servicers, so that health and reflection know them.
        settings: the service's settings.
        name: ``ledger``, ``fit``, ``engine-sd``, …
        address: where it will listen.
        stopping: set as soon as the process shall end. Long streams (KeepAlive, Watch) must end when it is set:
            otherwise they hold up the stop for the whole grace.
        health: what answers health checks; use :meth:`set_serving`.
    """

    def __init__(self, server: grpc.aio.Server, settings: ServiceSettings, name: str, address: Address) -> None:
        self.server = server
        self.settings = settings
        self.name = name
        self.address = address
        self.stopping = asyncio.Event()
        self.service_names: list[str] = []
        self.health = health.aio.HealthServicer()

    def add(self, add_to_server: Callable[[T, Any], None], servicer: T) -> None:
        """Register ``servicer`` by its generated ``add_…Servicer_to_server``."""
        add_to_server(servicer, _NameRecorder(self.server, self.service_names))

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told from now on, of the process and of each service in it. Nothing is refused by it.

        A process serves from its start until it stops; this is for one that finds out that it does not get on with its
        work. While it stops, it stays NOT_SERVING.
        """
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self.service_names):
            await self.health.set(service, status)


Build = Callable[[ServerContext], Awaitable[AsyncClosable | None]]


class RunningServer:
    """A server that serves. Also an async context manager that stops it."""

    def __init__(
        self,
        context: ServerContext,
        target: str,
        built: AsyncClosable | None,
        place: contextlib.ExitStack,
    ) -> None:
        self.context = context
        self.target = target
        """What a client dials."""
        self._built = built
        self._place = place
        self._stopped = False

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop: NOT_SERVING, no new calls, ``grace_s`` (default: the setting) for those in flight, then give back all.

        Cancelling this cuts the wait: calls in flight are cancelled, the built parts still see their ``aclose`` begin.
        """
        if self._stopped:
            return
        self._stopped = True
        grace = self.context.settings.grace_s if grace_s is None else grace_s
        try:
            await self.context.health.enter_graceful_shutdown()
            self.context.stopping.set()
            try:
                await self.context.server.stop(grace)
            except asyncio.CancelledError:
                await self.context.server.stop(None)
                raise
            finally:
                if self._built is not None:
                    await self._built.aclose()
        finally:
            self._place.close()

    async def __aenter__(self) -> "RunningServer":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()


async def start_server(
    settings: ServiceSettings, name: str, build: Build, *, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> RunningServer:
    """Start the server of service ``name`` in this process: no signals, logs or telemetry are set up.

    Calls are traced if this process has an OpenTelemetry SDK by now. ``interceptors`` run inside ours, so what they
    raise becomes a status like what a handler raises.

    Raises:
        SettingsError: the settings do not allow to listen there.
        StartError: the place is taken, or cannot be bound. Whatever ``build`` raises passes through.
    """
    address = choose_address(settings, name)
    outer: list[grpc.aio.ServerInterceptor] = [telemetry.ServerTelemetry()] if rpc_telemetry.recording() else []
    with contextlib.ExitStack() as place:
        if address.socket_path is not None:
            # Before the service is built: a second ledger must not so much as open the first one's store.
            place.enter_context(own_socket(address.socket_path))
        server = grpc.aio.server(
            interceptors=[*outer, ErrorInterceptor(), *interceptors],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=settings.max_concurrent_calls,
        )
        context = ServerContext(server, settings, name, address)
        built = await build(context)
        try:
            health_pb2_grpc.add_HealthServicer_to_server(context.health, server)
            await context.set_serving(True)
            reflection.enable_server_reflection(
                [*context.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
            )
            port = _bind(server, address)
            # A start that is cancelled in its midst leaves a server whose stop fails (InvalidStateError, grpcio 1.85).
            await to_its_end(server.start())
        except BaseException:
            context.stopping.set()
            await server.stop(None)
            if built is not None:
                await built.aclose()
            raise
        return RunningServer(context, address.target(port), built, place.pop_all())


def run_service(settings: ServiceSettings, name: str, build: Build) -> NoReturn:
    """Run service ``name`` until SIGTERM or SIGINT; the main of its process. Always ends it by ``SystemExit``.

    Exit codes: 0 stopped by a signal (the second signal cuts the grace), 1 could not start or failed (one line on
    stderr says why), 2 wrong settings.
    """
    logs.configure(f"weighbridge-{name}", settings.log_level)
    try:
        end_telemetry = telemetry.configure(f"weighbridge-{name}", settings.otlp_endpoint)
        try:
            asyncio.run(_serve_until_signal(settings, name, build))
        finally:
            end_telemetry()
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # all is done: an impatient signal must not spoil the exit code
    except SettingsError as error:
        print(f"Wrong settings.\n{error}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE) from None
    except StartError as error:
        print(f"weighbridge-{name} cannot start: {error}", file=sys.stderr)
        raise SystemExit(START_FAILED_EXIT_CODE) from None
    except Exception as error:
        _log.error("service_failed", **logs.describe_error(error))
        print(f"weighbridge-{name} failed: {error}", file=sys.stderr)
        raise SystemExit(START_FAILED_EXIT_CODE) from None
    raise SystemExit(0)


async def _serve_until_signal(settings: ServiceSettings, name: str, build: Build) -> None:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        # Not signal.signal: gRPC's threads may be the ones that get the signal, and only this wakes the loop then.
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await _start_and_stop(settings, name, build, signals)
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            # What is left (worker threads, the last traces) may be slow: a signal then ends the process where it is.
            signal.signal(number, lambda *_: os._exit(0))


async def _start_and_stop(
    settings: ServiceSettings, name: str, build: Build, signals: asyncio.Queue[signal.Signals]
) -> None:
    starting = asyncio.create_task(start_server(settings, name, build))
    if not await _before_signal(starting, signals):
        _log.info("stopped_while_starting")
        return
    running = starting.result()
    _leave_to_itself_what_stays()
    _log.info("serving", target=running.target, services=running.context.service_names)
    received = await signals.get()
    _log.info("stopping", signal=received.name, grace_s=settings.grace_s)
    if await _before_signal(asyncio.create_task(running.stop()), signals):
        _log.info("stopped")
    else:
        _log.warning("stopped_at_once")


def _leave_to_itself_what_stays() -> None:
    """What a service is made of is no garbage until its end: looking through it again and again, and through what calls
    in flight hold, took a seventh of the processor time of an admission (50 of 340 µs, November 2026), and pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])


async def _before_signal(work: asyncio.Task[Any], signals: asyncio.Queue[signal.Signals]) -> bool:
    """Wait until ``work`` has ended; each signal cancels it. Returns whether it was completed, raises its error."""
    while not work.done():
        signalled = asyncio.create_task(signals.get())
        await asyncio.wait({work, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done() and not work.cancel():
            signals.put_nowait(signalled.result())  # came too late to cancel this, and is meant for what comes next
        signalled.cancel()
    if work.cancelled():
        return False
    work.result()
    return True


def _bind(server: grpc.aio.Server, address: Address) -> int:
    try:
        port = server.add_insecure_port(address.bind_to())
    except RuntimeError as error:
        raise StartError(f"Cannot listen on {address.bind_to()}: the address is in use or not allowed.") from error
    if port == 0:
        raise StartError(f"Cannot listen on {address.bind_to()}: the address is in use or not allowed.")
    return port


class _NameRecorder:
    """Stands in for the server while a servicer registers, to learn the service's full name."""

    def __init__(self, server: grpc.aio.Server, names: list[str]) -> None:
        self._server = server
        self._names = names

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = tuple(handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler) and handler.service_name() not in self._names:
                self._names.append(handler.service_name())
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, AnyHandler]) -> None:
        self._server.add_registered_method_handlers(service_name, handlers)
