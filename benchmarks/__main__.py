"""Run the benchmarks named on the command line, or all of them, and print every figure."""

import argparse
import importlib
import platform
import sys

from benchmarks.measure import render

SUITES = ("headers", "trees", "catalogue", "admission", "book", "recovery", "watching", "chat", "images", "ds4")


def main() -> int:
    """Print every figure. Exit 1 with ``--check`` if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"any of: {', '.join(SUITES)} (default: all)")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal was missed")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}. There are: {', '.join(SUITES)}")
    print(f"python {platform.python_version()}, {platform.platform()}")
    missed = 0
    for name in arguments.suites or SUITES:
        print(f"\n== {name}", flush=True)
        for comparison in importlib.import_module(f"benchmarks.{name}").run():
            print(render(comparison), flush=True)
            missed += comparison.met is False
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
