"""Catalogue models over a real channel: listed, found, planned from disk before pins before sizes."""

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import weighbridge_catalog
from fit_fakes import CONFIG, GIB, FakeLedger, at, chat, cpu, named, refusal, unified
from safetensors.numpy import save_file
from weighbridge_fit.pinned import pin
from weighbridge_fit.wire.facts import facts_from
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

OURS = sorted(path.stem for path in weighbridge_catalog.MODELS.glob("*.json"))


def manifest(model: Path, **changes: Any) -> dict[str, Any]:
    """A manifest of the folder's model file."""
    size = (model / "model.safetensors").stat().st_size
    return {
        "format": "weighbridge.model/1",
        "id": model.name,
        "version": "1.0.0",
        "name": "A tiny Qwen3",
        "use": "chat",
        "engine": "mlx",
        "license": "MIT",
        "repository": {"name": "me/tiny"},
        "chat": {"max_context_tokens": 8192},
        "files": [{"path": "model.safetensors", "component": "model", "size_bytes": size}],
        **changes,
    }


def write(manifests: Path, document: dict[str, Any]) -> None:
    (manifests / f"{document['id']}.json").write_text(json.dumps(document))


@pytest.fixture
def tiny(manifests: Path, model: Path) -> Path:
    """The tiny model, known to the catalogue and on disk."""
    write(manifests, manifest(model))
    return model


def damage(folder: Path, away: Path, fault: str) -> None:
    """Makes the model in a folder less than whole."""
    weights = folder / "model.safetensors"
    if fault == "missing":
        weights.unlink()
    elif fault == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        folder.rename(away)
        if fault == "a file":
            folder.write_text("")
        elif fault == "a link that leads out":
            folder.symlink_to(away)


async def every_page(rpc: Any, request: Any, field: str) -> list[list[Any]]:
    pages = []
    while True:
        response = await rpc(request)
        pages.append(list(getattr(response, field)))
        if not response.next_page_token:
            return pages
        request.page_token = response.next_page_token


async def test_the_catalogue_is_listed_in_pages(fit: Any) -> None:
    whole = await fit.ListModels(pb.ListModelsRequest())
    assert [model.catalog_id for model in whole.models] == OURS
    assert (whole.next_page_token, list(whole.notes)) == ("", [])
    pages = await every_page(fit.ListModels, pb.ListModelsRequest(page_size=25), "models")
    assert [len(page) for page in pages] == [25, 25, 8]
    assert [model for page in pages for model in page] == list(whole.models)
    pages = await every_page(fit.ListModels, pb.ListModelsRequest(use=pb.MODEL_USE_IMAGE, page_size=6), "models")
    assert [len(page) for page in pages] == [6, 6], "a last page that is full has no other after it"
    counts = {pb.MODEL_USE_IMAGE: 12, pb.MODEL_USE_VIDEO: 4, pb.MODEL_USE_CHAT: 42}
    for use, count in counts.items():
        listed = (await fit.ListModels(pb.ListModelsRequest(use=use))).models
        assert (len(listed), {model.use for model in listed}) == (count, {use})


@pytest.mark.parametrize("rpc", ["ListModels", "ListFits"])
@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"page_size": -1}, "INVALID_PAGE_SIZE", "page_size"),
        ({"page_token": "x"}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"page_token": "\u00e9"}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"page_token": "AAAA"}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"page_token": "A" * 5000}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"use": 99}, "INVALID_ARGUMENT", "use"),
    ],
)
async def test_pages_that_are_none_are_refused(
    fit: Any, ledger: FakeLedger, rpc: str, fields: dict[str, Any], reason: str, field: str
) -> None:
    request = pb.ListModelsRequest(**fields) if rpc == "ListModels" else pb.ListFitsRequest(**fields)
    failure = await refusal(getattr(fit, rpc)(request))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert [name for name, _ in failure.field_violations] == [field]


async def test_a_token_of_another_list_is_refused(fit: Any, ledger: FakeLedger) -> None:
    token = (await fit.ListModels(pb.ListModelsRequest(page_size=1))).next_page_token
    for call in (
        fit.ListModels(pb.ListModelsRequest(use=pb.MODEL_USE_CHAT, page_token=token)),
        fit.ListFits(pb.ListFitsRequest(page_token=token)),
    ):
        assert (await refusal(call)).reason == "INVALID_PAGE_TOKEN"
    chosen = pb.ListFitsRequest(catalog_ids=["sd-1.5", "sd-turbo"], page_size=1)
    chosen.page_token = (await fit.ListFits(chosen)).next_page_token
    assert [found.catalog_id for found in (await fit.ListFits(chosen)).fits] == ["sd-turbo"]
    chosen.catalog_ids.append("sdxl-turbo")
    assert (await refusal(fit.ListFits(chosen))).reason == "INVALID_PAGE_TOKEN"


async def test_a_page_goes_on_where_the_last_one_ended_whatever_came_between(
    fit: Any, manifests: Path, model: Path
) -> None:
    first = await fit.ListModels(pb.ListModelsRequest(page_size=10))
    write(manifests, manifest(model, id="a-new-one"))
    second = await fit.ListModels(pb.ListModelsRequest(page_size=1, page_token=first.next_page_token))
    assert second.models[0].catalog_id == OURS[10]


async def test_one_entry_says_all_that_a_pull_needs(fit: Any, model: Path) -> None:
    found = (await fit.GetModel(pb.GetModelRequest(catalog_id="flux-1-schnell-q4"))).model
    assert (found.display_name, found.license) == ("FLUX.1 schnell (Q4_K_S)", "Apache-2.0")
    assert (found.engine_kind, found.use) == (plan_pb2.ENGINE_KIND_SD, pb.MODEL_USE_IMAGE)
    assert (found.width_px.min, found.width_px.max, found.default_side_px) == (512, 2048, 1024)
    assert (found.recommended_steps, found.image_to_image, found.commercial_use) == (4, True, True)
    assert found.folder == str(model.parent / "flux-1-schnell-q4")
    assert not found.on_disk and not found.user_entry and not found.HasField("facts")
    assert found.file_bytes == sum(file.size_bytes for file in found.files) == 12_259_327_156
    main = found.files[0]
    assert (main.name, main.path, main.component) == (main.path, "flux1-schnell-Q4_K_S.gguf", "diffusion_model")
    assert main.url.endswith("/flux1-schnell-Q4_K_S.gguf") and len(main.sha256) == 64
    video = (await fit.GetModel(pb.GetModelRequest(catalog_id="wan2.2-ti2v-5b"))).model
    assert (video.repository, len(video.revision)) == ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 40)
    assert "25 to 161 frames" in " ".join(video.notes)
    language = (await fit.GetModel(pb.GetModelRequest(catalog_id="qwen3.5-2b-q4"))).model
    assert (language.max_context_tokens, language.parameters) == (256_000, "2B")
    assert not language.HasField("width_px") and not language.HasField("image_to_image")


@pytest.mark.parametrize(
    ("catalog_id", "hint"),
    [("qwen3.5-2b", "Did you mean qwen3.5-2b-q4?"), ("", "in the catalogue."), ("x" * 100_000, "in the catalogue.")],
)
async def test_an_unknown_id_is_not_found(fit: Any, ledger: FakeLedger, catalog_id: str, hint: str) -> None:
    for call in (
        fit.GetModel(pb.GetModelRequest(catalog_id=catalog_id)),
        fit.CheckPull(pb.CheckPullRequest(catalog_id=catalog_id)),
        fit.ListFits(pb.ListFitsRequest(catalog_ids=["sd-1.5", catalog_id])),
        fit.PlanModel(pb.PlanModelRequest(model=named(catalog_id))),
        fit.DescribeWeights(pb.DescribeWeightsRequest(model=named(catalog_id))),
    ):
        failure = await refusal(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert failure.message.endswith(hint)
        assert len(failure.message) < 500


async def test_a_broken_manifest_is_said_wherever_it_is_missed(fit: Any, ledger: FakeLedger, manifests: Path) -> None:
    (manifests / "mine.json").write_text('{"format": "weighbridge.model/1", "id": "mine"}')
    listed = await fit.ListModels(pb.ListModelsRequest())
    assert [model.catalog_id for model in listed.models] == OURS
    (note,) = listed.notes
    assert note.startswith("mine.json, version: ")
    assert list((await fit.ListFits(pb.ListFitsRequest(catalog_ids=["sd-1.5"]))).notes) == [note]
    for call in (
        fit.GetModel(pb.GetModelRequest(catalog_id="mine")),
        fit.PlanModel(pb.PlanModelRequest(model=at("mine"))),
    ):
        failure = await refusal(call)
        assert failure.reason == "MODEL_NOT_FOUND"
        assert note in failure.message


async def test_a_model_on_disk_is_planned_from_its_headers(fit: Any, ledger: FakeLedger, tiny: Path) -> None:
    assert (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model.on_disk
    by_id = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    by_path = await fit.PlanModel(pb.PlanModelRequest(model=at("tiny")))
    assert by_id.resolved_path == str(tiny)
    assert by_id == by_path
    assert not by_id.notes
    described = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=named("tiny"), include_tensors=True))
    assert [tensor.name for tensor in described.facts.tensors] == ["model.w"]
    solved = await fit.SolveContext(pb.SolveContextRequest(model=named("tiny")))
    assert solved.context_tokens == 8192


async def test_current_leases_are_asked_for_catalogue_models_too(fit: Any, ledger: FakeLedger, tiny: Path) -> None:
    ledger.outcome = lease_pb2.OUTCOME_MUST_WAIT
    plan = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny"), check_current_leases=True))
    assert plan.availability == pb.AVAILABILITY_MUST_WAIT
    assert ledger.asked[-1].claim == plan.claim
    assert ledger.asked[-1].purpose.model_name == "tiny"


async def test_a_change_on_disk_is_seen(fit: Any, ledger: FakeLedger, tiny: Path, manifests: Path) -> None:
    before = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    save_file({"model.w": np.zeros((64, 65), np.float16)}, tiny / "model.safetensors")
    write(manifests, manifest(tiny))
    after = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert after.launch.mlx.weight_bytes == before.launch.mlx.weight_bytes + 128
    (tiny / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    deeper = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert deeper.requirement.total.low_bytes > after.requirement.total.low_bytes


@pytest.mark.parametrize("fault", ["missing", "short", "no folder", "a file", "a link that leads out"])
async def test_what_is_not_whole_is_not_on_disk(
    fit: Any, ledger: FakeLedger, tiny: Path, tmp_path: Path, fault: str
) -> None:
    damage(tiny, tmp_path / "elsewhere", fault)
    assert not (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model.on_disk
    plan = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert plan.resolved_path == ""
    assert [note.code for note in plan.notes] == ["PRICED_BY_RANGE", "CATALOG_MODEL_NOT_ON_DISK"]
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_MLX
    assert not plan.HasField("launch")
    for call in (
        fit.DescribeWeights(pb.DescribeWeightsRequest(model=named("tiny"))),
        fit.SolveContext(pb.SolveContextRequest(model=named("tiny"))),
    ):
        failure = await refusal(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CATALOG_MODEL_NOT_ON_DISK")
        assert "weighbridge pull tiny" in failure.message


def record(folder: Path, catalog_id: str, sizes: dict[str, int]) -> None:
    """What a pull writes last."""
    files = [{"path": path, "size_bytes": size, "sha256": "", "modified_ns": 1} for path, size in sizes.items()]
    document = {"format": "weighbridge.pulled-model/1", "catalog_id": catalog_id, "version": "1.0.0", "files": files}
    (folder / "weighbridge.json").write_text(json.dumps(document))


async def test_what_a_pull_recorded_decides_what_is_whole(fit: Any, ledger: FakeLedger, tiny: Path) -> None:
    size = (tiny / "model.safetensors").stat().st_size
    record(tiny, "tiny", {"model.safetensors": size, "tokenizer.json": 5})
    assert not (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model.on_disk
    (tiny / "tokenizer.json").write_text("12345")
    assert (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model.on_disk
    record(tiny, "tiny", {"../tiny/model.safetensors": size})
    assert not (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model.on_disk


async def test_a_path_that_a_pull_brought_is_the_catalogues_model(fit: Any, ledger: FakeLedger, tiny: Path) -> None:
    size = (tiny / "model.safetensors").stat().st_size
    record(tiny, "tiny", {"model.safetensors": size})
    moved = tiny.parent / "moved"
    damage(tiny, moved, "no folder")
    plan = await fit.PlanModel(pb.PlanModelRequest(model=at("moved")))
    assert (plan.model_name, plan.resolved_path) == ("tiny", str(moved))
    record(moved, "nobody-knows-it", {"model.safetensors": size})
    assert (await fit.PlanModel(pb.PlanModelRequest(model=at("moved")))).model_name == "moved"
    for broken in ("", "[]", '{"catalog_id": 1}', "{" * 100):
        (moved / "weighbridge.json").write_text(broken)
        assert (await fit.PlanModel(pb.PlanModelRequest(model=at("moved")))).model_name == "moved"


async def test_pinned_facts_price_a_model_like_its_files(
    fit: Any, ledger: FakeLedger, tiny: Path, manifests: Path, tmp_path: Path
) -> None:
    on_disk = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    described = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=named("tiny"), include_tensors=True))
    write(manifests, manifest(tiny, facts=pin(facts_from(described.facts))))
    entry = (await fit.GetModel(pb.GetModelRequest(catalog_id="tiny"))).model
    assert entry.facts.model_digest == described.facts.model_digest
    assert await fit.PlanModel(pb.PlanModelRequest(model=named("tiny"))) == on_disk, "they agree: nothing to say"
    damage(tiny, tmp_path / "elsewhere", "no folder")
    pinned = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert (pinned.resolved_path, [note.code for note in pinned.notes]) == ("", ["CATALOG_MODEL_NOT_ON_DISK"])
    assert (pinned.requirement, pinned.claim, pinned.shape) == (on_disk.requirement, on_disk.claim, on_disk.shape)
    again = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=named("tiny"), include_tensors=True))
    assert again == described


async def test_files_count_where_pins_disagree_and_that_is_said(
    fit: Any, ledger: FakeLedger, tiny: Path, manifests: Path
) -> None:
    described = await fit.DescribeWeights(pb.DescribeWeightsRequest(model=named("tiny"), include_tensors=True))
    part = pin(facts_from(described.facts))
    save_file({"model.w": np.zeros((64, 65), np.float16)}, tiny / "model.safetensors")
    write(manifests, manifest(tiny, facts=part))
    plan = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert plan.launch.mlx.weight_bytes == 8192 + 128
    assert [note.code for note in plan.notes] == ["FACTS_DISAGREE"]


async def test_a_model_of_parts_brings_its_own(fit: Any, ledger: FakeLedger, model: Path, manifests: Path) -> None:
    """As engine sd loads it: the diffusion model's file, and each part by its role."""
    folder = model.parent / "parts"
    folder.mkdir()
    for name, tensor in (("main", "double_blocks.0.img_mod.lin.weight"), ("ae", "decoder.conv_in.weight")):
        save_file({tensor: np.zeros((64, 64), np.float16)}, folder / f"{name}.safetensors")
    files = [
        {
            "path": f"{name}.safetensors",
            "component": component,
            "size_bytes": (folder / f"{name}.safetensors").stat().st_size,
            "url": f"https://example.org/{name}.safetensors",
        }
        for name, component in (("main", "diffusion_model"), ("ae", "vae"))
    ]
    sides = {"min": 64, "max": 1024}
    write(
        manifests,
        manifest(
            model,
            id="parts",
            use="image",
            engine="sd",
            weights_kind="diffusion-model",
            chat=None,
            render={"width_px": sides, "height_px": sides},
            files=files,
        ),
    )
    by_id = await fit.PlanModel(pb.PlanModelRequest(model=named("parts")))
    parts = {"vae": "parts/ae.safetensors"}
    by_path = await fit.PlanModel(
        pb.PlanModelRequest(
            model=at("parts/main.safetensors"),
            options=plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(parts=parts)),
            workload=plan_pb2.Workload(image=by_id.workload.image),
        )
    )
    assert by_id.resolved_path == str(folder / "main.safetensors")
    assert by_id.requirement.total == by_path.requirement.total
    assert {str(folder / "main.safetensors"), str(folder / "ae.safetensors")} <= set(by_id.launch.sd.arguments)
    assert list(by_id.launch.sd.arguments) == list(by_path.launch.sd.arguments)


async def test_a_range_counts_the_context_that_is_asked_for(fit: Any, ledger: FakeLedger) -> None:
    def asked(context: int, slots: int) -> pb.PlanModelRequest:
        return pb.PlanModelRequest(
            model=named("ornith-9b-q4"), workload=chat(context, slots), machine=unified(64 * GIB)
        )

    plans = {key: await fit.PlanModel(asked(*key)) for key in [(0, 0), (4096, 1), (8192, 1), (8192, 2)]}
    assert plans[0, 0] == plans[4096, 1]
    # 32,768 bytes for a token and 51,511,296 for a conversation, as the entry's author gives them.
    lines = {key: {line.component: line for line in plan.requirement.lines} for key, plan in plans.items()}
    assert lines[8192, 1]["kv_cache"].expected_bytes == 8192 * 32_768 + 51_511_296
    assert lines[8192, 2]["kv_cache"].expected_bytes == 2 * (8192 * 32_768 + 51_511_296)
    weights = lines[4096, 1]["weights"]
    assert (weights.expected_bytes, weights.high_bytes) == (5_950_219_560, 5_950_219_560)
    assert weights.source == requirement_pb2.FIGURE_SOURCE_ASSUMED
    assert plans[8192, 2].workload.chat.slots == 2
    for bad in (chat(-1, 1), chat(2**40, 1), chat(1, 10_000)):
        failure = await refusal(
            fit.PlanModel(pb.PlanModelRequest(model=named("ornith-9b-q4"), workload=bad, machine=cpu(64 * GIB)))
        )
        assert failure.reason == "INVALID_OPTION"


async def test_a_range_that_does_not_run_says_what_would_and_by_how_much(fit: Any, ledger: FakeLedger) -> None:
    async def asked(context: int, size: int) -> pb.PlanModelResponse:
        request = pb.PlanModelRequest(model=named("ornith-9b-q4"), workload=chat(context, 2), machine=unified(size))
        made: pb.PlanModelResponse = await fit.PlanModel(request)
        return made

    long = await asked(262_144, 16 * GIB)
    assert long.assessment.verdict != requirement_pb2.VERDICT_RUNS
    sentence = next(words for words in long.assessment.help if words.startswith("A context of "))
    context = int(sentence.split(" ")[3].replace(",", ""))
    shorter = await asked(context, 16 * GIB)
    assert shorter.assessment.verdict == requirement_pb2.VERDICT_RUNS
    assert (await asked(context + 256, 16 * GIB)).assessment.verdict != requirement_pb2.VERDICT_RUNS
    saved = (long.requirement.total.high_bytes - shorter.requirement.total.high_bytes) / GIB
    assert f"saves {saved:.2f} GiB" in sentence
    # 5.54 GiB of files on a machine of 5: nothing but smaller weights helps.
    small = await asked(4096, 5 * GIB)
    assert any("The weights alone are 5.54 GiB" in words and "90%" in words for words in small.assessment.help)
    # 6.7 GiB do, and the smallest context is too large.
    between = await asked(4096, round(6.5 * GIB))
    assert any("No context is small enough" in words and "GiB more" in words for words in between.assessment.help)
    too_long = pb.PlanModelRequest(model=named("ornith-9b-q4"), workload=chat(262_145, 1), machine=unified(64 * GIB))
    assert (await refusal(fit.PlanModel(too_long))).reason == "CONTEXT_TOO_LONG"


async def test_an_engine_that_the_catalogue_says_is_another_is_refused(fit: Any, ledger: FakeLedger) -> None:
    images = "This model makes images: use `weighbridge image`, with the engine sd."
    chats = "This model is for chat: use `weighbridge chat`, with the engine mlx."
    for request, way_out in (
        (pb.PlanModelRequest(model=named("sd-1.5"), engine_kind=plan_pb2.ENGINE_KIND_MLX), images),
        (pb.PlanModelRequest(model=named("qwen3.5-2b-q4"), engine_kind=plan_pb2.ENGINE_KIND_DS4), chats),
    ):
        failure = await refusal(fit.PlanModel(request))
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")
        assert "is loaded by" in failure.message
        assert failure.message.endswith(way_out)
    failure = await refusal(fit.PlanModel(pb.PlanModelRequest(model=named("sd-1.5"), workload=chat(4096))))
    assert (failure.reason, failure.field_violations[0][0]) == ("INVALID_OPTION", "workload")


async def test_the_engine_that_loads_it_may_plan_what_is_not_here_yet(fit: Any, ledger: FakeLedger) -> None:
    plan = await fit.PlanModel(pb.PlanModelRequest(model=named("qwen3.5-2b-q4"), engine_kind=plan_pb2.ENGINE_KIND_MLX))
    assert (plan.resolved_path, plan.engine_kind) == ("", plan_pb2.ENGINE_KIND_MLX)
    assert "CATALOG_MODEL_NOT_ON_DISK" in [note.code for note in plan.notes]


async def test_the_largest_picture_comes_with_its_plan(fit: Any, ledger: FakeLedger) -> None:
    request = pb.SolveSizeRequest(model=named("sdxl-base-1.0"), machine=unified(64 * GIB))
    whole = await fit.SolveSize(request)
    assert (whole.width_px, whole.height_px) == (1536, 1536), "the largest it renders well"
    assert whole.plan.assessment.verdict == requirement_pb2.VERDICT_RUNS
    assert (whole.plan.workload.image.width_px, whole.plan.workload.image.height_px) == (1536, 1536)
    wide = await fit.SolveSize(
        pb.SolveSizeRequest(model=named("sdxl-base-1.0"), aspect_width=2, aspect_height=1, machine=unified(64 * GIB))
    )
    assert (wide.width_px, wide.height_px) == (1536, 768)
    failure = await refusal(fit.SolveSize(pb.SolveSizeRequest(model=named("sdxl-base-1.0"), machine=cpu(GIB))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN")
    for fields in ({"aspect_width": 2}, {"aspect_width": -1, "aspect_height": 1}):
        bad = pb.SolveSizeRequest(model=named("sdxl-base-1.0"), **fields)
        assert (await refusal(fit.SolveSize(bad))).reason == "INVALID_OPTION"
    failure = await refusal(fit.SolveSize(pb.SolveSizeRequest(model=at("tiny"))))
    assert failure.reason == "UNSUPPORTED_ARCHITECTURE"
