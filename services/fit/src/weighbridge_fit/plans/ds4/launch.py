"""The flags of a ds4 launch, in order.

Two are written in one form whatever the build calls them, and the engine that has read the build's own help puts them
its way: `--mtp-model FILE` (`--mtp FILE` before August 2026) and `--glm-mtp` (`--mtp` without a file since). The engine
adds host, port, `--kv-disk-dir` where `--kv-disk-space-mb` is given, and nothing that costs memory.
"""

from weighbridge_fit.calibration.ds4 import Compute, Layout
from weighbridge_fit.plans.ds4.companions import Companion
from weighbridge_fit.plans.ds4.decisions import Decisions
from weighbridge_fit.plans.ds4.drafting import Drafter
from weighbridge_fit.plans.ds4.options import FULL_POWER, Basics
from weighbridge_fit.plans.ds4.policy import DISK_KV_SPACE_MIB
from weighbridge_fit.plans.ds4.shape import Ds4Weights, Family

# The legacy head drafts from two tokens on; its own default of one drafts nothing.
LEGACY_DRAFT_TOKENS = 2


def arguments(
    path: str, weights: Ds4Weights, basics: Basics, decisions: Decisions, compute: Compute
) -> tuple[str, ...]:
    """Flags and values. `path` is the model's file, "" where it is not on disk."""
    flags = ["--model", path] if path else []
    flags += [f"--{compute.value}", "--ctx", str(basics.context_tokens)]
    if basics.disk_kv:
        flags += ["--kv-disk-space-mb", str(DISK_KV_SPACE_MIB)]
    if decisions.streams:
        flags += ["--ssd-streaming", "--ssd-streaming-cache-experts", f"{decisions.cache_gib}GB"]
    # Said although it is the default: a later default must not change what was planned. GLM takes none, and V4.1 is
    # priced at its own alone.
    takes_chunk = weights.family is Family.V4 or (weights.family is Family.OTHER and not basics.chunk_is_usual)
    if basics.layout is Layout.JULY and takes_chunk:
        flags += ["--prefill-chunk", str(basics.chunk_tokens)]
    if basics.power != FULL_POWER:
        flags += ["--power", str(basics.power)]
    if basics.sessions > 1:
        flags += ["--batched-session", str(basics.sessions)]
    flags += _drafter_flags(decisions)
    if decisions.vision_file is not None:
        flags += ["--vision", _opened(decisions.vision_file)]
    return tuple(flags)


def _drafter_flags(decisions: Decisions) -> list[str]:
    if decisions.drafter is Drafter.EMBEDDED:
        return ["--glm-mtp"]
    if decisions.drafter_file is None:
        return []
    file = ["--mtp-model", _opened(decisions.drafter_file)]
    if decisions.drafter is Drafter.DSPARK:
        return ["--dspark", *file]
    return [*file, "--mtp-draft", str(LEGACY_DRAFT_TOKENS)]


def _opened(companion: Companion) -> str:
    """Its path; its name where it is not on disk, and nothing can be launched."""
    return companion.path or companion.name
