"""Checkpoints from before torch 1.6, through torch itself: in a process of its own, with limits, weights-only.

Their pickles are not framed by an archive that says what is where, so torch reads them, where it is installed (the
extra `weighbridge-fit[torch]`). It is asked to make no weights (`skip_data`) and refuses everything that is not a
tensor or a plain container (`weights_only`). What it says is checked like any other file's facts.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import Any

from weighbridge_fit.budget import MIB
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import MAX_ELEMENTS, TensorFact
from weighbridge_fit.files import RegularFile

# Importing torch takes 1 to 3 s, the pickles of the largest files well below one.
WALL_SECONDS = 60.0
MAX_ANSWER_BYTES = 64 * MIB
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
ADVICE = "convert it to safetensors"


def read_legacy(file: RegularFile) -> tuple[TensorFact, ...]:
    """The tensors of a legacy checkpoint. Raises LEGACY_CHECKPOINT without torch or when torch refuses the file,
    PARSE_BUDGET when it takes too long or too much, TRUNCATED."""
    if importlib.util.find_spec("torch") is None:
        message = (
            "this checkpoint is in torch's format from before version 1.6: install weighbridge-fit[torch] to read it, "
            f"or {ADVICE}"
        )
        raise WeightError(WeightReason.LEGACY_CHECKPOINT, message)
    return _facts(_ask(file))


def _ask(file: RegularFile) -> dict[str, Any]:
    command = [sys.executable, "-I", "-m", "weighbridge_fit.torch_checkpoint.legacy_child", str(file.size)]
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    with subprocess.Popen(
        command,
        stdin=file.fileno(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd="/",
    ) as child:
        timer = threading.Timer(WALL_SECONDS, child.kill)
        timer.start()
        try:
            assert child.stdout is not None
            answer = child.stdout.read(MAX_ANSWER_BYTES + 1)
        finally:
            child.kill()  # It has said all it had to say.
            timer.cancel()
    try:
        if len(answer) <= MAX_ANSWER_BYTES and type(said := json.loads(answer)) is dict:
            return said
    except ValueError:
        pass
    message = f"torch needed more time or memory for this legacy checkpoint than it may have: {ADVICE}"
    raise WeightError(WeightReason.PARSE_BUDGET, message)


def _facts(said: dict[str, Any]) -> tuple[TensorFact, ...]:
    """The child's answer as facts. It read a file that nobody vouches for, so it is not believed blindly."""
    if "reason" in said:
        raise WeightError(WeightReason(str(said["reason"])), str(said["message"])[:400])
    facts = []
    for name, dtype, shape, elements, size in said["tensors"]:
        if not all(type(count) is int and 0 <= count <= MAX_ELEMENTS for count in (*shape, elements, size)):
            raise WeightError(WeightReason.BAD_SHAPE, "a tensor's sizes are no sizes")
        facts.append(TensorFact(str(name), str(dtype), tuple(shape), elements, size))
    return tuple(facts)
