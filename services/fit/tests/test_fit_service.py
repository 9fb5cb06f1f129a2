"""The service over a real channel: answers, refusals with code and reason, and a ledger that is there or not."""

import json
import os
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from fit_fakes import CONFIG, GIB, FakeLedger, at, chat, cpu, refusal
from google.protobuf import timestamp_pb2
from safetensors.numpy import save_file
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

TINY = at("tiny")


async def test_weights_are_described_without_a_ledger(fit: Any, model: Path) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    assert (facts.name, facts.tensor_bytes, facts.tensor_count) == ("tiny", 8192, 1)
    assert facts.format == weights_pb2.WEIGHT_FORMAT_SAFETENSORS
    assert facts.file_bytes == (model / "model.safetensors").stat().st_size
    assert (facts.architecture, facts.geometry.kv_heads, len(facts.geometry.layers)) == ("qwen3", 2, 2)
    assert len(facts.model_digest) == 64


async def test_a_plan_says_everything_about_a_launch(fit: Any, ledger: FakeLedger, model: Path) -> None:
    plan = await fit.PlanModel(pb.PlanModelRequest(model=TINY))
    total = plan.requirement.total
    assert total.low_bytes <= total.expected_bytes <= total.high_bytes
    assert plan.assessment.verdict == requirement_pb2.VERDICT_RUNS
    assert plan.claim.host_bytes == total.expected_bytes
    assert plan.claim.host_bytes + plan.claim.optional_host_bytes == total.high_bytes
    assert plan.launch.mlx.weight_bytes == 8192
    assert plan.launch.mlx.context_tokens == plan.workload.chat.context_tokens == 4096
    assert plan.launch.mlx.prefill_step_tokens == plan.options.mlx.prefill_step_tokens == 512
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_MLX
    assert plan.capacity.total.effective_bytes == 4 * GIB
    assert plan.resolved_path == str(model)
    assert not plan.HasField("observations")
    assert plan.availability == pb.AVAILABILITY_UNSPECIFIED
    kv = next(line for line in plan.requirement.lines if line.component == "kv_cache")
    assert kv.low_bytes == 2 * 2 * 2 * 64 * 2 * 4096


async def test_facts_given_inline_are_planned_like_the_files(fit: Any, ledger: FakeLedger) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    from_disk = await fit.PlanModel(pb.PlanModelRequest(model=TINY))
    inline = await fit.PlanModel(pb.PlanModelRequest(model=weights_pb2.ModelRef(facts=facts)))
    assert inline.resolved_path == ""
    inline.resolved_path = from_disk.resolved_path
    assert inline == from_disk


async def test_a_what_if_machine_is_priced_by_the_ledger_and_sees_no_observations(fit: Any, ledger: FakeLedger) -> None:
    plan = await fit.PlanModel(pb.PlanModelRequest(model=TINY, machine=cpu(64 << 20), check_current_leases=True))
    assert plan.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
    assert plan.assessment.reason_code == "EXCEEDS_CAPACITY"
    assert plan.assessment.help
    assert plan.claim.host_bytes > 64 << 20
    assert [type(request).__name__ for request in ledger.asked] == ["GetCapacityRequest"]
    same = await fit.PlanModel(pb.PlanModelRequest(model=TINY, machine=cpu(4 * GIB)))
    own = await fit.PlanModel(pb.PlanModelRequest(model=TINY))
    assert same == own


async def test_three_observations_move_the_expected_figure(fit: Any, ledger: FakeLedger) -> None:
    before = await fit.PlanModel(pb.PlanModelRequest(model=TINY, engine_build="b1"))
    asked = ledger.asked[-1]
    assert (asked.model_digest, asked.engine_build, asked.shape) == (before.model_digest, "b1", before.shape)
    peak = before.requirement.total.expected_bytes + 1_000_000
    ledger.observations = [
        lease_pb2.Observation(peak_bytes=peak - number, observe_time=timestamp_pb2.Timestamp(seconds=100 + number))
        for number in range(3)
    ]
    after = await fit.PlanModel(pb.PlanModelRequest(model=TINY, engine_build="b1"))
    assert after.requirement.total.expected_bytes == round(peak * 1.03)
    assert after.requirement.total.low_bytes == before.requirement.total.low_bytes
    assert (after.observations.count, after.observations.p95_peak_bytes) == (3, peak)
    assert after.observations.latest_time.seconds == 102
    assert after.claim.source == requirement_pb2.FIGURE_SOURCE_MEASURED


async def test_the_leases_of_this_moment_are_asked_for(fit: Any, ledger: FakeLedger) -> None:
    ledger.outcome = lease_pb2.OUTCOME_AFTER_EVICTION
    plan = await fit.PlanModel(pb.PlanModelRequest(model=TINY, check_current_leases=True))
    assert plan.availability == pb.AVAILABILITY_AFTER_EVICTION
    assert plan.would_evict_lease_ids == ["l1"]
    assert ledger.asked[-1].claim == plan.claim


async def test_without_a_ledger_a_plan_says_so(fit: Any) -> None:
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=TINY)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE")
    assert failure.retry_after_s is not None
    assert "Start it" in failure.message
    # Whoever chats names no machine, and one that was named could not be planned for either.
    assert "name a machine" not in failure.message
    pool = machine_pb2.POOL_KIND_UNIFIED
    elsewhere = pb.PlanModelRequest(model=TINY, machine=machine_pb2.Machine(pool=pool, ram_bytes=64 * GIB))
    assert (await refusal(fit.PlanModel(elsewhere))).message == failure.message


@pytest.mark.parametrize("reference", ["absent", "../outside", "/etc", "/etc/hostname", ""])
async def test_absent_and_forbidden_models_look_alike(fit: Any, reference: str) -> None:
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at(reference))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert failure.message == f"There is no model {reference!r} under the models root."
    assert failure.metadata == {}


async def test_an_unknown_catalogue_id_is_not_found(fit: Any) -> None:
    request = pb.DescribeWeightsRequest(model=weights_pb2.ModelRef(catalog_id="qwen"))
    failure = await refusal(fit.DescribeWeights(request))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("four.gguf", b"GGUF", "MALFORMED_WEIGHTS"),
        ("four.safetensors", b"\x01\x02\x03\x04", "MALFORMED_WEIGHTS"),
        ("absurd.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "MALFORMED_WEIGHTS"),
        ("model.ckpt", b"PK\x03\x04" + bytes(30), "MALFORMED_WEIGHTS"),
        ("old.gguf", b"GGUF\x01\0\0\0" + bytes(16), "UNSUPPORTED_FORMAT"),
    ],
)
async def test_malformed_files_name_file_and_cause(
    fit: Any, model: Path, name: str, content: bytes, reason: str
) -> None:
    (model.parent / name).write_bytes(content)
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at(name))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert failure.metadata["file"] == name
    assert failure.metadata["cause"]
    assert name in failure.message
    assert str(model.parent) not in failure.message, "paths of this machine stay here"


async def test_a_truncated_file_says_where_it_ends(fit: Any, model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-100])
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY)))
    assert failure.reason == "MALFORMED_WEIGHTS"
    assert failure.metadata == {"file": "model.safetensors", "cause": "TRUNCATED", "offset": str(len(whole) - 100)}


async def test_a_malformed_config_names_the_field(fit: Any, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": "two"}))
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY)))
    assert (failure.reason, failure.metadata["file"]) == ("MALFORMED_CONFIG", "config.json")
    assert "num_hidden_layers" in failure.message


MLX = plan_pb2.EngineOptions
BAD_REQUESTS = [
    ({"workload": chat(context=8193)}, "CONTEXT_TOO_LONG", "workload.chat.context_tokens"),
    ({"workload": chat(context=-5)}, "INVALID_OPTION", "workload.chat.context_tokens"),
    ({"workload": chat(slots=1000)}, "INVALID_OPTION", "workload.chat.slots"),
    ({"options": MLX(mlx=plan_pb2.MlxOptions(kv_bits=5))}, "INVALID_OPTION", "options.mlx.kv_bits"),
    ({"options": MLX(mlx=plan_pb2.MlxOptions(kv_bits=0))}, "INVALID_OPTION", "options.mlx.kv_bits"),
    (
        {"options": MLX(sd=plan_pb2.SdOptions()), "engine_kind": plan_pb2.ENGINE_KIND_MLX},
        "INVALID_OPTION",
        "options",
    ),
]


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_REQUESTS)
async def test_requests_that_cannot_be_planned_name_the_field(
    fit: Any, ledger: FakeLedger, fields: dict[str, Any], reason: str, field: str
) -> None:
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=TINY, **fields)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert [name for name, _ in failure.field_violations] == [field]


async def test_other_architectures_are_refused_by_name(fit: Any, ledger: FakeLedger, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    for asked in (
        pb.PlanModelRequest(model=TINY, engine_kind=plan_pb2.ENGINE_KIND_MLX),
        pb.PlanModelRequest(model=TINY, options=MLX(mlx=plan_pb2.MlxOptions(kv_bits=8))),
    ):
        failure = await refusal(fit.PlanModel(asked))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")
        assert "mamba" in failure.message
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "warp_drive"}))
    failure = await refusal(fit.SolveContext(pb.SolveContextRequest(model=TINY)))
    assert failure.reason == "UNSUPPORTED_ARCHITECTURE"


@pytest.mark.parametrize("machine", [None, cpu(1 << 20), cpu(64 * GIB)])
async def test_a_model_that_cannot_be_priced_is_guessed_and_never_blocked(
    fit: Any, ledger: FakeLedger, model: Path, machine: machine_pb2.Machine | None
) -> None:
    path = model.parent / "other.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + bytes(1000))
    plan = await fit.PlanModel(pb.PlanModelRequest(model=at("other.gguf"), workload=chat(), machine=machine))
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_GENERIC
    assert plan.assessment.verdict == requirement_pb2.VERDICT_UNKNOWN
    (line,) = plan.requirement.lines
    assert line.source == plan.claim.source == requirement_pb2.FIGURE_SOURCE_ASSUMED
    guessed = 1024 * 110 // 100 + GIB  # the file has 24 + 1000 bytes
    assert line.expected_bytes == plan.requirement.total.expected_bytes == guessed
    assert plan.claim.host_bytes == min(guessed, plan.capacity.host.effective_bytes)
    assert plan.claim.optional_host_bytes == 0
    assert not plan.HasField("launch")
    assert [note.code for note in plan.notes] == ["NOT_PRICED"]
    assert plan.resolved_path == str(path)


@pytest.mark.parametrize("reference", ["large", "large/model.safetensors"])
async def test_a_header_too_large_to_be_read_is_unknown_and_blocks_nothing(
    fit: Any, ledger: FakeLedger, model: Path, reference: str
) -> None:
    folder = model.parent / "large"
    folder.mkdir()
    header = b"{}".ljust(9 << 20)
    size = 8 + len(header)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    plan = await fit.PlanModel(pb.PlanModelRequest(model=at(reference), workload=chat()))
    assert (plan.assessment.verdict, plan.assessment.reason_code) == (
        requirement_pb2.VERDICT_UNKNOWN,
        "HEADER_TOO_LARGE",
    )
    assert plan.requirement.total.expected_bytes == size * 110 // 100 + GIB
    assert not plan.HasField("launch")
    named = pb.PlanModelRequest(model=at(reference), workload=chat(), engine_kind=plan_pb2.ENGINE_KIND_MLX)
    assert (await refusal(fit.PlanModel(named))).reason == "HEADER_TOO_LARGE"
    assert (await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at(reference))))).reason == (
        "HEADER_TOO_LARGE"
    )


async def test_a_guess_is_held_against_the_leases_of_this_moment_too(fit: Any, ledger: FakeLedger, model: Path) -> None:
    (model / "config.json").write_text("{}")
    plan = await fit.PlanModel(pb.PlanModelRequest(model=TINY, check_current_leases=True))
    assert plan.availability == pb.AVAILABILITY_NOW
    assert ledger.asked[-1].purpose.engine_kind == "generic"


async def test_a_request_without_a_model_is_refused(fit: Any) -> None:
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MODEL_MISSING")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tensor_bytes": 0}, "model.facts.tensor_bytes"),
        ({"tensor_bytes": -1}, "model.facts.tensor_bytes"),
        ({"tensor_bytes": 5}, "model.facts.components"),
        ({"file_bytes": -1}, "model.facts.file_bytes"),
        ({"geometry": weights_pb2.ModelGeometry(hidden_size=-1)}, "model.facts.geometry.hidden_size"),
        ({"geometry": weights_pb2.ModelGeometry(layers=[99])}, "model.facts.geometry.layers"),
        ({"geometry": weights_pb2.ModelGeometry(layers=[1] * 4097)}, "model.facts.geometry.layers"),
        ({"geometry": weights_pb2.ModelGeometry(vocab_size=2**62)}, "model.facts.geometry.vocab_size"),
        ({"geometry": weights_pb2.ModelGeometry(activation_bytes=16)}, "model.facts.geometry.activation_bytes"),
        ({"geometry": weights_pb2.ModelGeometry(model_type="q" * 1000)}, "model.facts.geometry.model_type"),
        ({"tensor_bytes": 2**63 - 1}, "model.facts.tensor_bytes"),
        ({"file_bytes": 2**63 - 1}, "model.facts.file_bytes"),
        ({"components": [weights_pb2.ComponentTally()] * 5000}, "model.facts.components"),
        ({"notes": ["n"] * 5000}, "model.facts.notes"),
        ({"architecture": "a" * 1000}, "model.facts.architecture"),
        ({"components": [weights_pb2.ComponentTally(bytes=-1)]}, "model.facts.components"),
    ],
)
async def test_inline_facts_that_no_file_could_have_are_refused(
    fit: Any, ledger: FakeLedger, changes: dict[str, Any], field: str
) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    for name in changes:
        facts.ClearField(name)
    facts.MergeFrom(weights_pb2.WeightFacts(**changes))
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=weights_pb2.ModelRef(facts=facts))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FACTS")
    assert failure.field_violations[0][0] == field


async def test_the_largest_context_comes_with_its_plan(fit: Any, ledger: FakeLedger) -> None:
    whole = await fit.SolveContext(pb.SolveContextRequest(model=TINY))
    assert whole.context_tokens == whole.plan.workload.chat.context_tokens == 8192
    small = await fit.SolveContext(pb.SolveContextRequest(model=TINY, slots=4, machine=cpu(192 << 20)))
    assert 0 < small.context_tokens < 8192
    assert small.plan.workload.chat.slots == 4
    assert small.plan.assessment.verdict == requirement_pb2.VERDICT_RUNS
    failure = await refusal(fit.SolveContext(pb.SolveContextRequest(model=TINY, machine=cpu(64 << 20))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN")


@pytest.mark.parametrize("engine", ["ds4", "generic"])
async def test_an_engine_that_does_not_load_the_model_says_so(fit: Any, ledger: FakeLedger, engine: str) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    facts.ClearField("geometry")
    kind = plan_pb2.EngineKind.Value(f"ENGINE_KIND_{engine.upper()}")
    inline = weights_pb2.ModelRef(facts=facts)
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=inline, engine_kind=kind)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")


async def test_a_picture_of_a_chat_model_is_refused_with_the_command_for_it(fit: Any, ledger: FakeLedger) -> None:
    asked = pb.PlanModelRequest(model=TINY, engine_kind=plan_pb2.ENGINE_KIND_SD)
    failure = await refusal(fit.PlanModel(asked))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")
    assert failure.message.endswith("This model is for chat: use `weighbridge chat`, with the engine mlx.")


ABSURD_SIZES = {"hidden_size": 1 << 31, "vocab_size": 1 << 31, "kv_heads": 1 << 31, "head_size": 1 << 31}


async def test_sizes_that_multiply_beyond_64_bits_are_refused_or_guessed(fit: Any, ledger: FakeLedger) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    facts.geometry.MergeFrom(weights_pb2.ModelGeometry(**ABSURD_SIZES))
    inline = weights_pb2.ModelRef(facts=facts)
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=inline, engine_kind=plan_pb2.ENGINE_KIND_MLX)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")
    plan = await fit.PlanModel(pb.PlanModelRequest(model=inline))
    assert plan.assessment.verdict == requirement_pb2.VERDICT_UNKNOWN


async def test_the_largest_inline_facts_still_make_a_plan(fit: Any, ledger: FakeLedger) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    facts.file_bytes = facts.tensor_bytes = facts.components[0].bytes = 1 << 60
    facts.ClearField("precisions")
    facts.ClearField("files")
    facts.components[0].ClearField("precisions")
    inline = weights_pb2.ModelRef(facts=facts)
    plan = await fit.PlanModel(pb.PlanModelRequest(model=inline, engine_kind=plan_pb2.ENGINE_KIND_MLX))
    assert plan.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
    assert plan.claim.host_bytes > 1 << 60


@pytest.mark.parametrize(
    ("workload", "options", "reason"),
    [
        (chat(2**63 - 1), {}, "CONTEXT_TOO_LONG"),
        (chat(-(2**63)), {}, "INVALID_OPTION"),
        (chat(1, 2**31 - 1), {}, "INVALID_OPTION"),
        (chat(1, -(2**31)), {}, "INVALID_OPTION"),
        (chat(), {"prefill_step_tokens": 0}, "INVALID_OPTION"),
        (chat(), {"prefill_step_tokens": -1}, "INVALID_OPTION"),
        (chat(), {"allocator_cache_bytes": 2**63 - 1}, "INVALID_OPTION"),
        (chat(), {"allocator_cache_bytes": -1}, "INVALID_OPTION"),
        (chat(), {"kv_bits": 4, "kv_group_size": 0}, "INVALID_OPTION"),
    ],
)
@pytest.mark.parametrize("made_for", [8192, 0])
async def test_absurd_workloads_are_refused(
    fit: Any, ledger: FakeLedger, workload: plan_pb2.Workload, options: dict[str, int], reason: str, made_for: int
) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=TINY))).facts
    facts.geometry.max_context_tokens = made_for
    failure = await refusal(
        fit.PlanModel(
            pb.PlanModelRequest(
                model=weights_pb2.ModelRef(facts=facts),
                workload=workload,
                options=plan_pb2.EngineOptions(mlx=plan_pb2.MlxOptions(**options)),
            )
        )
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)


async def test_what_a_folder_says_can_always_travel(fit: Any, model: Path) -> None:
    bad = os.fsdecode(b"\xff\xfe")
    folder = model.parent / bad
    folder.mkdir()
    save_file({"model.w": np.zeros((64, 64), np.float16)}, folder / f"{bad}.safetensors")
    (model / "again").symlink_to(folder)
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("tiny/again")))).facts
    assert facts.tensor_bytes == 8192
    save_file({"model.w": np.zeros((64, 64), np.float16)}, folder / "b.safetensors")
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("tiny/again"))))
    assert failure.reason == "SEVERAL_MODELS"
    (folder / "b.safetensors").unlink()
    (folder / f"{bad}.safetensors").write_bytes(b"")
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("tiny/again"))))
    assert failure.reason == "MALFORMED_WEIGHTS"


async def test_the_longest_names_do_not_burst_the_trailers(fit: Any, model: Path) -> None:
    key = b"k" * 65_000
    pair = len(key).to_bytes(8, "little") + key + b"\x63\0\0\0" + bytes(8)
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (model.parent / "long.gguf").write_bytes(head + pair)
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("long.gguf"))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_WEIGHTS")
    failure = await refusal(fit.DescribeWeights(pb.DescribeWeightsRequest(model=at("x/" * 1_000_000))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
