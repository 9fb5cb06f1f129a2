"""ds4 between its messages: what is asked, what is answered, advice, the largest context, verdict and claim."""

import dataclasses
from typing import Any

import pytest
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.families.registry import FAMILIES
from weighbridge_fit.lines import Source
from weighbridge_fit.model import Model
from weighbridge_fit.planning import Answer, answer
from weighbridge_fit.plans.ds4.options import Ds4Request
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.solving import solve_context
from weighbridge_fit.verdict import Verdict, judge
from weighbridge_proto.fit.v1 import plan_pb2

from services.fit.tests.fit_ds4_layout import GIB, companion, facts_of, flash, listed, processor, unified, with_card

FAMILY = Ds4Family()
Q2 = listed("deepseek-v4-flash-284b-q2")
READ = Model(facts_of(flash()), paths={"": "/models/q2.gguf"})
CATALOGUE = [listed(f"deepseek-v4-flash-284b-{quantisation}") for quantisation in ("q2", "q2q4", "q4", "mxfp4")] + [
    listed("glm-5.2-754b-q2")
]
MACHINES = {
    **{f"unified:{ram}": unified(ram) for ram in (24, 40, 48, 64, 96, 128, 192, 256, 512)},
    **{f"gb10:{ram}": unified(ram, "linux/arm64") for ram in (64, 121, 128)},
    "limited": unified(128, limit_gib=24),
    **{f"cpu:{ram}": processor(ram) for ram in (32, 128, 512)},
    **{f"discrete:{ram}+{card}": with_card(ram, card) for ram, card in ((64, 24), (128, 24), (192, 96))},
}


def options(**given: Any) -> plan_pb2.EngineOptions:
    return plan_pb2.EngineOptions(ds4=plan_pb2.Ds4Options(**given))


def asked(model: Model, capacity: Capacity, **given: Any) -> Answer:
    return answer(FAMILY, model, Ds4Request(**given), capacity)


def test_it_is_registered() -> None:
    assert isinstance(FAMILIES[Engine.DS4], Ds4Family)


def test_every_option_reaches_the_request() -> None:
    given = {
        "stream_experts": True,
        "expert_cache_gib": 8,
        "prefill_chunk_tokens": 1024,
        "draft_policy": "on",
        "vision": False,
        "sessions": 2,
        "disk_kv": False,
        "power": "60",
        "engine_layout": "2026-07",
        "compute": "cuda",
    }
    files = {"drafter_file": "d.gguf", "vision_file": "v.gguf"}
    assert given.keys() | files.keys() == {field.name for field in plan_pb2.Ds4Options.DESCRIPTOR.fields}
    workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=4096, slots=2))
    request = FAMILY.request(workload, options(**given, **files))
    assert request == Ds4Request(context_tokens=4096, slots=2, **given)
    assert FAMILY.companions(options(**files)) == {"drafter": "d.gguf", "vision": "v.gguf"}
    assert FAMILY.request(plan_pb2.Workload(), plan_pb2.EngineOptions()) == Ds4Request()


def test_a_companion_without_a_name_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        FAMILY.companions(options(drafter_file=""))
    assert refused.value.field == "options.ds4.drafter_file"


@pytest.mark.parametrize("name", ["unified:48", "unified:128", "gb10:64", "limited", "cpu:128", "discrete:192+96"])
@pytest.mark.parametrize("model", [*CATALOGUE[:3], READ])
def test_what_was_planned_plans_the_same_again(model: Model, name: str) -> None:
    capacity = MACHINES[name]
    try:
        first = FAMILY.plan(model, Ds4Request(), capacity)
    except PlanError as refused:
        assert refused.reason == "EXPERT_CACHE_UNSAFE"
        return
    again = FAMILY.plan(model, FAMILY.request(FAMILY.workload(first), FAMILY.options(first)), capacity)
    assert again.shape.text() == first.shape.text()
    assert again.requirement == first.requirement
    assert again.arguments == first.arguments


def test_the_launch_and_the_workload_as_planned() -> None:
    made = FAMILY.plan(READ, Ds4Request(context_tokens=65_536), unified(128))
    launch = FAMILY.launch(made)
    assert launch is not None and tuple(launch.ds4.arguments) == made.arguments
    chat = FAMILY.workload(made).chat
    assert (chat.context_tokens, chat.slots) == (65_536, 1)
    told = launch.ds4
    assert (told.context_tokens, told.sessions, told.prefill_chunk_tokens) == (65_536, 1, 4096)
    assert (told.compute, told.vision) == ("metal", False)
    # Experts are streamed: of the file's 80.77 GiB 8.197 stay, and load.
    assert told.loaded_bytes == 8_801_384_796
    assert made.shape.text() == (
        "ds4;compute=metal;layout=2026-07;weights=streamed/64;context=65536;sessions=1;chunk=4096;drafter=none;"
        "vision=off;power=100;disk_kv=on"
    )


def test_only_a_launch_on_the_processor_leaves_a_shared_gpu_to_others() -> None:
    for compute, leaves in (("cpu", True), ("cuda", False)):
        assert asked(READ, unified(128, "linux/arm64"), compute=compute).claim.cpu_only is leaves
    assert not asked(READ, unified(128)).claim.cpu_only


def test_an_engine_is_told_what_it_will_print() -> None:
    """A logged launch of V4 Flash Q2 at 131,072 tokens and 32 GiB of cache: 35.35 GiB planned. What no law knows is
    not guessed."""

    def printed(model: Model, capacity: Capacity, **given: Any) -> int:
        launch = FAMILY.launch(FAMILY.plan(model, Ds4Request(**given), capacity))
        assert launch is not None
        return launch.ds4.planned_bytes

    assert round(printed(Q2, unified(128)) / GIB, 2) == 35.35
    resident = printed(READ, unified(128, "linux/arm64"), stream_experts=False, context_tokens=163_840)
    # The file, and 3797.75 MiB of context as a log of CUDA at 163,840 tokens has it.
    assert round((resident - 86_720_111_488) / 2**20, 2) == 3797.75
    for model, capacity, given in (
        (Q2, unified(128), {"sessions": 2}),
        (Q2, unified(128), {"engine_layout": "2026-05"}),
        (Q2, processor(128), {}),
        (listed("glm-5.2-754b-q2"), unified(128), {}),
    ):
        assert printed(model, capacity, **given) == 0


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.entry.catalog_id)
def test_verdict_and_claim_agree_on_every_machine(model: Model, name: str) -> None:
    capacity = MACHINES[name]
    try:
        made = asked(model, capacity)
    except PlanError as refused:
        assert refused.reason == "EXPERT_CACHE_UNSAFE"
        return
    on_host = made.claim.host_bytes
    on_card = sum(device.required_bytes for device in made.claim.devices)
    fits = on_host <= capacity.host_ceiling.effective and on_host + on_card <= capacity.total.effective
    cards = [device.ceiling.effective for device in capacity.devices]
    fits = fits and on_card <= max(cards, default=0)
    assert fits is (made.assessment.verdict is not Verdict.WONT_RUN)
    if made.assessment.verdict is Verdict.RUNS and not capacity.devices:
        assert on_host == made.requirement.total.expected
    assert made.claim_source is Source.DERIVED


def test_a_resident_launch_that_nobody_can_hold_wont_run_and_advice_names_streaming() -> None:
    # 113 GiB hold the weights and the system's 32, and the person allows 80.
    made = asked(Q2, unified(113, limit_gib=80), stream_experts=False)
    assert made.assessment.verdict is Verdict.WONT_RUN
    assert any("stream_experts=true" in sentence for sentence in made.assessment.help)


def test_advice_names_a_cache_that_runs_and_what_it_saves() -> None:
    capacity = unified(96, limit_gib=48)
    made = asked(Q2, capacity, expert_cache_gib=32)
    assert made.assessment.verdict is not Verdict.RUNS
    sentence = next(each for each in made.assessment.help if "expert_cache_gib=" in each)
    cache = int(sentence.partition("expert_cache_gib=")[2].partition(")")[0])
    assert asked(Q2, capacity, expert_cache_gib=cache).assessment.verdict is Verdict.RUNS
    assert asked(Q2, capacity, expert_cache_gib=cache + 1).assessment.verdict is not Verdict.RUNS


def test_advice_names_one_session_and_no_pictures() -> None:
    seeing = dataclasses.replace(Q2, companions={"vision": companion(9 * GIB)}, paths={"vision": "/v.gguf"})
    help_for_pictures = asked(seeing, unified(96, limit_gib=58), expert_cache_gib=32).assessment.help
    assert any("vision=false" in sentence for sentence in help_for_pictures)
    help_for_sessions = asked(Q2, unified(128, limit_gib=60), expert_cache_gib=32, sessions=4).assessment.help
    assert any("sessions=1" in sentence for sentence in help_for_sessions)


def test_the_largest_context_runs_and_the_next_step_does_not() -> None:
    capacity = unified(64)
    request = Ds4Request(stream_experts=True)
    largest = solve_context(FAMILY, READ, request, capacity)
    assert 0 < largest < FAMILY.longest_context(READ)

    def verdict(context: int) -> Verdict:
        made = FAMILY.plan(READ, FAMILY.with_context(request, context), capacity)
        assert FAMILY.context_of(made) == context
        return judge(made.requirement, capacity).verdict

    assert verdict(largest) is Verdict.RUNS
    assert verdict(largest + 256) is not Verdict.RUNS


def test_the_longest_context_is_the_catalogues() -> None:
    assert FAMILY.longest_context(Q2) == 1_000_000
    assert FAMILY.longest_context(READ) == 1_048_576
