"""Any ds4 launch on any machine: lines, totals, claim and flags are one plan; the ledger refuses what fit refuses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.facts import Role
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.lines import Phase
from weighbridge_fit.lines import Source as FigureSource
from weighbridge_fit.model import Model
from weighbridge_fit.planning import Answer, answer, too_small
from weighbridge_fit.plans.ds4.options import Ds4Request
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.verdict import Verdict
from weighbridge_fit.wire.answer import claim_message
from weighbridge_fit.wire.machine import capacity_from
from weighbridge_ledger.book.charging import NOTHING_USED, static_shortage
from weighbridge_ledger.book.placing import on_cards
from weighbridge_ledger.book.states import NO_EXTERNAL
from weighbridge_ledger.machine.capacity import assemble
from weighbridge_ledger.machine.ceilings import ceilings_for
from weighbridge_ledger.machine.messages import capacity_to_proto
from weighbridge_ledger.machine.model import Device, Machine, Pool, Source
from weighbridge_ledger.service.messages import claim_of

from services.fit.tests.fit_ds4_layout import GIB, companion, facts_of, flash, glm, listed, pro, slim, tensor, v41

FAMILY = Ds4Family()
BLOCK = tensor("blk.3.nextn.eh_proj.weight", "F16", 1024, 1024)
MODELS = [
    *(listed(f"deepseek-v4-flash-284b-{mix}") for mix in ("q2", "q2q4", "q4", "mxfp4")),
    listed("glm-5.2-754b-q2"),
    *(
        Model(facts_of(tensors, architecture), paths={"": "/models/main.gguf"})
        for tensors, architecture in (
            (slim(flash()), "deepseek4"),
            (slim(flash("q2", range(37, 43))), "deepseek4"),
            (v41(), "deepseek41"),
            (v41("q4"), "deepseek41"),
            ((*glm(), BLOCK), "glm-dsa"),
            (pro(), "deepseek4"),
            (slim(flash()), "laguna"),
        )
    ),
]
DRAFTERS = [
    None,
    companion(5_991_479_541),
    companion(8 * GIB),
    companion(3_865_470_566, "mtp.0.a"),
    replace(companion(1 << 20), role=Role.DRAFTER),
]
VISIONS = [None, companion(934_155_386), replace(companion(12 * GIB), role=Role.PROJECTOR)]


def beside(model: Model, drafter: Any, vision: Any) -> Model:
    found = {role: facts for role, facts in (("drafter", drafter), ("vision", vision)) if facts is not None}
    paths = dict(model.paths) | {role: f"/models/{role}.gguf" for role in found}
    return replace(model, companions=found, paths=paths)


def numbered(model: int, drafter: int, vision: int) -> Model:
    """By numbers: what fails is printed, and a model has hundreds of tensors."""
    return beside(MODELS[model], DRAFTERS[drafter], VISIONS[vision])


ANY_MODEL = st.tuples(*(st.integers(0, len(each) - 1) for each in (MODELS, DRAFTERS, VISIONS)))


def _machine(pool: Pool, ram: int, cards: list[int], platform: str) -> Machine:
    devices = tuple(Device(str(number), "card", size * GIB) for number, size in enumerate(cards))
    own = devices if pool is Pool.DISCRETE else ()
    return Machine(
        node_id="node", pool=pool, ram_bytes=ram * GIB, devices=own, source=Source.DECLARED, platform=platform
    )


MACHINES = st.one_of(
    st.builds(
        _machine,
        st.just(Pool.UNIFIED),
        st.integers(8, 768),
        st.just([]),
        st.sampled_from(["darwin/arm64", "linux/arm64", ""]),
    ),
    st.builds(_machine, st.just(Pool.CPU), st.integers(8, 768), st.just([]), st.just("linux/x86_64")),
    st.builds(
        _machine,
        st.just(Pool.DISCRETE),
        st.integers(8, 768),
        st.lists(st.sampled_from([8, 24, 48, 80, 141]), min_size=1, max_size=3),
        st.sampled_from(["linux/x86_64", ""]),
    ),
)
LIMITS = st.none() | st.integers(1, 400).map(lambda size: size * GIB)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


REQUESTS = st.builds(
    Ds4Request,
    context_tokens=st.sampled_from([0, 1, 4096, 16_384, 65_536, 262_144, 1_000_000]),
    slots=st.just(0),
    sessions=maybe(st.integers(1, 8)),
    stream_experts=maybe(st.booleans()),
    expert_cache_gib=maybe(st.integers(1, 200)),
    prefill_chunk_tokens=maybe(st.sampled_from([1, 512, 2048, 4096, 8192])),
    draft_policy=maybe(st.sampled_from(["off", "on", "auto"])),
    vision=maybe(st.booleans()),
    disk_kv=maybe(st.booleans()),
    power=maybe(st.sampled_from(["1", "50", "100"])),
    engine_layout=maybe(st.sampled_from(["2026-05", "2026-07"])),
)
# Every flag that a launch may have, and whether a value follows: what ds4 8d57664, 7e3dbef and the builds since name
# their own. Host, port and the folder of checkpoints are the engine's to add.
FLAGS = {
    "--model": True,
    "--metal": False,
    "--cuda": False,
    "--cpu": False,
    "--ctx": True,
    "--kv-disk-space-mb": True,
    "--ssd-streaming": False,
    "--ssd-streaming-cache-experts": True,
    "--prefill-chunk": True,
    "--power": True,
    "--batched-session": True,
    "--dspark": False,
    "--mtp-model": True,
    "--mtp-draft": True,
    "--glm-mtp": False,
    "--vision": True,
}


def seen(machine: Machine, limit: int | None) -> Capacity:
    return capacity_from(capacity_to_proto(assemble(machine, limit_bytes=limit)))


def planned(model: Model, request: Ds4Request, capacity: Capacity) -> Answer | None:
    try:
        return answer(FAMILY, model, request, capacity, advise=False)
    except PlanError:
        return None


def parsed(flags: tuple[str, ...]) -> dict[str, str]:
    """Flags with their values, each at most once; fails for any that is not on the list."""
    found: dict[str, str] = {}
    rest: Iterator[str] = iter(flags)
    for flag in rest:
        assert flag in FLAGS and flag not in found, flags
        found[flag] = next(rest) if FLAGS[flag] else ""
    return found


@settings(max_examples=400, deadline=None)
@given(ANY_MODEL, REQUESTS, MACHINES, LIMITS)
def test_lines_add_up_to_the_totals_and_the_totals_to_the_claim(
    numbers: tuple[int, int, int], request: Ds4Request, machine: Machine, limit: int | None
) -> None:
    model, capacity = numbered(*numbers), seen(machine, limit)
    made = planned(model, request, capacity)
    if made is None:
        return
    needed, claim = made.requirement, made.claim
    passing = {each.component for each in needed.lines if each.phase is not Phase.RESIDENT}
    assert passing <= {"disk_kv"}, "one phase more than what is held, so that sums are sums"
    for bound in ("low", "expected", "high"):
        assert getattr(needed.total, bound) == sum(getattr(each.bytes, bound) for each in needed.lines)
        on_card = sum(getattr(each.bytes, bound) for each in needed.lines if each.on_device)
        assert getattr(needed.device_peak, bound) == getattr(needed.device, bound) == on_card
    required = claim.host_bytes + sum(card.required_bytes for card in claim.devices)
    most = required + claim.optional_host_bytes + sum(card.optional_bytes for card in claim.devices)
    assert required <= needed.total.expected and most <= max(required, needed.total.high)
    if made.assessment.verdict is Verdict.WONT_RUN:
        assert required == needed.total.expected, "what is refused claims what it needs, uncut"
    else:
        assert claim.host_bytes + claim.optional_host_bytes <= capacity.host_ceiling.effective
        assert most <= capacity.total.effective
        for card in claim.devices:
            assert card.required_bytes + card.optional_bytes <= capacity.largest_card.ceiling.effective
    if made.assessment.verdict is Verdict.RUNS:
        assert (required, most) == (needed.total.expected, needed.total.high), "nothing is cut"


@settings(max_examples=400, deadline=None)
@given(ANY_MODEL, REQUESTS, MACHINES, LIMITS)
def test_flags_say_what_was_planned_and_every_part_of_it_has_a_line(
    numbers: tuple[int, int, int], request: Ds4Request, machine: Machine, limit: int | None
) -> None:
    model = numbered(*numbers)
    made = planned(model, request, seen(machine, limit))
    if made is None:
        return
    message = FAMILY.launch(made.plan)
    assert message is not None
    launch, options = message.ds4, FAMILY.options(made.plan).ds4
    flags, lines = parsed(tuple(launch.arguments)), {line.component: line for line in made.requirement.lines}
    assert [name for name in ("metal", "cuda", "cpu") if f"--{name}" in flags] == [launch.compute] == [options.compute]
    assert int(flags["--ctx"]) == launch.context_tokens == FAMILY.workload(made.plan).chat.context_tokens
    assert int(flags.get("--batched-session", 1)) == launch.sessions == options.sessions
    assert int(flags.get("--prefill-chunk", launch.prefill_chunk_tokens)) == launch.prefill_chunk_tokens
    assert flags.get("--power", "100") == options.power
    # Streamed: the cache of the flags is the one that the lines hold, all but a part of one expert.
    assert ("--ssd-streaming" in flags) is ("--ssd-streaming-cache-experts" in flags) is options.stream_experts
    assert ("expert_cache" in lines) is options.stream_experts
    if options.stream_experts:
        assert flags["--ssd-streaming-cache-experts"] == f"{options.expert_cache_gib}GB"
        held = sum(lines[name].bytes.high for name in ("expert_cache", "prefill_reserve") if name in lines)
        assert 0 < held <= options.expert_cache_gib * GIB
        assert launch.loaded_bytes == lines["model"].bytes.expected
    # Companions: a flag, a file and a line, or none of them.
    assert ("--vision" in flags) is launch.vision is options.vision is ("vision" in lines)
    drafts = "--mtp-model" in flags or "--glm-mtp" in flags
    assert drafts is ("drafter" in lines)
    assert "--mtp-model" in flags or not {"--dspark", "--mtp-draft"} & flags.keys()
    assert not drafts or (options.draft_policy != "off" and launch.sessions == 1)
    if "--mtp-model" in flags:
        assert lines["drafter"].bytes.low >= model.companions["drafter"].file_bytes
    if launch.vision:
        assert lines["vision"].bytes.low == model.companions["vision"].file_bytes
    assert ("--kv-disk-space-mb" in flags) is ("disk_kv" in lines) is options.disk_kv
    # ds4 prints less than it holds.
    assert launch.planned_bytes <= made.requirement.total.expected
    assert flags.get("--model", "") == model.path


@settings(max_examples=200, deadline=None)
@given(ANY_MODEL, REQUESTS, MACHINES, LIMITS)
def test_what_was_planned_is_planned_alike_again(
    numbers: tuple[int, int, int], request: Ds4Request, machine: Machine, limit: int | None
) -> None:
    """Options and workload as they are shown are the whole decision: nothing is left for an engine to decide."""
    model, capacity = numbered(*numbers), seen(machine, limit)
    made = planned(model, request, capacity)
    if made is None:
        return
    again = planned(model, FAMILY.request(FAMILY.workload(made.plan), FAMILY.options(made.plan)), capacity)
    assert again is not None
    assert again.plan.shape.text() == made.plan.shape.text()
    assert (again.plan.arguments, again.requirement, again.claim) == (
        made.plan.arguments,
        made.requirement,
        made.claim,
    )


@settings(max_examples=400, deadline=None)
@given(ANY_MODEL, REQUESTS, MACHINES, LIMITS)
def test_launches_are_refused_by_both_or_by_neither(
    numbers: tuple[int, int, int], request: Ds4Request, machine: Machine, limit: int | None
) -> None:
    """WONT_RUN exactly where the empty ledger refuses the claim, EXPERT_CACHE_UNSAFE included."""
    model, capacity = numbered(*numbers), seen(machine, limit)
    try:
        made = answer(FAMILY, model, request, capacity, advise=False)
        verdict, claim = made.assessment.verdict, made.claim
    except PlanError as error:
        refused = too_small(model.facts, capacity, error)
        if refused is None:
            return
        verdict, claim = refused.assessment.verdict, refused.claim
        assert verdict is Verdict.WONT_RUN
    ceilings = ceilings_for(machine, limit)
    wanted = claim_of("claim", claim_message(claim, FigureSource.DERIVED))
    placed = on_cards(wanted, ceilings, NO_EXTERNAL, NOTHING_USED)
    assert placed is not None
    assert (static_shortage(placed, ceilings) is not None) is (verdict is Verdict.WONT_RUN)


def test_the_properties_meet_launches_of_every_kind() -> None:
    """What a generator never makes, no property tests: one launch of each kind, by hand."""
    gb10 = seen(_machine(Pool.UNIFIED, 256, [], "linux/arm64"), None)
    v4, other = MODELS[5], MODELS[7]
    for model, request, flags in (
        (beside(v4, DRAFTERS[1], None), Ds4Request(stream_experts=False), {"--dspark", "--mtp-model"}),
        (beside(v4, DRAFTERS[3], VISIONS[1]), Ds4Request(stream_experts=False, draft_policy="on"), {"--mtp-draft"}),
        (beside(other, DRAFTERS[2], None), Ds4Request(draft_policy="on"), {"--ssd-streaming", "--dspark"}),
        (MODELS[9], Ds4Request(stream_experts=False, draft_policy="on"), {"--glm-mtp"}),
        (v4, Ds4Request(sessions=3, power="50"), {"--batched-session", "--power", "--prefill-chunk"}),
    ):
        made = planned(model, request, gb10)
        assert made is not None and flags <= parsed(made.plan.arguments).keys()
