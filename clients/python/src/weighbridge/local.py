"""fit and ledger inside this process. The only module of the client that imports a service."""

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from weighbridge_common import logs
from weighbridge_common.listening import StartError
from weighbridge_common.server import start_server
from weighbridge_common.settings import SettingsError, parse
from weighbridge_fit.service import build as build_fit
from weighbridge_fit.settings import FitSettings
from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings


class LocalSettingsError(Exception):
    """A setting that the services read is wrong. The text names the variable and the reason."""


class LocalStartError(Exception):
    """The services could not start in this process. The text says why."""


@asynccontextmanager
async def local_services(environ: Mapping[str, str]) -> AsyncIterator[dict[str, str]]:
    """Run the servicers of fit and ledger in this process while the body runs; yields their targets by name.

    They listen in a temporary folder of this user's alone, and the ledger's store is thrown away with it: nothing is
    admitted here, it only knows the machine and its ceilings. What the person set for the services (a declared machine,
    a limit on header size) holds here too; what says where they listen and keep things does not.

    Raises:
        LocalSettingsError: a setting is wrong.
        LocalStartError: the services could not start.
    """
    # Standard output is the answer's alone, and refusals are told as such: only what should not happen is logged.
    logs.configure("weighbridge-cli", "error")
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        folder = Path(name)
        run_dir = folder / "run"
        own = {
            name: value
            for name, value in environ.items()
            if not name.endswith(("_LISTEN", "_TARGET", "_DATA_DIR")) or not name.startswith("WEIGHBRIDGE_")
        }
        own["WEIGHBRIDGE_RUN_DIR"] = os.fspath(run_dir)
        own["WEIGHBRIDGE_LEDGER_DATA_DIR"] = os.fspath(folder / "ledger")
        # It runs as the person who asks, so it may read what that person may.
        own.setdefault("WEIGHBRIDGE_FIT_MODELS_ROOT", "/")
        async with AsyncExitStack() as stack:
            try:
                ledger = await stack.enter_async_context(
                    await start_server(parse(LedgerSettings, own), "ledger", build_ledger)
                )
                own["WEIGHBRIDGE_LEDGER_TARGET"] = ledger.target
                fit = await stack.enter_async_context(await start_server(parse(FitSettings, own), "fit", build_fit))
            except SettingsError as error:
                raise LocalSettingsError(str(error)) from error
            except StartError as error:
                raise LocalStartError(str(error)) from error
            yield {"ledger": ledger.target, "fit": fit.target}
