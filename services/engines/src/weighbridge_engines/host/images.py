"""Images through the engine: checked, loaded if need be, in their turn, rendered by the ledger's leave, and sent."""

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import cast

import grpc
from weighbridge_common.tasks import to_its_end
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.errors import RequestError, unavailable
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge_engines.host import failures
from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.loads import LoadJob
from weighbridge_engines.host.metrics import mark_image_span
from weighbridge_engines.host.plans import request_key
from weighbridge_engines.host.refusals import LeaseEndingError
from weighbridge_engines.host.render_turn import RenderTurn
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.troubles import broken_off, refuse_over_grant
from weighbridge_engines.host.visit import Visit
from weighbridge_engines.host.wish import Wish
from weighbridge_engines.sd_server import pictures, requests
from weighbridge_engines.sd_server.jobs import ImageRuntime, Rendered, RenderJob, RenderProgress
from weighbridge_engines.sd_server.requests import ImageRequest

MAX_LOADS = 3
"""A model that is taken away before it could render is loaded again this often, all in all. Those times do not count at
which it was ended for a render that somebody else had cancelled."""

CHUNK_BYTES = 256 * 1024

MOST_PLANS = 64
"""Kept for one loaded model: one for each size that it was asked for."""


@dataclass(frozen=True)
class _Prepared:
    """A request, ready to be rendered.

    Attributes:
        request: what was asked for.
        wish: what is to be loaded for it, if it is not; its model is always named.
        plan: the plan of that.
        job: the render.
        source_unused: why the source image is not used; empty: it is, or there is none.
        number: how many requests came before it.
    """

    request: ImageRequest
    wish: Wish
    plan: fit_pb.PlanModelResponse
    job: RenderJob
    source_unused: str
    number: int


class Images:
    """GenerateImage of one engine."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._numbers = itertools.count()
        self._decoding = asyncio.Lock()
        """One request's pictures at a time: what they take of the host's own memory is in nobody's claim."""
        self._plans: weakref.WeakKeyDictionary[Residency, dict[bytes, fit_pb.PlanModelResponse]]
        self._plans = weakref.WeakKeyDictionary()

    async def generate(
        self, message: image_pb.GenerateImageRequest
    ) -> AsyncGenerator[image_pb.GenerateImageResponse, None]:
        """The events of one request.

        Raises:
            RequestError: as the contract lists.
        """
        clock = self._host.around.clock
        began_s, model_name, error_type = clock.monotonic(), "", None
        try:
            prepared = await self._prepare(requests.check(message))
            model_name = prepared.plan.model_name
            async with contextlib.aclosing(self._responses(prepared)) as responses:
                async for response in responses:
                    yield response
        except RequestError as error:
            error_type = error.failure.reason
            raise
        except (asyncio.CancelledError, GeneratorExit):
            error_type = "CANCELLED"
            raise
        except Exception as error:
            error_type = type(error).__qualname__
            raise
        finally:
            self._host.metrics.rendered(model_name, clock.monotonic() - began_s, error_type)

    # -- before anything is loaded or queued --

    async def _prepare(self, request: ImageRequest) -> _Prepared:
        message = request.message
        self._host.refuse_if_stopping()
        wish = Wish(
            model=message.model if message.HasField("model") else None,
            workload=request.workload(),
            options=message.options,
            any_shape=True,
        )
        there = self._there(wish)
        if wish.model is None:
            if there is None:
                raise failures.no_model_loaded(ending=self._host.current is not None)
            wish = replace(wish, model=there.model, options=there.plan.options)
        plan = await self._plan(wish, there)
        request.check_plan(plan)
        _refuse_too_large(plan)
        source_unused = request.why_source_unused(plan)
        if source_unused:
            wish = replace(wish, workload=request.workload(with_source=False))
            plan = await self._plan(wish, there)
        async with self._decoding:
            # A thread goes on when its caller leaves, so the next one waits for its end and not for the caller's.
            job = await to_its_end(asyncio.to_thread(request.job, plan, not source_unused))
        return _Prepared(request, wish, plan, job, source_unused, next(self._numbers))

    def _there(self, wish: Wish) -> Residency | LoadJob | None:
        key = None if wish.model is None else request_key(wish.model, wish.workload, wish.options)
        return self._host.find_ready(wish, key) or self._host.find_job(wish, key)

    async def _plan(self, wish: Wish, there: Residency | LoadJob | None) -> fit_pb.PlanModelResponse:
        return await (self._host.plan(wish) if there is None else self._plan_like(there, wish.workload))

    async def _plan_like(self, there: Residency | LoadJob, workload: plan_pb2.Workload) -> fit_pb.PlanModelResponse:
        """The plan of other work for a model, launched as it is."""
        wish = Wish(model=there.model, workload=workload, options=there.plan.options)
        if isinstance(there, LoadJob):
            return await self._host.plan(wish)
        known = self._plans.setdefault(there, {}).get(_key(workload))
        return known or self._keep(there, workload, await self._host.plan(wish))

    def _keep(
        self, residency: Residency, workload: plan_pb2.Workload, plan: fit_pb.PlanModelResponse
    ) -> fit_pb.PlanModelResponse:
        plans = self._plans.setdefault(residency, {})
        if len(plans) >= MOST_PLANS:
            plans.clear()
        plans[_key(workload)] = plan
        return plan

    # -- the render --

    async def _responses(self, prepared: _Prepared) -> AsyncGenerator[image_pb.GenerateImageResponse, None]:
        taken_away = 0
        while True:
            visit = Visit(self._host, prepared.wish, wants_use=True, plan=prepared.plan)
            try:
                async with contextlib.aclosing(visit.events()) as loading:
                    async for event in loading:
                        yield image_pb.GenerateImageResponse(load=event)
                turn = await self._turn(visit.residency, prepared)
            finally:
                visit.close()
            try:
                async with contextlib.aclosing(turn.events()) as events:
                    async for step in events:
                        if not isinstance(step, Rendered):
                            yield _told(step)
                            continue
                        async with contextlib.aclosing(_sent(prepared, step)) as responses:
                            async for response in responses:
                                yield response
                return
            except LeaseEndingError:
                # Its memory was asked back just now, or its engine was ended with somebody else's render. A new claim
                # takes its turn in the ledger's queue.
                failure = broken_off(visit.residency)
                if failure is None or failure.failure.reason != failures.RENDER_CANCELLED:
                    taken_away += 1
                if taken_away == MAX_LOADS:
                    raise unavailable(
                        "LEASE_VACATING",
                        "The model's memory was asked back each time it was loaded.",
                        retry_after_s=1.0,
                    ) from None
            finally:
                turn.leave()
            await self._host.leave_ending(visit.residency)

    async def _turn(self, residency: Residency, prepared: _Prepared) -> RenderTurn:
        await refuse_over_grant(residency)
        runtime = cast(ImageRuntime, residency.runtime)  # of a kind that does images
        runtime.check(prepared.job)
        plan, workload = prepared.plan, prepared.wish.workload
        if plan.shape == residency.plan.shape:
            self._keep(residency, workload, plan)
        else:
            plan = await self._plan_like(residency, workload)
            _refuse_too_large(plan)
        mark_image_span(self._host.around.kind.name, plan.model_name, residency.hold.lease_id, prepared.job)
        return RenderTurn(self._host, residency, runtime, plan, prepared.job, prepared.number)


def _refuse_too_large(plan: fit_pb.PlanModelResponse) -> None:
    """Refuse a render that would be ended at its last step.

    A tight plan may be loaded, for its claim is cut to what can be granted; a render under it takes at its last step
    what was cut. What is on a card may spill to host memory and is left to the engine.
    """
    is_cut = plan.requirement.total.expected_bytes > plan.claim.host_bytes
    if plan.assessment.verdict == requirement_pb2.VERDICT_TIGHT and not plan.claim.devices and is_cut:
        raise failures.render_too_large(plan)


def _key(workload: plan_pb2.Workload) -> bytes:
    return workload.SerializeToString(deterministic=True)


def _told(step: int | RenderProgress) -> image_pb.GenerateImageResponse:
    if isinstance(step, RenderProgress):
        progress = image_pb.ImageProgress(phase=step.phase, done=step.done, total=step.total)
        return image_pb.GenerateImageResponse(progress=progress)
    return image_pb.GenerateImageResponse(queued=image_pb.ImageQueued(position=step))


async def _sent(prepared: _Prepared, rendered: Rendered) -> AsyncGenerator[image_pb.GenerateImageResponse, None]:
    """The images in pieces, and the end."""
    request, job = prepared.request, prepared.job
    if len(rendered.images) != job.batch:
        raise _engine_error(f"made {len(rendered.images)} of {job.batch} images")
    with _broken_pictures():
        images = [pictures.of_engine(png) for png in rendered.images]
    for index, image in enumerate(images):
        with _broken_pictures():
            data = await asyncio.to_thread(pictures.encoded, image, request.output, request.message.strip_metadata)
        for chunk in _chunks(index, data, request.output.value):
            yield image_pb.GenerateImageResponse(chunk=chunk)
    finished = image_pb.ImageFinished(
        seed=job.seed,
        size=plan_pb2.ImageWorkload(
            width_px=images[0].width,
            height_px=images[0].height,
            batch=job.batch,
            reference_images=len(job.reference_pngs),
            source_images=int(job.source_png is not None),
        ),
        source_skipped_reason=prepared.source_unused,
    )
    finished.render_time.FromNanoseconds(round(rendered.seconds * 1e9))
    yield image_pb.GenerateImageResponse(finished=finished)


@contextlib.contextmanager
def _broken_pictures() -> Iterator[None]:
    """Decoders of broken files raise whatever they stumble over: OSError, SyntaxError, ValueError, struct.error, ..."""
    try:
        yield
    except Exception as error:
        raise _engine_error("answered with something that is no image") from error


def _chunks(index: int, data: bytes, media_type: str) -> Iterator[image_pb.ImageChunk]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield image_pb.ImageChunk(
            image_index=index,
            data=data[start : start + CHUNK_BYTES],
            last=start + CHUNK_BYTES >= len(data),
            media_type="" if start else media_type,
        )


def _engine_error(what: str) -> RequestError:
    return RequestError(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", f"sd-server {what}. Its log may say why.")
