"""SIGKILL of each process in turn while an answer streams (admission rules 5-14): no leak, and the next chat works."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2, chat_service_pb2_grpc
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import weights_pb2

from tests.harness import Suite, running_suite, wait_until

pytestmark = pytest.mark.mlx

ANSWER_TOKENS = 400
"""Long enough for every kill to come while the answer streams."""


@pytest.fixture
def model(tiny_models: Path) -> Path:
    """A tiny random model: it starts and answers fast, and what it says does not matter here."""
    return tiny_models / "tiny-qwen3-bf16"


@pytest.fixture
def own_suite(models_root: Path, tiny_models: Path) -> Iterator[Suite]:
    with running_suite(models_root) as started:
        yield started
        assert started.stop() == 0
        assert list(started.run_dir.glob("*.sock")) == []


def request(model: Path, prompt: str, tokens: int) -> chat_service_pb2.ChatRequest:
    return chat_service_pb2.ChatRequest(
        model=weights_pb2.ModelRef(path=str(model)),
        messages=[
            chat_service_pb2.ChatMessage(
                role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text=prompt)]
            )
        ],
        sampling=chat_service_pb2.Sampling(temperature=0),
        max_output_tokens=tokens,
    )


async def stream_and_kill(suite: Suite, model: Path, victim: psutil.Process) -> RpcFailure | None:
    """Kill ``victim`` after the third piece of an answer.

    Returns how the stream failed, None if it went on to its end.
    """
    async with open_channel(f"unix:{suite.run_dir / 'engine-mlx.sock'}") as channel:
        call = chat_service_pb2_grpc.ChatServiceStub(channel).Chat(request(model, "Count.", ANSWER_TOKENS), timeout=120)
        pieces = 0
        try:
            async for response in call:
                pieces += response.HasField("delta")
                if pieces == 3:
                    victim.kill()
                    pieces += 1
        except grpc.aio.AioRpcError as error:
            return RpcFailure.from_rpc_error(error)
        return None


def engine_child(suite: Suite) -> psutil.Process:
    return suite.find("weighbridge_engines.mlx_qwen.runtime")


def held_equals_committed(suite: Suite) -> bool:
    """Committed bytes are those of leases whose engine process lives."""
    leases = suite.json("leases").get("leases", [])
    alive = sum(
        int(lease["charge"]["host_bytes"])
        for lease in leases
        if all(psutil.pid_exists(int(process["pid"])) for process in lease.get("engine_processes", []))
    )
    return suite.committed_bytes() == alive


def next_chat_works(suite: Suite, model: Path) -> None:
    wait_until(
        lambda: suite.cli("chat", str(model), "Go on.", "--max-tokens", "5", check=False).stdout,
        what="the next chat to work",
    )


def test_the_engines_child_is_killed(own_suite: Suite, model: Path) -> None:
    own_suite.cli("load", str(model))
    child = engine_child(own_suite)
    failure = asyncio.run(stream_and_kill(own_suite, model, child))
    assert failure is not None and failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.reason == "ENGINE_DIED"
    wait_until(lambda: own_suite.committed_bytes() == 0, what="the dead engine's bytes to come back")
    next_chat_works(own_suite, model)
    assert held_equals_committed(own_suite)


def test_the_engine_service_is_killed(own_suite: Suite, model: Path) -> None:
    own_suite.cli("load", str(model))
    child = engine_child(own_suite)
    service = own_suite.find("lifeline weighbridge_engines mlx")
    failure = asyncio.run(stream_and_kill(own_suite, model, service))
    assert failure is not None and failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.reason
    assert not psutil.wait_procs([child], timeout=20)[1], "the child outlived its parent"
    wait_until(lambda: own_suite.committed_bytes() == 0, what="the dead service's bytes to come back")
    next_chat_works(own_suite, model)
    assert held_equals_committed(own_suite)


def test_the_ledger_is_killed(own_suite: Suite, model: Path) -> None:
    own_suite.cli("load", str(model))
    before = own_suite.committed_bytes()
    child = engine_child(own_suite)
    ledger = own_suite.find("lifeline weighbridge_ledger")
    failure = asyncio.run(stream_and_kill(own_suite, model, ledger))
    assert failure is None, "the answer needs no ledger once it has begun"
    wait_until(lambda: own_suite.cli("capacity", check=False).returncode == 0, what="the ledger to be back")
    assert child.is_running()
    assert own_suite.committed_bytes() == before, "a restart keeps the leases"
    next_chat_works(own_suite, model)
    assert held_equals_committed(own_suite)


def test_the_whole_suite_is_killed(models_root: Path, model: Path) -> None:
    """Nobody outlives a SIGKILL of ``weighbridge up``, and the next one starts with an empty book."""
    with running_suite(models_root) as suite:
        suite.cli("load", str(model))
        everyone = suite.processes()
        assert suite.process is not None
        suite.process.kill()
        suite.process.wait()
        assert not psutil.wait_procs(everyone, timeout=30)[1]
        suite.start()
        wait_until(lambda: suite.committed_bytes() == 0, what="the dead leases to be swept")
        next_chat_works(suite, model)
        assert suite.stop() == 0


def state_when_settled(suite: Suite) -> str:
    """The engine's state once it neither loads nor unloads; empty until then."""
    [engine] = suite.json("ps")["engines"]
    state: str = engine["state"]
    return state if state in ("ENGINE_STATE_EMPTY", "ENGINE_STATE_READY") else ""


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 1.0, 1.5, 2.0])
def test_a_load_cancelled_at_any_moment_leaves_nothing(models_root: Path, model: Path, after_s: float) -> None:
    import signal
    import subprocess
    import sys

    with running_suite(models_root) as suite:
        load = subprocess.Popen(
            [sys.executable, "-m", "weighbridge", "load", str(model)],
            env=suite.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(after_s)  # the moment of the cancel is what varies
        load.send_signal(signal.SIGINT)
        finished = load.wait(timeout=60) == 0
        if not finished:
            if wait_until(lambda: state_when_settled(suite), what="the load to end") == "ENGINE_STATE_READY":
                # The cancel came when the model was loaded already, and only the command had not ended: it stays.
                suite.cli("unload", "mlx")
            wait_until(lambda: suite.committed_bytes() == 0, what="the cancelled load's bytes to come back")
            wait_until(
                lambda: not [p for p in suite.processes() if "mlx_qwen.runtime" in " ".join(p.cmdline())],
                what="the cancelled load's process to end",
            )
        assert suite.stop() == 0
