"""Fit and the ledger together, over real channels: a what-if equals the machine itself, the leases of this moment and
measured peaks reach the plans of every engine."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import timestamp_pb2
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.wire.facts import facts_message
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from services.fit.tests import fit_ds4_layout, sd_data
from services.fit.tests.fit_shapes import geometry
from tests.contract.fit_and_ledger import Pair, serving

GIB = 1 << 30
SPECS = ("unified:64", "cpu:32", "discrete:64+24", "discrete:32+8+16", "unified:8")


def with_tensors(facts: WeightFacts) -> weights_pb2.ModelRef:
    """Facts as a client would give them: what follows from the tensors is left to fit."""
    message = facts_message(facts, include_tensors=True)
    for field in ("components", "precisions", "model_digest", "largest_tensor_bytes"):
        message.ClearField(field)
    return weights_pb2.ModelRef(facts=message)


def language_model(name: str, size: int, stored: WeightFormat) -> weights_pb2.ModelRef:
    """Facts with a public model's geometry and without tensors."""
    shape = geometry(name)
    facts = replace(
        sd_data.facts((), name),
        format=stored,
        file_bytes=size,
        tensor_bytes=size,
        tensor_count=1,
        components=(),
        architecture=shape.model_type,
        geometry=shape,
    )
    return weights_pb2.ModelRef(facts=facts_message(facts))


MODELS: Mapping[str, weights_pb2.ModelRef] = {
    "sd": with_tensors(sd_data.facts_of("klein4b", "Q4_0")),
    "sd from the catalogue": weights_pb2.ModelRef(catalog_id="flux-1-schnell-q4"),
    "ds4": with_tensors(fit_ds4_layout.facts_of(fit_ds4_layout.flash())),
    "ds4 from the catalogue": weights_pb2.ModelRef(catalog_id="deepseek-v4-flash-284b-q2"),
    "mlx": language_model("Qwen3-0.6B", 1 * GIB, WeightFormat.SAFETENSORS),
    "mlx from the catalogue": weights_pb2.ModelRef(catalog_id="qwen3.6-27b-q4"),
    "llama.cpp": language_model("Qwen3-32B", 20 * GIB, WeightFormat.GGUF),
    "vllm": language_model("Gemma-3-27B", 20 * GIB, WeightFormat.SAFETENSORS),
    "diffusers from the catalogue": weights_pb2.ModelRef(catalog_id="wan2.2-ti2v-5b"),
}


@pytest.fixture(params=SPECS)
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(tmp_path, request.param) as both:
        yield both


def bare(capacity: machine_pb2.Capacity) -> machine_pb2.Capacity:
    """A capacity without what belongs to the moment and to the book, and not to the machine."""
    found = machine_pb2.Capacity()
    found.CopyFrom(capacity)
    for field in ("source", "epoch", "revision", "measure_time"):
        found.ClearField(field)
    return found


async def outcome(call: Any) -> Any:
    """What a call answers with its machine's capacity stripped, or how it is refused."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return RpcFailure.from_rpc_error(error)
    for holder in (answer, getattr(answer, "plan", None)):
        if holder is not None and hasattr(holder, "capacity"):
            holder.capacity.CopyFrom(bare(holder.capacity))
    return answer


SOLVED_OR_PLANNED = (
    ("PlanModel", pb.PlanModelRequest),
    ("SolveContext", pb.SolveContextRequest),
    ("SolveSize", pb.SolveSizeRequest),
)


@pytest.mark.parametrize("limit", [0, 3 * GIB])
async def test_a_what_if_equals_the_same_real_machine(pair: Pair, limit: int) -> None:
    """For every engine and every rpc that takes a machine, also under a person's limit."""
    if limit:
        await pair.ledger.SetLimit(ledger_service_pb2.SetLimitRequest(limit_bytes=limit))
    machine = await pair.machine()
    assert machine.limit_bytes == limit
    planned = 0
    for name, model in MODELS.items():
        for rpc, request in SOLVED_OR_PLANNED:
            own = await outcome(getattr(pair.fit, rpc)(request(model=model)))
            other = await outcome(getattr(pair.fit, rpc)(request(model=model, machine=machine)))
            assert own == other, (name, rpc)
            planned += not isinstance(own, RpcFailure)
    for tier in plan_pb2.QualityTier.values():
        own, other = [
            await outcome(pair.fit.ListFits(pb.ListFitsRequest(quality=tier, **at)))
            for at in ({}, {"machine": machine})
        ]
        assert own == other
        assert len(own.fits) == 58
    for catalog_id in ("sd-1.5", "qwen3.6-27b-q4", "deepseek-v4-flash-284b-q2", "glm-5.2-754b-q2"):
        own, other = [
            await outcome(pair.fit.CheckPull(pb.CheckPullRequest(catalog_id=catalog_id, **at)))
            for at in ({}, {"machine": machine})
        ]
        assert own == other
    assert planned > len(MODELS), "refusals alone would prove little"


@pytest.fixture
async def of_64(tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(tmp_path, "unified:64") as both:
        yield both


async def planned(pair: Pair, name: str, **more: Any) -> pb.PlanModelResponse:
    made: pb.PlanModelResponse = await pair.fit.PlanModel(pb.PlanModelRequest(model=MODELS[name], **more))
    return made


@pytest.mark.parametrize("name", ["sd", "sd from the catalogue", "mlx", "mlx from the catalogue", "llama.cpp"])
async def test_a_plan_says_how_it_stands_against_the_leases_of_this_moment(of_64: Pair, name: str) -> None:
    free = await planned(of_64, name, check_current_leases=True)
    assert free.availability == pb.AVAILABILITY_NOW
    assert (await planned(of_64, name)).availability == pb.AVAILABILITY_UNSPECIFIED
    # Somebody holds all but a little of what it needs.
    rest = free.capacity.total.effective_bytes - free.claim.host_bytes + 1
    await of_64.hold(requirement_pb2.Claim(host_bytes=rest))
    now = await planned(of_64, name, check_current_leases=True)
    assert now.availability == pb.AVAILABILITY_MUST_WAIT
    # The verdict is about the machine, whatever else is running, and so is the claim.
    assert (now.assessment, now.claim) == (free.assessment, free.claim)
    # Another machine's leases are nobody's.
    what_if = await planned(of_64, name, check_current_leases=True, machine=await of_64.machine())
    assert what_if.availability == pb.AVAILABILITY_UNSPECIFIED


async def test_what_the_ledger_would_always_refuse_is_never_available(tmp_path: Path) -> None:
    async with serving(tmp_path, "unified:8") as pair:
        for name in ("mlx from the catalogue", "diffusers from the catalogue", "llama.cpp"):
            made = await planned(pair, name, check_current_leases=True)
            assert made.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
            assert made.availability == pb.AVAILABILITY_NEVER


@pytest.mark.parametrize("name", ["sd", "ds4"])
async def test_measured_peaks_sharpen_the_next_plan_of_the_same_weights_build_and_shape(
    tmp_path: Path, name: str
) -> None:
    async with serving(tmp_path, "unified:256") as pair:
        first = await planned(pair, name, engine_build="build-1")
        assert first.model_digest, "observations are kept by it"
        assert not first.HasField("observations")
        total = first.requirement.total
        peak = (total.low_bytes + total.expected_bytes) // 2

        async def measured(count: int, **changed: str) -> None:
            for _ in range(count):
                seen = {
                    "model_digest": first.model_digest,
                    "engine_build": "build-1",
                    "shape": first.shape,
                    "planned_bytes": total.expected_bytes,
                    "peak_bytes": peak,
                    "observe_time": timestamp_pb2.Timestamp(seconds=1_790_000_000),
                } | changed
                await pair.ledger.RecordObservation(
                    ledger_service_pb2.RecordObservationRequest(observation=lease_pb2.Observation(**seen))
                )

        # Other weights, another build, another shape: nothing of this plan's.
        await measured(3, model_digest="f" * 64)
        await measured(3, engine_build="build-2")
        await measured(3, shape="another")
        assert await planned(pair, name, engine_build="build-1") == first
        await measured(2)
        told = await planned(pair, name, engine_build="build-1")
        assert told.observations.count == 2, "shown from the first on"
        assert told.requirement == first.requirement
        await measured(1)
        sharpened = await planned(pair, name, engine_build="build-1")
        assert (sharpened.observations.count, sharpened.observations.p95_peak_bytes) == (3, peak)
        assert sharpened.requirement.total.expected_bytes == max(total.low_bytes, round(peak * 1.03))
        assert sharpened.requirement.lines == first.requirement.lines, "the estimate stays beside it"
        assert (sharpened.requirement.total.low_bytes, sharpened.requirement.total.high_bytes) == (
            total.low_bytes,
            total.high_bytes,
        )
        assert sharpened.claim.host_bytes == sharpened.requirement.total.expected_bytes
        assert sharpened.claim.source == requirement_pb2.FIGURE_SOURCE_MEASURED
        assert not (await planned(pair, name, machine=await pair.machine())).HasField("observations")
