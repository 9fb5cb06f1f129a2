"""A stand-in for ds4-server on machines without it: the same flags, lines, answers, exits and traps, and no model.

It reads the header of the model that it is given and says what it was told to. What the real one does depending on
build, machine, model or luck is switched on in behaviour.py. It is held to the real one by tests that both must pass
(services/engines/tests/ds4).

    python -m services.engines.standins.ds4 --model deepseek-q2.gguf --ctx 32768 --port 8000
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.engines.standins.ds4.behaviour import Behaviour, from_environment
from services.engines.standins.ds4.command_line import parse
from services.engines.standins.ds4.startup import load
from services.engines.standins.ds4.stopping import Stopping


def main(arguments: Sequence[str], behaviour: Behaviour) -> int:
    """What ds4-server's main does. Returns when it has been asked to end."""
    stopping = Stopping(deaf=behaviour.deaf)
    line = parse(arguments, behaviour)
    loaded = load(line, behaviour)
    if line.has("trace"):
        _trace(line.text("trace"))
    # Imported where it is needed: a refused start need not wait for it.
    import asyncio

    from services.engines.standins.ds4.server import serve

    asyncio.run(serve(line, loaded, behaviour, stopping))
    return 0


def _trace(path: str) -> None:
    """Prompts and answers are not written: only that the file can be."""
    from services.engines.standins.ds4 import log

    try:
        Path(path).write_bytes(b"")
    except OSError as error:
        log.server(f"failed to open trace file {path}: {error.strerror}")
        sys.exit(1)
    log.server(f"tracing session to {path}")


if __name__ == "__main__":
    code = main(sys.argv[1:], from_environment())
    sys.stderr.flush()
    os._exit(code)
