"""The ledger as a process, with the floor of any answer beside it."""

from weighbridge_common.server import AsyncClosable, ServerContext, run_service
from weighbridge_common.settings import load
from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings

from benchmarks.floor import Floor


async def build(context: ServerContext) -> AsyncClosable | None:
    """The ledger as it is, and the floor: both go through the same server and interceptors."""
    Floor().add_to(context.server)
    return await build_ledger(context)


if __name__ == "__main__":
    run_service(load(LedgerSettings), "ledger", build)
