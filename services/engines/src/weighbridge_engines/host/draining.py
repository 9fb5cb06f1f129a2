"""What an engine still works on after its caller has gone: its slot, its use and its stake stay until it is over."""

import asyncio
import contextlib

import structlog
from weighbridge_common.logs import describe_error
from weighbridge_proto.errors import RequestError

from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.waiting import first_of

_log = structlog.get_logger(__name__)


def drain(host: EngineHost, residency: Residency, held: contextlib.AsyncExitStack) -> None:
    """Keep ``held`` (slot and use) until the engine works no more on a call that was given up, or is not waited for.

    Returns at once; may be called while the call is being cancelled.
    """
    stake = object()
    # Before the call lets go of its own: a moment without a stake, and the model may end.
    residency.use.give_up(stake)
    host.tell_change()
    host.start(_drain(host, residency, held, stake), f"drain-{residency.hold.lease_id}")


async def _drain(host: EngineHost, residency: Residency, held: contextlib.AsyncExitStack, stake: object) -> None:
    try:
        async with held:
            await _settle(host, residency)
    finally:
        residency.use.drop(stake)
        host.tell_change()


async def _settle(host: EngineHost, residency: Residency) -> None:
    settling = asyncio.ensure_future(residency.runtime.settle())
    try:
        await first_of(settling, residency.forced, residency.trouble)
        if settling.done():
            settling.result()
    except EngineBrokenError as error:
        host.recycle(residency, error)
    except (EngineLostError, RequestError) as error:
        # Whoever watches the process tells whether it has ended. If not, it is asked again by the next call.
        _log.info("settling_failed", lease_id=residency.hold.lease_id, **describe_error(error))
    finally:
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
