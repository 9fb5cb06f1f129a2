"""Fuzzes one format with hypothesis for some time. Started by __main__."""

import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from services.fit.fuzz.mutations import files
from services.fit.fuzz.targets import TARGETS, check

EXAMPLES_PER_ROUND = 2000


def main() -> int:
    """Format, seconds, least number of inputs, first seed, where to leave an input that fails."""
    name, failures = sys.argv[1], sys.argv[5]
    seconds, least, first = map(int, sys.argv[2:5])
    target = TARGETS[name]
    count = accepted = 0
    failing = b""

    def one(data: bytes) -> None:
        nonlocal count, accepted, failing
        count += 1
        try:
            accepted += check(target, data)
        except BaseException:
            failing = data
            raise

    for content in target.seeds():
        assert check(target, content), "a seed must be a file that is read"
    deadline = time.monotonic() + seconds
    number = first
    while time.monotonic() < deadline or count < least:
        run = settings(
            max_examples=EXAMPLES_PER_ROUND,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(seed(number)(given(files(name, target))(one)))
        try:
            run()
        except BaseException:
            path = Path(failures) / f"{name}-hypothesis-{number}"
            path.write_bytes(failing)
            print(f"seed {number}: the input is in {path}", file=sys.stderr)
            raise
        number += 1
    print(f"inputs: {count}, read: {accepted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
