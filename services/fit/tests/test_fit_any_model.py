"""Whatever facts come inline and whatever is asked: an answer that can travel, or a refusal by name. Nothing else."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.facts import ComponentTotal, FileSummary, PrecisionTotal, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.families.registry import ALL
from weighbridge_fit.geometry import LayerKind, LayerMeasure, ModelGeometry
from weighbridge_fit.lines import MAX_BYTES
from weighbridge_fit.model import Model
from weighbridge_fit.model_config import MAX_SIZE
from weighbridge_fit.planning import answer, too_small
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.architectures import ARCHITECTURES
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.tally import verified
from weighbridge_fit.wire.answer import assessment_message, claim_message, note_messages, requirement_message
from weighbridge_fit.wire.facts import MAX_INLINE_BYTES
from weighbridge_proto.fit.v1 import plan_pb2

GIB = 1 << 30
# A message travels in a call's trailers, of which gRPC's own limit is 8 KiB.
LONGEST_MESSAGE = 1500

# Mostly those of models, so that much is priced; the rest are as large as the contract takes.
sizes = st.sampled_from([1, 2, 8, 16, 64, 128, 256, 512, 1024, 4096, 150_000, 1 << 20, MAX_SIZE])
unsaid = st.just(0)
USUAL_KINDS = (
    *(LayerKind.FULL_ATTENTION, LayerKind.SLIDING_ATTENTION, LayerKind.SHARED, LayerKind.GATED_DELTA),
    LayerKind.LATENT_ATTENTION,
)
FORMATS = {Engine.DS4: WeightFormat.GGUF, Engine.GENERIC: WeightFormat.DIFFUSERS}
byte_counts = st.sampled_from([1, GIB, 86_720_111_488, MAX_INLINE_BYTES // 4])
measures = st.builds(LayerMeasure, *[unsaid | sizes] * 6)


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    every = list(LayerKind) if draw(st.integers(0, 4)) == 0 else USUAL_KINDS
    kinds = draw(st.lists(st.sampled_from(every), min_size=1, max_size=5))
    layers = tuple(kinds * draw(st.sampled_from([1, 16])))
    own = draw(st.sampled_from([0, 1]))
    made = ModelGeometry(
        model_type=draw(st.sampled_from([*ARCHITECTURES, "deepseek4", "glm_moe_dsa", "whisper", "unheard of", ""])),
        layers=layers,
        measures=tuple(draw(measures) for _ in kinds) * (len(layers) // len(kinds)) * own,
        activation_bytes=draw(st.sampled_from([2, 2, 2, 4, 4, 0, 1, 8])),
        tied_embeddings=draw(st.booleans()),
    )
    numbers = [name for name, value in vars_of(made).items() if value == 0 and name != "activation_bytes"]
    # Most say most of their sizes, else nothing would be priced.
    return replace(made, **{name: draw(sizes if draw(st.integers(0, 99)) else unsaid) for name in numbers})


def vars_of(made: ModelGeometry) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__ if type(getattr(made, name)) is int}


NAMES = (
    *("model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.switch_mlp.gate_proj.weight"),
    *("model.layers.{}.mlp.down_proj.weight", "model.layers.{}.mlp.down_proj.scales", "mtp.{}.fc.weight"),
    *("blk.{}.ffn_gate_exps.weight", "blk.{}.attn_compressor_ape.weight", "blk.{}.attn_kv.weight"),
    *("blk.{}.engram_embd.weight", "token_embd.weight", "model.layers.{}.self_attn.q_proj.lora_a"),
    *("model.layers.{}.self_attn.q_proj.lora_b", "transformer_blocks.{}.attn1.to_q.weight", "\u0661.{}.\u0000"),
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, TensorFact]:
    name = draw(st.sampled_from(NAMES)).format(draw(st.sampled_from([0, 1, 9999, 99_999_999])))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 64, 128, 4096, 1 << 20]), max_size=3)))
    elements = 1
    for side in shape:
        elements *= side
    dtype = draw(st.sampled_from(["BF16", "F16", "F32", "U32", "I8", "F8_E4M3", "Q4_K", "?"]))
    component = draw(st.sampled_from(["model", "model", "draft", "transformer", "vae", "diffusion_model", ""]))
    return component, TensorFact(name, dtype, shape, elements, draw(st.sampled_from([0, 1, 2 * elements, 1 << 50])))


@st.composite
def facts(draw: st.DrawFn, engine: Engine) -> WeightFacts:
    size = draw(byte_counts)
    listed = draw(st.lists(tensors(), max_size=4)) if draw(st.booleans()) else []
    labelled = {(part, tensor.name): (part, tensor) for part, tensor in listed}
    names = draw(st.sets(st.sampled_from(["model", "draft", "transformer", "unet", "vae", "text_encoder"]), min_size=1))
    stored = draw(st.sampled_from([(), (PrecisionTotal("F32", 1, MAX_INLINE_BYTES, size),)]))
    usual = FORMATS.get(engine, WeightFormat.SAFETENSORS)
    kind = draw(st.sampled_from([*WeightFormat, *[usual] * 20, WeightFormat.SAFETENSORS]))
    return verified(
        WeightFacts(
            name="inline",
            format=kind,
            file_bytes=size,
            tensor_bytes=0 if labelled else size * len(names),
            tensor_count=0,
            element_count=0,
            largest_tensor_bytes=0,
            precisions=(),
            components=() if labelled else tuple(ComponentTotal(name, 1, size, stored) for name in sorted(names)),
            files=(FileSummary("a", size, 8, kind, 1),),
            architecture=draw(
                st.sampled_from(["qwen3", "deepseek4", "deepseek41", "glm-dsa", "WanPipeline", "FluxPipeline", "sd15"])
            ),
            geometry=draw(geometries()) if draw(st.integers(0, 9)) else None,
            tensors=tuple(sorted(labelled.values())),
        )
    )


@st.composite
def machines(draw: st.DrawFn) -> Capacity:
    pool = draw(st.sampled_from(list(Pool)))
    host, card = draw(st.sampled_from([0, 16 * GIB, 512 * GIB, 1 << 61])), draw(st.sampled_from([0, 24 * GIB, 1 << 60]))
    devices = (DeviceCeiling("card", Ceiling(card, card), draw(st.sampled_from([0, GIB]))),)
    cards = devices if pool is Pool.DISCRETE and card else ()
    whole = Ceiling(host + card, host + card) if cards else Ceiling(host, host)
    platform = draw(st.sampled_from(["", "darwin/arm64", "linux/x86_64", "linux/arm64", "//"]))
    return Capacity(pool, Ceiling(host, host), whole, cards, draw(st.sampled_from([0, host])), platform)


WORDS = ["none", "ane", "cpu", "cuda", "on", "a", "2026-05", "mlx", "vllm", "q8_0", "8", "bfloat16", "sequential", "?"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.sampled_from([0, 1, 3, 8, 64, 256, 4096, (1 << 31) - 1, -1]),
    "str": st.sampled_from(WORDS),
    "bool": st.booleans(),
    "float": st.sampled_from([0.0, 0.5, 1.0, -1.0, float("inf"), float("nan")]),
}


def filled(draw: st.DrawFn, message: Any, share: int) -> None:
    """Some of a message's plain fields."""
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(0, share)) or field.message_type is not None or field.is_repeated:
            continue
        kind = "int" if field.enum_type is not None else type(getattr(message, field.name)).__name__
        value = draw(VALUES[kind])
        if field.enum_type is not None:
            value = draw(st.sampled_from(list(field.enum_type.values_by_number)))
        setattr(message, field.name, value)


@st.composite
def questions(draw: st.DrawFn, family: Any) -> tuple[plan_pb2.Workload, plan_pb2.EngineOptions]:
    workload, options = plan_pb2.Workload(), plan_pb2.EngineOptions()
    asked = getattr(workload, family.workload_name)
    asked.SetInParent()
    filled(draw, asked, 6)
    if family.workload_name == "chat":
        contexts = [0, 0, 0, 0, 1, 100, 4096, 1 << 20, 1 << 24, (1 << 24) + 1, -1, 1 << 62]
        asked.context_tokens = draw(st.sampled_from(contexts))
    filled(draw, getattr(options, family.options_name), 20)
    return workload, options


@pytest.mark.parametrize("family", ALL, ids=lambda family: f"{family.engine.value} {family.workload_name}")
def test_facts_that_nobody_vouches_for_are_priced_or_refused_by_name(family: Any) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(facts(family.engine), st.none() | facts(family.engine), machines(), questions(family))
    def check(weighed: WeightFacts, other: WeightFacts | None, capacity: Capacity, question: Any) -> None:
        workload, options = question
        companions = dict.fromkeys(("drafter", "vision", "vae"), other) if other is not None else {}
        model = Model(weighed, companions)
        try:
            family.companions(options)
            made = answer(family, model, family.request(workload, options), capacity)
        except PlanError as refused:
            assert refused.reason.isupper() and refused.field
            assert len(refused.message) <= LONGEST_MESSAGE
            too_small(weighed, capacity, refused)
            return
        assert requirement_message(made.requirement).total.high_bytes <= MAX_BYTES
        assert assessment_message(made.assessment).reason
        claim_message(made.claim, made.claim_source)
        assert all(len(note.message) <= LONGEST_MESSAGE for note in note_messages(made.plan.notes))
        # What was planned can be said and asked for again.
        again = family.request(family.workload(made.plan), family.options(made.plan))
        assert family.plan(model, again, capacity).shape.text() == made.plan.shape.text()

    check()
