"""What the stand-in does where the real sd-server's way depends on machine, model or luck."""

import dataclasses
import json
import os
from dataclasses import dataclass

VARIABLE = "STANDIN_SD_SERVER"
"""Environment variable with the behaviour as JSON, for a stand-in that is started by hand."""


@dataclass(frozen=True)
class Behaviour:
    """Seconds and faults. The default is a quick server without a fault.

    Attributes:
        load_s: how long it loads.
        encode_s: how long the prompt takes.
        step_s: how long each sampling step takes.
        decode_s: how long each picture takes to decode.
        bind_delay_s: from saying that it listens to binding its port.
        load_fault: what ends it while it loads: "" nothing, "out_of_memory", a signal's name (SIGKILL, SIGILL),
            "silence" (exit 1 without a word), or "hang" (it loads for ever).
        render_fault: what goes wrong in every render: "" nothing, "out_of_memory" (no picture, and it lives on),
            "no_results" (likewise, without a reason), or a signal's name (it ends at the first step).
        largest_pixels: a picture of more cannot be allocated; 0: there is no such limit.
        answers: whether requests are answered at all; False: connections are taken and nothing comes.
    """

    load_s: float = 0.0
    encode_s: float = 0.02
    step_s: float = 0.02
    decode_s: float = 0.02
    bind_delay_s: float = 0.0
    load_fault: str = ""
    render_fault: str = ""
    largest_pixels: int = 0
    answers: bool = True

    def to_json(self) -> str:
        """For :data:`VARIABLE`."""
        return json.dumps(dataclasses.asdict(self))


def from_environment() -> Behaviour:
    """The behaviour that :data:`VARIABLE` holds, else the default."""
    return Behaviour(**json.loads(os.environ.get(VARIABLE) or "{}"))
