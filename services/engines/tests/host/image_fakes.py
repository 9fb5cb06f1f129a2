"""A renderer that computes nothing: a real process that sleeps, and a runtime that does what its test wants of it."""

# ruff: noqa: N802 # rpcs are named as in the contract

import asyncio
import contextlib
import io
import random
import shutil

import grpc
from host_fakes import ManualClock, Suite
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from weighbridge_engines.host.kind import EngineLostError, KindDescription, KindLaunch
from weighbridge_engines.sd_server.jobs import Rendered, RenderProgress
from weighbridge_engines.supervisor.child import ChildSpec
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.engines.v1 import image_service_pb2_grpc
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2, fit_service_pb2_grpc, plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

MIB = 2**20
WEIGHTS_BYTES = 500 * MIB
BYTES_PER_PIXEL = 1024
"""What the planner below takes for a picture: 256 MiB at 512 x 512."""


LONGEST_S = 30.0
"""No render here takes seconds: one that waits for ever fails by its deadline."""


def claim_of(width, height):
    """What a plan claims for a picture of this size."""
    return WEIGHTS_BYTES + BYTES_PER_PIXEL * width * height


def png_of(job, index=0):
    """A picture that no other job has, with its generation data."""
    data = PngInfo()
    data.add_text("parameters", f"{job.prompt}\nSteps: {job.steps}, Seed: {job.seed + index}")
    noise = random.Random(f"{job.prompt} {job.seed + index}").randbytes(3 * job.width * job.height)
    made = io.BytesIO()
    Image.frombytes("RGB", (job.width, job.height), noise).save(made, "PNG", pnginfo=data)
    return made.getvalue()


class ImageFit(fit_service_pb2_grpc.FitServiceServicer):
    """Plans pictures of 64 to 2048 pixels, in multiples of 64; the machine is too small for 2048 x 2048.

    `rendering` is what each model is said to be like, by name: ``a`` is a checkpoint, ``diffusion`` is none.
    """

    def __init__(self):
        self.plans = []

    async def PlanModel(self, request, context):
        self.plans.append(request)
        name, asked = request.model.path, request.workload.image
        width, height = (-(-(side or 512) // 64) * 64 for side in (asked.width_px, asked.height_px))
        plan = fit_service_pb2.PlanModelResponse(
            claim=requirement_pb2.Claim(host_bytes=claim_of(width, height)),
            model_digest=f"digest-{name.removeprefix('also-')}",
            model_name=name,
            engine_kind=plan_pb2.ENGINE_KIND_SD,
            options=request.options,
            shape=f"{width}x{height};sources={asked.source_images};references={asked.reference_images}",
            resolved_path=f"/models/{name.removeprefix('also-')}",
        )
        plan.options.sd.parts.clear()  # fit tells them by their digests alone
        plan.workload.image.CopyFrom(asked)
        plan.workload.image.width_px, plan.workload.image.height_px = width, height
        if asked.reference_images and name != "references":
            plan.notes.add(code="REFERENCES_IGNORED")
        plan.launch.sd.rendering.CopyFrom(
            plan_pb2.SdRendering(
                steps=4, guidance=1.0, min_side=64, max_width=2048, max_height=2048, size_multiple=64,
                weights_kind="diffusion-model" if name == "diffusion" else "checkpoint",
            )
        )  # fmt: skip
        plan.requirement.total.expected_bytes = plan.claim.host_bytes
        plan.assessment.verdict = requirement_pb2.VERDICT_RUNS
        if width * height >= 2048 * 2048:
            plan.assessment.verdict, plan.assessment.reason = requirement_pb2.VERDICT_WONT_RUN, "It needs 9 GiB."
        elif width * height > 1536 * 1536:  # a tight one: what is expected cannot be granted whole
            plan.assessment.verdict = requirement_pb2.VERDICT_TIGHT
            plan.claim.host_bytes = claim_of(1536, 1536)
        return plan


class FakeImageRuntime:
    """Renders as the prompt says: ``slow`` stops in its second step, ``slow text`` before its first, ``slow decode``
    after its last, until the kind lets it go on; ``lost`` loses its engine, ``refused`` is refused by it."""

    def __init__(self, kind):
        self.kind = kind
        self._closed = asyncio.get_running_loop().create_future()

    async def is_ready(self):
        return True

    async def is_alive(self):
        return True

    async def load(self, plan):
        yield engine_pb.LoadStarting(phase="weights", fraction=1.0)

    def check(self, job):
        if job.sampler not in ("", "euler"):
            raise invalid_argument("sampler", "is unknown", "UNKNOWN_SAMPLER")

    async def render(self, job):
        kind = self.kind
        kind.jobs.append(job)
        kind.rendering += 1
        kind.most_rendering = max(kind.most_rendering, kind.rendering)
        try:
            yield RenderProgress("text_encode", 0, 1)
            if "slow text" in job.prompt:
                await self._pause()
            yield RenderProgress("text_encode", 1, 1)
            steps = job.steps * job.batch
            yield RenderProgress("sampling", 0, steps)
            for done in range(1, steps + 1):
                kind.clock.advance(kind.step_s)
                yield RenderProgress("sampling", done, steps)
                if done == 1 and job.prompt == "slow":
                    await self._pause()
            if "slow decode" in job.prompt:
                await self._pause()
            if "refused" in job.prompt:
                raise RequestError(grpc.StatusCode.INTERNAL, "RENDER_FAILED", "It made no picture.")
            for done in range(job.batch + 1):
                yield RenderProgress("decode", done, job.batch)
            kind.finished.append(job.prompt)
            images = tuple(png_of(job, index) for index in range(job.batch))
            yield Rendered(kind.made(images), job.width, job.height, 1.5)
        finally:
            kind.rendering -= 1

    async def _pause(self):
        going_on = asyncio.ensure_future(self.kind.go_on.wait())
        try:
            await asyncio.wait([going_on, self._closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            going_on.cancel()
        if self._closed.done():
            raise EngineLostError("the connection broke")

    async def aclose(self):
        if not self._closed.done():
            self._closed.set_result(None)


class FakeImageKind:
    """An engine for images whose process sleeps."""

    name = "sd"
    title = "The image engine"
    engine_kind = plan_pb2.ENGINE_KIND_SD
    does_chat = False
    does_images = True
    exclusive = True
    least_start_timeout_s = 0.0
    least_stop_grace_s = 0.0

    def __init__(self, clock):
        self.clock = clock
        self.step_s = 0.0
        self.go_on = asyncio.Event()
        self.jobs = []
        self.finished = []
        self.rendering = 0
        self.most_rendering = 0
        self.made = lambda images: images

    def describe(self):
        return KindDescription("fake renderer", "build-1")

    def check_options(self, options):
        pass

    def complete_options(self, options):
        pass

    def check_plan(self, plan):
        pass

    def launch(self, plan, workspace):
        child = ChildSpec("renderer", (shutil.which("sleep"), "1000"), {}, workspace)
        return KindLaunch(child, lambda: FakeImageRuntime(self))

    def slots(self, plan):
        return 1


class ImageSuite(Suite):
    """A suite whose engine renders. Its clock moves only when a step of a render or the test moves it."""

    def __init__(self, run_dir, **settings):
        self.clock = ManualClock()
        super().__init__(run_dir, clock=self.clock.clock(), kind=FakeImageKind(self.clock), fit=ImageFit(), **settings)

    async def __aenter__(self):
        await super().__aenter__()
        self.images = image_service_pb2_grpc.ImageServiceStub(self.channel)
        return self

    def image(self, prompt="hello", model="a", **fields):
        request = image_pb.GenerateImageRequest(prompt=prompt, **fields)
        if model:
            request.model.CopyFrom(weights_pb2.ModelRef(path=model))
        return self.images.GenerateImage(request, timeout=LONGEST_S)

    async def image_all(self, prompt="hello", model="a", **fields):
        return [event async for event in self.image(prompt, model, **fields)]

    @contextlib.asynccontextmanager
    async def slow_image(self, prompt="slow", model="a", **fields):
        """A render that has come to its pause."""
        call = self.image(prompt, model, **fields)
        seen = len(self.kind.jobs)
        async for event in call:
            step = event.progress
            if len(self.kind.jobs) > seen and step.phase and _at_pause(prompt, step):
                break
        yield call


def _at_pause(prompt, step):
    pause = {"slow": ("sampling", 1), "slow text": ("text_encode", 0)}.get(prompt, ("sampling", step.total))
    return (step.phase, step.done) == pause


def size(width, height, **fields):
    return plan_pb2.ImageWorkload(width_px=width, height_px=height, **fields)


def pictures_of(events):
    """The files of a response, put together from their pieces."""
    files = {}
    for event in events:
        if event.WhichOneof("event") == "chunk":
            files[event.chunk.image_index] = files.get(event.chunk.image_index, b"") + event.chunk.data
    return [files[index] for index in sorted(files)]
