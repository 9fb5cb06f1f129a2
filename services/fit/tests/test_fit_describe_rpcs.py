"""What a client is told about folders and facts: over a real channel."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fit_fakes import GIB, FakeLedger, at, refusal
from fit_model_files import FLUX, LLAMA_GGUF, VAE, write_gguf, write_pipeline
from safetensors.numpy import save_file
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2


async def test_a_folder_of_quantisations_is_refused_with_the_names(fit: Any, model: Path) -> None:
    for quantisation in ("Q4_K_M", "Q8_0"):
        write_gguf(model.parent / f"llama/llama-{quantisation}.gguf", LLAMA_GGUF)
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("llama"))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "SEVERAL_MODELS")
    assert "llama-Q4_K_M.gguf, llama-Q8_0.gguf" in failure.message
    response = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("llama/llama-Q8_0.gguf")))
    assert response.facts.architecture == "llama"


async def test_a_diffusers_tree_is_priced_and_not_launched(fit: Any, ledger: FakeLedger, model: Path) -> None:
    write_pipeline(model.parent / "flux", "FluxPipeline", {"transformer": FLUX, "vae": VAE})
    response = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("flux")))
    assert [total.component for total in response.facts.components] == ["transformer", "vae"]
    machine = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_CPU, ram_bytes=64 * GIB)
    plan = await fit.PlanModel(pb.PlanModelRequest(model=at("flux"), machine=machine))
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_GENERIC
    assert not plan.HasField("launch")
    assert (plan.workload.image.width_px, plan.options.generic.law) == (1024, "diffusers")
    # One who computes on the processor computes in 32 bits.
    assert plan.options.generic.load_dtype == "float32"
    lines = {line.component: line.expected_bytes for line in plan.requirement.lines}
    stored = {total.component: total.bytes for total in response.facts.components}
    assert lines["transformer"] == 2 * stored["transformer"]
    options = plan_pb2.EngineOptions(generic=plan_pb2.GenericOptions(offload="disk"))
    request = pb.PlanModelRequest(model=at("flux"), machine=machine, options=options)
    assert (await refusal(fit.PlanModel(request))).reason == "INVALID_OPTION"


@pytest.mark.parametrize(
    ("field", "value"), [("tensor_bytes", 3), ("tensor_count", 9), ("model_digest", "ab" * 32), ("file_bytes", 1)]
)
async def test_facts_that_contradict_their_tensors_are_refused_by_field(
    fit: Any, model: Path, field: str, value: Any
) -> None:
    request = pb.DescribeWeightsRequest(model=at("tiny"), include_tensors=True)
    facts = (await fit.DescribeWeights(request)).facts
    setattr(facts, field, value)
    contradicting = pb.DescribeWeightsRequest(model=weights_pb2.ModelRef(facts=facts))
    failure = await refusal(fit.DescribeWeights(contradicting))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FACTS")
    assert [name for name, _ in failure.field_violations] == [f"model.facts.{field}"]


async def test_facts_with_tensors_get_their_totals_and_digest(fit: Any, model: Path) -> None:
    request = pb.DescribeWeightsRequest(model=at("tiny"), include_tensors=True)
    facts = (await fit.DescribeWeights(request)).facts
    bare = weights_pb2.WeightFacts(format=facts.format, files=facts.files, tensors=facts.tensors)
    inline = weights_pb2.ModelRef(facts=bare)
    told = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=inline))).facts
    assert told.model_digest == facts.model_digest
    assert (told.tensor_bytes, told.file_bytes) == (facts.tensor_bytes, facts.file_bytes)
    assert told.components == facts.components


async def test_what_is_no_model_of_its_own_is_told_where_it_belongs(fit: Any, ledger: FakeLedger, model: Path) -> None:
    adapter = model.parent / "adapter"
    adapter.mkdir()
    names = {f"layers.0.self_attn.q_proj.lora_{side}": np.zeros((4, 4), np.float32) for side in "ab"}
    save_file(names, adapter / "adapters.safetensors")
    (adapter / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    plan = await fit.PlanModel(pb.PlanModelRequest(model=at("adapter")))
    assert plan.assessment.verdict == requirement_pb2.VERDICT_UNKNOWN
    (note,) = plan.notes
    assert note.code == "NOT_PRICED" and "This is an adapter" in note.message and "adapters of mlx" in note.message


async def test_a_solver_says_when_a_model_is_of_another_kind(fit: Any, ledger: FakeLedger, model: Path) -> None:
    """Also for what is not here: getting it would not help."""
    picture = weights_pb2.ModelRef(catalog_id="sd-1.5")
    failure = await refusal(fit.SolveContext(pb.SolveContextRequest(model=picture)))
    assert (failure.reason, failure.message) == (
        "UNSUPPORTED_ARCHITECTURE",
        "A context is a chat's, and this is a model of pictures.",
    )
    for chat in (at("tiny"), weights_pb2.ModelRef(catalog_id="qwen3.5-2b-q4")):
        failure = await refusal(fit.SolveSize(pb.SolveSizeRequest(model=chat)))
        assert (failure.reason, failure.message) == (
            "UNSUPPORTED_ARCHITECTURE",
            "A size is a picture's, and this is a model for chat.",
        )
