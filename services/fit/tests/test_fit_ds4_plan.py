"""The ds4 plan: lines that add up to ds4's own accounting, decisions, refusals, companions, machines, monotony."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_common.sizes import format_gib
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.lines import Line, Phase
from weighbridge_fit.model import Model
from weighbridge_fit.planning import too_small
from weighbridge_fit.plans.ds4.options import Ds4Request, Ds4Shape
from weighbridge_fit.plans.ds4.plan import plan
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Note, Plan
from weighbridge_fit.verdict import Verdict

from services.fit.tests.fit_ds4_layout import (
    GIB,
    MIB,
    companion,
    entry,
    facts_of,
    flash,
    listed,
    processor,
    unified,
    with_card,
)

Q2 = Model(facts_of(flash()), paths={"": "/models/q2.gguf"})
CATALOGUE = ("deepseek-v4-flash-284b-q2", "deepseek-v4-flash-284b-q2q4", "deepseek-v4-flash-284b-q4", "glm-5.2-754b-q2")
Q2_LISTED = listed("deepseek-v4-flash-284b-q2")
RESIDENT = Ds4Request(stream_experts=False)
GB10 = unified(128, "linux/arm64")


def made(model: Model = Q2_LISTED, capacity: Capacity | None = None, **asked: Any) -> Plan:
    return plan(model, Ds4Request(**asked), capacity or unified(128))


def shape(plan_made: Plan) -> Ds4Shape:
    assert isinstance(plan_made.shape, Ds4Shape)
    return plan_made.shape


def line(plan_made: Plan, component: str) -> Line:
    return next(each for each in plan_made.requirement.lines if each.component == component)


def components(plan_made: Plan) -> set[str]:
    return {each.component for each in plan_made.requirement.lines}


def note(plan_made: Plan, code: str) -> Note | None:
    return next((each for each in plan_made.notes if each.code == code), None)


def v41(size: int = 365_713_686_528, **changes: Any) -> Model:
    facts = dataclasses.replace(Q2_LISTED.facts, file_bytes=size, architecture="deepseek41", name="v4.1")
    return dataclasses.replace(Model(facts), **changes)


def test_ds4_prints_a_plan_of_35_35_gib_for_the_logged_launch() -> None:
    launch = made(context_tokens=131_072)
    assert shape(launch).expert_cache_gib == 32
    printed = note(launch, "ENGINE_PRINTS")
    assert printed is not None
    assert round(int(printed.metadata["planned_bytes"]) / GIB, 2) == 35.35
    parts = {name: round(line(launch, name).bytes.expected / GIB, 2) for name in components(launch)}
    assert parts["kv_cache"] == 1.36
    assert parts["context_scratch"] == 1.00
    assert parts["expert_cache"] == 28.62
    assert round(line(launch, "prefill_reserve").bytes.expected / GIB, 3) == 3.375
    # What the print leaves out: about 7.2 GiB more of weights that stay, and 3.9 GiB of workspace.
    assert round(line(launch, "model").bytes.expected / GIB - 0.99, 1) == 7.2
    assert parts["workspace"] == 3.89


def test_both_lines_are_shown() -> None:
    launch = made(context_tokens=131_072)
    both = note(launch, "POLICY_RESIDENT")
    assert both is not None
    assert int(both.metadata["policy_bytes"]) == 36 * GIB
    assert int(both.metadata["engine_bytes"]) == launch.requirement.total.expected
    assert "count on 36.00 GiB" in both.message
    # Words for whoever loads a model: what is claimed comes first, and a lease may be larger.
    assert both.message.startswith(f"At least {format_gib(launch.requirement.total.expected)} of memory is claimed")
    assert "policy" not in both.message and "priced" not in both.message
    resident = made(capacity=unified(128), stream_experts=False)
    both = note(resident, "POLICY_RESIDENT")
    assert both is not None and int(both.metadata["policy_bytes"]) == 96 * GIB


def test_a_resident_launch_holds_file_context_workspace_and_slack() -> None:
    launch = made(capacity=GB10, stream_experts=False, context_tokens=131_072)
    assert not shape(launch).streams
    assert line(launch, "model").bytes.expected == 86_720_111_488
    assert line(launch, "backend_slack").bytes.expected >= 8 * GIB
    context = line(launch, "kv_cache").bytes.expected + line(launch, "context_scratch").bytes.expected
    assert round(context / MIB, 2) == 3111.75
    # Reported on a GB10 at 131,072 tokens: about 105 GiB, system included.
    total = launch.requirement.total
    assert total.expected < 105 * GIB
    assert total.high > 104 * GIB
    assert components(launch).isdisjoint({"expert_cache", "prefill_reserve"})
    assert launch.weight_bytes == 86_720_111_488


@pytest.mark.parametrize("context", [32_768, 163_840, 1_000_000])
def test_the_context_lines_are_what_ds4_prints(context: int) -> None:
    printed = {32_768: 1053.75, 163_840: 3797.75, 1_000_000: 21302.79}
    launch = made(Q2, GB10, context_tokens=context)
    buffers = line(launch, "kv_cache").bytes.expected + line(launch, "context_scratch").bytes.expected
    assert abs(buffers / MIB - printed[context]) <= 0.01


@pytest.mark.parametrize(
    ("layout", "capacity", "mib"),
    [
        ("2026-05", GB10, 2426),
        ("2026-07", GB10, 3112),
        ("2026-07", unified(128), 2420),
        ("2026-07", processor(128), 1731),
    ],
)
def test_layouts_and_backends_differ(layout: str, capacity: Capacity, mib: int) -> None:
    launch = made(Q2, capacity, context_tokens=131_072, engine_layout=layout)
    buffers = line(launch, "kv_cache").bytes.expected + line(launch, "context_scratch").bytes.expected
    assert round(buffers / MIB) == mib


def test_residency_only_where_it_was_asked_for_and_leaves_32_gib() -> None:
    assert shape(made(capacity=unified(128))).streams
    assert not shape(made(capacity=unified(128), stream_experts=False)).streams
    assert not shape(made(capacity=unified(113), stream_experts=False)).streams
    refused = made(capacity=unified(112), stream_experts=False)
    assert shape(refused).streams
    why = note(refused, "RESIDENCY_REFUSED")
    assert why is not None and "112.76 GiB" in why.message
    for platform in ("linux/x86_64",):
        assert shape(made(capacity=unified(256, platform), stream_experts=False)).streams
    assert not shape(made(listed("deepseek-v4-flash-284b-q4"), unified(256), stream_experts=False)).streams


CACHES = [
    ("deepseek-v4-flash-284b-q2", 48, 12),
    ("deepseek-v4-flash-284b-q2", 64, 28),
    ("deepseek-v4-flash-284b-q2", 96, 32),
    ("deepseek-v4-flash-284b-q2q4", 64, 26),
    ("deepseek-v4-flash-284b-q2q4", 128, 36),
    ("deepseek-v4-flash-284b-q4", 64, 16),
    ("deepseek-v4-flash-284b-q4", 96, 48),
    ("deepseek-v4-flash-284b-mxfp4", 256, 64),
    ("glm-5.2-754b-q2", 64, 6),
    ("glm-5.2-754b-q2", 192, 32),
]


@pytest.mark.parametrize(("catalog_id", "ram_gib", "cache"), CACHES)
def test_the_policys_cache_is_what_is_launched_on_a_mac(catalog_id: str, ram_gib: int, cache: int) -> None:
    launch = made(listed(catalog_id), unified(ram_gib))
    assert shape(launch).expert_cache_gib == cache
    held = sum(line(launch, name).bytes.expected for name in ("expert_cache", "prefill_reserve"))
    assert cache * GIB - 15 * MIB < held <= cache * GIB, "whole experts only"


@pytest.mark.parametrize(
    ("catalog_id", "ram_gib"),
    [(name, 32) for name in CATALOGUE] + [("deepseek-v4-flash-284b-q4", 48), ("glm-5.2-754b-q2", 48)],
)
def test_no_safe_cache_is_a_refusal_that_says_what_would_help(catalog_id: str, ram_gib: int) -> None:
    with pytest.raises(PlanError) as refused:
        made(listed(catalog_id), unified(ram_gib))
    assert refused.value.reason == "EXPERT_CACHE_UNSAFE"
    assert "It lacks" in refused.value.message and "smaller model" in refused.value.message


@pytest.mark.parametrize(
    ("catalog_id", "ram_gib", "least_gib"),
    [
        # The author's bytes beside the cache, the engine's smallest cache, the system's 32 GiB.
        ("deepseek-v4-flash-284b-q2", 32, 4 + 4 + 32),
        ("deepseek-v4-flash-284b-q4", 48, 16 + 7 + 32),
        ("deepseek-v4-flash-284b-mxfp4", 32, 16 + 7 + 32),
    ],
)
def test_a_refusal_shows_the_least_that_would_start(catalog_id: str, ram_gib: int, least_gib: int) -> None:
    model, capacity = listed(catalog_id), unified(ram_gib)
    with pytest.raises(PlanError) as refused:
        made(model, capacity)
    least = refused.value.least
    assert least is not None
    assert least.total.expected == least_gib * GIB
    assert f"need {least_gib}.00 GiB of memory, this machine has {ram_gib}.00 GiB" in refused.value.message
    # One GiB less than that refuses too, and with it the same lines are a launch.
    with pytest.raises(PlanError):
        made(model, unified(least_gib - 1))
    launch = made(model, unified(least_gib))
    engine = {line.component: line.bytes for line in least.lines if line.component != "system_reserve"}
    assert engine == {line.component: line.bytes for line in launch.requirement.lines}
    # The ledger refuses it on the empty machine, as the verdict says.
    answered = too_small(model.facts, capacity, refused.value)
    assert answered is not None and answered.note.code == "LEAST_SHOWN"
    assert answered.assessment.verdict is Verdict.WONT_RUN
    assert answered.claim.host_bytes == least_gib * GIB > capacity.host_ceiling.effective


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([listed(name) for name in CATALOGUE] + [Q2]),
    st.integers(8, 70),
    st.sampled_from(["darwin/arm64", "linux/arm64", "linux/x86_64"]),
    st.sampled_from([0, 8, 24, 48, 96]),
)
def test_a_refusal_is_always_a_verdict(model: Model, ram_gib: int, platform: str, card_gib: int) -> None:
    """Whatever the machine: the sentence comes with figures that the ledger refuses there."""
    capacity = with_card(ram_gib, card_gib) if card_gib else unified(ram_gib, platform)
    try:
        made(model, capacity)
    except PlanError as refused:
        answered = too_small(model.facts, capacity, refused)
        assert answered is not None and answered.assessment.verdict is Verdict.WONT_RUN


def test_a_cache_that_ds4_would_refuse_at_its_start_is_no_plan() -> None:
    # 39 GiB leave 3 GiB beside the author's 4 and the system's 32: less than the headroom of 3.375 GiB.
    with pytest.raises(PlanError) as refused:
        made(capacity=unified(39))
    assert refused.value.reason == "EXPERT_CACHE_UNSAFE"
    assert shape(made(capacity=unified(40))).expert_cache_gib == 4
    with pytest.raises(PlanError) as small:
        made(expert_cache_gib=3)
    assert (small.value.reason, small.value.field) == ("INVALID_OPTION", "options.ds4.expert_cache_gib")


def test_a_person_who_limits_memory_gets_a_smaller_cache_and_is_told() -> None:
    launch = made(capacity=unified(128, limit_gib=32))
    lowered = note(launch, "EXPERT_CACHE_LOWERED")
    assert lowered is not None
    assert launch.requirement.total.expected <= 32 * GIB
    assert shape(launch).expert_cache_gib == int(lowered.metadata["cache_gib"]) < 32
    assert shape(made(capacity=unified(128, limit_gib=32), expert_cache_gib=32)).expert_cache_gib == 32


def test_a_model_without_an_author_is_sized_by_what_the_engine_holds() -> None:
    launch = made(Q2, unified(64))
    assert note(launch, "EXPERT_CACHE_CLAMPED") is not None
    assert launch.requirement.total.expected <= (64 - 32) * GIB + GIB // 2, "32 GiB stay, but for rounding"


STREAMLESS = dataclasses.replace(entry("deepseek-v4-flash-284b-q2"), ssd_streaming=False)


def test_a_model_without_streaming_ignores_the_override_and_says_so() -> None:
    model = dataclasses.replace(Q2_LISTED, entry=STREAMLESS)
    launch = made(model, unified(64), stream_experts=True)
    assert not shape(launch).streams
    assert note(launch, "STREAMING_IGNORED") is not None
    assert "--ssd-streaming" not in launch.arguments
    assert note(made(model, unified(64)), "STREAMING_IGNORED") is None


def test_builds_of_may_do_not_stream() -> None:
    launch = made(engine_layout="2026-05", stream_experts=True, capacity=unified(128))
    assert not shape(launch).streams
    assert note(launch, "STREAMING_IGNORED") is not None
    assert shape(launch).chunk_tokens == 2048
    assert "--prefill-chunk" not in launch.arguments


def test_the_flags_in_order() -> None:
    assert made(Q2, context_tokens=65_536, expert_cache_gib=16).arguments == (
        "--model", "/models/q2.gguf", "--metal", "--ctx", "65536", "--kv-disk-space-mb", "16384",
        "--ssd-streaming", "--ssd-streaming-cache-experts", "16GB", "--prefill-chunk", "4096",
    )  # fmt: skip
    resident = made(Q2, GB10, stream_experts=False, disk_kv=False, power="50", sessions=2, prefill_chunk_tokens=1024)
    assert resident.arguments == (
        "--model", "/models/q2.gguf", "--cuda", "--ctx", "131072", "--prefill-chunk", "1024", "--power", "50",
        "--batched-session", "2",
    )  # fmt: skip


DRAFTER = companion(5_991_479_541)
VISION = companion(934_155_386)


def beside(model: Model, **companions: Any) -> Model:
    paths = dict(model.paths) | {role: f"/models/{role}.gguf" for role in companions}
    return dataclasses.replace(model, companions=companions, paths=paths)


@pytest.mark.parametrize(
    ("role", "facts", "said"),
    [
        ("drafter", dataclasses.replace(DRAFTER, format=WeightFormat.SAFETENSORS), "stored as safetensors"),
        ("drafter", dataclasses.replace(VISION, role=Role.PROJECTOR), "projector"),
        ("drafter", dataclasses.replace(DRAFTER, role=Role.ADAPTER), "adapter"),
        ("drafter", companion(GIB, "blk.0.attn_kv.weight"), "a whole model"),
        ("vision", dataclasses.replace(DRAFTER, role=Role.DRAFTER), "drafter"),
        ("vision", facts_of(flash()), "a whole model"),
    ],
)
def test_a_companion_that_is_something_else_is_refused(role: str, facts: WeightFacts, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        made(beside(Q2, **{role: facts}), GB10, stream_experts=False)
    assert (refused.value.reason, refused.value.field) == ("INVALID_OPTION", f"options.ds4.{role}_file")
    assert said in refused.value.message
    fitting = dataclasses.replace(DRAFTER, role=Role.DRAFTER if role == "drafter" else Role.PROJECTOR)
    assert role in components(made(beside(Q2, **{role: fitting}), GB10, stream_experts=False))


def test_a_resident_cuda_launch_drafts_unasked_and_pays_for_it() -> None:
    launch = made(beside(Q2, drafter=DRAFTER), GB10, stream_experts=False)
    drafter = line(launch, "drafter")
    assert drafter.bytes.low == DRAFTER.file_bytes
    at = launch.arguments.index("--dspark")
    assert launch.arguments[at : at + 3] == ("--dspark", "--mtp-model", "/models/drafter.gguf")


@pytest.mark.parametrize(
    ("capacity", "asked", "code", "reason"),
    [
        (GB10, {"draft_policy": "on"}, "DRAFT_UNMET", "STREAMING"),
        (GB10, {}, "DRAFT_NOT_USED", "STREAMING"),
        (unified(128), {"stream_experts": False}, "DRAFT_NOT_USED", "AUTO_NOT_CUDA"),
        (unified(117, "linux/arm64"), {"stream_experts": False, "draft_policy": "on"}, "DRAFT_UNMET", "NO_ROOM"),
        (GB10, {"stream_experts": False, "draft_policy": "on", "sessions": 2}, "DRAFT_UNMET", "SESSIONS"),
        (GB10, {"draft_policy": "on", "engine_layout": "2026-05"}, "DRAFT_UNMET", "BUILD_TOO_OLD"),
        (processor(128), {"draft_policy": "on"}, "DRAFT_UNMET", "PROCESSOR"),
    ],
)
def test_unmet_requests_have_stable_reasons(capacity: Capacity, asked: dict[str, Any], code: str, reason: str) -> None:
    launch = made(beside(Q2, drafter=DRAFTER), capacity, **asked)
    said = note(launch, code)
    assert said is not None and said.metadata["reason"] == reason
    assert "drafter" not in components(launch)
    assert "--mtp-model" not in launch.arguments


def test_no_drafter_is_unmet_only_for_who_asked() -> None:
    wanted = note(made(draft_policy="on"), "DRAFT_UNMET")
    assert wanted is not None and wanted.metadata["reason"] == "NO_DRAFTER"
    assert not [each for each in made().notes if each.code.startswith("DRAFT")]


def test_a_legacy_head_drafts_two_tokens_when_asked() -> None:
    head = companion(3_865_470_566, "mtp.0.e_proj.weight", "mtp.0.h_proj.weight")
    launch = made(beside(Q2, drafter=head), GB10, stream_experts=False, draft_policy="on")
    assert launch.arguments[-4:] == ("--mtp-model", "/models/drafter.gguf", "--mtp-draft", "2")
    auto = note(made(beside(Q2, drafter=head), GB10, stream_experts=False), "DRAFT_NOT_USED")
    assert auto is not None and auto.metadata["reason"] == "AUTO_SLIGHT_GAIN"


def test_a_dspark_drafter_is_no_legacy_head_though_both_name_their_tensors_by_stage() -> None:
    parts = ("mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight", "mtp.2.confidence_head.proj.weight")
    drafter = companion(5_991_479_541, "mtp.0.attn_q_a.weight", "mtp.1.attn_q_a.weight", *parts)
    launch = made(beside(Q2, drafter=drafter), GB10, stream_experts=False, draft_policy="on")
    assert launch.arguments[-3:] == ("--dspark", "--mtp-model", "/models/drafter.gguf")
    # On a resident CUDA launch it drafts by itself, which a legacy head does not.
    assert "--dspark" in made(beside(Q2, drafter=drafter), GB10, stream_experts=False).arguments


def test_v41_drafts_while_it_streams_if_asked() -> None:
    drafter = companion(int(8.04 * GIB))
    model = beside(v41(), drafter=drafter)
    launch = made(model, unified(96), draft_policy="on")
    assert shape(launch).streams
    assert line(launch, "drafter").bytes.expected == drafter.file_bytes + 64 * MIB
    without = made(model, unified(96), draft_policy="off")
    # The cache makes room for the drafter: 8.1 GiB in whole GiB.
    assert shape(without).expert_cache_gib - shape(launch).expert_cache_gib in (8, 9)
    auto = note(made(model, unified(128)), "DRAFT_NOT_USED")
    assert auto is not None and auto.metadata["reason"] == "AUTO_STREAMED"


def test_glm_takes_no_drafter_file_and_has_a_block_of_its_own() -> None:
    glm = listed("glm-5.2-754b-q2")
    refused = note(made(beside(glm, drafter=DRAFTER), unified(256), draft_policy="on"), "DRAFT_UNMET")
    assert refused is not None and refused.metadata["reason"] == "MODEL_REFUSES"
    own = made(glm, unified(256), draft_policy="on", stream_experts=False)
    assert "--glm-mtp" in own.arguments and "drafter" in components(own)
    assert "--prefill-chunk" not in own.arguments


def test_the_vision_companion_counts_in_the_cache_with_and_without_an_author() -> None:
    for model, ram in ((Q2_LISTED, 48), (Q2, 60)):
        alone, seeing = made(model, unified(ram)), made(beside(model, vision=VISION), unified(ram))
        assert line(seeing, "vision").bytes.expected == VISION.file_bytes
        assert shape(seeing).expert_cache_gib == shape(alone).expert_cache_gib - 1
        assert seeing.arguments[-2:] == ("--vision", "/models/vision.gguf")
    blind = made(beside(Q2, vision=VISION), vision=False)
    assert "vision" not in components(blind) and "--vision" not in blind.arguments
    wanted = note(made(vision=True), "VISION_UNMET")
    assert wanted is not None and wanted.metadata["reason"] == "NO_COMPANION"


def test_companions_that_only_the_catalogue_knows_are_priced() -> None:
    own = entry("deepseek-v4-flash-284b-q2")
    extra = dataclasses.replace(own.files[0], path="vision.gguf", component="vision", size_bytes=GIB)
    seen: CatalogEntry = dataclasses.replace(own, files=(*own.files, extra))
    launch = made(dataclasses.replace(Q2_LISTED, entry=seen))
    assert line(launch, "vision").bytes.expected == GIB
    assert line(launch, "model").bytes.expected == 8_801_384_796


def test_v41_at_32k_is_what_ds4_asks_for() -> None:
    parts = ("model", "session", "engine_reserve")
    resident = made(v41(), unified(512), stream_experts=False, context_tokens=32_768)
    assert -(-sum(line(resident, name).bytes.expected for name in parts) // MIB) == 165_510
    streamed = made(v41(), unified(512), context_tokens=32_768)
    fixed = sum(line(streamed, name).bytes.expected for name in (*parts, "prefill_reserve"))
    assert -(-fixed // MIB) == 27_007
    assert note(resident, "ENGINE_MAY_REFUSE") is None
    tight = note(made(v41(), unified(208), stream_experts=False, context_tokens=32_768), "ENGINE_MAY_REFUSE")
    assert tight is not None and tight.metadata["needed_mib"] == "165510"
    assert "iogpu.wired_limit_mb=165510" in tight.message


def test_v41_takes_its_larger_chunk_from_16k() -> None:
    assert shape(made(v41(), unified(256), context_tokens=16_384)).chunk_tokens == 8192
    assert shape(made(v41(), unified(256), context_tokens=16_383)).chunk_tokens == 4096


def test_glm_is_priced_at_89_kib_a_token_and_capped_by_its_author() -> None:
    glm = listed("glm-5.2-754b-q2")
    launch = made(glm, unified(256))
    assert shape(launch).context_tokens == 65_536
    assert line(launch, "kv_cache").bytes.expected == 65_536 * 91_136
    above = made(glm, unified(256), context_tokens=131_072)
    assert note(above, "ABOVE_LAUNCH_CONTEXT") is not None
    with pytest.raises(PlanError) as refused:
        made(glm, unified(256), prefill_chunk_tokens=2048)
    assert refused.value.field == "options.ds4.prefill_chunk_tokens"


def test_a_model_of_unknown_layout_is_a_range_that_says_so() -> None:
    pro = dataclasses.replace(Q2_LISTED.facts, file_bytes=430_000_000_000)
    launch = made(Model(pro), unified(512))
    assert note(launch, "PRICED_BY_RANGE") is not None
    assert launch.requirement.total.low < launch.requirement.total.expected < launch.requirement.total.high


def test_on_a_card_the_model_lies_on_the_card_and_its_process_on_the_host() -> None:
    launch = made(capacity=with_card(128, 48))
    on_card = {each.component for each in launch.requirement.lines if each.on_device}
    assert on_card >= {"model", "kv_cache", "workspace", "expert_cache", "prefill_reserve", "backend_slack"}
    assert not on_card & {"process", "disk_kv"}
    assert launch.requirement.device.expected <= int(48 * 0.95 * GIB), "the cache is what the card has room for"
    assert note(launch, "EXPERT_CACHE_LOWERED") is not None
    assert "--cuda" in launch.arguments


def test_the_processor_maps_the_whole_file_and_is_a_diagnosis() -> None:
    launch = made(Q2, processor(128))
    weights = line(launch, "model").bytes
    assert (weights.low, weights.high) == (8_801_384_796 - 1_059_061_760, 86_720_111_488)
    # Measured: 8.9 GB of file pages after one short request.
    assert weights.low < 8_900_000_000 < weights.expected
    assert note(launch, "PROCESSOR_ONLY") is not None
    assert components(launch).isdisjoint({"workspace", "backend_slack"})


@pytest.mark.parametrize(
    ("capacity", "asked", "reason", "field"),
    [
        (processor(64, "darwin/x86_64"), {}, "UNSUPPORTED_PLATFORM", "machine.platform"),
        (unified(64, "windows/x86_64"), {}, "UNSUPPORTED_PLATFORM", "machine.platform"),
        (processor(64, "darwin/arm64"), {}, "UNSUPPORTED_PLATFORM", "machine.pool"),
        (with_card(64, 24, "darwin/arm64"), {}, "UNSUPPORTED_PLATFORM", "machine.pool"),
        (unified(128), {"compute": "cpu"}, "INVALID_OPTION", "options.ds4.compute"),
        (unified(128), {"compute": "cuda"}, "INVALID_OPTION", "options.ds4.compute"),
        (GB10, {"compute": "metal"}, "INVALID_OPTION", "options.ds4.compute"),
        (processor(128), {"compute": "cuda"}, "INVALID_OPTION", "options.ds4.compute"),
        (GB10, {"compute": "rocm"}, "INVALID_OPTION", "options.ds4.compute"),
        (GB10, {"engine_layout": "2025-01"}, "INVALID_OPTION", "options.ds4.engine_layout"),
        (GB10, {"context_tokens": 1_000_001}, "CONTEXT_TOO_LONG", "workload.chat.context_tokens"),
        (GB10, {"context_tokens": -1}, "INVALID_OPTION", "workload.chat.context_tokens"),
        (GB10, {"slots": 65}, "INVALID_OPTION", "workload.chat.slots"),
        (GB10, {"sessions": 0}, "INVALID_OPTION", "options.ds4.sessions"),
        (GB10, {"sessions": 2, "slots": 3}, "INVALID_OPTION", "options.ds4.sessions"),
        (GB10, {"sessions": 2, "engine_layout": "2026-05"}, "INVALID_OPTION", "options.ds4.sessions"),
        (GB10, {"prefill_chunk_tokens": 0}, "INVALID_OPTION", "options.ds4.prefill_chunk_tokens"),
        (
            GB10,
            {"prefill_chunk_tokens": 4096, "engine_layout": "2026-05"},
            "INVALID_OPTION",
            "options.ds4.prefill_chunk_tokens",
        ),
        (GB10, {"draft_policy": "maybe"}, "INVALID_OPTION", "options.ds4.draft_policy"),
        (GB10, {"power": "0"}, "INVALID_OPTION", "options.ds4.power"),
        (GB10, {"power": "٣"}, "INVALID_OPTION", "options.ds4.power"),
        (GB10, {"expert_cache_gib": 1 << 30}, "INVALID_OPTION", "options.ds4.expert_cache_gib"),
    ],
)
def test_what_cannot_be_is_refused_by_name(capacity: Capacity, asked: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(PlanError) as refused:
        made(capacity=capacity, **asked)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def test_unified_memory_on_a_platform_that_nobody_names_is_taken_for_a_mac() -> None:
    launch = made(capacity=unified(128, ""), stream_experts=False)
    assert not shape(launch).streams
    assert note(launch, "PLATFORM_ASSUMED") is not None and "--metal" in launch.arguments


MODELS = [listed(name) for name in CATALOGUE] + [Q2, v41()]
MACHINES = [unified(128), unified(192, "linux/arm64"), unified(256, limit_gib=64), with_card(192, 48)]
CONTEXTS = st.integers(1, 1_000_000)


def totals(plan_made: Plan) -> tuple[int, int, int]:
    total = plan_made.requirement.total
    return total.low, total.expected, total.high


def not_more(less: Plan, more: Plan) -> None:
    assert all(one <= other for one, other in zip(totals(less), totals(more), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(MACHINES), CONTEXTS, CONTEXTS, st.booleans())
def test_a_larger_context_is_never_cheaper(
    model: Model, capacity: Capacity, one: int, other: int, streams: bool
) -> None:
    less, more = sorted((one, other))
    asked = {"stream_experts": streams}
    not_more(made(model, capacity, context_tokens=less, **asked), made(model, capacity, context_tokens=more, **asked))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(MACHINES), st.integers(1, 64), st.integers(1, 64))
def test_more_sessions_are_never_cheaper(model: Model, capacity: Capacity, one: int, other: int) -> None:
    less, more = sorted((one, other))
    not_more(made(model, capacity, sessions=less), made(model, capacity, sessions=more))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), st.integers(9, 80), st.integers(9, 80))
def test_a_larger_cache_is_never_cheaper(model: Model, one: int, other: int) -> None:
    less, more = sorted((one, other))
    not_more(made(model, unified(128), expert_cache_gib=less), made(model, unified(128), expert_cache_gib=more))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(MACHINES), CONTEXTS, st.booleans(), st.integers(1, 4))
def test_lines_add_up(model: Model, capacity: Capacity, context: int, streams: bool, sessions: int) -> None:
    launch = made(model, capacity, context_tokens=context, stream_experts=streams, sessions=sessions)
    resident = sum(each.bytes.expected for each in launch.requirement.lines if each.phase is Phase.RESIDENT)
    assert launch.requirement.total.expected == resident
    staged = line(launch, "disk_kv").bytes.high
    assert launch.requirement.total.high == staged + sum(
        each.bytes.high for each in launch.requirement.lines if each.phase is Phase.RESIDENT
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Q2, Q2_LISTED]), st.integers(33, 512))
def test_a_launch_that_is_planned_leaves_the_system_its_memory(model: Model, ram_gib: int) -> None:
    """By the figures of whoever decided: the author's, or the engine's where there is none."""
    try:
        launch = made(model, unified(ram_gib))
    except PlanError as refused:
        assert refused.reason == "EXPERT_CACHE_UNSAFE"
        return
    cache = shape(launch).expert_cache_gib * GIB
    if model.entry is not None:
        assert cache + 4 * GIB + 32 * GIB <= ram_gib * GIB
    elif ram_gib < 192:
        assert launch.requirement.total.expected + 32 * GIB <= ram_gib * GIB
