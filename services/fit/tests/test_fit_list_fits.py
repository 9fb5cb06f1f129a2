"""The whole catalogue on one machine, in one call that no single model can break."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import weighbridge_catalog
from fit_fakes import GIB, FakeLedger, cpu, named, refusal, unified
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit import listing
from weighbridge_fit.asking import ModelDesk
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.catalog import ranged
from weighbridge_fit.catalog.entry import CatalogEntry, CatalogFile, Use
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.reading import HeaderReader
from weighbridge_fit.servicer import FitServicer
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

OURS = sorted(path.stem for path in weighbridge_catalog.MODELS.glob("*.json"))
ENTRIES = Catalogue(weighbridge_catalog.MODELS, None).snapshot().entries
RUNS, WONT_RUN = requirement_pb2.VERDICT_RUNS, requirement_pb2.VERDICT_WONT_RUN
UNKNOWN = requirement_pb2.VERDICT_UNKNOWN


def on_cpu(size: int) -> Capacity:
    ceiling = Ceiling(size, size)
    return Capacity(Pool.CPU, ceiling, ceiling, total_ram=size, platform="linux/x86_64")


async def test_every_model_is_priced_by_one_look_at_the_machine(fit: Any, ledger: FakeLedger) -> None:
    response = await fit.ListFits(pb.ListFitsRequest(machine=unified(64 * GIB)))
    assert [found.catalog_id for found in response.fits] == OURS
    assert (response.next_page_token, list(response.notes)) == ("", [])
    assert (response.capacity.pool, response.capacity.total_ram_bytes) == (machine_pb2.POOL_KIND_UNIFIED, 64 * GIB)
    assert response.capacity.total.effective_bytes == 64 * GIB
    assert [type(request).__name__ for request in ledger.asked] == ["GetCapacityRequest"]
    for found in response.fits:
        assert found.assessment.verdict not in (UNKNOWN, requirement_pb2.VERDICT_UNSPECIFIED), found
        assert found.assessment.reason
        assert 0 < found.total.low_bytes <= found.total.expected_bytes <= found.total.high_bytes
        assert found.workload.WhichOneof("kind") == ("chat" if ENTRIES[found.catalog_id].use is Use.CHAT else "image")
        assert found.claim.host_bytes > 0
        # ds4's layouts are known to the byte by their files' sizes; of all others only the sizes are known.
        if ENTRIES[found.catalog_id].engine is not Engine.DS4:
            assert found.claim.source == requirement_pb2.FIGURE_SOURCE_ASSUMED
        assert not found.priced_by_facts and not found.on_disk


async def test_a_list_and_a_plan_of_one_model_say_the_same(fit: Any, ledger: FakeLedger) -> None:
    machine = unified(32 * GIB)
    for found in (await fit.ListFits(pb.ListFitsRequest(machine=machine))).fits:
        plan = await fit.PlanModel(pb.PlanModelRequest(model=named(found.catalog_id), machine=machine))
        assert (found.assessment.verdict, found.assessment.reason) == (plan.assessment.verdict, plan.assessment.reason)
        assert (found.total, found.claim) == (plan.requirement.total, plan.claim)
        assert (found.workload, found.engine_kind) == (plan.workload, plan.engine_kind)


async def test_a_what_if_is_the_same_as_that_machine(fit: Any, ledger: FakeLedger) -> None:
    assert await fit.ListFits(pb.ListFitsRequest()) == await fit.ListFits(pb.ListFitsRequest(machine=cpu(4 * GIB)))


async def test_use_and_ids_choose_and_pages_add_up(fit: Any, ledger: FakeLedger) -> None:
    images = (await fit.ListFits(pb.ListFitsRequest(use=pb.MODEL_USE_IMAGE))).fits
    assert len(images) == 12
    chosen = pb.ListFitsRequest(catalog_ids=["sd-turbo", "qwen3.5-2b-q4", "sd-turbo"])
    assert [found.catalog_id for found in (await fit.ListFits(chosen)).fits] == ["qwen3.5-2b-q4", "sd-turbo"]
    chosen.use = pb.MODEL_USE_CHAT
    assert [found.catalog_id for found in (await fit.ListFits(chosen)).fits] == ["qwen3.5-2b-q4"]
    whole = list((await fit.ListFits(pb.ListFitsRequest())).fits)
    request, paged = pb.ListFitsRequest(page_size=20), []
    while True:
        response = await fit.ListFits(request)
        paged += response.fits
        if not response.next_page_token:
            break
        request.page_token = response.next_page_token
    assert paged == whole


async def test_quality_sizes_images_inside_their_ranges(fit: Any, ledger: FakeLedger) -> None:
    """Half, one and one and a half times the default side, clamped to what a model renders well."""
    sizes: dict[str, list[tuple[int, int]]] = {}
    totals: dict[str, list[int]] = {}
    tiers = (plan_pb2.QUALITY_TIER_DRAFT, plan_pb2.QUALITY_TIER_STANDARD, plan_pb2.QUALITY_TIER_HIGH)
    ids = ["sd-1.5", "sdxl-base-1.0", "sdxl-turbo", "flux-1-dev-q4", "wan2.2-ti2v-5b", "qwen3.5-2b-q4"]
    for tier in tiers:
        request = pb.ListFitsRequest(quality=tier, catalog_ids=ids, machine=unified(64 * GIB))
        for found in (await fit.ListFits(request)).fits:
            image = found.workload.image
            sizes.setdefault(found.catalog_id, []).append((image.width_px, image.height_px))
            totals.setdefault(found.catalog_id, []).append(found.total.high_bytes)
    assert sizes["sd-1.5"] == [(256, 256), (512, 512), (768, 768)]
    assert sizes["sdxl-base-1.0"] == [(512, 512), (1024, 1024), (1536, 1536)]
    assert sizes["sdxl-turbo"] == [(512, 512), (512, 512), (768, 768)]
    assert sizes["flux-1-dev-q4"] == [(512, 512), (1024, 1024), (1536, 1536)]
    assert sizes["wan2.2-ti2v-5b"] == [(1280, 704)] * 3, "a tier is for images"
    assert sizes["qwen3.5-2b-q4"] == [(0, 0)] * 3
    for catalog_id in ("sd-1.5", "sdxl-base-1.0", "flux-1-dev-q4"):
        assert totals[catalog_id] == sorted(totals[catalog_id])


async def test_a_model_on_disk_is_priced_by_its_facts(
    fit: Any, ledger: FakeLedger, model: Path, manifests: Path
) -> None:
    size = (model / "model.safetensors").stat().st_size
    document = {
        "format": "weighbridge.model/1",
        "id": "tiny",
        "version": "1.0.0",
        "name": "Tiny",
        "use": "chat",
        "engine": "mlx",
        "license": "MIT",
        "repository": {"name": "me/tiny"},
        "files": [{"path": "model.safetensors", "component": "model", "size_bytes": size}],
    }
    (manifests / "tiny.json").write_text(json.dumps(document))
    request = pb.ListFitsRequest(catalog_ids=["tiny"])
    (found,) = (await fit.ListFits(request)).fits
    plan = await fit.PlanModel(pb.PlanModelRequest(model=named("tiny")))
    assert found.priced_by_facts and found.on_disk
    assert (found.total, found.claim) == (plan.requirement.total, plan.claim)
    assert found.workload.chat.context_tokens == 4096

    (model / "model.safetensors").write_bytes(bytes(size))
    (found,) = (await fit.ListFits(request)).fits
    assert found.assessment.verdict == UNKNOWN
    assert found.assessment.reason_code == "MALFORMED_WEIGHTS"
    assert "model.safetensors" in found.assessment.reason
    assert found.on_disk and not found.priced_by_facts
    assert len((await fit.ListFits(pb.ListFitsRequest())).fits) == 59, "and no other model is missing for it"


async def test_without_a_ledger_a_list_says_so(fit: Any) -> None:
    failure = await refusal(fit.ListFits(pb.ListFitsRequest()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE")


class KnownMachine:
    """A ledger client that knows one machine."""

    async def capacity(self, machine: machine_pb2.Machine | None) -> machine_pb2.Capacity:
        ceiling = machine_pb2.Ceiling(automatic_bytes=GIB, effective_bytes=GIB)
        return machine_pb2.Capacity(pool=machine_pb2.POOL_KIND_CPU, host=ceiling, total=ceiling)


async def test_a_cancelled_list_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its caller goes away while the third model is priced."""
    root = ModelsRoot(tmp_path)
    reader = HeaderReader(root, 1)
    shelf = Shelf(Catalogue(weighbridge_catalog.MODELS, None), reader, root, tmp_path)
    ledger: Any = KnownMachine()
    servicer = FitServicer(ModelDesk(reader, shelf), shelf, ledger)
    priced: list[str] = []
    real, loop = listing.fit_of, asyncio.get_running_loop()

    def counted(entry: CatalogEntry, *rest: Any) -> pb.ModelFit:
        priced.append(entry.catalog_id)
        if len(priced) == 3:
            loop.call_soon_threadsafe(call.cancel)
        return real(entry, *rest)

    monkeypatch.setattr(listing, "fit_of", counted)
    context: Any = None
    call = asyncio.create_task(servicer.ListFits(pb.ListFitsRequest(), context))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert priced == OURS[:3]


def test_whatever_goes_wrong_with_one_model_is_said_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(listing, "answer", broken)
    entry = ENTRIES["sd-1.5"]
    found = listing.fit_of(entry, known_by_sizes(entry), plan_pb2.QUALITY_TIER_UNSPECIFIED, on_cpu(64 * GIB))
    assert (found.catalog_id, found.assessment.verdict) == ("sd-1.5", UNKNOWN)
    assert found.assessment.reason_code == "PRICING_FAILED"
    assert "log" in found.assessment.reason
    assert 0 < found.claim.host_bytes <= 64 * GIB


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ENTRIES)),
    st.integers(1, 1 << 18),
    st.sampled_from([Pool.CPU, Pool.UNIFIED]),
    st.sampled_from(["linux/x86_64", "darwin/arm64", "linux/arm64", "win32/arm64", "darwin/x86_64", ""]),
)
def test_every_model_gets_an_answer_on_every_machine(
    catalog_id: str, mebibytes: int, pool: Pool, platform: str
) -> None:
    size = mebibytes << 20
    ceiling = Ceiling(size, size)
    capacity = Capacity(pool, ceiling, ceiling, total_ram=size, platform=platform)
    entry = ENTRIES[catalog_id]
    found = listing.fit_of(entry, known_by_sizes(entry), plan_pb2.QUALITY_TIER_UNSPECIFIED, capacity)
    assert found.assessment.reason_code != "PRICING_FAILED"
    assert found.assessment.verdict != requirement_pb2.VERDICT_UNSPECIFIED
    refused_by_the_ledger = found.claim.host_bytes > size
    assert (found.assessment.verdict == WONT_RUN) == refused_by_the_ledger


def mlx_entry(*sizes: int, **figures: int) -> CatalogEntry:
    files = tuple(CatalogFile(f"{number}.safetensors", "model", size) for number, size in enumerate(sizes))
    return CatalogEntry("m", "1.0.0", "M", Use.CHAT, Engine.MLX, files, "MIT", figures=figures)


def test_the_range_of_a_chat_model_is_what_the_page_says() -> None:
    needed = ranged.plausible(mlx_entry(60 * GIB, 40 * GIB), context_tokens=1000, slots=2)
    mib = 1 << 20
    assert needed.total.low == 97 * GIB + 2000 * 6 * 1024 + 128 * mib
    assert needed.total.expected == 100 * GIB + 2000 * 64 * 1024 + 768 * mib + 2 * GIB
    assert needed.total.high == 100 * GIB + 2000 * 352 * 1024 + 2 * GIB + 6 * GIB
    small = ranged.plausible(mlx_entry(1000 * mib, kv_bytes_per_token=10, kv_fixed_bytes=7), context_tokens=100)
    assert small.total.low == 600 * mib + 1007 + 128 * mib


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.integers(1, 64), st.integers(1, 1 << 20))
def test_a_range_grows_with_files_context_and_conversations(size: int, context: int, slots: int, more: int) -> None:
    base = ranged.plausible(mlx_entry(size), context, slots).total
    for larger in (
        ranged.plausible(mlx_entry(size + more), context, slots).total,
        ranged.plausible(mlx_entry(size), context + more, slots).total,
        ranged.plausible(mlx_entry(size), context, slots + more).total,
    ):
        assert larger.low >= base.low and larger.expected >= base.expected and larger.high >= base.high
