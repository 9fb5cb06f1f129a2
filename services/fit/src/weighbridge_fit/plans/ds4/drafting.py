"""Whether a launch drafts (DSpark, the legacy draft head, a draft block in the model's own file), and with what.

Residency is decided first and never yields: it is worth about 9.5 times the speed, drafting about 1.05 times (measured
by gezel, August 2026). The order of the rules is that of gezel 1.0.5.
"""

from dataclasses import dataclass
from enum import Enum

from weighbridge_fit.calibration.ds4 import Compute


class DraftPolicy(Enum):
    """What somebody wants."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


class Drafter(Enum):
    """What there is to draft with."""

    NONE = "none"
    DSPARK = "dspark"
    LEGACY_HEAD = "legacy_head"
    EMBEDDED = "embedded"


class DraftReason(Enum):
    """Why a launch drafts or not: stable names."""

    ASKED = "ASKED"
    AUTO_RESIDENT_CUDA = "AUTO_RESIDENT_CUDA"
    OFF = "OFF"
    NO_DRAFTER = "NO_DRAFTER"
    PROCESSOR = "PROCESSOR"
    BUILD_TOO_OLD = "BUILD_TOO_OLD"
    SESSIONS = "SESSIONS"
    MODEL_REFUSES = "MODEL_REFUSES"
    STREAMING = "STREAMING"
    NO_ROOM = "NO_ROOM"
    AUTO_STREAMED = "AUTO_STREAMED"
    AUTO_NOT_CUDA = "AUTO_NOT_CUDA"
    AUTO_SLIGHT_GAIN = "AUTO_SLIGHT_GAIN"


_WHY = {
    DraftReason.NO_DRAFTER: "there is no drafter file; name one with drafter_file.",
    DraftReason.PROCESSOR: "ds4 drafts on Metal and CUDA only.",
    DraftReason.BUILD_TOO_OLD: "builds before July 2026 know no DSpark drafter; use a newer one.",
    DraftReason.SESSIONS: "ds4 does not draft with more than one session; use one session.",
    DraftReason.MODEL_REFUSES: "ds4 takes no drafter file for this model.",
    DraftReason.STREAMING: (
        "ds4 refuses a drafter while experts are streamed, for every model but DeepSeek V4.1. It needs a model that "
        "stays in memory whole (stream_experts=false) with 32 GiB to spare."
    ),
    DraftReason.NO_ROOM: (
        "the drafter does not fit beside the weights, or beside the least expert cache, which are worth far more in "
        "memory."
    ),
    DraftReason.AUTO_STREAMED: "drafting a streamed launch can be slower; draft_policy=on drafts all the same.",
    DraftReason.AUTO_NOT_CUDA: "on Metal drafting was measured to lose; draft_policy=on drafts all the same.",
    DraftReason.AUTO_SLIGHT_GAIN: (
        "this kind of drafter helps at temperature zero only, and little; draft_policy=on drafts all the same."
    ),
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """The decision. `unmet`: drafting was wanted and is not possible."""

    enabled: bool
    reason: DraftReason
    unmet: bool = False

    @property
    def sentence(self) -> str:
        """Why not, for people; "" for a launch that drafts and for one that was told not to."""
        why = _WHY.get(self.reason)
        return f"This launch does not draft: {why}" if why else ""


def decide(
    policy: DraftPolicy,
    drafter: Drafter,
    *,
    compute: Compute,
    streams: bool,
    streamed_drafting: bool,
    fits: bool,
    refusal: DraftReason | None = None,
) -> Drafting:
    """Decides in this order: off, no drafter, what this build or model cannot do (`refusal`), streaming, room, asked
    for, and last what pays unasked.

    `streamed_drafting`: ds4 takes a drafter for this model while it streams (V4.1 alone; an unknown model counts as
    one that aborts at its start). `fits`: the drafter fits beside the resident weights, or beside a safe cache.
    """
    wanted = policy is DraftPolicy.ON
    if policy is DraftPolicy.OFF:
        return Drafting(False, DraftReason.OFF)
    if drafter is Drafter.NONE:
        return Drafting(False, DraftReason.NO_DRAFTER, wanted)
    if refusal is not None:
        return Drafting(False, refusal, wanted)
    if streams and not streamed_drafting:
        return Drafting(False, DraftReason.STREAMING, wanted)
    if not fits:
        return Drafting(False, DraftReason.NO_ROOM, wanted)
    if wanted:
        return Drafting(True, DraftReason.ASKED)
    if streams:
        return Drafting(False, DraftReason.AUTO_STREAMED)
    if compute is not Compute.CUDA:
        return Drafting(False, DraftReason.AUTO_NOT_CUDA)
    if drafter is not Drafter.DSPARK:
        return Drafting(False, DraftReason.AUTO_SLIGHT_GAIN)
    return Drafting(True, DraftReason.AUTO_RESIDENT_CUDA)
