"""Every reason that the contract of fit names, provoked over a real channel; and no reason that it does not name."""

import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from weighbridge_fit.wire.facts import facts_message
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from services.fit.tests import fit_model_files, sd_data
from services.fit.tests.fit_shapes import geometry
from tests.contract.fit_and_ledger import Pair, serving

GIB = 1 << 30
CONTRACT = Path(__file__).parents[2] / "proto" / "weighbridge" / "fit" / "v1" / "fit_service.proto"
# Words in capitals that are no reasons: codes, verdicts, an engine, a figure's source.
CODES = frozenset(code.name for code in grpc.StatusCode)
NO_REASONS = (CODES - {"INVALID_ARGUMENT"}) | {"WONT_RUN", "UNKNOWN", "RUNS", "GENERIC", "ASSUMED"}


def named_in_the_contract() -> set[str]:
    """Reasons in the comments of the service and its rpcs."""
    text = CONTRACT.read_text("utf-8")
    before, _, service = text.partition("service FitService {")
    service = service.partition("\n}")[0]
    lead = before.rpartition(";\n\n")[2]
    comments = " ".join(line.strip()[2:] for line in (lead + service).splitlines() if line.strip().startswith("//"))
    return set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", comments)) - NO_REASONS


def path(name: str) -> weights_pb2.ModelRef:
    return weights_pb2.ModelRef(path=name)


def plan(model: weights_pb2.ModelRef | None = None, **more: Any) -> Callable[[Pair], Awaitable[Any]]:
    return lambda pair: pair.fit.PlanModel(pb.PlanModelRequest(model=model, **more))


def mlx(**options: Any) -> plan_pb2.EngineOptions:
    return plan_pb2.EngineOptions(mlx=plan_pb2.MlxOptions(**options))


QWEN = replace(
    sd_data.facts((), "qwen"),
    file_bytes=GIB,
    tensor_bytes=GIB,
    tensor_count=1,
    components=(),
    architecture="qwen3_moe",
    geometry=replace(geometry("Qwen3-0.6B"), model_type="qwen3_moe", experts=8, experts_per_token=2),
)
INLINE = weights_pb2.ModelRef(facts=facts_message(QWEN))
MACHINE = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_CPU, ram_bytes=64 * GIB)
SMALL = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_CPU, ram_bytes=GIB)
WINDOWS = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_UNIFIED, ram_bytes=128 * GIB, platform="windows/x86_64")
DS4 = weights_pb2.ModelRef(catalog_id="deepseek-v4-flash-284b-q2")

CASES: Mapping[str, tuple[grpc.StatusCode, Callable[[Pair], Awaitable[Any]]]] = {
    "MODEL_NOT_FOUND": (grpc.StatusCode.NOT_FOUND, plan(path("absent"))),
    "MALFORMED_WEIGHTS": (grpc.StatusCode.INVALID_ARGUMENT, plan(path("broken.safetensors"))),
    "HEADER_TOO_LARGE": (
        grpc.StatusCode.INVALID_ARGUMENT,
        lambda pair: pair.fit.DescribeWeights(pb.DescribeWeightsRequest(model=path("large.safetensors"))),
    ),
    "MALFORMED_CONFIG": (grpc.StatusCode.INVALID_ARGUMENT, plan(path("config"))),
    "UNSUPPORTED_FORMAT": (grpc.StatusCode.INVALID_ARGUMENT, plan(path("notes.txt"))),
    "SEVERAL_MODELS": (grpc.StatusCode.INVALID_ARGUMENT, plan(path("several"))),
    "MODEL_MISSING": (grpc.StatusCode.INVALID_ARGUMENT, plan()),
    "INVALID_FACTS": (
        grpc.StatusCode.INVALID_ARGUMENT,
        plan(weights_pb2.ModelRef(facts=weights_pb2.WeightFacts(tensor_bytes=-1))),
    ),
    "CATALOG_MODEL_NOT_ON_DISK": (
        grpc.StatusCode.FAILED_PRECONDITION,
        lambda pair: pair.fit.DescribeWeights(
            pb.DescribeWeightsRequest(model=weights_pb2.ModelRef(catalog_id="sd-1.5"))
        ),
    ),
    "INVALID_ARGUMENT": (
        grpc.StatusCode.INVALID_ARGUMENT,
        plan(INLINE, machine=machine_pb2.Machine(pool=machine_pb2.POOL_KIND_CPU, ram_bytes=-1)),
    ),
    "CONTEXT_TOO_LONG": (
        grpc.StatusCode.INVALID_ARGUMENT,
        plan(INLINE, workload=plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=1 << 40))),
    ),
    "UNSUPPORTED_ARCHITECTURE": (
        grpc.StatusCode.INVALID_ARGUMENT,
        plan(INLINE, engine_kind=plan_pb2.ENGINE_KIND_SD),
    ),
    "INVALID_OPTION": (grpc.StatusCode.INVALID_ARGUMENT, plan(INLINE, options=mlx(kv_bits=7))),
    "ADAPTER_MISMATCH": (grpc.StatusCode.INVALID_ARGUMENT, plan(INLINE, options=mlx(adapters=["vae.safetensors"]))),
    "DRAFTER_MISMATCH": (grpc.StatusCode.INVALID_ARGUMENT, plan(INLINE, options=mlx(draft_model="vae.safetensors"))),
    "DRAFT_HEAD_MISSING": (grpc.StatusCode.INVALID_ARGUMENT, plan(INLINE, options=mlx(draft_head=True))),
    "EXPERT_SLAB_TOO_SMALL": (
        grpc.StatusCode.INVALID_ARGUMENT,
        plan(path("experts"), options=mlx(expert_slab_bytes=1)),
    ),
    "UNSUPPORTED_PLATFORM": (grpc.StatusCode.INVALID_ARGUMENT, plan(DS4, machine=WINDOWS)),
    "MODEL_WONT_RUN": (
        grpc.StatusCode.FAILED_PRECONDITION,
        lambda pair: pair.fit.SolveContext(pb.SolveContextRequest(model=INLINE, machine=SMALL)),
    ),
    "INVALID_PAGE_TOKEN": (
        grpc.StatusCode.INVALID_ARGUMENT,
        lambda pair: pair.fit.ListModels(pb.ListModelsRequest(page_token="?")),
    ),
    "INVALID_PAGE_SIZE": (
        grpc.StatusCode.INVALID_ARGUMENT,
        lambda pair: pair.fit.ListFits(pb.ListFitsRequest(page_size=-1)),
    ),
}
ELSEWHERE = {"LEDGER_UNREACHABLE", "EXPERT_CACHE_UNSAFE"}
"""Needs a suite without a ledger; is the reason of a verdict."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    models = tmp_path / "models"
    models.mkdir()
    (models / "broken.safetensors").write_bytes(struct.pack("<Q", 40) + b"{")
    header = b"{}".ljust(9 << 20)
    (models / "large.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (models / "notes.txt").write_text("no weights")
    fit_model_files.write_safetensors(models / "vae.safetensors", fit_model_files.VAE)
    fit_model_files.write_safetensors(models / "config" / "model.safetensors", fit_model_files.LANGUAGE)
    fit_model_files.write_json(models / "config" / "config.json", {"model_type": "qwen3", "num_hidden_layers": "two"})
    for name in ("one", "other"):
        fit_model_files.write_gguf(models / "several" / f"{name}.gguf", fit_model_files.LLAMA_GGUF)
    experts = {
        **fit_model_files.LANGUAGE,
        **{f"model.layers.0.mlp.switch_mlp.{part}_proj.weight": (4, 8, 8) for part in ("gate", "up", "down")},
    }
    fit_model_files.write_safetensors(models / "experts" / "model.safetensors", experts)
    fit_model_files.write_json(
        models / "experts" / "config.json",
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 1,
            "head_dim": 8,
            "vocab_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
        },
    )
    async with serving(tmp_path, "cpu:64") as both:
        yield both


def test_every_reason_of_the_contract_has_a_case_and_every_case_is_in_the_contract() -> None:
    assert named_in_the_contract() == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("reason", CASES)
async def test_a_refusal_has_its_code_its_reason_and_a_sentence(pair: Pair, reason: str) -> None:
    code, call = CASES[reason]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(pair)
    failure = RpcFailure.from_rpc_error(refused.value)
    assert (failure.code, failure.reason) == (code, reason)
    assert failure.is_ours
    assert len(failure.message) > 20
    assert "/models" not in failure.message and "Traceback" not in failure.message


async def test_without_a_ledger_no_ceiling_is_known(tmp_path: Path) -> None:
    async with serving(tmp_path, "cpu:64", with_ledger=False) as pair:
        for call in (
            plan(INLINE),
            plan(INLINE, machine=MACHINE),
            lambda both: both.fit.ListFits(pb.ListFitsRequest()),
            lambda both: both.fit.SolveContext(pb.SolveContextRequest(model=INLINE)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(pair)
            failure = RpcFailure.from_rpc_error(refused.value)
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE")
        # A failure to assess allows the download and says so.
        checked = await pair.fit.CheckPull(pb.CheckPullRequest(catalog_id="sd-1.5"))
        assert (checked.assessed, checked.assessment.reason_code) == (False, "LEDGER_UNREACHABLE")


async def test_what_a_machine_refuses_by_an_engines_own_rule_is_a_verdict(pair: Pair) -> None:
    mac = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_UNIFIED, ram_bytes=32 * GIB, platform="darwin/arm64")
    made = await pair.fit.PlanModel(pb.PlanModelRequest(model=DS4, machine=mac))
    assert made.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
    assert made.assessment.reason_code == "EXPERT_CACHE_UNSAFE"


async def test_a_solver_that_finds_nothing_says_what_stands_against_the_smallest(pair: Pair) -> None:
    calls = {
        "context": pair.fit.SolveContext(pb.SolveContextRequest(model=INLINE, machine=SMALL)),
        "picture": pair.fit.SolveSize(
            pb.SolveSizeRequest(model=weights_pb2.ModelRef(catalog_id="sd-1.5"), machine=SMALL)
        ),
    }
    for what, call in calls.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        failure = RpcFailure.from_rpc_error(refused.value)
        assert what in failure.message
        assert "this machine allows 0.60 GiB" in failure.message
        assert failure.metadata["verdict_reason"] == "EXCEEDS_CAPACITY"
        assert "The weights alone are" in failure.message
