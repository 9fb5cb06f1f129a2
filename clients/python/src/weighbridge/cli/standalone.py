"""`facts` and `fit` without a running suite: the same services, in this process."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from weighbridge_proto import targets
from weighbridge_proto.errors import UNREACHABLE

from weighbridge.cli.output import say
from weighbridge.cli.running import CommandError, cancelled_by_signals, open_suite
from weighbridge.client import Suite
from weighbridge.failures import CallError, ExitCode
from weighbridge.supervision.services import is_installed


@asynccontextmanager
async def fit_suite() -> AsyncIterator[Suite]:
    """A suite with a fit service: the running one, else one of this process's own.

    Raises:
        CallError: the service that ``WEIGHBRIDGE_FIT_TARGET`` names does not answer: that one was meant, no other.
        CommandError: none runs, and the services are not installed here.
    """
    async with AsyncExitStack() as stack:
        suite = await stack.enter_async_context(open_suite())
        try:
            await suite.reach("fit")
        except CallError as failed:
            if failed.failure.reason != UNREACHABLE or os.environ.get(targets.target_variable("fit")):
                raise
            if not (is_installed("weighbridge_fit") and is_installed("weighbridge_ledger")):
                raise CommandError(
                    "No suite is running, and this installation has no services of its own. Start a suite with "
                    "`weighbridge up`, or install them: pip install 'weighbridge[local]'.",
                    ExitCode.UNREACHABLE,
                ) from None
            say("No suite is running; worked out here.")
            suite = await stack.enter_async_context(own_suite())
        yield suite


@asynccontextmanager
async def own_suite() -> AsyncIterator[Suite]:
    """A suite of ledger and fit in this process, which must have them installed.

    Raises:
        CommandError: they cannot start.
    """
    from weighbridge import local  # services are imported only where they are needed

    async with AsyncExitStack() as stack:
        stack.enter_context(cancelled_by_signals())  # the services keep a temporary folder
        try:
            services = await stack.enter_async_context(local.local_services(os.environ))
        except local.LocalSettingsError as wrong:
            raise CommandError(f"Wrong settings. {wrong}", ExitCode.USAGE) from None
        except local.LocalStartError as failed:
            raise CommandError(str(failed)) from None
        yield await stack.enter_async_context(Suite(services=services))
