"""Prints the readings of this machine as a file that a ledger can be started with: `python -m …machine.record`."""

import sys

from weighbridge_ledger.machine.probe import ThisMachine
from weighbridge_ledger.machine.recorded import to_json

if __name__ == "__main__":
    sys.stdout.write(to_json(ThisMachine().read()))
