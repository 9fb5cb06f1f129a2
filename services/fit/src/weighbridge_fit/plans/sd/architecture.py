"""Which architecture a model has: by its tensors, else by what its catalogue entry is known to be."""

from weighbridge_fit.laws.sd_shapes import ARCHITECTURES
from weighbridge_fit.model import Model
from weighbridge_fit.plans.sd.profiles import profile_for
from weighbridge_fit.plans.sd.remembered import Remembered
from weighbridge_fit.recognise.stable_diffusion import architecture_of

_BY_TENSORS: Remembered[str] = Remembered()


def architecture_of_model(model: Model) -> str:
    """The architecture's name, "" if nothing says it. Its buffers were measured if `laws.sd_shapes` lists it."""
    facts = model.facts
    found = facts.architecture
    if found not in ARCHITECTURES and facts.tensors:
        found = _BY_TENSORS.get(facts, "", lambda: architecture_of(fact for _, fact in facts.tensors)) or found
    if found not in ARCHITECTURES and model.entry is not None:
        found = model.entry.architecture or profile_for(model, "").architecture or found
    return found
