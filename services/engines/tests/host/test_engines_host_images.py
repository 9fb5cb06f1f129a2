"""Images: checked before anything is loaded, rendered under a lease that covers them, sent in pieces."""

import asyncio
import io
import threading
import zlib

import grpc
import pytest
from host_fakes import eventually, failure_of, kill, kinds
from image_fakes import ImageSuite, claim_of, pictures_of, png_of, size
from PIL import Image
from weighbridge_engines.host.images import Images
from weighbridge_engines.sd_server import pictures
from weighbridge_proto.engines.v1 import chat_service_pb2
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import plan_pb2

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def picture(width=64, height=64, color="red"):
    made = io.BytesIO()
    Image.new("RGB", (width, height), color).save(made, "PNG")
    return image_pb.SourceImage(data=made.getvalue())


# -- what comes back --


async def test_an_image_loads_its_model_and_is_rendered_by_the_ledgers_leave(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(seed=5)
        loading = [event for event in events if event.WhichOneof("event") == "load"]
        assert events[: len(loading)] == loading
        steps = [event.progress for event in events if event.WhichOneof("event") == "progress"]
        assert [(step.phase, step.done, step.total) for step in steps] == [
            ("text_encode", 0, 1), ("text_encode", 1, 1),
            ("sampling", 0, 4), ("sampling", 1, 4), ("sampling", 2, 4), ("sampling", 3, 4), ("sampling", 4, 4),
            ("decode", 0, 1), ("decode", 1, 1),
        ]  # fmt: skip
        assert kinds(events)[-1] == "finished"
        finished = events[-1].finished
        assert (finished.seed, finished.size.width_px, finished.size.height_px) == (5, 512, 512)
        assert (finished.size.batch, finished.source_skipped_reason) == (1, "")
        assert finished.render_time.ToMilliseconds() == 1500
        assert pictures_of(events) == [png_of(suite.kind.jobs[0])]  # the engine's own bytes
        [lease] = suite.ledger.active
        assert suite.ledger.uses_begun == 1
        await eventually(lambda: lease.uses == 0)
        assert kinds(await suite.image_all())[0] == "progress"
        assert len(suite.ledger.admits) == 1


async def test_an_engine_for_images_refuses_a_chat_and_says_what_to_use(run_dir):
    async with ImageSuite(run_dir) as suite:
        failure = await failure_of(suite.chats.Chat(chat_service_pb2.ChatRequest()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNIMPLEMENTED, "ENGINE_DOES_NOT_CHAT")
    assert "makes images and does not chat" in failure.message and "`weighbridge image`" in failure.message


async def test_images_come_in_pieces_of_at_most_256_kib_each_with_its_number(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(size=size(512, 512, batch=2))
        chunks = [event.chunk for event in events if event.WhichOneof("event") == "chunk"]
        assert max(len(chunk.data) for chunk in chunks) == 256 * 1024
        for index in (0, 1):
            pieces = [chunk for chunk in chunks if chunk.image_index == index]
            assert len(pieces) > 1
            assert [piece.media_type for piece in pieces] == ["image/png"] + (len(pieces) - 1) * [""]
            assert [piece.last for piece in pieces] == (len(pieces) - 1) * [False] + [True]
        assert [chunk.image_index for chunk in chunks] == sorted(chunk.image_index for chunk in chunks)
        [job] = suite.kind.jobs
        assert pictures_of(events) == [png_of(job, 0), png_of(job, 1)]


@pytest.mark.parametrize(
    ("format", "media_type", "name"),
    [(image_pb.IMAGE_FORMAT_JPEG, "image/jpeg", "JPEG"), (image_pb.IMAGE_FORMAT_WEBP, "image/webp", "WEBP")],
)
async def test_images_come_in_the_format_that_was_asked_for(run_dir, format, media_type, name):
    async with ImageSuite(run_dir) as suite:
        for strip in (False, True):
            events = await suite.image_all("a cat", size=size(64, 64), format=format, strip_metadata=strip)
            assert next(event.chunk.media_type for event in events if event.HasField("chunk")) == media_type
            [data] = pictures_of(events)
            opened = Image.open(io.BytesIO(data))
            assert (opened.format, opened.size) == (name, (64, 64))
            assert ("a cat".encode("utf-16-be") in data) is not strip


async def test_a_seed_that_was_chosen_is_told(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(size=size(64, 64))
        assert events[-1].finished.seed == suite.kind.jobs[0].seed


async def test_a_size_is_rounded_up_and_told_as_rendered(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(size=size(65, 127))
        told = events[-1].finished.size
        assert (told.width_px, told.height_px) == (128, 128)
        assert Image.open(io.BytesIO(pictures_of(events)[0])).size == (128, 128)


async def test_an_image_of_whatever_is_loaded(run_dir):
    async with ImageSuite(run_dir) as suite:
        failure = await failure_of(suite.image(model=None))
        assert (failure.code, failure.reason) == (PRECONDITION, "NO_MODEL_LOADED")
        await suite.load_all("a")
        assert kinds(await suite.image_all(model=None))[-1] == "finished"
        assert suite.fit.plans[-1].model.path == "a"


# -- refused before anything is loaded or queued --


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"prompt": " "}, INVALID, "INVALID_IMAGE_REQUEST"),
        ({"steps": 101}, INVALID, "INVALID_IMAGE_REQUEST"),
        ({"size": size(65_536, 65_536)}, INVALID, "SIZE_OUT_OF_RANGE"),
        ({"size": size(2049, 64)}, INVALID, "SIZE_OUT_OF_RANGE"),
        ({"size": size(2048, 2048)}, PRECONDITION, "MODEL_WONT_RUN"),
        ({"source_images": [image_pb.SourceImage(data=b"no picture")]}, INVALID, "INVALID_IMAGE"),
        ({"reference_images": [picture()]}, PRECONDITION, "REFERENCES_NOT_SUPPORTED"),
        (
            {"model": "diffusion", "source_images": [picture()], "require_source": True},
            PRECONDITION, "SOURCE_NOT_SUPPORTED",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loaded", [False, True])
async def test_what_cannot_be_rendered_is_refused_before_anything_is_loaded_or_queued(
    run_dir, fields, code, reason, loaded
):
    async with ImageSuite(run_dir) as suite:
        if loaded:
            await suite.load_all(fields.get("model", "a"))
        failure = await failure_of(suite.image(**fields))
        assert (failure.code, failure.reason) == (code, reason)
        assert bool(failure.field_violations) is (code is INVALID)
        assert len(suite.ledger.admits) == int(loaded)
        assert suite.ledger.uses_begun == 0
        assert not suite.kind.jobs


async def test_a_sampler_that_the_engine_does_not_know_is_refused_before_it_is_queued(run_dir):
    async with ImageSuite(run_dir) as suite, suite.slow_image():
        failure = await failure_of(suite.image(sampler="eular"))
        assert (failure.code, failure.reason) == (INVALID, "UNKNOWN_SAMPLER")
        assert len(suite.kind.jobs) == 1
        suite.kind.go_on.set()


# -- sources --


async def test_a_source_that_the_model_cannot_use_is_left_out_and_the_reason_told(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(model="diffusion", source_images=[picture()], strength=0.5)
        assert "Nobody has verified that diffusion" in events[-1].finished.source_skipped_reason
        assert events[-1].finished.size.source_images == 0
        assert suite.kind.jobs[0].source_png is None
        # Nothing is claimed for encoding what is not encoded.
        assert suite.host.current.plan.workload.image.source_images == 0


async def test_a_source_that_the_model_starts_from_is_given_to_the_engine(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(
            source_images=[picture(300, 200)], strength=0.5, require_source=True, size=size(128, 64)
        )
        assert (events[-1].finished.source_skipped_reason, events[-1].finished.size.source_images) == ("", 1)
        [job] = suite.kind.jobs
        assert (Image.open(io.BytesIO(job.source_png)).size, job.strength) == ((128, 64), 0.5)
        assert suite.host.current.plan.workload.image.source_images == 1


async def test_reference_images_are_given_to_a_model_that_takes_them(run_dir):
    async with ImageSuite(run_dir) as suite:
        events = await suite.image_all(model="references", reference_images=[picture(), picture()])
        assert events[-1].finished.size.reference_images == 2
        assert len(suite.kind.jobs[0].reference_pngs) == 2


async def test_pictures_of_one_request_are_decoded_at_a_time_also_when_its_caller_leaves(run_dir, monkeypatch):
    """What is decoded lies in the service's own memory, which is in nobody's claim."""
    read, at_once, begun = pictures.read, [], 0
    go_on = threading.Event()

    def slow_read(*arguments):
        nonlocal begun
        begun += 1
        at_once.append(arguments)
        assert len(at_once) == 1
        go_on.wait(30)
        at_once.clear()
        return read(*arguments)

    monkeypatch.setattr(pictures, "read", slow_read)
    async with ImageSuite(run_dir) as suite:
        images = Images(suite.host)
        request = image_pb.GenerateImageRequest(prompt="hello", source_images=[picture()])
        request.model.path = "a"
        left = asyncio.ensure_future(anext(images.generate(request)))
        try:
            await eventually(lambda: begun == 1)
            stays = asyncio.ensure_future(anext(images.generate(request)))
            left.cancel()
            for _ in range(10):  # a cancelled task ends in the next turn of the loop or two, if nothing holds it
                await asyncio.sleep(0)
            assert not left.done()
        finally:
            go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert (await stays).WhichOneof("event") == "load"
    assert begun == 2


# -- the lease --


async def test_a_larger_render_makes_the_lease_larger_first_and_a_smaller_one_just_runs(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.image_all(size=size(512, 512))
        assert suite.ledger.committed == claim_of(512, 512)
        suite.ledger.verbs.clear()
        await suite.image_all(size=size(1024, 512))
        assert [verb for verb in suite.ledger.verbs if verb != "renew"][:2] == ["resize", "begin"]
        assert suite.ledger.committed == claim_of(1024, 512)
        for asked in (size(64, 64), size(512, 512), size(1024, 512)):
            await suite.image_all(size=asked)
        assert len(suite.ledger.resizes) == 1
        assert suite.ledger.committed == claim_of(1024, 512)
        assert len(suite.ledger.admits) == 1


async def test_a_render_for_which_the_lease_cannot_grow_is_refused_and_does_not_reach_the_engine(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        suite.ledger.refuse_resize = RequestError(EXHAUSTED, "CANNOT_GROW", "1 GiB is missing.")
        failure = await failure_of(suite.image(size=size(1024, 1024)))
        assert (failure.code, failure.reason) == (EXHAUSTED, "CANNOT_GROW")
        assert "1 GiB is missing." in failure.message and "Ask for a smaller image" in failure.message
        assert not suite.kind.jobs
        assert suite.ledger.committed == claim_of(512, 512)
        assert kinds(await suite.image_all())[-1] == "finished"


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_render_that_is_expected_to_need_more_than_can_be_granted_does_not_begin(run_dir, loaded):
    async with ImageSuite(run_dir) as suite:
        if loaded:
            await suite.load_all()
        held = suite.ledger.committed
        failure = await failure_of(suite.image(size=size(1600, 1600)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "RENDER_TOO_LARGE")
        assert failure.metadata["expected_bytes"] == str(claim_of(1600, 1600))
        assert failure.metadata["grantable_bytes"] == str(claim_of(1536, 1536))
        assert suite.ledger.committed == held
        assert not suite.kind.jobs
        assert not suite.ledger.resizes
        assert kinds(await suite.image_all(size=size(1536, 1536)))[-1] == "finished"


async def test_a_size_is_planned_once_for_a_loaded_model(run_dir):
    async with ImageSuite(run_dir) as suite:
        for _ in range(3):
            await suite.image_all(size=size(512, 512))
            await suite.image_all(size=size(256, 512))
        assert len(suite.fit.plans) == 2


async def test_other_sizes_are_planned_with_the_options_that_the_model_was_loaded_with(run_dir):
    async with ImageSuite(run_dir) as suite:
        options = plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(vae_tiling=True, parts={"vae": "vae.safetensors"}))
        await suite.load_all("a", options=options)
        await suite.image_all(size=size(1024, 512))
        assert suite.fit.plans[-1].options == options


async def test_a_model_named_in_other_words_is_the_loaded_one_with_its_options(run_dir):
    async with ImageSuite(run_dir) as suite:
        options = plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(vae_tiling=True))
        await suite.load_all("a", options=options)
        await suite.image_all(model="also-a", size=size(1024, 512))
        assert (suite.fit.plans[-1].model.path, suite.fit.plans[-1].options) == ("a", options)
        assert len(suite.ledger.admits) == 1


async def test_an_engine_that_holds_more_than_it_was_granted_takes_no_render(run_dir):
    async with ImageSuite(run_dir) as suite:
        held = claim_of(512, 512) * 115 // 100
        suite.ledger.refuse_growth = True
        await suite.load_all()
        suite.held_bytes = lambda: held
        await eventually(lambda: suite.host.current is None or suite.host.current.over_grant)
        failure = await failure_of(suite.image())
        assert (failure.code, failure.reason) == (EXHAUSTED, "OUT_OF_GRANT")
        assert not suite.kind.jobs


async def test_the_measured_peak_is_of_the_largest_size_that_was_rendered(run_dir):
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        for asked in (size(256, 256), size(1024, 512), size(512, 512)):
            await suite.image_all(size=asked)
        await suite.unload()
        [observation] = suite.ledger.observations
        assert observation.shape == "1024x512;sources=0;references=0"
        assert observation.planned_bytes == observation.granted_bytes == claim_of(1024, 512)
        assert observation.peak_bytes == 500_000_000


async def test_a_model_that_rendered_nothing_tells_no_peak(run_dir):
    # The peak of a load alone would be taken for what a render takes, and the next claim be too small for one.
    async with ImageSuite(run_dir) as suite:
        await suite.load_all()
        await failure_of(suite.image("refused"))
        await suite.unload()
        assert not suite.ledger.observations


# -- engines that fail --


async def test_an_engine_that_is_killed_in_mid_render_is_explained_and_loaded_again_by_the_next_request(run_dir):
    async with ImageSuite(run_dir) as suite:
        async with suite.slow_image() as call:
            kill(suite.host.current.child.engine.pid)
            failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
        assert failure.metadata["signal"] == "SIGKILL"
        await suite.nothing_left()
        assert suite.ledger.released == ["CRASHED"]
        # Its place in the restart budget is taken: the host waits a moment before the next start.
        assert kinds(await suite.image_all())[-1] == "finished"


async def test_a_render_that_the_engine_refuses_keeps_it(run_dir):
    async with ImageSuite(run_dir) as suite:
        failure = await failure_of(suite.image("refused"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "RENDER_FAILED")
        assert kinds(await suite.image_all())[-1] == "finished"
        assert len(suite.ledger.admits) == 1


@pytest.mark.parametrize(
    "made",
    [lambda images: images[:1], lambda images: (), lambda images: (images[0], b"no picture")],
    ids=["one is missing", "none", "no picture"],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_an_error(run_dir, made):
    async with ImageSuite(run_dir) as suite:
        suite.kind.made = made
        failure = await failure_of(suite.image(size=size(64, 64, batch=2)))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")


def broken_within(png):
    """A PNG whose header is whole, and whose pixels break off at a chunk without a name: Pillow raises SyntaxError."""
    data = png.index(b"IDAT") + 4
    some = png[data : data + 16]
    whole = len(some).to_bytes(4) + b"IDAT" + some + zlib.crc32(b"IDAT" + some).to_bytes(4)
    return png[: data - 8] + whole + (1).to_bytes(4) + bytes(4) + png[data + 16 :]


@pytest.mark.parametrize("output", [image_pb.IMAGE_FORMAT_JPEG, image_pb.IMAGE_FORMAT_WEBP])
async def test_a_picture_of_the_engines_that_is_broken_within_is_its_error(run_dir, output):
    with pytest.raises(SyntaxError):
        Image.open(io.BytesIO(broken_within(picture().data))).load()
    async with ImageSuite(run_dir) as suite:
        suite.kind.made = lambda images: tuple(map(broken_within, images))
        failure = await failure_of(suite.image(size=size(64, 64), format=output))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR")
