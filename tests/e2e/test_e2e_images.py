"""Images through a whole suite: with the real sd-server where it is here, and with its stand-in."""

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from PIL import Image
from weighbridge.demo.otlp_receiver import OtlpReceiver
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import engine_service_pb2, image_service_pb2
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2, ledger_service_pb2_grpc

from services.engines.standins.sd.program import HOW_TO_GET_IT, real_sd_server, write_standin
from tests.harness import Suite, running_suite
from tests.images import (
    PROMPT,
    SIDE_PX,
    ImageEngine,
    ImageModel,
    Told,
    admitted,
    ask_directly,
    made_of_one_file,
    made_of_parts,
    port_of,
    sd_server_of,
    told,
)
from tests.traces import callers_of, whole_trace

MIB = 2**20
RELEASED = ledger_service_pb2.CHANGE_KIND_RELEASED

REAL = pytest.param("real", marks=pytest.mark.skipif(real_sd_server() is None, reason=HOW_TO_GET_IT))


@pytest.fixture(scope="module", params=[REAL, "standin"])
def program(request: Any, tmp_path_factory: Any) -> Path:
    """The sd-server that the engine starts."""
    real = real_sd_server() if request.param == "real" else None
    return real or write_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as opened:
        yield opened


@pytest.fixture(scope="module")
def parts(models_root: Path) -> ImageModel:
    """A model of several files, which starts from no picture."""
    return made_of_parts(models_root)


@pytest.fixture(scope="module")
def checkpoint(models_root: Path) -> ImageModel:
    """A model of one file, which starts from a picture too."""
    return made_of_one_file(models_root)


@pytest.fixture(scope="module")
def suite(
    models_root: Path, parts: ImageModel, checkpoint: ImageModel, program: Path, receiver: OtlpReceiver
) -> Iterator[Suite]:
    """A suite with the engine for images, on a machine whose GPU is its own while it renders."""
    settings = {
        "WEIGHBRIDGE_LEDGER_MACHINE": "unified:8",
        "WEIGHBRIDGE_ENGINES_SD_SERVER": str(program),
        "WEIGHBRIDGE_OTLP_ENDPOINT": receiver.endpoint,
    }
    with running_suite(models_root, "sd", **settings) as started:
        yield started


@asynccontextmanager
async def client(suite: Suite) -> AsyncIterator[ImageEngine]:
    """The engine over a connection of its own."""
    async with open_channel(f"unix:{suite.run_dir}/engine-sd.sock") as channel:
        yield ImageEngine(channel)


@pytest.fixture
async def engine(suite: Suite) -> AsyncIterator[ImageEngine]:
    """The engine. Whatever a test did, unloading gives every byte back."""
    async with client(suite) as connected:
        yield connected
        await connected.unload()
    assert suite.committed_bytes() == 0


@asynccontextmanager
async def ledger_of(suite: Suite) -> AsyncIterator[Any]:
    async with open_channel(f"unix:{suite.run_dir}/ledger.sock") as channel:
        yield ledger_service_pb2_grpc.LedgerServiceStub(channel)


# Text to image, as a person asks for it


@dataclass(frozen=True)
class Commanded:
    """What `weighbridge image` made of a model that was not loaded."""

    file: bytes
    told: Told
    made_directly: bytes
    committed_bytes: int
    """While the model was loaded."""


STEPS = 2


@pytest.fixture(scope="module")
def commanded(suite: Suite, parts: ImageModel, tmp_path_factory: Any) -> Commanded:
    file = tmp_path_factory.mktemp("image") / "fox.png"
    lines = suite.cli(
        "image", str(parts.path), PROMPT, "-o", str(file), "--json",
        "--size", f"{SIDE_PX}x{SIDE_PX}", "--steps", str(STEPS), "--seed", "7",
    ).stdout.splitlines()  # fmt: skip
    events = [
        json_format.ParseDict(event, image_service_pb2.GenerateImageResponse())
        for event in map(json.loads, lines)
        if "image" not in event
    ]
    committed = suite.committed_bytes()
    [picture] = ask_directly(port_of(sd_server_of(suite)), "/sdapi/v1/txt2img", steps=STEPS)
    suite.cli("unload", "sd")
    return Commanded(file.read_bytes(), Told(events), picture, committed)


def test_text_becomes_the_very_file_that_sd_server_makes_itself(commanded: Commanded) -> None:
    assert commanded.file == commanded.made_directly


def test_a_render_tells_its_load_then_its_phases_then_its_end(commanded: Commanded) -> None:
    kinds = [kind for kind, _ in itertools.groupby(commanded.told.kinds)]
    assert kinds == ["load.planned", "load.admitted", "load.starting", "progress", "finished"]
    progress = [event.progress for event in commanded.told.events if event.HasField("progress")]
    phases = [phase for phase, _ in itertools.groupby(progress, lambda step: step.phase)]
    assert phases == ["text_encode", "sampling", "decode"]
    counted = {phase: [step.done for step in progress if step.phase == phase] for phase in phases}
    assert counted["sampling"] == list(range(STEPS + 1))
    assert all(done == sorted(done) for done in counted.values())
    assert all(step.total == {"sampling": STEPS}.get(step.phase, 1) for step in progress)


def test_a_loaded_model_is_charged_and_an_unloaded_one_is_not(suite: Suite, commanded: Commanded) -> None:
    assert commanded.committed_bytes > 0
    assert suite.committed_bytes() == 0


def test_a_render_is_one_trace_down_to_the_request_to_sd_server(commanded: Commanded, receiver: OtlpReceiver) -> None:
    trace = whole_trace(receiver, "ImageService/GenerateImage", "sd")
    callers = callers_of(trace, "POST /sdapi/v1/txt2img")
    assert ("weighbridge-engine-sd", "GenerateImage") in callers
    assert ("weighbridge-cli", "GenerateImage") in callers


# Image to image


async def test_an_image_becomes_what_sd_server_makes_of_it_itself(
    suite: Suite, engine: ImageEngine, checkpoint: ImageModel, tmp_path: Path
) -> None:
    source = tmp_path / "source.png"
    Image.radial_gradient("L").resize((SIDE_PX, SIDE_PX)).convert("RGB").save(source)
    from_picture = await told(
        engine.generate(
            checkpoint,
            steps=4,
            strength=0.6,
            require_source=True,
            source_images=[image_service_pb2.SourceImage(data=source.read_bytes())],
        )
    )
    assert from_picture.finished.source_skipped_reason == ""
    assert from_picture.finished.size.source_images == 1
    directly = await asyncio.to_thread(
        ask_directly,
        port_of(sd_server_of(suite)),
        "/sdapi/v1/img2img",
        steps=4,
        denoising_strength=0.6,
        init_images=[base64.b64encode(source.read_bytes()).decode()],
    )
    assert from_picture.images == directly


# Sizes and memory


async def test_a_size_beyond_every_range_never_comes_to_the_engine(engine: ImageEngine, parts: ImageModel) -> None:
    # sd-server takes it, and is busy with it for more than a minute or ends for want of memory.
    await told_ready(engine.load(parts))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await told(engine.generate(parts, side_px=65536))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(refused.value) == "SIZE_OUT_OF_RANGE"
    printed = [line.line async for line in engine.engines.TailLog(engine_service_pb2.TailLogRequest(max_lines=1000))]
    assert any("listening on" in line for line in printed)
    assert not any("65536" in line for line in printed), "it prints the size of what it begins to render"


RENDERS_TO_STEADY = 10
"""What sd-server keeps of one render may grow with the next, so a peak is read after some."""


@pytest.mark.timeout(400)  # the largest took 146 s on two cores that seven others shared, 2026-12-01
@pytest.mark.parametrize("side_px", [64, 128, 256])
async def test_the_planned_peak_is_near_the_measured_one(
    suite: Suite, engine: ImageEngine, parts: ImageModel, program: Path, side_px: int
) -> None:
    if program != real_sd_server():
        pytest.skip("the stand-in has no model in memory")
    await told_ready(engine.load(parts, side_px=side_px))
    for _ in range(RENDERS_TO_STEADY):
        assert (await told(engine.generate(parts, side_px=side_px))).kinds[-1] == "finished"
    kept_bytes = sd_server_of(suite).memory_info().rss
    await engine.unload()
    async with ledger_of(suite) as ledger:
        listed = await ledger.ListObservations(ledger_service_pb2.ListObservationsRequest(page_size=1))
        [observed] = listed.observations
    assert f"size={side_px}x{side_px}" in observed.shape
    assert observed.peak_bytes >= kept_bytes, "the ledger was told of all that the process holds"
    allowed = 0.05 * observed.peak_bytes + 64 * MIB
    assert abs(observed.planned_bytes - observed.peak_bytes) <= allowed, (observed.planned_bytes, observed.peak_bytes)


# Two clients, two models, room for one


@pytest.fixture
def room_for_one(suite: Suite, parts: ImageModel, checkpoint: ImageModel) -> Iterator[None]:
    """A limit under which either model runs and not both."""
    claims = []
    for model in (parts, checkpoint):
        settings = [word for role, path in model.parts.items() for word in ("--set", f"parts={role}={path}")]
        plan = suite.json("fit", str(model.path), "--engine", "sd", "--size", f"{SIDE_PX}x{SIDE_PX}", *settings)
        claims.append(int(plan["claim"]["host_bytes"]))
    limit_bytes = max(claims) * 5 // 4
    assert sum(claims) > limit_bytes
    suite.cli("limit", f"{limit_bytes}B")
    yield
    suite.cli("limit", "auto")


async def test_two_clients_with_a_model_each_have_their_renders_in_order(
    suite: Suite,
    engine: ImageEngine,
    parts: ImageModel,
    checkpoint: ImageModel,
    room_for_one: None,
    program: Path,
) -> None:
    async with client(suite) as other, ledger_of(suite) as ledger:
        log = ledger.Watch(ledger_service_pb2.WatchRequest())
        assert (await log.read()).WhichOneof("change") == "snapshot"

        # Still in flight when it is looked at: 20 steps take the stand-in 0.4 s, the real one 15 s.
        first = engine.generate(parts, steps=20 if program == real_sd_server() else 100)
        rendering = await told(first, until="progress")
        server = sd_server_of(suite)
        lease_of_first = admitted(rendering)
        second = other.generate(checkpoint)
        waiting = await told(second, until="load.reclaiming")
        assert list(waiting.events[-1].load.reclaiming.victim_lease_ids) == [lease_of_first]
        [waits] = [lease for lease in await leases(ledger) if lease.state == lease_pb2.LEASE_STATE_QUEUED]
        assert [(reason.code, list(reason.lease_ids)) for reason in waits.wait_reasons] == [
            ("BYTES_HELD", [lease_of_first])
        ]
        assert server.is_running(), "it was not ended for the other model"

        assert len((await told(first)).images) == 1
        answer = await told(second)
        assert len(answer.images) == 1
        assert admitted(answer) == waits.lease_id
        await engine.unload()
        changes = await changes_until_released(log, waits.lease_id)

    kind = ledger_service_pb2.ChangeKind
    names = {lease_of_first: "first", waits.lease_id: "second"}
    told_by_log = [(names[change.lease.lease_id], kind.Name(change.kind)) for change in changes]
    order = [
        ("first", "CHANGE_KIND_LOADED"),
        ("second", "CHANGE_KIND_QUEUED"),
        ("first", "CHANGE_KIND_VACATING"),
        ("first", "CHANGE_KIND_RELEASED"),
        ("second", "CHANGE_KIND_GRANTED"),
        ("second", "CHANGE_KIND_LOADED"),
        ("second", "CHANGE_KIND_RELEASED"),
    ]
    assert [change for change in told_by_log if change in order] == order
    [asked] = [change.lease for change in changes if change.kind == kind.CHANGE_KIND_VACATING]
    assert asked.end_reason.metadata["waiting_lease_id"] == waits.lease_id


# Faults


async def test_a_server_killed_in_a_render_is_an_error_at_once_and_the_next_render_works(
    suite: Suite, engine: ImageEngine, parts: ImageModel
) -> None:
    broken = engine.generate(parts, steps=100)
    begun = await told(broken, until="progress")
    sd_server_of(suite).kill()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await told(broken)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(lost.value) == "ENGINE_DIED"
    again = await told(engine.generate(parts))
    assert len(again.images) == 1
    assert admitted(again) != admitted(begun), "its process was gone, and so was its lease"


async def told_ready(loading: Any) -> None:
    """A load that went well."""
    assert [event.WhichOneof("event") async for event in loading][-1] == "ready"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return RpcFailure.from_rpc_error(error).reason


async def leases(ledger: Any) -> list[lease_pb2.Lease]:
    return list((await ledger.ListLeases(ledger_service_pb2.ListLeasesRequest())).leases)


async def changes_until_released(log: Any, lease_id: str) -> list[ledger_service_pb2.WatchResponse]:
    """The changes of leases in the ledger's log, up to the end of this one."""
    changes = []
    while not changes or (changes[-1].kind, changes[-1].lease.lease_id) != (RELEASED, lease_id):
        change = await log.read()
        if change.HasField("lease"):
            changes.append(change)
    return changes
