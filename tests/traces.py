"""The trace of one command of the suite, as it came to a receiver of spans, for end-to-end tests."""

from collections.abc import Sequence

from weighbridge.demo.otlp_receiver import OtlpReceiver
from weighbridge.demo.trace_tree import SpanRecord

from tests.harness import wait_until

COMMAND = "weighbridge-cli"


def whole_trace(receiver: OtlpReceiver, method: str, engine: str) -> Sequence[SpanRecord]:
    """The last trace in which the command called ``method`` ("ChatService/Chat"), with one root and no span missing.

    Spans come in batches, so it waits until the command, ``engine`` ("ds4"), fit and the ledger have all told of
    theirs and no parent is unknown.

    Raises:
        AssertionError: something of it did not come in time, or it has several roots.
    """
    services = {COMMAND, f"weighbridge-engine-{engine}", "weighbridge-fit", "weighbridge-ledger"}

    def found() -> list[SpanRecord]:
        spans = receiver.spans()
        asked = [span for span in spans if span.service == COMMAND and span.name.endswith(method)]
        trace = [span for span in spans if asked and span.trace_id == asked[-1].trace_id]
        ids = {span.span_id for span in trace}
        all_came = all(not span.parent_id or span.parent_id in ids for span in trace)
        return trace if all_came and {span.service for span in trace} >= services else []

    trace: list[SpanRecord] = wait_until(found, what=f"the trace of {method}")
    assert sum(not span.parent_id for span in trace) == 1, "one root"
    return trace


def callers_of(trace: Sequence[SpanRecord], name: str) -> list[tuple[str, str]]:
    """Who called the one span of this name: service and method of each span above it, from the nearest up.

    Raises:
        ValueError: there is none of this name, or there are several.
    """
    by_id = {span.span_id: span for span in trace}
    [span] = [span for span in trace if span.name == name]
    callers = []
    while span.parent_id:
        span = by_id[span.parent_id]
        callers.append((span.service, span.name.rpartition("/")[2]))
    return callers
