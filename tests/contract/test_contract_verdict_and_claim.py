"""Fit's verdict and the ledger's refusal are one rule: WONT_RUN exactly where the empty machine refuses the claim.

Both rules are pure; the machine travels from one to the other as it does on the wire, and so does the claim.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.catalog.manifest import read_manifest
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.claim import Claim as FitClaim
from weighbridge_fit.claim import DeviceClaim, claim_for
from weighbridge_fit.facts import ComponentTotal, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.families.mlx import MlxFamily, compute_device
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.lines import Line, Phase, Range, requirement
from weighbridge_fit.lines import Source as FigureSource
from weighbridge_fit.model import Model
from weighbridge_fit.observed import Observed
from weighbridge_fit.planning import Answer, guess
from weighbridge_fit.planning import answer as answer_for
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_fit.solving import solve_context as solve_for
from weighbridge_fit.solving import solve_size
from weighbridge_fit.verdict import Verdict, judge, uses_card
from weighbridge_fit.wire.answer import claim_message
from weighbridge_fit.wire.machine import capacity_from
from weighbridge_ledger.book.charging import NOTHING_USED, static_shortage
from weighbridge_ledger.book.placing import on_cards
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


BOUNDS = st.lists(st.integers(0, 24).map(lambda size: size * GIB), min_size=3, max_size=3).map(sorted)
LINES = st.lists(
    st.builds(
        lambda bounds, phase, on_device: Line(
            "x", phase, Range(*bounds), FigureSource.DERIVED, "", Range(*bounds), on_device
        ),
        BOUNDS,
        st.sampled_from(Phase),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


SMALL_MACHINES = st.builds(
    machine_of,
    st.sampled_from([Pool.DISCRETE, Pool.DISCRETE, Pool.UNIFIED, Pool.CPU]),
    st.integers(1, 64).map(lambda size: size * GIB),
    st.lists(st.integers(1, 24).map(lambda size: size * GIB), min_size=1, max_size=3),
)
SMALL_LIMITS = st.none() | st.integers(1, 60).map(lambda size: size * GIB)


@settings(max_examples=1000, deadline=None)
@given(LINES, SMALL_MACHINES, SMALL_LIMITS, st.booleans())
def test_any_requirement_is_refused_by_both_or_by_neither(
    lines: list[Line], machine: Machine, limit: int | None, only_largest: bool
) -> None:
    """Whatever a family plans, on a card or in host memory; also where it may hold less on the card than all of it."""
    capacity = ceilings_seen_by_fit(machine, limit)
    if not capacity.devices:
        lines = [replace(line, on_device=False) for line in lines]
    needed = requirement(tuple(lines))
    if only_largest:
        needed = replace(needed, device=Range(0, needed.device.expected, needed.device.high))
    verdict = judge(needed, capacity).verdict
    shortage = refused(claim_for(needed, capacity, verdict), machine, limit)
    assert (verdict is Verdict.WONT_RUN) == (shortage is not None)
    # And it is said exactly where even the least there is to place finds no place.
    on_card = uses_card(needed, capacity)
    least = (
        FitClaim(needed.host.low, 0, (DeviceClaim("", needed.device.low),) if needed.device.low else ())
        if on_card
        else FitClaim(needed.total.low, 0)
    )
    nowhere = refused(least, machine, limit) is not None or (on_card and needed.total.low > capacity.total.effective)
    assert (verdict is Verdict.WONT_RUN) == nowhere


def test_several_cards_are_not_one_large_card() -> None:
    """20 GiB on one of three cards with 7.6 each: 12.4 spill, and 6 GiB of host memory do not hold them."""
    machine = machine_of(Pool.DISCRETE, 10 * GIB, [8 * GIB] * 3)
    capacity = ceilings_seen_by_fit(machine, None)
    weights = Range.exactly(20 * GIB)
    needed = requirement((Line("x", Phase.RESIDENT, weights, FigureSource.DERIVED, "", on_device=True),))
    assert needed.total.low < capacity.total.effective
    assert judge(needed, capacity).verdict is Verdict.WONT_RUN
    assert refused(claim_for(needed, capacity, Verdict.WONT_RUN), machine, None) is not None


def diffusion_model(text: int, diffusion: int, vae: int) -> Model:
    """A klein 4B of any size: parts in MiB of half precision."""
    sizes = {
        "text_encoders.llm.model.layers.0.mlp.up_proj.weight": (text, 1 << 19),
        "model.diffusion_model.double_blocks.0.img_attn.qkv.weight": (diffusion, 1 << 19),
        "first_stage_model.decoder.conv_in.weight": (vae, 1 << 15, 4, 4),
    }
    tensors = tuple(
        ("", TensorFact(name, "F16", shape, prod(shape), 2 * prod(shape))) for name, shape in sorted(sizes.items())
    )
    size = sum(fact.bytes for _, fact in tensors)
    return Model(
        replace(model(size), geometry=None, architecture="klein4b", tensors=tensors, tensor_count=len(tensors))
    )


PICTURES = st.builds(
    SdRequest,
    width_px=st.sampled_from([0, 64, 512, 832, 1024, 2048]),
    height_px=st.sampled_from([0, 64, 512, 1216, 1024, 2048]),
    source_images=st.integers(0, 1),
    reference_images=st.integers(0, 2),
    vae_tiling=st.sampled_from([None, False, True]),
    flash_attention=st.sampled_from([None, True]),
    offload_to_cpu=st.sampled_from([None, False, True]),
    text_encoder_on_cpu=st.sampled_from([None, True]),
    vae_on_cpu=st.sampled_from([None, True]),
    mmap=st.sampled_from([None, True]),
)
PARTS = st.builds(diffusion_model, st.integers(1, 40_000), st.integers(1, 60_000), st.integers(1, 2_000))
SD = SdFamily()


@settings(max_examples=400, deadline=None)
@given(PARTS, PICTURES, MACHINES, LIMITS)
def test_pictures_are_refused_by_both_or_by_neither(
    parts: Model, request: SdRequest, machine: Machine, limit: int | None
) -> None:
    """One memory, none but the CPU's, one to three cards."""
    made = answer_for(SD, parts, request, ceilings_seen_by_fit(machine, limit), advise=False)
    assert (made.assessment.verdict is Verdict.WONT_RUN) == (refused(made.claim, machine, limit) is not None)


CATALOGUE = Path(__file__).parents[2] / "catalog" / "models"
GRID = [
    *((Pool.UNIFIED, ram, ()) for ram in (4, 8, 16, 24, 64, 128)),
    *((Pool.CPU, ram, ()) for ram in (2, 8, 16, 32, 128)),
    *(
        (Pool.DISCRETE, ram, cards)
        for ram in (8, 16, 32, 64)
        for cards in ((4,), (8,), (12,), (24,), (12, 24), (8,) * 3)
    ),
]


def test_every_catalogue_picture_model_on_every_machine_of_a_grid() -> None:
    entries = [read_manifest(path.read_bytes(), path.name) for path in sorted(CATALOGUE.glob("*.json"))]
    pictures = [known_by_sizes(entry) for entry in entries if entry.engine is Engine.SD]
    assert len(pictures) == 12
    seen = set()
    for model_ in pictures:
        for pool, ram, cards in GRID:
            for limit in (None, 6 * GIB):
                machine = machine_of(pool, ram * GIB, [card * GIB for card in cards])
                made = answer_for(SD, model_, SdRequest(), ceilings_seen_by_fit(machine, limit), advise=False)
                verdict = made.assessment.verdict
                assert (verdict is Verdict.WONT_RUN) == (refused(made.claim, machine, limit) is not None)
                seen.add((pool, verdict))
    assert seen >= {(pool, verdict) for pool in Pool for verdict in (Verdict.RUNS, Verdict.WONT_RUN, Verdict.TIGHT)}


@settings(max_examples=15, deadline=None)
@given(PARTS, MACHINES, LIMITS, st.sampled_from([(1, 1), (3, 2), (2, 3)]))
def test_the_largest_picture_runs_and_is_granted_and_the_next_does_not_run(
    parts: Model, machine: Machine, limit: int | None, aspect: tuple[int, int]
) -> None:
    capacity = ceilings_seen_by_fit(machine, limit)
    width, height = solve_size(SD, parts, SdRequest(vae_tiling=True), capacity, aspect)
    asked = SdRequest(vae_tiling=True, width_px=width, height_px=height)
    if not width:
        smallest = SdRequest(vae_tiling=True, width_px=64, height_px=64)
        made = answer_for(SD, parts, smallest, capacity, advise=False)
        assert made.assessment.verdict is not Verdict.RUNS
        return
    made = answer_for(SD, parts, asked, capacity, advise=False)
    assert made.assessment.verdict is Verdict.RUNS
    assert refused(made.claim, machine, limit) is None
    longer = max(width, height) + SD.side_step(parts)
    if longer <= SD.side_range(parts)[1]:
        next_size = (
            (longer, longer)
            if aspect == (1, 1)
            else ((longer, -(-longer * 2 // 48) * 16) if aspect == (3, 2) else (-(-longer * 2 // 48) * 16, longer))
        )
        larger = SdRequest(vae_tiling=True, width_px=next_size[0], height_px=next_size[1])
        assert answer_for(SD, parts, larger, capacity, advise=False).assessment.verdict is not Verdict.RUNS


@pytest.mark.parametrize(
    ("ram", "card", "verdict", "required"),
    [
        # 4 GiB of text encoder and 6 of diffusion model, 1024 x 1024 in tiles: 10 GiB of weights, 2.7 GiB of buffer.
        (64, 24, Verdict.RUNS, None),
        # The weights exceed the card: parts wait in host memory, and the claim is the whole card.
        (64, 10, Verdict.TIGHT, 0.95 * 10),
        # The largest part exceeds it too: it spills, as the ledger lets the only model of a card.
        (64, 4, Verdict.TIGHT, 0.95 * 4),
        # 60 % of 8 GiB and 3.8 GiB of card hold less than the weights alone.
        (8, 4, Verdict.WONT_RUN, None),
    ],
)
def test_a_card_is_charged_for_weights_and_claimed_for_the_peak(
    ram: int, card: int, verdict: Verdict, required: float | None
) -> None:
    machine = machine_of(Pool.DISCRETE, ram * GIB, [card * GIB])
    parts = diffusion_model(4 << 10, 6 << 10, 160)
    asked = SdRequest(width_px=1024, height_px=1024, vae_tiling=True)
    made = answer_for(SD, parts, asked, ceilings_seen_by_fit(machine, None), advise=False)
    assert made.assessment.verdict is verdict
    needed = made.requirement
    assert needed.device.low == 6 * GIB, "the largest component alone"
    assert needed.device.expected == 10 * GIB + (160 << 20), "all weights"
    assert (refused(made.claim, machine, None) is not None) == (verdict is Verdict.WONT_RUN)
    if required is not None:
        assert made.claim.devices[0].required_bytes == int(required * GIB)
    if verdict is Verdict.RUNS:
        assert made.claim.devices[0].required_bytes == needed.device_peak.expected > needed.device.expected
