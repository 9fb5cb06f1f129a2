"""The context solver over every kind of cache: its answer runs, the next step does not; and what helps really helps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.facts import ComponentTotal, WeightFacts, WeightFormat
from weighbridge_fit.families.mlx import MlxFamily
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.model import Model
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan
from weighbridge_fit.solving import solve_context
from weighbridge_fit.verdict import Verdict
from weighbridge_proto.fit.v1 import plan_pb2

FULL, SLIDING, DELTA = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION, LayerKind.GATED_DELTA
GIB = 1 << 30
LONGEST = 131_072

DENSE = ModelGeometry(
    "qwen3", hidden_size=1024, intermediate_size=3072, vocab_size=50_000, attention_heads=16, kv_heads=8,
    head_size=128, layers=(FULL,) * 28, max_context_tokens=LONGEST, activation_bytes=2,
)  # fmt: skip
HYBRID = replace(
    DENSE, model_type="qwen3_5", layers=(DELTA, DELTA, DELTA, FULL) * 7, delta_key_heads=16, delta_value_heads=16,
    delta_key_size=128, delta_value_size=128, delta_conv_width=4, head_size=256, kv_heads=4,
)  # fmt: skip
WINDOWED = replace(DENSE, model_type="llama", layers=(SLIDING, FULL) * 14, sliding_window_tokens=4096)
SHARED = replace(
    DENSE, model_type="gemma4_text", layers=(SLIDING, SLIDING, FULL) * 8 + (LayerKind.SHARED,) * 4,
    sliding_window_tokens=512,
    measures=(LayerMeasure(8, 256, 256), LayerMeasure(8, 256, 256), LayerMeasure(2, 512, 512)) * 8
    + (LayerMeasure(),) * 4,
)  # fmt: skip
LATENT = replace(
    DENSE, model_type="deepseek_v3", layers=(LayerKind.LATENT_ATTENTION,) * 20, latent_rank=512, latent_rope_size=64,
    head_size=192, value_head_size=128,
)  # fmt: skip
STATES = replace(
    DENSE, model_type="nemotron_h", layers=(LayerKind.STATE_SPACE, FULL, LayerKind.MEMORYLESS) * 6,
    measures=(LayerMeasure(state_elements=524_288, convolution_elements=18_432), LayerMeasure(), LayerMeasure()) * 6,
)  # fmt: skip
GEOMETRIES = (DENSE, HYBRID, WINDOWED, SHARED, LATENT, STATES)


def model(geometry: ModelGeometry, draft: int = 0) -> Model:
    parts = {"model": GIB, **({"draft": draft} if draft else {})}
    return Model(
        WeightFacts(
            name="m",
            format=WeightFormat.SAFETENSORS,
            file_bytes=sum(parts.values()),
            tensor_bytes=sum(parts.values()),
            tensor_count=1,
            element_count=1,
            largest_tensor_bytes=1,
            precisions=(),
            components=tuple(ComponentTotal(name, 1, size, ()) for name, size in parts.items()),
            architecture=geometry.model_type,
            geometry=geometry,
        )
    )


def machine(size: int, pool: Pool) -> Capacity:
    return Capacity(pool, Ceiling(size, size), Ceiling(size, size))


REQUESTS = st.builds(
    MlxRequest,
    slots=st.integers(1, 4),
    prefill_step_tokens=st.sampled_from([None, 1, 100, 256, 4096]),
    draft_head=st.booleans(),
    prompt_cache_bytes=st.sampled_from([None, GIB // 8]),
)
MACHINES = st.builds(machine, st.integers(2 * GIB, 24 * GIB), st.sampled_from([Pool.CPU, Pool.UNIFIED]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GEOMETRIES), REQUESTS, MACHINES)
def test_a_solved_context_runs_and_the_next_step_does_not(
    geometry: ModelGeometry, asked: MlxRequest, capacity: Capacity
) -> None:
    family, weighed = MlxFamily(), model(geometry, draft=GIB // 16)
    found = solve_context(family, weighed, asked, capacity)

    def verdict(context: int) -> Verdict:
        return answer(family, weighed, replace(asked, context_tokens=context), capacity).assessment.verdict

    if found:
        assert verdict(found) is Verdict.RUNS
    if found < LONGEST:
        assert verdict(min(found + 256, LONGEST)) is not Verdict.RUNS


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(GEOMETRIES), REQUESTS, st.integers(1, 100_000), st.integers(1, 5000))
def test_every_kind_of_cache_is_monotone_in_context_and_slots(
    geometry: ModelGeometry, asked: MlxRequest, context: int, more: int
) -> None:
    facts = model(geometry, draft=GIB // 16).facts
    for device in (MlxFamily().plan(model(geometry), MlxRequest(), machine(GIB, pool)).shape.device for pool in Pool):
        base = plan(facts, replace(asked, context_tokens=context), device).requirement.total
        for larger in (
            replace(asked, context_tokens=context + more),
            replace(asked, context_tokens=context, slots=asked.slots + 1),
        ):
            total = plan(facts, larger, device).requirement.total
            assert total.low >= base.low and total.expected >= base.expected and total.high >= base.high


def test_windows_and_states_stop_growing() -> None:
    for geometry, name in ((WINDOWED, "kv_window"), (STATES, "recurrent_state")):
        sizes = {
            line.bytes
            for context in (20_000, 100_000)
            for line in MlxFamily()
            .plan(model(geometry), MlxRequest(context_tokens=context), machine(GIB, Pool.CPU))
            .requirement.lines
            if line.component == name
        }
        assert len(sizes) == 1


@pytest.mark.parametrize(
    ("geometry", "size", "expected"),
    [
        (DENSE, 7, {"kv_bits": 8, "prefill_step_tokens": 256}),
        (DENSE, 10, {"prefill_step_tokens": 1024}),
        (HYBRID, 5, {"prefill_step_tokens": 256}),
        (HYBRID, 8, {"prefill_step_tokens": 1024}),
        (WINDOWED, 4, {}),
    ],
)
def test_what_is_said_to_help_helps(geometry: ModelGeometry, size: int, expected: dict[str, int]) -> None:
    family, weighed, capacity = MlxFamily(), model(geometry), machine(size * GIB, Pool.UNIFIED)
    asked = MlxRequest(context_tokens=60_000)
    said = [words for words in answer(family, weighed, asked, capacity).assessment.help if "saves up to" in words]
    assert len(said) == bool(expected)
    for name, value in expected.items():
        assert f"{name}={value}" in said[0] and "GiB" in said[0]
    helped = answer(family, weighed, replace(asked, **expected), capacity).assessment.verdict  # type: ignore[arg-type]
    assert (helped is Verdict.RUNS) is bool(expected)


@pytest.mark.parametrize(
    ("target", "drafter", "longest"),
    [
        (DENSE, replace(DENSE, layers=(FULL,) * 2, max_context_tokens=32_768), 32_768),
        (DENSE, replace(WINDOWED, layers=(SLIDING, FULL), max_context_tokens=0), 4095),
        (WINDOWED, replace(DENSE, layers=(FULL,) * 2), 4095),
        (DENSE, replace(DENSE, layers=(FULL,) * 2), LONGEST),
    ],
)
def test_a_drafter_bounds_the_context_that_is_solved_for(
    target: ModelGeometry, drafter: ModelGeometry, longest: int
) -> None:
    """A drafter was made for a context, and windows can be cut back until they are full: a bound, not a refusal."""
    weighed = replace(model(target), companions={"drafter": model(drafter).facts})
    asked, ample = MlxRequest(draft_model="d"), machine(600 * GIB, Pool.UNIFIED)
    assert solve_context(MlxFamily(), weighed, asked, ample) == longest


def test_options_travel_there_and_back() -> None:
    family = MlxFamily()
    options = plan_pb2.EngineOptions(
        mlx=plan_pb2.MlxOptions(
            kv_bits=8, kv_group_size=32, draft_head=True, draft_tokens=2, prompt_cache_bytes=GIB,
            prefill_step_tokens=512, allocator_cache_bytes=0, split_lane="none",
        )
    )  # fmt: skip
    workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=1000, slots=2))
    made = family.plan(model(DENSE, draft=1000), family.request(workload, options), machine(GIB, Pool.CPU))
    returned = family.options(made)
    again = family.plan(
        model(DENSE, draft=1000), family.request(family.workload(made), returned), machine(GIB, Pool.CPU)
    )
    assert again.shape == made.shape
    assert returned.mlx.draft_tokens == 2 and returned.mlx.prompt_cache_bytes == GIB
    assert family.launch(made) is None, "the MLX engine of this version has no draft head"


def test_companions_are_named_by_their_roles() -> None:
    options = plan_pb2.EngineOptions(mlx=plan_pb2.MlxOptions(adapters=["a/b", "c"], draft_model="d"))
    assert MlxFamily().companions(options) == {"adapter:a/b": "a/b", "adapter:c": "c", "drafter": "d"}


@pytest.mark.parametrize("names", [["a"] * 2, [""], ["a+b"], [str(number) for number in range(100_000)]])
def test_adapters_that_cannot_be_are_refused_before_any_is_read(names: list[str]) -> None:
    options = plan_pb2.EngineOptions(mlx=plan_pb2.MlxOptions(adapters=names))
    with pytest.raises(PlanError) as refused:
        MlxFamily().companions(options)
    assert (refused.value.reason, refused.value.field) == ("INVALID_OPTION", "options.mlx.adapters")
