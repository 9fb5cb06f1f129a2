"""Fit's verdict and the ledger's refusal are one rule: WONT_RUN exactly where the empty machine refuses the claim.

Both rules are pure; the machine travels from one to the other as it does on the wire, and so does the claim.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.claim import Claim as FitClaim
from weighbridge_fit.facts import ComponentTotal, WeightFacts, WeightFormat
from weighbridge_fit.families.mlx import MlxFamily, compute_device
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.lines import Source as FigureSource
from weighbridge_fit.model import Model
from weighbridge_fit.observed import Observed
from weighbridge_fit.planning import Answer, guess
from weighbridge_fit.planning import answer as answer_for
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.solving import solve_context as solve_for
from weighbridge_fit.verdict import Verdict
from weighbridge_fit.wire.answer import claim_message
from weighbridge_fit.wire.machine import capacity_from
from weighbridge_ledger.book.charging import NOTHING_USED, on_cards, static_shortage
from weighbridge_ledger.book.states import NO_EXTERNAL, Shortage
from weighbridge_ledger.machine.capacity import assemble
from weighbridge_ledger.machine.ceilings import ceilings_for
from weighbridge_ledger.machine.messages import capacity_to_proto
from weighbridge_ledger.machine.model import Device, Machine, Pool, Source
from weighbridge_ledger.service.messages import claim_of

GIB = 1 << 30
FULL, DELTA = LayerKind.FULL_ATTENTION, LayerKind.GATED_DELTA
DENSE = ModelGeometry(
    "qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    vocab_size=151_936,
    attention_heads=16,
    kv_heads=8,
    head_size=128,
    layers=(FULL,) * 28,
    max_context_tokens=40_960,
    activation_bytes=2,
)
HYBRID = replace(
    DENSE,
    model_type="qwen3_5",
    layers=(DELTA, DELTA, DELTA, FULL) * 6,
    delta_key_heads=16,
    delta_value_heads=16,
    delta_key_size=128,
    delta_value_size=128,
    delta_conv_width=4,
)


def answer(facts: WeightFacts, request: MlxRequest, capacity: Capacity, observed: Observed | None = None) -> Answer:
    return answer_for(MlxFamily(), Model(facts), request, capacity, observed)


def solve_context(facts: WeightFacts, request: MlxRequest, capacity: Capacity) -> int:
    return solve_for(MlxFamily(), Model(facts), request, capacity)


def model(size: int, geometry: ModelGeometry = DENSE) -> WeightFacts:
    return WeightFacts(
        name="m",
        format=WeightFormat.SAFETENSORS,
        file_bytes=size,
        tensor_bytes=size,
        tensor_count=1,
        element_count=size // 2,
        largest_tensor_bytes=size // 4,
        precisions=(),
        components=(ComponentTotal("model", 1, size, ()),),
        architecture=geometry.model_type,
        geometry=geometry,
    )


def ceilings_seen_by_fit(machine: Machine, limit: int | None) -> Capacity:
    return capacity_from(capacity_to_proto(assemble(machine, limit_bytes=limit)))


def refused(claim: FitClaim, machine: Machine, limit: int | None) -> Shortage | None:
    """What the ledger says to a claim on the empty machine."""
    ceilings = ceilings_for(machine, limit)
    asked = claim_of("claim", claim_message(claim, FigureSource.DERIVED))
    placed = on_cards(asked, ceilings, NO_EXTERNAL, NOTHING_USED)
    assert placed is not None
    return static_shortage(placed, ceilings)


SIZES = st.integers(1, 4 * GIB) | st.integers(1, 600 * GIB)


def machine_of(pool: Pool, ram: int, cards: list[int]) -> Machine:
    devices = tuple(Device(f"card{index}", "card", size) for index, size in enumerate(cards))
    return Machine("node", pool, ram, devices if pool is Pool.DISCRETE else (), Source.DECLARED)


MACHINES = st.builds(
    machine_of,
    st.sampled_from(Pool),
    st.integers(256 << 20, 16 * GIB) | st.integers(GIB, 1024 * GIB),
    st.lists(st.integers(GIB, 192 * GIB), min_size=1, max_size=3),
)
LIMITS = st.none() | st.integers(-1, 8 * GIB) | st.integers(1, 1024 * GIB)
REQUESTS = st.builds(
    MlxRequest,
    context_tokens=st.sampled_from([0, 1, 256, 8192, 40_960]),
    slots=st.sampled_from([0, 1, 8, 256]),
    kv_bits=st.sampled_from([None, 4, 8]),
)


@settings(max_examples=400, deadline=None)
@given(SIZES, st.sampled_from([DENSE, HYBRID]), REQUESTS, MACHINES, LIMITS)
def test_what_fit_says_is_what_the_ledger_does(
    size: int, geometry: ModelGeometry, request: MlxRequest, machine: Machine, limit: int | None
) -> None:
    made = answer(model(size, geometry), request, ceilings_seen_by_fit(machine, limit))
    assert (made.assessment.verdict is Verdict.WONT_RUN) == (refused(made.claim, machine, limit) is not None)


@settings(max_examples=200, deadline=None)
@given(SIZES, MACHINES, LIMITS, st.integers(1, 2000 * GIB))
def test_a_measurement_changes_the_claim_and_never_the_agreement(
    size: int, machine: Machine, limit: int | None, peak: int
) -> None:
    made = answer(model(size), MlxRequest(), ceilings_seen_by_fit(machine, limit), Observed(5, peak))
    assert (made.assessment.verdict is Verdict.WONT_RUN) == (refused(made.claim, machine, limit) is not None)


@settings(max_examples=200, deadline=None)
@given(SIZES, MACHINES, LIMITS)
def test_a_guess_is_granted_on_every_empty_machine(size: int, machine: Machine, limit: int | None) -> None:
    made = guess(model(size), ceilings_seen_by_fit(machine, limit), "why")
    assert made.assessment.verdict is Verdict.UNKNOWN
    assert refused(made.claim, machine, limit) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40 * GIB), MACHINES, LIMITS)
def test_the_largest_context_runs_and_is_granted(size: int, machine: Machine, limit: int | None) -> None:
    capacity = ceilings_seen_by_fit(machine, limit)
    largest = solve_context(model(size), MlxRequest(), capacity)
    if largest:
        made = answer(model(size), MlxRequest(context_tokens=largest), capacity)
        assert made.assessment.verdict is Verdict.RUNS
        assert refused(made.claim, machine, limit) is None
        assert made.claim.host_bytes + made.claim.optional_host_bytes == made.requirement.total.high


DISCRETE: dict[str, Any] = {"node_id": "node", "pool": Pool.DISCRETE, "source": Source.DECLARED}


@pytest.mark.parametrize(
    ("ram", "card", "limit", "verdict"),
    [
        # MLX computes on the CPU there: 10 GiB of weights need 10 GiB of RAM's share (60 %), whatever the card holds.
        (8, 80, None, Verdict.WONT_RUN),
        (64, 8, None, Verdict.RUNS),
        (64, 80, 9, Verdict.WONT_RUN),
        (64, 80, 100, Verdict.RUNS),
    ],
)
def test_a_card_holds_nothing_of_an_mlx_model(ram: int, card: int, limit: int | None, verdict: Verdict) -> None:
    machine = Machine(ram_bytes=ram * GIB, devices=(Device("card", "card", card * GIB),), **DISCRETE)
    in_bytes = None if limit is None else limit * GIB
    capacity = ceilings_seen_by_fit(machine, in_bytes)
    assert compute_device(capacity) is ComputeDevice.CPU
    made = answer(model(10 * GIB), MlxRequest(context_tokens=256), capacity)
    assert made.assessment.verdict is verdict
    assert made.requirement.device_peak.high == 0
    assert not claim_message(made.claim, FigureSource.DERIVED).devices
    assert (refused(made.claim, machine, in_bytes) is not None) == (verdict is Verdict.WONT_RUN)
    if limit == 9:
        assert made.assessment.reason_code == "EXCEEDS_LIMIT"
