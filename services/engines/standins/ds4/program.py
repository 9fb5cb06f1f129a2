"""Programs for tests: the stand-in as a file that can be executed, and the real ds4-server where one is named."""

import os
import sys
from pathlib import Path

from weighbridge_engines.ds4.binary import COMPUTE_MARKS

from services.engines.standins.ds4.behaviour import Behaviour

REPOSITORY = Path(__file__).resolve().parents[4]

REAL_VARIABLE = "WEIGHBRIDGE_TEST_DS4_SERVER"
"""Environment variable that names a real ds4-server for tests, or the folder of one."""

HOW_TO_GET_IT = f"no ds4-server here: build one from github.com/antirez/ds4 and name it with {REAL_VARIABLE}"


def write_standin(folder: Path, behaviour: Behaviour | None = None) -> Path:
    """An executable file `ds4-server` in ``folder`` that behaves like this wherever and however it is started."""
    program = folder / "ds4-server"
    wanted = behaviour or Behaviour()
    compute = wanted.compute or ("metal" if sys.platform == "darwin" else "cuda")
    mark = dict(COMPUTE_MARKS).get(compute, b"none").decode()
    program.write_text(
        f"#!{sys.executable}\n"
        f"# What tells that a real one was built for {compute}: {mark}\n"
        "import sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from services.engines.standins.ds4 import __main__ as standin\n"
        "from services.engines.standins.ds4.behaviour import Behaviour\n"
        f"sys.exit(standin.main(sys.argv[1:], {wanted!r}))\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    return program


def real_ds4_server() -> Path | None:
    """What :data:`REAL_VARIABLE` names; None where it names nothing.

    Raises FileNotFoundError when what it names is not there: a test that was asked for must not be skipped.
    """
    named = os.environ.get(REAL_VARIABLE)
    if not named:
        return None
    for candidate in (Path(named), Path(named) / "ds4-server"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    raise FileNotFoundError(f"{REAL_VARIABLE} names no ds4-server: {named}")
