"""GENERIC over a real channel: files on disk that no engine of ours runs are priced, by name and unnamed."""

import json
from pathlib import Path
from typing import Any

import gguf
import grpc
import numpy as np
from fit_fakes import CONFIG, GIB, FakeLedger, at, chat, cpu, refusal
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2

GENERIC = plan_pb2.ENGINE_KIND_GENERIC


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(4)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 2, 0, 2])
    writer.add_shortconv_l_cache(3)
    writer.add_context_length(4096)
    writer.add_vocab_size(32)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float16))
    writer.add_tensor("blk.0.ffn_norm.weight", np.zeros((64,), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def test_a_gguf_file_is_priced_by_llama_cpps_law(fit: Any, ledger: FakeLedger, model: Path) -> None:
    write_gguf(model.parent / "small.gguf")
    plan = await fit.PlanModel(
        pb.PlanModelRequest(model=at("small.gguf"), workload=chat(1000, 2), machine=cpu(4 * GIB))
    )
    assert plan.engine_kind == GENERIC
    assert plan.shape == "generic;law=llama_cpp;context=1000;slots=2;kv=f16;batch=512;on=host"
    found = {line.component: line.expected_bytes for line in plan.requirement.lines}
    # 2 layers x 2 x 2 heads x 16 x 2 bytes, 2,048 cells; 2 x (3 - 1) x 64 in float32, twice.
    assert (found["kv_cache"], found["recurrent_state"]) == (2 * 128 * 2048, 2 * 2 * 128 * 4)
    assert found["model"] == 32 * 64 * 2 + 64 * 4
    assert not plan.HasField("launch")
    assert plan.options.generic.law == "llama_cpp"
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("small.gguf")))).facts
    inline = await fit.PlanModel(
        pb.PlanModelRequest(model={"facts": facts}, engine_kind=GENERIC, workload=chat(1000, 2), machine=cpu(4 * GIB))
    )
    assert inline.requirement.total == plan.requirement.total


async def test_a_folder_of_another_architecture_is_priced_and_solved_for(
    fit: Any, ledger: FakeLedger, model: Path
) -> None:
    config = {**CONFIG, "model_type": "stablelm", "max_position_embeddings": 1 << 20}
    (model / "config.json").write_text(json.dumps(config))
    options = plan_pb2.EngineOptions(generic=plan_pb2.GenericOptions(law="llama_cpp", kv_type="q8_0"))
    small = cpu(2 * GIB)
    solved = await fit.SolveContext(pb.SolveContextRequest(model=at("tiny"), options=options, machine=small))
    assert solved.plan.engine_kind == GENERIC
    assert 0 < solved.context_tokens <= 1 << 20
    assert solved.plan.workload.chat.context_tokens == solved.context_tokens


async def test_what_cannot_be_asked_is_refused_by_name(fit: Any, ledger: FakeLedger, model: Path) -> None:
    options = plan_pb2.EngineOptions(generic=plan_pb2.GenericOptions(law="ollama"))
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=at("tiny"), options=options)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_OPTION")
    assert [name for name, _ in failure.field_violations] == ["options.generic.law"]
