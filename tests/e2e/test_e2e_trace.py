"""One trace follows a chat from the command through engine, fit and ledger, with no orphan."""

from pathlib import Path

import pytest
from weighbridge.demo.otlp_receiver import OtlpReceiver

from tests.harness import running_suite

pytestmark = pytest.mark.mlx


def test_a_chat_is_one_tree(models_root: Path, demo_model: Path) -> None:
    with OtlpReceiver() as receiver:
        with running_suite(models_root, WEIGHBRIDGE_OTLP_ENDPOINT=receiver.endpoint) as suite:
            suite.cli("chat", str(demo_model), "What is the capital of France?")
            suite.cli("unload", "mlx")
            assert suite.stop() == 0
        spans = receiver.spans()
    chats = [span for span in spans if span.name.endswith("ChatService/Chat") and span.service == "weighbridge-cli"]
    assert len(chats) == 1
    trace = [span for span in spans if span.trace_id == chats[0].trace_id]
    assert {span.service for span in trace} >= {
        "weighbridge-cli", "weighbridge-engine-mlx", "weighbridge-fit", "weighbridge-ledger",
    }  # fmt: skip
    ids = {span.span_id for span in trace}
    orphans = [span for span in trace if span.parent_id and span.parent_id not in ids]
    assert not orphans
    assert sum(not span.parent_id for span in trace) == 1, "one root"
    assert not [s for s in trace if s.name.endswith(("/KeepAlive", "/Watch"))], (
        "long-lived streams are traces of their own"
    )
