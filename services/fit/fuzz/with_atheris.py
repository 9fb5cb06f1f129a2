"""Fuzzes one format with atheris, which watches which lines an input reaches. Started by __main__."""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weighbridge_fit"]):
    from services.fit.fuzz.mutations import insides
    from services.fit.fuzz.targets import TARGETS, check

# Long enough for everything that a header can say; each byte more costs speed.
MAX_LENGTH = 4096


def main() -> None:
    """Format, seconds, first seed, where to leave an input that fails."""
    name, seconds, first, failures = sys.argv[1:5]
    target = TARGETS[name]
    for content in target.seeds():
        assert check(target, content), "a seed must be a file that is read"

    def one(data: bytes) -> None:
        # The first byte says whether the rest is a file or only its inside.
        check(target, target.wrap(data[1:]) if data[:1] < b"\x80" else data[1:])

    with tempfile.TemporaryDirectory() as folder:
        seeds = [b"\xff" + content for content in target.seeds()] + [b"\0" + content for content in insides(name)]
        for number, content in enumerate(seeds):
            (Path(folder) / str(number)).write_bytes(content)
        atheris.Setup(
            [
                sys.argv[0],
                f"-max_total_time={seconds}",
                f"-seed={first}",
                f"-max_len={MAX_LENGTH}",
                "-timeout=10",
                "-rss_limit_mb=2048",
                "-print_final_stats=1",
                f"-artifact_prefix={failures}/{name}-atheris-",
                folder,
            ],
            one,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
