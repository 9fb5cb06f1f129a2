"""Every change of the ledger, for as long as anybody wants to know: over restarts, and over what was missed."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import grpc
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import ledger_service_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError

RETRY_S = (0.2, 5.0)
"""First and longest pause before the next attempt to reach a ledger that went away; each is twice the last."""

LEDGER_AWAY = "LEDGER_AWAY"
LEDGER_RESTARTED = "LEDGER_RESTARTED"
REVISION_COMPACTED = "REVISION_COMPACTED"
WATCHER_TOO_SLOW = "WATCHER_TOO_SLOW"


@dataclass(frozen=True)
class Interruption:
    """The changes do not simply go on.

    Attributes:
        reason: ``LEDGER_AWAY`` (it is tried again until it is back), or why there is a gap, after which everything is
            listed anew: ``LEDGER_RESTARTED``, ``REVISION_COMPACTED``, ``WATCHER_TOO_SLOW``.
        message: a sentence for people.
    """

    reason: str
    message: str


async def follow(
    suite: Suite, epoch: str = "", revision: int = 0, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncGenerator[ledger_service_pb2.WatchResponse | Interruption, None]:
    """The changes after ``revision`` of ``epoch``; without an epoch a snapshot first, and the changes after it.

    Goes on for ever. When the ledger goes away after it was reached once, it is tried again; where it resumes, nothing
    is missing. Where it cannot, an :class:`Interruption` says why and a snapshot of how things stand follows.

    Args:
        suite: where the ledger is.
        epoch: of the last response that was seen.
        revision: of the last response that was seen.
        sleep: how to wait.

    Raises:
        CallError: the ledger was never reached, or refuses.
    """
    reached, away, pause = False, False, RETRY_S[0]
    while True:
        try:
            await suite.reach("ledger")
            call = suite.ledger.Watch(ledger_service_pb2.WatchRequest(epoch=epoch, revision=revision))
            try:
                async for response in call:
                    reached, away, pause = True, False, RETRY_S[0]
                    epoch, revision = response.epoch, response.revision
                    yield response
            except grpc.RpcError as error:
                raise CallError.from_rpc_error(error, "ledger") from error
            finally:
                # Without it a caller that stops early would leave the ledger telling nobody.
                call.cancel()
            raise CallError(RpcFailure(grpc.StatusCode.UNAVAILABLE, LEDGER_AWAY, "The ledger ended the watch."))
        except CallError as failed:
            gap = _gap(failed.failure, epoch)
            if gap is None and not (reached and failed.failure.code is grpc.StatusCode.UNAVAILABLE):
                raise
        if gap is not None:
            reached, epoch, revision = True, "", 0
            yield gap
            continue
        if not away:
            away = True
            yield Interruption(LEDGER_AWAY, "The ledger went away. Watching goes on when it is back.")
        await sleep(pause)
        pause = min(2 * pause, RETRY_S[1])


def _gap(failure: RpcFailure, epoch: str) -> Interruption | None:
    """Why what follows cannot be resumed; None: that is not what failed."""
    if failure.reason == WATCHER_TOO_SLOW:
        text = "This watch fell too far behind: some changes were not seen. Everything as it stands now:"
        return Interruption(WATCHER_TOO_SLOW, text)
    if failure.reason != REVISION_COMPACTED:
        return None
    if failure.metadata.get("epoch", epoch) != epoch:
        text = "The ledger was started anew since then: changes in between were not seen. Everything as it stands now:"
        return Interruption(LEDGER_RESTARTED, text)
    text = "The changes after that point are no longer kept: some were not seen. Everything as it stands now:"
    return Interruption(REVISION_COMPACTED, text)
