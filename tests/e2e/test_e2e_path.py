"""The main path as a user goes it: facts, fit, load, chat, unload, with the real MLX runtime on the CPU."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness import Suite, running_suite, wait_until

pytestmark = pytest.mark.mlx

QUESTION = "What is the capital of France?"


@pytest.fixture(autouse=True)
def leaves_nothing(suite: Suite):
    """Whatever a test did, unloading gives every byte back."""
    yield
    suite.cli("unload", "mlx")
    assert suite.committed_bytes() == 0


def test_chat_answers_and_gives_every_byte_back(suite: Suite, demo_model: Path) -> None:
    answer = suite.cli("chat", str(demo_model), QUESTION)
    assert "Paris" in answer.stdout
    leases = suite.json("leases")["leases"]
    assert [lease["state"] for lease in leases] == ["LEASE_STATE_ACTIVE"]
    charged = int(leases[0]["charge"]["host_bytes"])
    assert suite.committed_bytes() == charged > 0
    suite.cli("unload", "mlx")
    assert suite.committed_bytes() == 0
    assert suite.json("leases").get("leases", []) == []


def test_plan_names_weights_exactly_and_the_peak_within_ten_percent(suite: Suite, demo_model: Path) -> None:
    plan = suite.json("fit", str(demo_model))
    weights = sum(int(line["expected_bytes"]) for line in plan["requirement"]["lines"] if line["component"] == "model")
    facts = suite.json("facts", str(demo_model))["facts"]
    assert weights == int(facts["tensor_bytes"])

    # A prompt and an answer that use most of the default context, so that the peak is the planned workload's.
    prompt = "Tell me a long story about the harbour. " * 330
    suite.cli("chat", str(demo_model), prompt, "--max-tokens", "64")
    suite.cli("unload", "mlx")
    child_peak = _latest_peak(suite)
    planned = int(plan["requirement"]["total"]["expected_bytes"])
    assert abs(planned - child_peak) <= 0.10 * child_peak, (planned, child_peak)


def _latest_peak(suite: Suite) -> int:
    """The peak that the engine recorded with the ledger, read over the wire."""
    import asyncio

    from weighbridge_proto.channel import open_channel
    from weighbridge_proto.ledger.v1 import ledger_service_pb2, ledger_service_pb2_grpc

    async def read() -> int:
        async with open_channel(f"unix:{suite.run_dir / 'ledger.sock'}") as channel:
            stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
            listed = await stub.ListObservations(ledger_service_pb2.ListObservationsRequest(page_size=1))
            return listed.observations[0].peak_bytes

    return asyncio.run(read())


def test_a_cancelled_chat_leaves_the_engine_free(suite: Suite, demo_model: Path) -> None:
    suite.cli("load", str(demo_model))
    chat = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "chat", str(demo_model), "Count from one to one thousand in words."],
        env=suite.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert chat.stdout is not None
    chat.stdout.read(1)  # the answer has begun
    chat.send_signal(signal.SIGINT)
    chat.wait(timeout=30)
    wait_until(
        lambda: suite.json("ps")["engines"][0]["requests_in_flight"] == 0,
        what="the engine to be free",
    )
    assert "Paris" in suite.cli("chat", str(demo_model), QUESTION).stdout


def test_an_idle_model_is_unloaded(models_root: Path, demo_model: Path) -> None:
    with running_suite(models_root, WEIGHBRIDGE_ENGINES_IDLE_TIMEOUT_S="1") as suite:
        suite.cli("load", str(demo_model))
        wait_until(lambda: suite.committed_bytes() == 0, what="the idle model to be unloaded")
        assert suite.stop() == 0


def test_stopping_leaves_no_process_and_no_socket(models_root: Path, demo_model: Path) -> None:
    with running_suite(models_root) as suite:
        suite.cli("load", str(demo_model))
        processes = suite.processes()
        assert suite.stop() == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]
        assert list(suite.run_dir.glob("*.sock")) == []
