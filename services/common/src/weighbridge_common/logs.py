"""Logs: JSON, one line per event, on stderr, with the ids of the trace that the event belongs to.

A prompt, an image or a secret never enters a log: fields that could hold one are withheld by name, and the text of an
unexpected error is left out where requests carry prompts.
"""

import contextlib
import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog
from opentelemetry import trace

WITHHELD_FIELDS = frozenset(
    {"prompt", "negative_prompt", "messages", "content", "text", "image", "images", "token", "secret", "authorization"}
)
"""Fields whose value never reaches a log, whoever passes it."""

_Event = MutableMapping[str, Any]


def configure(service_name: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Send this process's events, and those of libraries that use ``logging``, to stderr as JSON lines.

    Args:
        service_name: what every line says as ``service``.
        level: the least level to write: debug, info, warning or error.
        stream: other than stderr, for tests.
    """
    number = getattr(logging, level.upper())

    def add_service(_logger: Any, _method: str, event: _Event) -> _Event:
        event["service"] = service_name
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        add_service,
        _add_trace,
        _withhold,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    out = _Lossy(stream or sys.stderr)
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, out)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries say a lot at info; what they warn about is ours to know.
    root.setLevel(max(number, logging.WARNING))


class _Lossy:
    """A stream that loses what it cannot write: on a full disk, which is what many an event is about, whoever tells of
    it must get on with its work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write it, or lose it."""
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Likewise."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def describe_error(error: BaseException, *, with_text: bool = True) -> dict[str, str]:
    """Fields that tell an unexpected error: its type, where it arose, and its text if that may be told.

    Without text, an ``OSError`` still says what the system said (``No space left on device``).
    """
    fields = {
        "error": type(error).__qualname__,
        "stack": "".join(traceback.format_tb(error.__traceback__)),
    }
    if with_text:
        fields["error_text"] = str(error)
    elif isinstance(error, OSError) and error.strerror:
        fields["error_text"] = error.strerror
    return fields


def _add_trace(_logger: Any, _method: str, event: _Event) -> _Event:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event


def _withhold(_logger: Any, _method: str, event: _Event) -> _Event:
    for name in WITHHELD_FIELDS & event.keys():
        event[name] = "[withheld]"
    return event
