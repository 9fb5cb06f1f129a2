"""``python -m weighbridge_ledger``: the ledger as a process."""

from weighbridge_common.server import run_service
from weighbridge_common.settings import load

from weighbridge_ledger.service.app import build_ledger
from weighbridge_ledger.settings import LedgerSettings


def main() -> None:
    """Run until a signal."""
    run_service(load(LedgerSettings), "ledger", build_ledger)


if __name__ == "__main__":
    main()
