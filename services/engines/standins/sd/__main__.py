"""A stand-in for sd-server on machines without it: the same flags, lines, answers, exits and traps, and no model.

It reads the headers of the weights that it is given and makes pictures of coloured blocks; the same request gives the
same picture. What the real one does depending on machine, model or luck is switched on in behaviour.py. It is held to
the real one by tests that both must pass (services/engines/tests/sd_server).

    python -m services.engines.standins.sd --diffusion-model ... --llm ... --taesd ... --listen-port 8080
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from services.engines.standins.sd import log
from services.engines.standins.sd.behaviour import Behaviour, from_environment
from services.engines.standins.sd.command_line import parse
from services.engines.standins.sd.model import load
from services.engines.standins.sd.server import serve


def main(arguments: Sequence[str], program: str, behaviour: Behaviour) -> int:
    """What sd-server's main does. Does not return while it serves."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends by the signal, without a word
    command_line = parse(arguments, program)
    model = load(command_line, behaviour)
    log.info("main.cpp:148", "listening on: {}:{}".format(*command_line.address))
    time.sleep(behaviour.bind_delay_s)
    serve(command_line, model, behaviour)
    return 0


if __name__ == "__main__":
    # Its threads are no reason to stay, and neither is what they hold.
    code = main(sys.argv[1:], sys.argv[0], from_environment())
    sys.stdout.flush()
    os._exit(code)
