"""Programs for tests: the stand-in as a file that can be executed, and the real sd-server where it is here."""

import os
import sys
from pathlib import Path

from services.engines.standins.sd.behaviour import Behaviour

REPOSITORY = Path(__file__).resolve().parents[4]

REAL_VARIABLE = "WEIGHBRIDGE_TEST_SD_SERVER"
"""Environment variable that names a real sd-server for tests, or the folder of one."""

MADE = REPOSITORY / ".cache" / "sd-server"
"""Where `make sd-server` puts it."""

HOW_TO_GET_IT = f"no sd-server here: make sd-server builds it (5 minutes), or name one with {REAL_VARIABLE}"


def write_standin(folder: Path, behaviour: Behaviour | None = None) -> Path:
    """An executable file `sd-server` in ``folder`` that behaves like this wherever and however it is started."""
    program = folder / "sd-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from services.engines.standins.sd import __main__ as standin\n"
        "from services.engines.standins.sd.behaviour import Behaviour\n"
        f"sys.exit(standin.main(sys.argv[1:], sys.argv[0], {behaviour or Behaviour()!r}))\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    return program


def real_sd_server() -> Path | None:
    """The real one: what :data:`REAL_VARIABLE` names, else what `make sd-server` built; None where it is not here.

    Raises FileNotFoundError when the variable names nothing: a test that was asked for must not be skipped.
    """
    named = os.environ.get(REAL_VARIABLE)
    places = [Path(named)] if named else [MADE]
    for place in places:
        for candidate in (place, place / "sd-server", place / "bin" / "sd-server"):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate.resolve()
    if named:
        raise FileNotFoundError(f"{REAL_VARIABLE} names no sd-server: {named}")
    return None
