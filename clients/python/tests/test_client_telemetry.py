"""Traces of the command, as a collector receives them."""

import os
import subprocess
import sys
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from weighbridge.demo.otlp_receiver import OtlpReceiver, read_spans
from weighbridge.demo.trace_tree import build_forest

COMMAND = [sys.executable, "-c", "from weighbridge.cli import main; main()"]


def test_a_command_is_a_root_span_and_its_calls_are_its_children(fake_suite: Any) -> None:
    with OtlpReceiver() as receiver:
        done = subprocess.run(
            [*COMMAND, "capacity"],
            env={**os.environ, "WEIGHBRIDGE_OTLP_ENDPOINT": receiver.endpoint},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        forest = build_forest(receiver.spans())
    assert forest.orphans == ()
    (root,) = forest.roots
    assert (root.span.name, root.span.service) == ("weighbridge capacity", "weighbridge-cli")
    assert [(child.span.name, child.span.status) for child in root.children] == [
        ("weighbridge.ledger.v1.LedgerService/GetCapacity", "OK")
    ]


def test_a_collector_that_is_not_there_changes_neither_answer_nor_exit_code(fake_suite: Any) -> None:
    done = subprocess.run(
        [*COMMAND, "capacity", "--json"],
        env={**os.environ, "WEIGHBRIDGE_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert '"committed_bytes"' in done.stdout


def test_without_a_collector_no_sdk_is_loaded(fake_suite: Any) -> None:
    check = (
        "import sys\nfrom weighbridge.cli import main\n"
        "try:\n main(['capacity'])\nexcept SystemExit as end:\n assert end.code == 0, end.code\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'weighbridge_common'))]\n"
        "assert loaded == [], loaded"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_spans_are_read_with_their_service_and_links() -> None:
    request = trace_service_pb2.ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "weighbridge-fit"
    span = resource.scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.parent_span_id = b"\x01" * 16, b"\x02" * 8, b"\x03" * 8
    span.name, span.start_time_unix_nano, span.end_time_unix_nano = "work", 5, 9
    span.attributes.add(key="rpc.status_code").value.string_value = "NOT_FOUND"
    span.links.add(trace_id=b"\x0a" * 16)
    (record,) = read_spans(request)
    assert (record.trace_id, record.span_id, record.parent_id) == ("01" * 16, "02" * 8, "03" * 8)
    assert (record.service, record.name, record.status) == ("weighbridge-fit", "work", "NOT_FOUND")
    assert (record.start_ns, record.end_ns, record.linked_trace_ids) == (5, 9, ("0a" * 16,))
