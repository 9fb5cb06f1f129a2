"""The command line of one ds4-server: what the plan says, in this build's words, and where it listens.

A flag that the build does not know is never left out: each of them changes what is held or what was asked for, and ds4
ends at an unknown flag only after the memory was claimed for it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from weighbridge_proto.errors import RequestError

from weighbridge_engines.ds4.binary import Ds4Binary

HOST = "127.0.0.1"
"""ds4 knows no password, and answers whoever reaches it."""

COMPUTE = frozenset({"--metal", "--cuda", "--cpu"})
"""What it computes on: a build does one of the first two, and the processor."""

WITHOUT_VALUE = COMPUTE | {"--ssd-streaming", "--dspark", "--glm-mtp"}
WITH_VALUE = frozenset(
    {"--model", "--ctx", "--kv-disk-space-mb", "--ssd-streaming-cache-experts", "--prefill-chunk", "--power",
     "--batched-session", "--mtp-model", "--mtp-draft", "--vision"}
)  # fmt: skip
"""What a plan may say. Anything else is of a newer fit than this engine."""

_INSTEAD = (
    ({"--ssd-streaming", "--ssd-streaming-cache-experts"}, "stream_experts=false"),
    ({"--prefill-chunk"}, "no prefill_chunk_tokens and no engine_layout"),
    ({"--power"}, "power=100"),
    ({"--batched-session"}, "one conversation at once (sessions=1)"),
    ({"--dspark", "--mtp-model", "--mtp-draft", "--glm-mtp"}, "draft_policy=off"),
    ({"--vision"}, "vision=false"),
    ({"--kv-disk-dir", "--kv-disk-space-mb"}, "disk_kv=false"),
)
"""By which options a plan does without a flag."""


def command_line(binary: Ds4Binary, planned: Sequence[str], port: int, checkpoints: Path | None) -> tuple[str, ...]:
    """The program and its arguments.

    Args:
        binary: the build.
        planned: the plan's arguments, flags of an allow-list with their values.
        port: where it listens, on 127.0.0.1. Never 0, which ds4 does not take.
        checkpoints: the folder for conversations on disk; used only where the plan grants space for them.

    Raises:
        RequestError: FAILED_PRECONDITION ENGINE_LACKS_FEATURE: the build does not know a flag that the plan stands on,
            or was built for something else than the plan computes on.
    """
    made: list[str] = []
    missing: list[str] = []
    for flag, value in _pairs(planned):
        spelled = _spelled(binary, flag)
        if spelled is None:
            missing.append(flag)
        else:
            made += [spelled] if value is None else [spelled, value]
    where = ["--host", HOST, "--port", str(port)]
    if "--kv-disk-space-mb" in planned and checkpoints is not None:
        where += ["--kv-disk-dir", str(checkpoints)]
    missing += [flag for flag in where if flag.startswith("--") and flag not in binary.flags]
    if missing:
        raise _lacks(binary, missing)
    return (str(binary.path), *made, *where)


def _spelled(binary: Ds4Binary, flag: str) -> str | None:
    if flag == "--mtp-model":
        return binary.drafter_flag
    if flag == "--glm-mtp":
        return binary.draft_block_flag
    if flag in COMPUTE and flag not in ("--cpu", f"--{binary.compute}"):
        return None
    return flag if flag in binary.flags and flag in WITHOUT_VALUE | WITH_VALUE else None


def _pairs(planned: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    waiting = iter(planned)
    for flag in waiting:
        yield flag, None if flag in WITHOUT_VALUE else next(waiting, None)


def _lacks(binary: Ds4Binary, missing: Sequence[str]) -> RequestError:
    instead = [what for flags, what in _INSTEAD if flags & set(missing)]
    if COMPUTE & set(missing):
        what = "the processor alone" if binary.compute == "cpu" else f"{binary.compute} and the processor"
        advice = (
            f"It computes on {what}: name a build for what the plan computes on, or ask for compute={binary.compute}."
        )
    elif instead:
        advice = f"A newer build may; or ask for {' and '.join(instead)}."
    else:
        advice = "Another build may."
    return RequestError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "ENGINE_LACKS_FEATURE",
        f"This build of ds4-server does not know {', '.join(missing)}, which the plan needs. {advice}",
        metadata={"flags": " ".join(missing), "compute": binary.compute, "engine_layout": binary.layout},
    )
