"""``python -m weighbridge_ledger``: the ledger as a process; with ``backup``, ``check`` or ``replay``, a tool."""

import sys


def main() -> None:
    """Run until a signal, or run a tool."""
    if len(sys.argv) > 1:
        from weighbridge_ledger.tools.command import main as run_tool

        run_tool(sys.argv[1:])
    # A tool needs no server, and a second less to start.
    from weighbridge_common.server import run_service
    from weighbridge_common.settings import load

    from weighbridge_ledger.service.app import build_ledger
    from weighbridge_ledger.settings import LedgerSettings

    run_service(load(LedgerSettings), "ledger", build_ledger)


if __name__ == "__main__":
    main()
