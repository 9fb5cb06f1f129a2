"""Verdict, claim, observations and the solver."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.claim import claim_for
from weighbridge_fit.facts import ComponentTotal, WeightFacts, WeightFormat
from weighbridge_fit.families.mlx import MlxFamily, compute_device
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.observed import Observed, sharpen, summarise
from weighbridge_fit.planning import Answer
from weighbridge_fit.planning import answer as answer_for
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.solve import largest_context
from weighbridge_fit.solving import solve_context as solve_for
from weighbridge_fit.verdict import Verdict, judge

GIB = 1 << 30

MODEL = WeightFacts(
    name="m",
    format=WeightFormat.SAFETENSORS,
    file_bytes=GIB,
    tensor_bytes=GIB,
    tensor_count=1,
    element_count=1,
    largest_tensor_bytes=1,
    precisions=(),
    components=(ComponentTotal("model", 1, GIB, ()),),
    architecture="qwen3",
    geometry=ModelGeometry(
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        vocab_size=151_936,
        attention_heads=16,
        kv_heads=8,
        head_size=128,
        layers=(LayerKind.FULL_ATTENTION,) * 28,
        max_context_tokens=40_960,
        activation_bytes=2,
    ),
)


def answer(facts: WeightFacts, request: MlxRequest, capacity: Capacity, observed: Observed | None = None) -> Answer:
    return answer_for(MlxFamily(), Model(facts), request, capacity, observed)


def solve_context(facts: WeightFacts, request: MlxRequest, capacity: Capacity) -> int:
    return solve_for(MlxFamily(), Model(facts), request, capacity)


def machine(size: int, limit: int | None = None, pool: Pool = Pool.CPU) -> Capacity:
    effective = size if limit is None else min(size, limit)
    ceiling = Ceiling(size, effective, limit)
    return Capacity(pool, ceiling, ceiling)


def needing(low: int, expected: int, high: int) -> Requirement:
    return requirement((Line("model", Phase.RESIDENT, Range(low, expected, high), Source.DERIVED, "x"),))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(7, Verdict.WONT_RUN), (8, Verdict.TIGHT), (10, Verdict.TIGHT), (11, Verdict.TIGHT), (12, Verdict.RUNS)],
)
def test_the_verdict_lies_between_the_bounds(size: int, expected: Verdict) -> None:
    assert judge(needing(8, 10, 12), machine(size)).verdict is expected


def test_the_reason_speaks_gib_and_names_whose_ceiling_it_is() -> None:
    needed = needing(8 * GIB, 10 * GIB, 12 * GIB)
    alone = judge(needed, machine(4 * GIB))
    assert (alone.reason_code, "8.00 GiB" in alone.reason, "4.00 GiB" in alone.reason) == (
        "EXCEEDS_CAPACITY",
        True,
        True,
    )
    assert "this machine" in alone.reason
    limited = judge(needed, machine(16 * GIB, limit=4 * GIB))
    assert limited.reason_code == "EXCEEDS_LIMIT"
    assert "your limit" in limited.reason
    both = judge(needed, machine(6 * GIB, limit=4 * GIB))
    assert both.reason_code == "EXCEEDS_CAPACITY", "raising the limit would not help"


def test_a_limit_above_the_machine_changes_nothing() -> None:
    needed = needing(8, 10, 12)
    assert judge(needed, machine(11, limit=100)) == judge(needed, machine(11))


ORDERED = st.lists(st.integers(0, 1000), min_size=3, max_size=3).map(sorted)


@given(ORDERED, st.integers(0, 1000))
def test_a_claim_fits_the_empty_machine_exactly_unless_the_verdict_is_wont_run(bounds: list[int], size: int) -> None:
    needed, capacity = needing(*bounds), machine(size)
    verdict = judge(needed, capacity).verdict
    claim = claim_for(needed, capacity, verdict)
    assert (claim.host_bytes <= size) is (verdict is not Verdict.WONT_RUN)
    assert claim.optional_host_bytes >= 0
    if verdict is not Verdict.WONT_RUN:
        assert claim.host_bytes == min(bounds[1], size)
        assert claim.host_bytes + claim.optional_host_bytes == min(bounds[2], size)


def test_the_host_share_binds_a_model_in_host_memory_on_a_machine_with_cards() -> None:
    capacity = Capacity(Pool.DISCRETE, Ceiling(6, 6), Ceiling(30, 30))
    assert judge(needing(8, 10, 12), capacity).verdict is Verdict.WONT_RUN


def test_metal_is_assumed_where_memory_is_unified() -> None:
    assert compute_device(machine(1, pool=Pool.UNIFIED)) is ComputeDevice.METAL
    assert compute_device(machine(1, pool=Pool.DISCRETE)) is ComputeDevice.CPU
    assert compute_device(machine(1)) is ComputeDevice.CPU


def test_the_95th_percentile_is_the_nearest_rank() -> None:
    assert summarise([]) is None
    assert summarise([5]) == Observed(1, 5)
    assert summarise(list(range(1, 101))) == Observed(100, 95)
    assert summarise([30, 10, 20]) == Observed(3, 30)


def test_three_observations_sharpen_the_expected_figure_and_nothing_else() -> None:
    needed = needing(800, 1000, 1200)
    assert sharpen(needed, Observed(2, 900)) is needed
    assert sharpen(needed, None) is needed
    assert sharpen(needed, Observed(3, 900)).total == Range(800, 927, 1200)
    assert sharpen(needed, Observed(3, 300)).total == Range(800, 800, 1200), "never below what is surely needed"
    assert sharpen(needed, Observed(3, 2000)).total == Range(800, 2060, 2060)
    assert sharpen(needed, Observed(3, 900)).lines == needed.lines


@given(st.integers(1, 40_960), st.integers(0, 50_000), st.integers(1, 512))
def test_the_solver_finds_the_largest_step_that_runs(longest: int, edge: int, step: int) -> None:
    found = largest_context(lambda context: context <= edge, longest, step)
    assert found <= longest
    assert found == longest or found % step == 0
    if found:
        assert found <= edge
    if found < longest:
        assert min(found + step, longest) > edge or found + step > longest


@pytest.mark.parametrize("size", [2.2, 2.5, 3.0, 4.0, 6.0])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_solved_context_runs_and_the_next_step_does_not(size: float, slots: int) -> None:
    capacity = machine(round(size * GIB))
    asked = MlxRequest(slots=slots)
    found = solve_context(MODEL, asked, capacity)
    assert found, "this machine holds the weights and some context"
    assert answer(MODEL, replace(asked, context_tokens=found), capacity).assessment.verdict is Verdict.RUNS
    if found < 40_960:
        following = min(found + 256, 40_960)
        assert answer(MODEL, replace(asked, context_tokens=following), capacity).assessment.verdict is not Verdict.RUNS


def test_help_names_a_context_that_runs() -> None:
    capacity = machine(3 * GIB)
    made = answer(MODEL, MlxRequest(context_tokens=40_960), capacity)
    assert made.assessment.verdict is not Verdict.RUNS
    words = made.assessment.help[0]
    context = int(words.removeprefix("A context of ").split(" ")[0].replace(",", ""))
    shorter = answer(MODEL, MlxRequest(context_tokens=context), capacity)
    assert shorter.assessment.verdict is Verdict.RUNS
    saved = (made.requirement.total.high - shorter.requirement.total.high) / GIB
    assert words == f"A context of {context:,} tokens runs here and saves {saved:.2f} GiB."


def test_help_says_how_much_is_missing_where_no_context_is_small_enough() -> None:
    smallest = answer(MODEL, MlxRequest(context_tokens=1), machine(64 * GIB)).requirement.total.high
    made = answer(MODEL, MlxRequest(context_tokens=40_960), machine(smallest - GIB // 4))
    assert any("the smallest needs 0.25 GiB more than there is" in words for words in made.assessment.help)


def test_help_for_weights_that_can_never_fit_names_a_quantisation() -> None:
    made = answer(MODEL, MlxRequest(), machine(GIB // 2))
    assert made.assessment.verdict is Verdict.WONT_RUN
    assert any("quantisation" in words and "50%" in words for words in made.assessment.help)


def test_help_for_weights_far_too_large_does_not_name_a_quantisation_that_nobody_has() -> None:
    made = answer(MODEL, MlxRequest(), machine(GIB // 50))
    assert any("smaller model" in words for words in made.assessment.help)
    assert not any("quantisation" in words for words in made.assessment.help)


def test_help_mentions_a_limit_that_is_in_the_way() -> None:
    made = answer(MODEL, MlxRequest(), machine(64 * GIB, limit=GIB))
    assert made.assessment.reason_code == "EXCEEDS_LIMIT"
    words = next(words for words in made.assessment.help if words.startswith("Your limit is 1.00 GiB"))
    assert "64.00 GiB" in words
    assert f"With a limit of {made.requirement.total.high / GIB:.2f} GiB or more it runs." in words


def test_a_machine_that_runs_it_needs_no_help() -> None:
    made = answer(MODEL, MlxRequest(), machine(64 * GIB))
    assert (made.assessment.verdict, made.assessment.help) == (Verdict.RUNS, ())
    assert made.claim.host_bytes == made.requirement.total.expected
    assert made.claim_source is Source.DERIVED
    assert answer(MODEL, MlxRequest(), machine(64 * GIB), Observed(3, 2 * GIB)).claim_source is Source.MEASURED
