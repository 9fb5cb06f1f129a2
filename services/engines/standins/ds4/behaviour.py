"""What the stand-in does where the real ds4-server's way depends on build, machine, model or luck."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "STANDIN_DS4_SERVER"
"""Environment variable with the behaviour as JSON, or with the path of a file of it, for a stand-in started by hand."""

BUILDS = ("2026-05", "2026-07", "2026-09")
"""Builds by month: the first (8d57664), one with streaming and DSpark (7e3dbef), one with V4.1, vision and both
together (ee7e840)."""


@dataclass(frozen=True)
class Behaviour:
    """Times in seconds, rates in tokens per second, and faults. The default is a quick server without a fault.

    Attributes:
        build: one of :data:`BUILDS`: which flags and checks it has.
        compute: the one backend that is compiled in beside the processor: "metal", "cuda", or "cpu" for none. "":
            Metal and CUDA both, which no real build has.
        metal_sources: whether Metal needs `metal/*.metal` below the working directory, as the real one does.
        working_set_gib: what Metal recommends to use at most, in GiB; an expert cache is lowered to it. 0: no limit.
        load_s: from the lock to listening.
        load_fault: what ends the load half-way: "" nothing, "out_of_memory" (of the card), "no_session" (no memory for
            the context), a signal's name (SIGKILL: the kernel's choice when memory runs out), "hang" (for ever).
        extra_planned_gib: how much larger its memory plan is than its arithmetic.
        prefill_rate: tokens of a prompt per second; 0: all at once.
        rate: tokens of an answer per second, each on its time; 0: as fast as they can be sent.
        reasoning: what it thinks, where a request lets it.
        answer: what it says, one token for each word.
        tokens: an answer of so many words instead; 0: `answer`.
        calls: tools that it calls after its answer, name and arguments as JSON, where a request has tools.
        prefill_fault: what goes wrong in a prompt: "" nothing, "error" (it fails), or a signal's name.
        decode_fault: what goes wrong in an answer: "" nothing, "error" (it fails), "cut" (the connection is
            closed), "stall" (nothing more comes), or a signal's name.
        decode_fault_after: tokens before that.
        faulty_requests: how many requests these faults are in, from the first on; -1: in every one.
        breaks_after: requests that it answers before every further one fails, while it stays up; -1: it never breaks.
        cancels: whether it notices that a client has left (builds with pull request 707); else only a write that fails
            ends work.
        keepalive_s: shortest time between two comments while a prompt is read.
        stall_s: a write that makes no progress for so long drops the stream.
        send_buffer_bytes: of the kernel for each connection, so that a stall comes early; 0: the system's own.
        answers: whether requests are answered at all; False: connections are taken and nothing comes.
        stopping: whether chats are refused as by a server that is about to end.
        deaf: whether it hears SIGTERM.
    """

    build: str = "2026-09"
    compute: str = ""
    metal_sources: bool = False
    working_set_gib: float = 0.0
    load_s: float = 0.0
    load_fault: str = ""
    extra_planned_gib: float = 0.0
    prefill_rate: float = 0.0
    rate: float = 0.0
    reasoning: str = "The user greets me. I greet back."
    answer: str = "Hello, and what can I do for you?"
    tokens: int = 0
    calls: tuple[tuple[str, str], ...] = ()
    prefill_fault: str = ""
    decode_fault: str = ""
    decode_fault_after: int = 3
    faulty_requests: int = -1
    breaks_after: int = -1
    cancels: bool = False
    keepalive_s: float = 5.0
    stall_s: float = 2.0
    send_buffer_bytes: int = 0
    answers: bool = True
    stopping: bool = False
    deaf: bool = False

    def __post_init__(self) -> None:
        if self.build not in BUILDS:
            raise ValueError(f"build is one of {', '.join(BUILDS)}, not {self.build!r}")

    def to_json(self) -> str:
        """For :data:`VARIABLE`."""
        return json.dumps(dataclasses.asdict(self))


def from_environment() -> Behaviour:
    """The behaviour that :data:`VARIABLE` holds or names, else the default."""
    given = os.environ.get(VARIABLE) or "{}"
    if not given.lstrip().startswith("{"):
        given = Path(given).read_text(encoding="utf-8")
    found = json.loads(given)
    found["calls"] = tuple((name, arguments) for name, arguments in found.get("calls", ()))
    return Behaviour(**found)
