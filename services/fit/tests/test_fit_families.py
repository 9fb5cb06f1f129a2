"""What is promised of every engine's family alike: the solver's answer runs and the next larger does not, more of
anything never costs less, and lines add up. A family that is not in here fails a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fit_ds4_layout import facts_of as ds4_facts
from fit_ds4_layout import flash
from fit_generic import facts as language_facts
from fit_shapes import geometry
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sd_data import facts as sd_facts
from sd_data import facts_of as sd_facts_of
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.facts import ComponentTotal, PrecisionTotal, WeightFacts, WeightFormat
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.families.registry import ALL
from weighbridge_fit.lines import Line, Phase, Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.diffusers.options import DiffusersRequest
from weighbridge_fit.plans.ds4.options import Ds4Request
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.generic.options import GenericRequest
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_fit.solve import CONTEXT_STEP, picture_sizes
from weighbridge_fit.solving import solve_context, solve_size
from weighbridge_fit.verdict import Verdict, judge

GIB = 1 << 30


def machine(pool: Pool, host: int, *cards: int) -> Capacity:
    """Ceilings as large as the memory."""
    devices = tuple(DeviceCeiling(f"gpu{number}", Ceiling(size, size), total=size) for number, size in enumerate(cards))
    platform = "darwin/arm64" if pool is Pool.UNIFIED else "linux/x86_64"
    total = host + sum(cards)
    return Capacity(pool, Ceiling(host, host), Ceiling(total, total), devices, total_ram=host, platform=platform)


def tree(bytes_by_component: Mapping[str, int]) -> WeightFacts:
    """A diffusers tree in 16 bits."""
    totals = tuple(
        ComponentTotal(name, 1, size, (PrecisionTotal("BF16", 1, size // 2, size),))
        for name, size in sorted(bytes_by_component.items())
    )
    whole = sum(bytes_by_component.values())
    return WeightFacts(
        name="tree",
        format=WeightFormat.DIFFUSERS,
        file_bytes=whole,
        tensor_bytes=whole,
        tensor_count=len(totals),
        element_count=whole // 2,
        largest_tensor_bytes=0,
        precisions=(),
        components=totals,
        architecture="WanPipeline",
    )


@dataclass(frozen=True)
class Sample:
    """A family's model, what is asked of it, and what can be more of: fields of its request with values in order."""

    family: Any
    model: Model
    request: Any
    more: Mapping[str, tuple[Any, ...]]
    machines: tuple[Capacity, ...]


CPUS = tuple(machine(Pool.CPU, size * GIB) for size in (3, 6, 12, 24, 48, 96))
MACS = tuple(machine(Pool.UNIFIED, size * GIB) for size in (3, 6, 12, 24, 48, 96))
CARDS = tuple(machine(Pool.DISCRETE, 64 * GIB, size * GIB) for size in (4, 8, 12, 24, 80))
SLOTS = (1, 2, 3, 8, 32)

SAMPLES: Mapping[str, Sample] = {
    "sd": Sample(
        ALL[0],
        Model(sd_facts_of("klein4b", "Q4_0")),
        SdRequest(),
        # Sides in steps that keep numbers of tokens ragged or not, as they are.
        {"batch": (1, 2, 3, 8), "width_px": (256, 512, 1024, 2048), "reference_images": (0, 1, 2)},
        (*CPUS, *MACS, *CARDS),
    ),
    "sd video": Sample(
        ALL[0],
        Model(sd_facts_of("wan21_1.3b", "Q4_0")),
        SdRequest(),
        {"frames": (1, 5, 33, 81, 121), "height_px": (256, 512, 768, 1024)},
        (*CPUS, *CARDS),
    ),
    "ds4": Sample(
        ALL[1],
        Model(ds4_facts(flash())),
        Ds4Request(expert_cache_gib=8),
        {"slots": SLOTS},
        tuple(machine(Pool.UNIFIED, size * GIB) for size in (48, 64, 96, 128, 192, 512)),
    ),
    "mlx": Sample(
        ALL[2],
        Model(language_facts(geometry("Qwen3.6-27B"), 5 * GIB, WeightFormat.SAFETENSORS)),
        MlxRequest(),
        {"slots": SLOTS, "prompt_cache_bytes": (0, GIB, 4 * GIB), "allocator_cache_bytes": (GIB, 2 * GIB)},
        (*CPUS, *MACS),
    ),
    "diffusers": Sample(
        ALL[3],
        Model(tree({"text_encoder": 11 * GIB, "transformer": 3 * GIB, "vae": GIB // 2})),
        DiffusersRequest(),
        {"frames": (1, 5, 33, 81, 121), "width_px": (256, 512, 832, 1280), "batch": (1, 2, 4)},
        (*CPUS, *MACS, *CARDS),
    ),
    "llama.cpp": Sample(
        ALL[4],
        Model(language_facts(geometry("Gemma-3-27B"), 5 * GIB)),
        GenericRequest(),
        {"slots": SLOTS, "micro_batch_tokens": (64, 512, 4096)},
        (*CPUS, *CARDS),
    ),
    "vllm": Sample(
        ALL[4],
        Model(language_facts(geometry("Llama-3.1-8B"), 5 * GIB, WeightFormat.SAFETENSORS)),
        GenericRequest(law="vllm"),
        {"slots": SLOTS, "micro_batch_tokens": (512, 8192)},
        (*CPUS, *CARDS),
    ),
}
CHATS = [name for name, sample in SAMPLES.items() if sample.family.workload_name == "chat"]
IMAGES = [name for name, sample in SAMPLES.items() if sample.family.workload_name == "image"]


def test_every_family_is_sampled() -> None:
    assert {type(sample.family) for sample in SAMPLES.values()} == {type(family) for family in ALL}


def verdict(sample: Sample, request: Any, capacity: Capacity) -> Verdict:
    """The verdict, WONT_RUN also where the family itself refuses the machine."""
    try:
        made = sample.family.plan(sample.model, request, capacity)
    except PlanError as error:
        assert error.reason == "EXPERT_CACHE_UNSAFE", error
        return Verdict.WONT_RUN
    return judge(made.requirement, capacity).verdict


@pytest.mark.parametrize("name", CHATS)
def test_a_solved_context_runs_and_the_next_larger_one_does_not(name: str) -> None:
    sample = SAMPLES[name]
    longest = sample.family.longest_context(sample.model)
    answers = set()
    for capacity in sample.machines:
        for slots in (1, 4):
            asked = replace(sample.request, slots=slots)
            try:
                found = solve_context(sample.family, sample.model, asked, capacity)
            except PlanError as error:
                assert error.reason == "EXPERT_CACHE_UNSAFE", error
                continue
            answers.add(found)
            assert found == longest or found % CONTEXT_STEP == 0
            if found:
                assert verdict(sample, sample.family.with_context(asked, found), capacity) is Verdict.RUNS
            if found < longest:
                following = sample.family.with_context(asked, min(found + CONTEXT_STEP, longest))
                assert verdict(sample, following, capacity) is not Verdict.RUNS
    assert len(answers) > 2, "from nothing to everything"


@pytest.mark.parametrize("aspect", [(1, 1), (16, 9), (2, 3)])
@pytest.mark.parametrize("name", IMAGES)
def test_a_solved_picture_runs_and_no_larger_one_does(name: str, aspect: tuple[int, int]) -> None:
    sample = SAMPLES[name]
    family, answers = sample.family, set()
    sizes = picture_sizes(aspect, family.side_step(sample.model), family.side_range(sample.model))
    for capacity in sample.machines:
        found = solve_size(family, sample.model, sample.request, capacity, aspect)
        answers.add(found)
        if found != (0, 0):
            assert verdict(sample, family.with_size(sample.request, *found), capacity) is Verdict.RUNS
        larger = sizes[sizes.index(found) + 1 :] if found in sizes else sizes
        # Next, and some way up: a larger picture may run where a smaller one does not.
        for size in {*larger[:1], *larger[:: max(1, len(larger) // 5)]}:
            assert verdict(sample, family.with_size(sample.request, *size), capacity) is not Verdict.RUNS
    assert len(answers) > 2


def bounds(needed: Requirement) -> tuple[int, ...]:
    total = needed.total
    return total.low, total.expected, total.high


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_more_of_anything_never_costs_less(data: st.DataObject) -> None:
    """Slots, batch, pixels, frames, references, caches, tokens at once: with everything else as it was."""
    sample = SAMPLES[data.draw(st.sampled_from(sorted(SAMPLES)))]
    capacity = data.draw(st.sampled_from(sample.machines))
    base = {field: data.draw(st.sampled_from(values)) for field, values in sample.more.items()}
    field = data.draw(st.sampled_from(sorted(sample.more)))
    less, more = sorted(data.draw(st.lists(st.sampled_from(sample.more[field]), min_size=2, max_size=2)))
    made = []
    for value in (less, more):
        try:
            made.append(sample.family.plan(sample.model, replace(sample.request, **{**base, field: value}), capacity))
        except PlanError as error:
            # The engine's own rules about a machine are not this test's.
            assert error.reason in ("EXPERT_CACHE_UNSAFE", "INVALID_OPTION"), error
            assume(False)
    # Where a plan moves weights off a card that would not hold them, parts take turns that stood side by side.
    assume(len({getattr(one.shape, "offload", None) for one in made}) == 1)
    small, large = (bounds(one.requirement) for one in made)
    assert all(before <= after for before, after in zip(small, large, strict=True)), (field, less, more)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(CHATS), st.integers(0, 17), st.integers(0, 17), st.data())
def test_a_longer_context_never_costs_less(name: str, one: int, other: int, data: st.DataObject) -> None:
    sample = SAMPLES[name]
    capacity = data.draw(st.sampled_from(sample.machines))
    longest = sample.family.longest_context(sample.model)
    made = []
    for power in sorted((one, other)):
        asked = sample.family.with_context(sample.request, min(1 << power, longest))
        try:
            made.append(sample.family.plan(sample.model, asked, capacity).requirement)
        except PlanError as error:
            assert error.reason == "EXPERT_CACHE_UNSAFE", error
            assume(False)
    small, large = map(bounds, made)
    assert all(before <= after for before, after in zip(small, large, strict=True))


def heavier(facts: WeightFacts, more: int) -> WeightFacts:
    """The same model with larger weights, as far as its facts say."""
    if facts.tensors:
        name = f"model.diffusion_model.extra.{more}.weight"
        added = [("", replaced(facts.tensors[0][1], name, more))]
        return sd_facts(tuple(sorted([*facts.tensors, *added])), facts.name)
    components = tuple(
        replace(
            total,
            bytes=total.bytes + 2 * more,
            precisions=tuple(
                replace(kind, bytes=kind.bytes + 2 * more, elements=kind.elements + more) for kind in total.precisions
            ),
        )
        for total in facts.components
    )
    size = sum(total.bytes for total in components)
    return replace(facts, components=components, tensor_bytes=size, file_bytes=size)


def replaced(tensor: Any, name: str, elements: int) -> Any:
    return tensor._replace(name=name, dtype="F16", shape=(1, elements), elements=elements, bytes=2 * elements)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SAMPLES)), st.integers(1, 1 << 33), st.data())
def test_more_weights_never_cost_less(name: str, more: int, data: st.DataObject) -> None:
    sample = SAMPLES[name]
    capacity = data.draw(st.sampled_from(sample.machines))
    assume(not isinstance(sample.family, Ds4Family))  # its layout is given: other tensors are other models
    light = sample.family.plan(sample.model, sample.request, capacity)
    heavy = sample.family.plan(Model(heavier(sample.model.facts, more)), sample.request, capacity)
    assert all(a <= b for a, b in zip(bounds(light.requirement), bounds(heavy.requirement), strict=True))
    assert heavy.weight_bytes >= light.weight_bytes


@pytest.mark.parametrize("name", SAMPLES)
def test_lines_add_up_to_the_peak_on_every_machine(name: str) -> None:
    sample = SAMPLES[name]
    for capacity in sample.machines:
        try:
            needed = sample.family.plan(sample.model, sample.request, capacity).requirement
        except PlanError as error:
            assert error.reason == "EXPERT_CACHE_UNSAFE", error
            continue
        for number, bound in enumerate(("low", "expected", "high")):
            assert bounds(needed)[number] == added_up(needed.lines, lambda line, at=bound: getattr(line.bytes, at))
        assert all(line.basis for line in needed.lines)


def added_up(lines: tuple[Line, ...], size: Callable[[Line], int]) -> int:
    """What is resident, and the largest phase on top."""
    resident = sum(size(line) for line in lines if line.phase is Phase.RESIDENT)
    phases = {line.phase for line in lines} - {Phase.RESIDENT}
    return resident + max((sum(size(line) for line in lines if line.phase is phase) for phase in phases), default=0)
