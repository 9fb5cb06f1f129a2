"""Two engine services on one ledger with room for one model: who is asked to make room, when, and who is left alone."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
)
from weighbridge_proto.fit.v1 import weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc
from weighbridge_proto.memory.v1 import requirement_pb2

from tests.harness import Suite, running_suite, wait_until

pytestmark = pytest.mark.mlx


class Engine:
    """One engine service, by its socket."""

    def __init__(self, channel: Any) -> None:
        self.engines = engine_service_pb2_grpc.EngineServiceStub(channel)
        self.chats = chat_service_pb2_grpc.ChatServiceStub(channel)

    def load(self, model: Path) -> Any:
        return self.engines.LoadModel(engine_service_pb2.LoadModelRequest(model=ref(model)))

    def chat(self, model: Path, tokens: int = 3) -> Any:
        message = chat_service_pb2.ChatMessage(
            role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text="Count.")]
        )
        return self.chats.Chat(
            chat_service_pb2.ChatRequest(
                model=ref(model),
                messages=[message],
                max_output_tokens=tokens,
                sampling=chat_service_pb2.Sampling(temperature=0),
            )
        )

    async def lease_id(self) -> str:
        """The lease of what is loaded; empty: nothing is."""
        engine = (await self.engines.GetEngine(engine_service_pb2.GetEngineRequest())).engine
        return engine.model.lease.lease_id

    async def unload(self) -> None:
        await self.engines.UnloadModel(engine_service_pb2.UnloadModelRequest())


def ref(model: Path) -> weights_pb2.ModelRef:
    return weights_pb2.ModelRef(path=str(model))


@pytest.fixture(scope="module")
def a(tiny_models: Path) -> Path:
    return tiny_models / "tiny-qwen3-bf16"


@pytest.fixture(scope="module")
def b(tiny_models: Path) -> Path:
    return tiny_models / "tiny-qwen35-bf16"


@pytest.fixture(scope="module")
def small_machine(models_root: Path, a: Path, b: Path) -> Iterator[Suite]:
    """A suite with room for either model and not for both, where no model is left alone for being young."""
    settings = {
        "WEIGHBRIDGE_LEDGER_MACHINE": "cpu:8",
        "WEIGHBRIDGE_LEDGER_MIN_RESIDENCY_S": "0",
        "WEIGHBRIDGE_LEDGER_MAX_RESIDENCY_S": "0",
    }
    with running_suite(models_root, **settings) as suite:
        claims = [int(suite.json("fit", str(model))["claim"]["host_bytes"]) for model in (a, b)]
        suite.cli("limit", f"{max(claims) * 5 // 4}B")
        assert sum(claims) > max(claims) * 5 // 4
        yield suite


@pytest.fixture(scope="module")
def second_run_dir(small_machine: Suite) -> Iterator[Path]:
    """The run folder of a second engine service on the ledger and the fit of the suite."""
    folder = small_machine.home / "second"
    env = small_machine.env | {
        "WEIGHBRIDGE_RUN_DIR": str(folder),
        "WEIGHBRIDGE_LEDGER_TARGET": f"unix:{small_machine.run_dir}/ledger.sock",
        "WEIGHBRIDGE_FIT_TARGET": f"unix:{small_machine.run_dir}/fit.sock",
    }
    argv = [sys.executable, "-m", "weighbridge.supervision.lifeline", "weighbridge_engines", "mlx"]
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_until((folder / "engine-mlx.sock").exists, what="the second engine service")
        yield folder
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
async def engines(small_machine: Suite, second_run_dir: Path) -> AsyncIterator[tuple[Engine, Engine]]:
    """The suite's engine service and the second one. Both are empty afterwards."""
    async with (
        open_channel(f"unix:{small_machine.run_dir}/engine-mlx.sock") as first,
        open_channel(f"unix:{second_run_dir}/engine-mlx.sock") as second,
    ):
        both = Engine(first), Engine(second)
        yield both
        for engine in both:
            await engine.unload()
    assert small_machine.committed_bytes() == 0


async def events(call: Any, *, until: str = "") -> list[Any]:
    """The events of a stream, the load's within a chat's like others, up to its end or to one of kind ``until``."""
    seen = []
    async for event in call:
        seen.append(event.load if event.WhichOneof("event") == "load" else event)
        if seen[-1].WhichOneof("event") == until:
            break
    return seen


def told_of(suite: Suite, lease_id: str) -> tuple[str, int] | None:
    """State and open uses of a lease, as the ledger tells them; None while it does not answer."""
    listed = suite.cli("leases", "--json", check=False)
    leases = json.loads(listed.stdout)["leases"] if listed.returncode == 0 else []
    return next(((lease["state"], lease["uses"]) for lease in leases if lease["lease_id"] == lease_id), None)


def kinds(seen: list[Any]) -> list[str]:
    return [event.WhichOneof("event") for event in seen]


def victims(seen: list[Any]) -> list[str]:
    """Who was asked to make room, as told last."""
    return next(
        list(event.reclaiming.victim_lease_ids) for event in reversed(seen) if event.WhichOneof("event") == "reclaiming"
    )


async def test_idle_engines_make_room_for_each_other(engines: tuple[Engine, Engine], a: Path, b: Path) -> None:
    first, second = engines
    await events(first.load(a))
    lease_of_a = await first.lease_id()

    loading_b = await events(second.load(b))
    assert kinds(loading_b)[-1] == "ready"
    assert victims(loading_b) == [lease_of_a]
    assert await first.lease_id() == ""
    assert kinds(await events(second.chat(b)))[-1] == "finished"
    lease_of_b = await second.lease_id()

    answer = await events(first.chat(a))
    assert victims(answer) == [lease_of_b]
    assert kinds(answer)[-1] == "finished"
    assert await second.lease_id() == ""


async def test_a_busy_engine_is_not_interrupted(
    engines: tuple[Engine, Engine], small_machine: Suite, a: Path, b: Path
) -> None:
    first, second = engines
    await events(first.load(a))
    lease_of_a = await first.lease_id()
    answer = first.chat(a, tokens=300)
    await events(answer, until="delta")
    loading_b = second.load(b)
    [*_, queued] = await events(loading_b, until="queued")
    assert queued.queued.reasons[0].code == "BYTES_HELD"
    assert told_of(small_machine, lease_of_a) == ("LEASE_STATE_ACTIVE", 1)

    [*_, finished] = await events(answer)
    assert finished.finished.usage.output_tokens == 300
    rest = await events(loading_b)
    assert victims(rest) == [lease_of_a]
    assert kinds(rest)[-1] == "ready"


async def test_a_busy_engine_is_busy_for_a_ledger_that_was_killed(
    engines: tuple[Engine, Engine], small_machine: Suite, a: Path, b: Path
) -> None:
    # Uses are lost with the ledger. An engine taken for idle then would be asked to vacate in the middle of an answer.
    first, second = engines
    await events(first.load(a))
    lease_of_a = await first.lease_id()
    answer = first.chat(a, tokens=3000)
    await events(answer, until="delta")
    small_machine.find("weighbridge_ledger").kill()
    busy = ("LEASE_STATE_ACTIVE", 1)
    wait_until(lambda: told_of(small_machine, lease_of_a) == busy, what="the restarted ledger to hear of the answer")
    loading_b = second.load(b)
    await events(loading_b, until="queued")
    assert told_of(small_machine, lease_of_a) == busy
    loading_b.cancel()
    answer.cancel()


async def test_a_pinned_engine_is_not_asked(
    engines: tuple[Engine, Engine], small_machine: Suite, a: Path, b: Path
) -> None:
    first, second = engines
    claim = requirement_pb2.Claim(host_bytes=int(small_machine.json("fit", str(b))["claim"]["host_bytes"]))
    outcomes = []
    async with open_channel(f"unix:{small_machine.run_dir}/ledger.sock") as channel:
        ledger = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        for pinned in (False, True):
            await events(first.engines.LoadModel(engine_service_pb2.LoadModelRequest(model=ref(a), pinned=pinned)))
            [lease] = (await ledger.ListLeases(ledger_service_pb2.ListLeasesRequest())).leases
            what_if = ledger.Admit(
                ledger_service_pb2.AdmitRequest(holder=lease.holder, claim=claim, validate_only=True)
            )
            preview = (await what_if.read()).preview
            outcomes.append((preview.outcome, list(preview.would_evict_lease_ids) == [lease.lease_id]))
    assert outcomes == [(lease_pb2.OUTCOME_AFTER_EVICTION, True), (lease_pb2.OUTCOME_MUST_WAIT, False)]
    assert await second.lease_id() == ""


async def test_a_switch_of_model_replaces_the_lease_of_its_own_engine(
    engines: tuple[Engine, Engine], a: Path, b: Path
) -> None:
    engine, _ = engines
    await events(engine.engines.LoadModel(engine_service_pb2.LoadModelRequest(model=ref(a), pinned=True)))
    lease_of_a = await engine.lease_id()
    switching = await events(engine.chat(b))
    assert victims(switching) == [lease_of_a]
    assert kinds(switching)[-1] == "finished"
