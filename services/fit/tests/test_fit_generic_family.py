"""GENERIC plans as they are asked for: refusals, notes, messages, verdicts, contexts solved for, and what must hold for
every shape."""

from dataclasses import replace
from typing import Any

import pytest
from fit_generic import CARD, HOST, LLAMA, UNIFIED, facts, lines, machine, note_codes
from fit_shapes import CONFIGS, GIB, dense, geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.families.generic import GenericChatFamily
from weighbridge_fit.families.mlx import MlxFamily
from weighbridge_fit.families.registry import recognise
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import kv
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.model import Model
from weighbridge_fit.model_config import geometry_from_config
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.generic.options import GenericRequest
from weighbridge_fit.plans.generic.plan import plan
from weighbridge_fit.solving import solve_context
from weighbridge_fit.verdict import Verdict
from weighbridge_proto.fit.v1 import plan_pb2

FAMILY = GenericChatFamily()


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (GenericRequest(law="ollama"), "INVALID_OPTION", "options.generic.law"),
        (GenericRequest(law="mlx"), "INVALID_OPTION", "options.generic.law"),
        (GenericRequest(kv_type="q9_0"), "INVALID_OPTION", "options.generic.kv_type"),
        (GenericRequest(law="vllm", kv_type="q8_0"), "INVALID_OPTION", "options.generic.kv_type"),
        (GenericRequest(micro_batch_tokens=0), "INVALID_OPTION", "options.generic.micro_batch_tokens"),
        (GenericRequest(micro_batch_tokens=10**6), "INVALID_OPTION", "options.generic.micro_batch_tokens"),
        (GenericRequest(device_share=0.5), "INVALID_OPTION", "options.generic.device_share"),
        (GenericRequest(law="vllm", device_share=0.0), "INVALID_OPTION", "options.generic.device_share"),
        (GenericRequest(law="vllm", device_share=1.5), "INVALID_OPTION", "options.generic.device_share"),
        (GenericRequest(law="vllm", device_share=float("nan")), "INVALID_OPTION", "options.generic.device_share"),
        (GenericRequest(slots=-1), "INVALID_OPTION", "workload.chat.slots"),
        (GenericRequest(slots=5000), "INVALID_OPTION", "workload.chat.slots"),
        (GenericRequest(context_tokens=-1), "INVALID_OPTION", "workload.chat.context_tokens"),
        (GenericRequest(context_tokens=131_073), "CONTEXT_TOO_LONG", "workload.chat.context_tokens"),
        (GenericRequest(context_tokens=1 << 40), "CONTEXT_TOO_LONG", "workload.chat.context_tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(request_: GenericRequest, reason: str, field: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(facts(LLAMA), request_, CARD)
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_heads_that_are_no_whole_blocks_cannot_be_quantised() -> None:
    odd = replace(LLAMA, head_size=80)
    with pytest.raises(PlanError, match="80"):
        plan(facts(odd), GenericRequest(kv_type="q8_0"), CARD)
    windows = facts(geometry("gemma3-1b"), format=WeightFormat.SAFETENSORS)
    with pytest.raises(PlanError) as caught:
        plan(windows, GenericRequest(law="mlx", kv_type="8"), UNIFIED)
    assert caught.value.field == "options.generic.kv_type"


def test_options_of_other_workloads_are_refused_by_name() -> None:
    options = plan_pb2.EngineOptions(generic=plan_pb2.GenericOptions(law="vllm", offload="model"))
    with pytest.raises(PlanError) as caught:
        FAMILY.request(plan_pb2.Workload(), options)
    assert caught.value.field == "options.generic.offload"


def test_requests_travel_and_come_back() -> None:
    given_options = plan_pb2.GenericOptions(law="vllm", kv_type="fp8", micro_batch_tokens=2048, device_share=0.8)
    workload = plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=4096, slots=3))
    asked = FAMILY.request(workload, plan_pb2.EngineOptions(generic=given_options))
    made = FAMILY.plan(Model(facts(LLAMA)), asked, CARD)
    assert FAMILY.workload(made) == workload
    assert FAMILY.options(made).generic == given_options
    assert FAMILY.launch(made) is None
    assert FAMILY.companions(plan_pb2.EngineOptions()) == {}


def test_encoders_have_no_cache_line_and_a_cache_beyond_reason_has_a_note() -> None:
    config = {"model_type": "xlm-roberta", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    encoder = geometry_from_config({**config, "max_position_embeddings": 512, "vocab_size": 250_002})
    made = plan(facts(encoder, GIB, WeightFormat.SAFETENSORS), GenericRequest(slots=64), CARD)
    assert not {"kv_cache", "kv_window", "kv_latent", "recurrent_state"} & set(lines(made))
    assert "NO_CACHE" in note_codes(made)
    assert made.shape.context_tokens == 512  # type: ignore[attr-defined]
    # ollama#9988: a 32B asked for 659.2 GiB.
    asked = GenericRequest(context_tokens=131_072, slots=21)
    many = plan(facts(geometry("Qwen3-32B"), 20 * GIB), asked, CARD)
    note = next(note for note in many.notes if note.code == "CACHE_OUTWEIGHS_MODEL")
    assert int(note.metadata["cache_bytes"]) == 21 * 32 * GIB
    assert "CACHE_OUTWEIGHS_MODEL" not in note_codes(plan(facts(LLAMA), GenericRequest(), CARD))


@pytest.mark.parametrize(
    "model",
    [
        facts(None),
        facts(replace(LLAMA, layers=())),
        facts(replace(LLAMA, kv_heads=0)),
        facts(replace(geometry("DeepSeek-V3.1"), latent_rank=0)),
        facts(replace(LLAMA, model_type="deepseek4")),
        replace(facts(LLAMA), role=Role.DRAFTER),
        replace(facts(LLAMA), role=Role.PROJECTOR),
    ],
)
def test_models_without_a_law_are_not_recognised_and_refused(model: WeightFacts) -> None:
    assert not FAMILY.recognises(Model(model))
    with pytest.raises(PlanError) as caught:
        plan(model, GenericRequest(), CARD)
    assert caught.value.reason == "UNSUPPORTED_ARCHITECTURE"


def test_engines_of_ours_come_first() -> None:
    assert isinstance(recognise(Model(facts(LLAMA))), GenericChatFamily)
    qwen = facts(geometry("Qwen3-0.6B"), GIB, WeightFormat.SAFETENSORS)
    assert isinstance(recognise(Model(qwen)), MlxFamily)


def test_ollama_10737_and_10911_run_on_two_cards_memory() -> None:
    """qwen3:32b in 20.2 GB was estimated at 66 and 47 GB for contexts of 19,000 and 12,288 on 48 GB."""
    for context, kind in ((19_000, "f16"), (12_288, "q8_0")):
        model = Model(facts(geometry("Qwen3-32B"), 20_200_000_000))
        made = answer(FAMILY, model, GenericRequest(context_tokens=context, kv_type=kind), machine(64 * GIB, 45 * GIB))
        assert made.assessment.verdict is Verdict.RUNS
        assert made.requirement.device_peak.high < 30 * GIB


@pytest.mark.parametrize("law", [law.value for law in KvLaw])
@pytest.mark.parametrize("capacity", [machine(20 * GIB), machine(64 * GIB, 14 * GIB), UNIFIED])
def test_a_solved_context_runs_and_the_next_step_does_not(law: str, capacity: Capacity) -> None:
    format = WeightFormat.GGUF if law == "llama_cpp" else WeightFormat.SAFETENSORS
    model = Model(facts(replace(LLAMA, max_context_tokens=0), 8 * GIB, format))
    asked = GenericRequest(law=law, slots=2)
    largest = solve_context(FAMILY, model, asked, capacity)
    assert largest > 0
    at = [
        answer(FAMILY, model, replace(asked, context_tokens=tokens), capacity).assessment.verdict
        for tokens in (largest, largest + 256)
    ]
    assert at == [Verdict.RUNS, Verdict.TIGHT] or at == [Verdict.RUNS, Verdict.WONT_RUN]


def test_what_does_not_run_is_told_what_would() -> None:
    model = Model(facts(LLAMA, 8 * GIB))
    made = answer(FAMILY, model, GenericRequest(context_tokens=131_072, slots=4), machine(24 * GIB))
    assert made.assessment.verdict is Verdict.WONT_RUN
    smaller = solve_context(FAMILY, model, GenericRequest(slots=4), machine(24 * GIB))
    assert any(f"{smaller:,} tokens" in sentence for sentence in made.assessment.help)


PRICED = [geometry(name) for name in CONFIGS]
REQUESTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "context_tokens": st.integers(1, 200_000),
        "slots": st.integers(1, 32),
        "law": st.sampled_from(["llama_cpp", "vllm"]),
        "micro_batch_tokens": st.sampled_from([None, 64, 512, 4096]),
    }
)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(PRICED), REQUESTS, st.integers(0, 5000), st.sampled_from([CARD, HOST, UNIFIED]))
def test_more_context_or_slots_never_need_less_and_lines_add_up(
    shape: ModelGeometry, asked: dict[str, Any], more: int, capacity: Capacity
) -> None:
    model = facts(replace(shape, max_context_tokens=0))
    base = plan(model, GenericRequest(**asked), capacity).requirement
    longer = GenericRequest(**{**asked, "context_tokens": asked["context_tokens"] + more})
    wider = GenericRequest(**{**asked, "slots": asked["slots"] + 1})
    for other in (longer, wider):
        bigger = plan(model, other, capacity).requirement
        assert bigger.total.low >= base.total.low
        assert bigger.total.expected >= base.total.expected
        assert bigger.total.high >= base.total.high
    for bound in ("low", "expected", "high"):
        assert getattr(base.total, bound) == sum(getattr(line.bytes, bound) for line in base.lines)
    held = kv.cache_bytes(
        model.geometry or shape,
        KvLaw(asked["law"]),
        asked["context_tokens"],
        asked["slots"],
        micro_batch=asked["micro_batch_tokens"] or 0,
    )
    assert held.total == sum(line.bytes.expected for line in base.lines if line.component in CACHES)


CACHES = {"kv_cache", "kv_window", "kv_latent", "recurrent_state"}


def test_sizes_beyond_counting_are_an_error_of_the_model() -> None:
    absurd = geometry_from_config(dense(4096, 1 << 20, 1 << 31, 1 << 31, 1 << 20))
    with pytest.raises(PlanError) as caught:
        plan(facts(absurd), GenericRequest(context_tokens=131_072), CARD)
    assert caught.value.reason == "UNSUPPORTED_ARCHITECTURE"
