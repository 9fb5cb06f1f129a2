"""Fuzzes the readers of weight files: each format with hypothesis and with atheris, side by side.

Starts from the seeds of corpus.py. Fails when an input makes a reader break what targets.py says, and leaves the input
in a folder; `--replay FILE` runs one again.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from services.fit.fuzz.targets import TARGETS, check

FAILURES = Path(".cache/fuzz")
LEAST_INPUTS = 200_000


def main() -> int:
    """Runs what the command line says. 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m services.fit.fuzz", description=__doc__)
    parser.add_argument("formats", nargs="*", choices=[*TARGETS, []], help="which formats (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each format and each engine (default: 60)")
    parser.add_argument("--inputs", type=int, default=LEAST_INPUTS, help="at least so many altogether")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs for hypothesis")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="read this one input, as a file of the format named"
    )
    arguments = parser.parse_args()
    names = arguments.formats or list(TARGETS)
    if arguments.replay:
        if len(names) != 1:
            parser.error("name the format of the file")
        data = arguments.replay.read_bytes()
        print("facts" if check(TARGETS[names[0]], data) else "a clear error")
        return 0
    FAILURES.mkdir(parents=True, exist_ok=True)
    has_atheris = importlib.util.find_spec("atheris") is not None
    if not has_atheris:
        print("ATHERIS IS NOT INSTALLED (it has no wheel for this Python): hypothesis fuzzes alone.", flush=True)
    total, failed = 0, False
    for name in names:
        count, broken = _fuzz(name, arguments, -(-arguments.inputs // len(names)), has_atheris)
        total += count
        failed |= broken
    print(f"{total} inputs, {'a promise was broken' if failed else 'every promise held'}")
    if total < arguments.inputs and not failed:
        print(f"that is fewer than {arguments.inputs}: give it more --seconds", file=sys.stderr)
        return 1
    return 1 if failed else 0


def _fuzz(name: str, arguments: argparse.Namespace, least: int, has_atheris: bool) -> tuple[int, bool]:
    """How many inputs one format was given, and whether one of them broke it."""
    common = [str(arguments.seed), str(FAILURES)]
    # Atheris is many times faster; without it hypothesis goes on until there were enough.
    commands = {
        "hypothesis": ["with_hypothesis", name, str(arguments.seconds), "0" if has_atheris else str(least), *common]
    }
    if has_atheris:
        commands["atheris"] = ["with_atheris", name, str(arguments.seconds), *common]
    running = {}
    for engine, (module, *rest) in commands.items():
        # What they say goes to files: a pipe that nobody empties would stop them.
        log = FAILURES / f"{name}-{engine}.log"
        with log.open("w") as said:
            command = [sys.executable, "-m", f"services.fit.fuzz.{module}", *rest]
            running[engine] = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT), log
    total, broken = 0, False
    for engine, (process, log) in running.items():
        process.wait()
        text = log.read_text(errors="replace")
        counted = re.search(r"^inputs: (\d+)|number_of_executed_units:\s*(\d+)", text, re.MULTILINE)
        if process.returncode or counted is None:
            print(f"{name}, {engine}: FAILED\n{text[-6000:]}", flush=True)
            broken = True
            continue
        count = int(counted.group(1) or counted.group(2))
        total += count
        print(f"{name}, {engine}: {count} inputs in {arguments.seconds} s", flush=True)
    return total, broken


if __name__ == "__main__":
    sys.exit(main())
