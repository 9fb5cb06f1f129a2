"""The main path as a user goes it: facts, fit, load, chat, unload, with the real MLX runtime on the CPU."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from weighbridge_proto.channel import open_channel
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc

from tests.harness import Suite, running_suite, wait_until

pytestmark = pytest.mark.mlx

QUESTION = "What is the capital of France?"


@pytest.fixture
def empty_afterwards(suite: Suite) -> Iterator[Suite]:
    """Whatever a test did, unloading gives every byte back."""
    yield suite
    suite.cli("unload", "mlx")
    assert suite.committed_bytes() == 0


async def latest_observation(suite: Suite) -> lease_pb2.Observation:
    """What the engine recorded with the ledger about its last model."""
    async with open_channel(f"unix:{suite.run_dir / 'ledger.sock'}") as channel:
        ledger = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        listed = await ledger.ListObservations(ledger_service_pb2.ListObservationsRequest(page_size=1))
        return listed.observations[0]


def test_chat_answers_and_gives_every_byte_back(empty_afterwards: Suite, demo_model: Path) -> None:
    suite = empty_afterwards
    assert "Paris" in suite.cli("chat", str(demo_model), QUESTION).stdout
    leases = suite.json("leases")["leases"]
    assert [lease["state"] for lease in leases] == ["LEASE_STATE_ACTIVE"]
    charged = int(leases[0]["charge"]["host_bytes"])
    assert suite.committed_bytes() == charged > 0
    suite.cli("unload", "mlx")
    assert suite.committed_bytes() == 0
    assert suite.json("leases").get("leases", []) == []


async def test_weights_exactly_and_the_peak_within_ten_percent(empty_afterwards: Suite, demo_model: Path) -> None:
    suite = empty_afterwards
    context = ["--context", "256"]
    plan = suite.json("fit", str(demo_model), *context)
    lines = plan["requirement"]["lines"]
    weights = sum(int(line["expected_bytes"]) for line in lines if line["component"] == "model")
    assert weights == int(suite.json("facts", str(demo_model))["facts"]["tensor_bytes"])

    # The peak of a plan is that of its whole context, so the conversation must fill it:
    # about 190 tokens and 40 more. A larger one would take minutes: MLX reads some ten prompt tokens a second on a CPU.
    suite.cli("load", str(demo_model), *context)
    suite.cli("chat", str(demo_model), "The harbour is busy today. " * 27, "--max-tokens", "40")
    suite.cli("unload", "mlx")
    observed = await latest_observation(suite)
    planned = int(plan["requirement"]["total"]["expected_bytes"])
    assert observed.planned_bytes == planned
    assert abs(planned - observed.peak_bytes) <= 0.10 * observed.peak_bytes, (planned, observed.peak_bytes)


@pytest.mark.parametrize("model", ["tiny-qwen3-bf16", "tiny-qwen35-bf16"])
def test_the_cache_holds_exactly_the_planned_bytes(empty_afterwards: Suite, tiny_models: Path, model: str) -> None:
    """Keys, values and states of a conversation that fills its last slab, byte for byte as planned for that context."""
    suite = empty_afterwards
    path, context = str(tiny_models / model), ["--context", "512"]
    suite.cli("load", path, *context)
    events = suite.cli("chat", path, "one two three " * 100, "--max-tokens", "100", "--json").stdout.splitlines()
    finished = next(event["finished"] for event in map(json.loads, events) if "finished" in event)
    plan = suite.json("fit", path, *context)
    planned = sum(
        int(line["low_bytes"])
        for line in plan["requirement"]["lines"]
        if line["component"] in ("kv_cache", "recurrent_state")
    )
    assert int(finished["usage"]["cache_bytes"]) == planned


def test_a_cancelled_chat_leaves_the_engine_free(empty_afterwards: Suite, demo_model: Path) -> None:
    suite = empty_afterwards
    suite.cli("load", str(demo_model))
    chat = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "chat", str(demo_model), "Count from one to one thousand in words."],
        env=suite.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert chat.stdout is not None
    assert chat.stdout.read(1), "the answer has begun"
    chat.send_signal(signal.SIGINT)
    assert chat.wait(timeout=30) == 130
    wait_until(
        lambda: all(not engine.get("requests_in_flight") for engine in suite.json("ps")["engines"]),
        what="the engine to be free",
    )
    assert "Paris" in suite.cli("chat", str(demo_model), QUESTION).stdout


def test_an_idle_model_is_unloaded(models_root: Path, tiny_models: Path) -> None:
    with running_suite(models_root, WEIGHBRIDGE_ENGINES_IDLE_TIMEOUT_S="1") as suite:
        suite.cli("load", str(tiny_models / "tiny-qwen3-bf16"))
        wait_until(lambda: suite.committed_bytes() == 0, what="the idle model to be unloaded")
        assert suite.stop() == 0


def test_stopping_leaves_no_process_and_no_socket(models_root: Path, tiny_models: Path) -> None:
    with running_suite(models_root) as suite:
        suite.cli("load", str(tiny_models / "tiny-qwen3-bf16"))
        processes = suite.processes()
        assert suite.stop() == 0
        assert not psutil.wait_procs(processes, timeout=10)[1]
        assert list(suite.run_dir.glob("*.sock")) == []
