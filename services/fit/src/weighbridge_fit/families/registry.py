"""Which family plans a model."""

from typing import TypeAlias

from weighbridge_fit.catalog.entry import Use
from weighbridge_fit.families.diffusers import DiffusersFamily
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.families.family import Family
from weighbridge_fit.families.generic import GenericChatFamily
from weighbridge_fit.families.mlx import MlxFamily
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Engine

Families: TypeAlias = tuple[Family, ...]
"""In the order in which they are asked whether a model is theirs. An engine may have one for each kind of workload."""


def families(sd_backend: str = "") -> Families:
    """All families. `sd_backend`: what sd-server is taken to be built for where a request does not say ("": not
    known)."""
    return SdFamily(sd_backend), Ds4Family(), MlxFamily(), DiffusersFamily(), GenericChatFamily()


ALL = families()

FAMILIES: dict[Engine, Family] = {family.engine: family for family in reversed(ALL)}
"""The first family of each engine."""

_WORKLOADS = {Use.IMAGE: "image", Use.VIDEO: "image", Use.CHAT: "chat"}


def recognise(model: Model, among: Families = ALL) -> Family | None:
    """The family of a model whose engine nobody named: the catalogue's word, else the first that knows it."""
    if model.entry is not None:
        return family_of(model.entry.engine, model, among=among)
    return next((family for family in among if family.recognises(model)), None)


def family_of(engine: Engine, model: Model, workload: str = "", among: Families = ALL) -> Family | None:
    """The family of an engine that plans a model: by the kind of workload where it is named ("chat", "image"), else by
    what the model is for, as the catalogue or its files say; None where no law of this engine is known."""
    of_engine = [family for family in among if family.engine is engine]
    named = workload or (_WORKLOADS[model.entry.use] if model.entry is not None else "")
    if named:
        # An engine of one kind alone is asked in any case: it says itself what it does not do.
        return next((family for family in of_engine if family.workload_name == named), next(iter(of_engine), None))
    # Nobody's model is most likely a chat model that says too little: it is the last family that tells what is missing.
    return next((family for family in of_engine if family.recognises(model)), next(reversed(of_engine), None))
