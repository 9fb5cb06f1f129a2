"""Facts and machines for plans by other engines' laws."""

from fit_shapes import GIB, geometry
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.facts import ComponentTotal, PrecisionTotal, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.lines import Line
from weighbridge_fit.plans.plan import Plan


def facts(
    shape: ModelGeometry | None,
    weights: int = 8 * GIB,
    format: WeightFormat = WeightFormat.GGUF,
    tensors: dict[str, int] | None = None,
    precisions: tuple[PrecisionTotal, ...] = (),
) -> WeightFacts:
    named = tuple(("model", TensorFact(name, "?", (1,), 1, size)) for name, size in (tensors or {}).items())
    return WeightFacts(
        name="m",
        format=format,
        file_bytes=weights,
        tensor_bytes=weights,
        tensor_count=1,
        element_count=1,
        largest_tensor_bytes=GIB,
        precisions=precisions,
        components=(ComponentTotal("model", 1, weights, precisions),),
        architecture=shape.model_type if shape else "",
        geometry=shape,
        tensors=tuple(sorted(named)),
    )


def machine(host: int, card: int = 0, pool: Pool | None = None) -> Capacity:
    devices = (DeviceCeiling("gpu0", Ceiling(card, card)),) if card else ()
    kind = pool or (Pool.DISCRETE if card else Pool.CPU)
    return Capacity(kind, Ceiling(host, host), Ceiling(host + card, host + card), devices)


CARD = machine(64 * GIB, 24 * GIB)
UNIFIED = machine(96 * GIB, pool=Pool.UNIFIED)
HOST = machine(96 * GIB)
LLAMA = geometry("Llama-3.1-8B")


def lines(made: Plan) -> dict[str, Line]:
    return {line.component: line for line in made.requirement.lines}


def note_codes(made: Plan) -> list[str]:
    return [note.code for note in made.notes]
