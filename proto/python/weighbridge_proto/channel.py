"""How every caller reaches a weighbridge service."""

import grpc

from weighbridge_proto import telemetry as _telemetry

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest request or response, on both sides (the contracts' limit: source images of a render travel inline)."""

MAX_METADATA_BYTES = 16 * 1024
"""Largest set of headers or trailers. A rich error takes up to 10 KiB in base64 (errors.MAX_STATUS_BYTES)."""

KEEPALIVE_PERIOD_MS = 30_000
"""Ping of an idle connection with calls in flight: a machine that vanished is noticed within 40 s."""

KEEPALIVE_TIMEOUT_MS = 10_000

RECONNECT_MS = (100, 1_000)
"""First and longest wait between attempts to connect: services of one machine restart within a second."""

CONNECT_MS = 5_000
"""How long one attempt may take (gRPC takes its least time between attempts for that too). At 100 ms, clients of a busy
machine gave up on services that were about to answer."""

MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_PERIOD_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
)
"""Options that server and client share."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *MESSAGE_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    # A proxy for the outside world must not be asked for a service of this machine or of this container network.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(target: str, *, telemetry: bool = True) -> grpc.aio.Channel:
    """Open a channel to ``target`` (see :func:`weighbridge_proto.targets.target`). Nothing is dialled yet.

    With ``telemetry``, calls are traced if this process has installed an OpenTelemetry SDK by now; without one the
    channel is the plain one and costs nothing extra.
    """
    channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return _telemetry.trace_channel(channel, target) if telemetry and _telemetry.recording() else channel
