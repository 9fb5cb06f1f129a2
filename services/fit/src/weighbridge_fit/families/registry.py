"""Which family plans a model."""

from weighbridge_fit.families.family import Family
from weighbridge_fit.families.mlx import MlxFamily
from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Engine

FAMILIES: dict[Engine, Family] = {family.engine: family for family in (MlxFamily(),)}
"""In the order in which they are asked whether a model is theirs."""


def recognise(model: Model) -> Family | None:
    """The family of a model whose engine nobody named: the catalogue's word, else the first that knows it."""
    if model.entry is not None:
        return FAMILIES.get(model.entry.engine)
    return next((family for family in FAMILIES.values() if family.recognises(model)), None)
