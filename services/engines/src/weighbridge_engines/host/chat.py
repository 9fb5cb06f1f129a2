"""One chat through the engine: loaded if need be, busy by the ledger's leave, in its turn, and measured."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from functools import partial

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, RpcFailure, invalid_argument, unavailable
from weighbridge_proto.ledger.v1 import lease_pb2

from weighbridge_engines.host import failures
from weighbridge_engines.host.chat_limits import look_through, refuse_too_many
from weighbridge_engines.host.draining import drain
from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_engines.host.metrics import ChatMeasure, mark_chat_end, mark_chat_span
from weighbridge_engines.host.refusals import LeaseEndingError
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.troubles import broken_off, explained, refuse_over_grant
from weighbridge_engines.host.visit import Visit
from weighbridge_engines.host.wish import Wish

MAX_LOADS = 3
"""A model that is taken away before it could be used is loaded again this often, all in all."""


async def chat(host: EngineHost, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
    """The events of one chat.

    Raises:
        RequestError: as the contract lists.
    """
    if not request.messages:
        raise invalid_argument("messages", "a conversation needs at least one message", "EMPTY_CONVERSATION")
    refuse_too_many(request)
    await look_through(request, partial(host.around.kind.check_chat, request))
    measure = ChatMeasure(host.around.clock.monotonic())
    model_name, usage, error_type = "", None, None
    wish = Wish(
        model=request.model if request.HasField("model") else None,
        workload=request.workload,
        options=request.options,
        any_shape=True,
    )
    may_load = not request.warm_up
    try:
        for attempt in range(MAX_LOADS):
            visit = Visit(host, wish, wants_use=True, may_load=may_load)
            try:
                async with contextlib.aclosing(visit.events()) as events:
                    async for event in events:
                        yield chat_pb.ChatResponse(load=event)
                model_name = visit.residency.plan.model_name
                try:
                    async with contextlib.aclosing(_answer(host, visit, request)) as responses:
                        async for response in responses:
                            measure.heard(response, host.around.clock.monotonic())
                            if response.WhichOneof("event") == "finished":
                                usage = response.finished.usage
                                mark_chat_end(response.finished)
                            yield response
                    return
                except LeaseEndingError:
                    # Its memory was asked back just now. A new claim takes its turn in the ledger's queue.
                    if attempt + 1 == MAX_LOADS:
                        raise unavailable(
                            "LEASE_VACATING",
                            "The model's memory was asked back each time it was loaded.",
                            retry_after_s=1.0,
                        ) from None
            finally:
                visit.close()
            await host.leave_ending(visit.residency)
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
        host.metrics.answered(model_name, measure, host.around.clock.monotonic(), usage, error_type)


async def _answer(
    host: EngineHost, visit: Visit, request: chat_pb.ChatRequest
) -> AsyncGenerator[chat_pb.ChatResponse, None]:
    residency = visit.residency
    await refuse_over_grant(residency)
    mark_chat_span(host.around.kind.name, residency.plan.model_name, residency.hold.lease_id, request)
    now, use_id = host.around.clock.monotonic, uuid.uuid4().hex
    # Busy from its turn on, not from the queue on: between two turns an engine may be asked to vacate, or those who
    # wait for it would keep every other claim waiting.
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(residency.queue.slot(is_warm_up=request.warm_up))
        held.callback(residency.hold.end_use, use_id)
        try:
            _refuse_broken_off(residency)
            asked_s = now()
            async with contextlib.aclosing(residency.hold.begin_use(use_id, residency.forced)) as rests:
                async for why_not in rests:
                    yield _waiting(why_not, now() - asked_s)
        except LeaseEndingError:
            if residency.forced.done() and not residency.trouble.done():
                raise RequestError.from_failure(residency.forced.result()) from None  # unloaded: not to be loaded again
            raise
        visit.begun()
        host.tell_change()
        started_s = now()
        try:
            async with contextlib.aclosing(_stream(host, residency, request)) as responses:
                async for response in responses:
                    yield response
        except BaseException:
            # Cancelled or failed: the caller is not kept until the engine is free, and nobody else has its turn before.
            drain(host, residency, held.pop_all())
            raise
        residency.queue.note_duration(now() - started_s)


def _refuse_broken_off(residency: Residency) -> None:
    """A model that was ended at once is not loaded again for those who waited, unless it served somebody else badly."""
    failure = broken_off(residency)
    if failure is not None:
        raise LeaseEndingError if failure.failure.reason == failures.ENGINE_RECYCLED else failure


def _waiting(failure: RpcFailure, waited_s: float) -> chat_pb.ChatResponse:
    reason = lease_pb2.WaitReason(code=failure.reason, message=failure.message)
    waiting = chat_pb.ChatWaiting(reasons=[reason])
    waiting.waited.FromNanoseconds(round(waited_s * 1e9))
    return chat_pb.ChatResponse(waiting=waiting)


async def _stream(
    host: EngineHost, residency: Residency, request: chat_pb.ChatRequest
) -> AsyncGenerator[chat_pb.ChatResponse, None]:
    try:
        async with contextlib.aclosing(residency.runtime.chat(request)) as responses:
            async for response in responses:
                residency.sign_of_life()
                yield response
    except EngineLostError as error:
        raise await explained(residency, error) from error
    except EngineBrokenError as error:
        raise host.recycle(residency, error) from error
