"""One started sd-server as the host has it: ours for certain, looked at while it loads, rendering, and explained when
it ends. Against the stand-in; the behaviour suite holds that to the real one."""

import asyncio
import base64
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PIL import Image
from weighbridge_engines.host.kind import EngineLostError
from weighbridge_engines.models import tiny_sd
from weighbridge_engines.sd_server import pictures
from weighbridge_engines.sd_server.client import CONNECTIONS_TRIED, OtherServerError, SdServerClient
from weighbridge_engines.sd_server.jobs import Rendered, RenderJob, RenderProgress
from weighbridge_engines.sd_server.kind import SdKind
from weighbridge_engines.supervisor.child import Child, spawn
from weighbridge_engines.supervisor.output import RingLog
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from services.engines.standins.sd.behaviour import Behaviour
from services.engines.standins.sd.program import write_standin

PNG = b"\x89PNG\r\n\x1a\n of our server"
JOB = RenderJob("a cat", "", 64, 64, 1, 3, 1.0, 7)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> fit_pb.PlanModelResponse:
    """The plan of a tiny model."""
    model = tiny_sd.write(tmp_path_factory.mktemp("tiny"))
    plan = fit_pb.PlanModelResponse(model_name="tiny", resolved_path=str(model.files["--diffusion-model"]))
    plan.launch.sd.arguments.extend(model.arguments)
    return plan


class Started:
    """A started server and the host's side of it."""

    def __init__(self, child: Child, runtime, steps: list) -> None:
        self.child = child
        self.runtime = runtime
        self.steps = steps

    async def render(self, job: RenderJob = JOB) -> tuple[list[RenderProgress], Rendered]:
        progress: list[RenderProgress] = []
        async for event in self.runtime.render(job):
            if isinstance(event, Rendered):
                return progress, event
            progress.append(event)
        raise AssertionError("it ended without a picture")


@pytest.fixture
def start(tmp_path: Path, planned):
    """Starts a stand-in that behaves like this, and waits until it serves."""

    @contextlib.asynccontextmanager
    async def started(behaviour: Behaviour | None = None, plan=planned, load: bool = True) -> AsyncIterator[Started]:
        folder, workspace = tmp_path / "program", tmp_path / "work"
        folder.mkdir()
        workspace.mkdir()
        kind = SdKind(str(write_standin(folder, behaviour)), tmp_path / "cache")
        assert not kind.describe().unavailable_reason
        launch = kind.launch(plan, workspace)
        child = await spawn(launch.child, RingLog(now=lambda: 0.0))
        child.open_gate()
        runtime = launch.connect()
        try:
            steps = [step async for step in runtime.load(plan)] if load else []
            child.was_ready = load
            yield Started(child, runtime, steps)
        finally:
            await runtime.aclose()
            child.kill()
            await child.wait()

    return started


async def test_it_is_looked_at_while_it_loads_and_serves_when_it_answers(start) -> None:
    async with start(Behaviour(load_s=0.3, bind_delay_s=0.2)) as server:
        fractions = [step.fraction for step in server.steps if step.phase == "weights"]
        assert fractions == sorted(fractions)
        assert server.steps[-1].phase == "listening"
        assert await server.runtime.is_alive()


async def test_a_render_tells_its_phases_in_order_and_gives_the_engine_s_own_png(start) -> None:
    async with start() as server:
        progress, rendered = await server.render()
        phases = list(dict.fromkeys(step.phase for step in progress))
        assert phases == ["text_encode", "sampling", "decode"]
        assert [(step.done, step.total) for step in progress if step.phase == "sampling"][-1] == (3, 3)
        assert rendered.images[0].startswith(b"\x89PNG")


@pytest.mark.parametrize("given", ["source_png", "reference_pngs"])
async def test_images_that_are_given_are_encoded_before_the_prompt(start, given: str) -> None:
    png = pictures.for_engine(Image.new("RGB", (64, 64)), 64, 64)
    async with start() as server:
        progress, _ = await server.render(replace(JOB, **{given: png if given == "source_png" else (png,)}))
    phases = [step.phase for step in progress]
    assert sorted(phases, key=["encode", "text_encode", "sampling", "decode"].index) == phases
    assert phases[0] == "encode"


async def test_the_same_seed_gives_the_same_picture_and_another_one_another(start) -> None:
    async with start() as server:
        (_, first), (_, again), (_, other) = [
            await server.render(RenderJob("a cat", "", 64, 64, 1, 1, 1.0, seed)) for seed in (1, 1, 2)
        ]
        assert first.images == again.images != other.images


@pytest.mark.parametrize(("field", "reason"), [("sampler", "UNKNOWN_SAMPLER"), ("scheduler", "UNKNOWN_SCHEDULER")])
async def test_what_it_would_silently_replace_is_refused(start, field: str, reason: str) -> None:
    async with start() as server:
        with pytest.raises(RequestError) as refused:
            await server.render(RenderJob("a cat", "", 64, 64, 1, 1, 1.0, 1, **{field: "no such"}))
        assert refused.value.failure.reason == reason


@pytest.mark.parametrize(
    ("fault", "reason"), [("out_of_memory", "RENDER_OUT_OF_MEMORY"), ("no_results", "RENDER_FAILED")]
)
async def test_a_render_that_fails_is_explained_and_the_server_is_kept(start, fault: str, reason: str) -> None:
    async with start(Behaviour(render_fault=fault)) as server:
        for _ in range(2):
            with pytest.raises(RequestError) as failed:
                await server.render()
            assert failed.value.failure.reason == reason
        assert not server.child.has_ended


async def test_a_server_that_is_killed_in_a_render_is_lost(start) -> None:
    async with start(Behaviour(render_fault="SIGSEGV")) as server:
        with pytest.raises(EngineLostError):
            await server.render()
        facts = await server.child.wait()
        explained = server.child.spec.explain(facts)
        assert (explained.cause.value, explained.metadata["signal"]) == ("CRASHED", "SIGSEGV")


async def test_a_server_on_our_port_that_is_not_ours_is_not_spoken_to(start) -> None:
    """SO_REUSEPORT lets two of them answer on one port, in turn."""
    async with start() as server:
        stranger = SdServerClient(_port_of(server.child), "weighbridge-of-somebody-else")
        try:
            with pytest.raises(OtherServerError):
                await stranger.is_ours()
            with pytest.raises(EngineLostError):
                await stranger.render(JOB)
        finally:
            await stranger.aclose()


@pytest.mark.parametrize("strangers", [0, 3, CONNECTIONS_TRIED])
async def test_a_render_goes_to_our_server_however_many_connections_lead_to_another(strangers: int) -> None:
    """The kernel deals connections out between two servers that share a port."""
    connections = itertools.count()
    rendered_by: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = "stranger" if next(connections) < strangers else "weighbridge-of-us"
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"post"):
                    length = next(line for line in head.splitlines() if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.partition(b":")[2]))
                    rendered_by.append(name)
                    body = json.dumps({"images": [base64.b64encode(PNG).decode()]}).encode()
                else:
                    body = json.dumps([{"name": name}]).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = SdServerClient(port, "weighbridge-of-us")
        try:
            if strangers < CONNECTIONS_TRIED:
                assert await client.is_ours(), "a living server is not taken for a dead one"
                connections = itertools.count()
                assert await client.render(JOB) == (PNG,)
                assert rendered_by == ["weighbridge-of-us"]
            else:
                with pytest.raises(EngineLostError, match=f"another program answers on its port, {port}"):
                    await client.render(JOB)
                assert rendered_by == []
        finally:
            await client.aclose()


async def test_a_server_on_our_port_that_answers_with_no_json_is_not_ours() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = SdServerClient(server.sockets[0].getsockname()[1], "weighbridge-of-us")
        try:
            with pytest.raises(OtherServerError):
                await client.is_ours()
            with pytest.raises(EngineLostError):
                await client.render(JOB)
        finally:
            await client.aclose()


async def test_a_render_that_is_asked_for_after_its_connections_were_closed_is_lost(start) -> None:
    """A model is unloaded by force between the ledger's leave for a render and the render."""
    async with start() as server:
        await server.runtime.aclose()
        with pytest.raises(EngineLostError):
            await server.render()


async def test_a_load_asks_again_where_the_server_is_slow_to_say_what_it_can(start, monkeypatch) -> None:
    """On a busy machine; the load fails by its own time limit, not by that of one question."""
    asked = SdServerClient.capabilities
    slow = iter((True, False))

    async def capabilities(client: SdServerClient) -> dict[str, Any]:
        if next(slow):
            raise httpx2.ReadTimeout("nothing came")
        return await asked(client)

    monkeypatch.setattr(SdServerClient, "capabilities", capabilities)
    async with start() as server:
        with pytest.raises(RequestError) as refused:
            await server.render(replace(JOB, sampler="no such"))
        assert refused.value.failure.reason == "UNKNOWN_SAMPLER"


async def test_one_whose_port_is_taken_ends_and_says_why(start, monkeypatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        monkeypatch.setattr("weighbridge_engines.sd_server.kind.free_loopback_port", lambda: port)
        async with start(load=False) as server:
            facts = await server.child.wait()
            explained = server.child.spec.explain(facts)
            assert (facts.exit_code, explained.metadata["failure"]) == (0, "CANNOT_BIND")


async def test_a_part_that_is_missing_is_named(start, planned) -> None:
    plan = fit_pb.PlanModelResponse()
    plan.CopyFrom(planned)
    del plan.launch.sd.arguments[4:]
    async with start(plan=plan, load=False) as server:
        facts = await server.child.wait()
        explained = server.child.spec.explain(facts)
        assert (facts.exit_code, explained.metadata["failure"]) == (1, "MISSING_TENSOR")
        assert "vae" in explained.message or "autoencoder" in explained.message


async def test_a_render_goes_on_when_nobody_listens_any_more(start) -> None:
    """Nothing but its end stops one: the next one waits for it."""
    async with start(Behaviour(step_s=0.1)) as server:
        rendering = server.runtime.render(JOB)
        assert isinstance(await anext(rendering), RenderProgress)
        await rendering.aclose()
        _, rendered = await server.render()
        assert rendered.images
        assert not server.child.has_ended


async def test_its_environment_and_arguments_have_no_secret_and_no_prompt(start) -> None:
    async with start() as server:
        await server.render()
        said = " ".join((*server.child.spec.argv, *server.child.spec.environ.values()))
        assert "a cat" not in said
        assert {"-v", "--verbose"}.isdisjoint(server.child.spec.argv)


def _port_of(child: Child) -> int:
    arguments = list(child.spec.argv)
    return int(arguments[arguments.index("--listen-port") + 1])


async def test_closing_a_render_that_waits_leaves_nothing_behind(start) -> None:
    async with start(Behaviour(encode_s=0.3)) as server:
        waiting = asyncio.ensure_future(server.render())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        _, rendered = await server.render()
        assert rendered.width == 64
