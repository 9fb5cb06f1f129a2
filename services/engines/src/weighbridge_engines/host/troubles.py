"""What a request learns of the engine that it was to use: that it holds too much, or why it is gone."""

import grpc
from weighbridge_common.sizes import format_gib
from weighbridge_proto.errors import RequestError

from weighbridge_engines.host import failures
from weighbridge_engines.host.kind import EngineLostError
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.waiting import first_of

EXPLANATION_S = 3.0
"""How long a broken answer waits to hear why the engine ended. It takes some tens of milliseconds."""


async def refuse_over_grant(residency: Residency) -> None:
    """Refuse new work while the engine holds much more than was granted.

    Raises:
        RequestError: RESOURCE_EXHAUSTED OUT_OF_GRANT.
    """
    if not residency.over_grant or residency.footprint is None:
        return
    # Measured a while ago: what the last answer held may have been freed since.
    held, grant = await residency.footprint.measure(), residency.hold.charged_host_bytes
    if residency.over_grant:
        raise RequestError.from_failure(failures.out_of_grant(format_gib(held), format_gib(grant), held, grant))


def broken_off(residency: Residency) -> RequestError | None:
    """Why the model was ended without waiting for its calls; None: it was not."""
    if residency.trouble.done():
        return RequestError.from_failure(residency.trouble.result().failure)
    return RequestError.from_failure(residency.forced.result()) if residency.forced.done() else None


async def explained(residency: Residency, lost: EngineLostError) -> RequestError:
    """Why the engine is gone."""
    await first_of(residency.forced, residency.trouble, timeout_s=EXPLANATION_S)
    unexplained = RequestError(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", f"The engine broke off the answer ({lost}).")
    return broken_off(residency) or unexplained
