"""Files that a ds4 launch opens beside the model: a drafter, and a vision companion."""

from dataclasses import dataclass

from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.model import Model
from weighbridge_fit.plans.ds4.drafting import Drafter
from weighbridge_fit.plans.errors import PlanError

DRAFTER = "drafter"
VISION = "vision"
# Both kinds of support file call their tensors by stage, `mtp.<number>.`; a DSpark drafter alone has the parts below.
# The legacy draft head (V4 Flash MTP, May 2026) has one stage and none of them (antirez/ds4 7e3dbef, 2026-07-23).
_SUPPORT_PREFIX, _MODEL_PREFIX = "mtp.", "blk."
_DSPARK_PARTS = (".main_proj.", ".markov_head.", ".confidence_head.")
_ROLES = {DRAFTER: Role.DRAFTER, VISION: Role.PROJECTOR}


@dataclass(frozen=True, slots=True)
class Companion:
    """One companion: its size, and what the engine would open ("" where it is not on disk)."""

    file_bytes: int
    path: str
    name: str


def companion_of(model: Model, role: str) -> Companion | None:
    """The file that was named or found, else the one that the catalogue lists. Raises PlanError INVALID_OPTION."""
    facts = model.companions.get(role)
    if facts is not None:
        _check(role, facts)
        size = max(facts.file_bytes, facts.tensor_bytes)
        if not size:
            raise PlanError("INVALID_OPTION", f"options.ds4.{role}_file", f"The {role} file is empty.")
        return Companion(size, model.paths.get(role, ""), facts.name)
    listed = [file for file in model.entry.files if file.component == role] if model.entry else []
    return Companion(listed[0].size_bytes, model.paths.get(role, ""), listed[0].name) if listed else None


def _check(role: str, facts: WeightFacts) -> None:
    """Raises PlanError INVALID_OPTION for a file that is plainly something else. One that says nothing of itself is
    taken at its word: vision companions and drafters of some builds do not."""
    if facts.format not in (WeightFormat.GGUF, WeightFormat.UNKNOWN):
        what = f"is stored as {facts.format.value}, and ds4 loads GGUF files"
    elif facts.role not in (Role.MODEL, _ROLES[role]):
        what = f"is a file of another kind ({facts.role.value})"
    elif facts.role is Role.MODEL and any(tensor.name.startswith(_MODEL_PREFIX) for _, tensor in facts.tensors):
        what = "is a whole model"
    else:
        return
    raise PlanError("INVALID_OPTION", f"options.ds4.{role}_file", f"This is no {role} file of ds4: it {what}.")


def drafter_kind(model: Model, companion: Companion | None, *, draft_block: bool) -> Drafter:
    """What there is to draft with: a file comes before a block in the model's own file."""
    if companion is None:
        return Drafter.EMBEDDED if draft_block else Drafter.NONE
    facts = model.companions.get(DRAFTER)
    names = [tensor.name for _, tensor in facts.tensors] if facts is not None else []
    staged = [name for name in names if name.startswith(_SUPPORT_PREFIX)]
    is_dspark = not staged or any(part in name for name in staged for part in _DSPARK_PARTS)
    return Drafter.DSPARK if is_dspark else Drafter.LEGACY_HEAD
