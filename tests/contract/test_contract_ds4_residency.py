"""What stays in memory, how large the expert cache is and which context a launch gets: the policy's worked tables
(gezel 1.0.5) cell by cell through PlanModel, on declared machines.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import weighbridge_catalog
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from services.fit.tests.fit_ds4_layout import entry, flash, slim, write_sparse
from tests.contract.ds4_models import CUDA, METAL, machine
from tests.contract.fit_and_ledger import Pair, serving

GIB = 1 << 30
Q2, Q2Q4, Q4, MXFP4, GLM = (
    "deepseek-v4-flash-284b-q2",
    "deepseek-v4-flash-284b-q2q4",
    "deepseek-v4-flash-284b-q4",
    "deepseek-v4-flash-284b-mxfp4",
    "glm-5.2-754b-q2",
)
# File bytes as published (the catalogue's for Q4 and GLM).
SIZES = {Q2: 86_720_111_488, Q2Q4: 97_591_747_456, MXFP4: 155_976_458_848}
# The memory in GiB from which a model may stay whole: its file and 32.
THRESHOLDS = {Q2: 112.8, Q2Q4: 122.9, MXFP4: 177.3, Q4: 185.3, GLM: 228.6}


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    (tmp_path / "models").mkdir()
    write_sparse(tmp_path / "models" / "nobodys.gguf", slim(flash()))
    async with serving(tmp_path, "unified:128") as both:
        yield both


def declared(spec: str, platform: str = "") -> machine_pb2.Machine:
    """A machine as WEIGHBRIDGE_LEDGER_MACHINE names one, on a platform."""
    made = parse_spec(spec)
    pools = {"unified": machine_pb2.POOL_KIND_UNIFIED, "discrete": machine_pb2.POOL_KIND_DISCRETE}
    devices = [machine_pb2.Device(device_id=card.device_id, total_bytes=card.total_bytes) for card in made.devices]
    return machine_pb2.Machine(
        pool=pools[made.pool.value], ram_bytes=made.ram_bytes, devices=devices, platform=platform
    )


async def plan(
    pair: Pair, model: str, where: machine_pb2.Machine, context: int = 0, **options: Any
) -> pb.PlanModelResponse:
    reference = weights_pb2.ModelRef(path=model) if model.endswith(".gguf") else weights_pb2.ModelRef(catalog_id=model)
    request = pb.PlanModelRequest(
        model=reference,
        machine=where,
        workload=plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=context)),
        options=plan_pb2.EngineOptions(ds4=plan_pb2.Ds4Options(**options)),
    )
    made: pb.PlanModelResponse = await pair.fit.PlanModel(request)
    return made


def notes(made: pb.PlanModelResponse) -> dict[str, dict[str, str]]:
    return {note.code: dict(note.metadata) for note in made.notes}


def cache_of(made: pb.PlanModelResponse) -> str:
    """The cache in GiB as the tables write it: a star where it was cut down, "refuse" where none is safe."""
    if made.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN:
        assert made.assessment.reason_code == "EXPERT_CACHE_UNSAFE"
        assert not made.HasField("launch"), "what is refused has no flags"
        assert "It lacks" in made.assessment.reason
        return "refuse"
    flags = list(made.launch.ds4.arguments)
    gib = made.options.ds4.expert_cache_gib
    assert flags[flags.index("--ssd-streaming-cache-experts") + 1] == f"{gib}GB"
    told = notes(made)
    assert "EXPERT_CACHE_LOWERED" not in told, "the policy's cache, and nothing else, decides"
    if "EXPERT_CACHE_CLAMPED" in told:
        assert told["EXPERT_CACHE_CLAMPED"]["cache_gib"] == str(gib)
        return f"{gib}*"
    return str(gib)


def streams(made: pb.PlanModelResponse) -> bool:
    flag = "--ssd-streaming" in made.launch.ds4.arguments
    assert made.options.ds4.stream_experts is flag
    return flag


# Derived cache in GiB by memory; a star marks one that was cut down.
CACHES = {
    #       Q2     Q2/Q4  Q4        MXFP4     GLM
    32: ("refuse", "refuse", "refuse", "refuse", "refuse"),
    48: ("12*", "10*", "refuse", "refuse", "refuse"),
    64: ("28*", "26*", "16*", "16*", "6*"),
    96: ("32", "36", "48*", "48*", "32"),
    128: ("32", "36", "64", "64", "32"),
    192: ("32", "36", "64", "64", "32"),
    256: ("32", "36", "64", "64", "32"),
}


@pytest.mark.parametrize("ram", CACHES)
async def test_the_expert_cache_of_every_model_on_a_mac(pair: Pair, ram: int) -> None:
    where = declared(f"unified:{ram}", "darwin/arm64")
    found = tuple([cache_of(await plan(pair, model, where)) for model in (Q2, Q2Q4, Q4, MXFP4, GLM)])
    assert found == CACHES[ram]


@pytest.mark.parametrize(("model", "gib"), THRESHOLDS.items())
async def test_the_memory_from_which_a_model_stays_whole_if_asked(pair: Pair, model: str, gib: float) -> None:
    size = entry(model).weight_bytes
    assert size == SIZES.get(model, size)
    assert round((size + 32 * GIB) / GIB, 1) == gib
    for compute in (METAL, CUDA):
        for missing in (0, 1):
            where = machine(compute, 0)
            where.ram_bytes = size + 32 * GIB - missing
            made = await plan(pair, model, where, stream_experts=False)
            assert streams(made) is bool(missing)
            assert ("RESIDENCY_REFUSED" in notes(made)) is bool(missing)
            if missing:
                assert notes(made)["RESIDENCY_REFUSED"]["needed_ram_bytes"] == str(size + 32 * GIB)
            # Nobody asked: it streams, however much memory there is.
            assert streams(await plan(pair, model, where))


@pytest.mark.parametrize(
    ("model", "where", "resident"),
    [
        (Q2, declared("unified:128", "darwin/arm64"), True),
        (MXFP4, declared("unified:128", "darwin/arm64"), False),
        (MXFP4, declared("unified:256", "darwin/arm64"), True),
        (Q2, declared("unified:256", "linux/x86_64"), False),
        # A card's memory says nothing of the system's, and a PC is not arm64.
        (Q2, declared("discrete:256+141", "linux/x86_64"), False),
        # Unified memory on a platform that nobody names is taken for a Mac's; a PC's processor is not.
        (Q2, declared("unified:128"), True),
        (Q2, declared("discrete:256+141"), False),
    ],
    ids=["81 on 128", "145 on 128", "145 on 256", "x86-64", "card", "no platform", "card and no platform"],
)
async def test_who_may_keep_a_model_whole(pair: Pair, model: str, where: Any, resident: bool) -> None:
    made = await plan(pair, model, where, stream_experts=False)
    assert streams(made) is not resident
    assert ("RESIDENCY_REFUSED" in notes(made)) is not resident
    assert streams(await plan(pair, model, where, stream_experts=True))


async def test_a_model_of_unknown_size_is_never_taken_for_one_that_fits(pair: Pair) -> None:
    """The policy streams it. Here it cannot be asked for: a file has a size, and facts without one are refused."""
    gguf = weights_pb2.WEIGHT_FORMAT_GGUF
    facts = weights_pb2.WeightFacts(name="unknown", architecture="deepseek4", format=gguf)
    options = plan_pb2.EngineOptions(ds4=plan_pb2.Ds4Options(stream_experts=False))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pair.fit.PlanModel(pb.PlanModelRequest(model=weights_pb2.ModelRef(facts=facts), options=options))
    failure = RpcFailure.from_rpc_error(refused.value)
    assert failure.reason == "INVALID_FACTS"
    assert "model.facts.tensor_bytes" in failure.message


async def test_a_configured_cache_is_cut_down_and_the_authors_is_not(pair: Pair) -> None:
    where = declared("unified:128", "darwin/arm64")
    # Resident 36 of which cache 32; resident 80 of which cache 64, and 96 wanted: 128 - 16 - 32.
    assert cache_of(await plan(pair, Q2, where)) == "32"
    assert cache_of(await plan(pair, Q4, where, expert_cache_gib=96)) == "80*"
    assert cache_of(await plan(pair, Q4, where, expert_cache_gib=80)) == "80"


@pytest.mark.parametrize(("ram", "cache"), [(119, "48"), (120, "64"), (100, "48"), (87, "32"), (86, "32")])
async def test_the_cache_where_nobody_says_one(pair: Pair, ram: int, cache: str) -> None:
    """From 120 GiB 64, from 88 GiB 48, else 32: a file without a catalogue entry."""
    assert cache_of(await plan(pair, "nobodys.gguf", declared(f"unified:{ram}", "darwin/arm64"))) == cache


@pytest.mark.parametrize("card", [24, 48, 80, 141])
async def test_a_card_gets_the_policys_cache_or_what_it_has_room_for(pair: Pair, card: int) -> None:
    where = declared(f"discrete:128+{card}", "linux/x86_64")
    made = await plan(pair, Q2, where)
    assert streams(made)
    told, gib = notes(made), made.options.ds4.expert_cache_gib
    # Beside the cache: 8.20 of weights, 3.04 of context, 3.89 of workspace, 8 of driver and copies.
    room = int(card * 0.95 - 23.14)
    if room >= 32:
        assert gib == 32 and "EXPERT_CACHE_LOWERED" not in told
    else:
        # ds4 reads prompts through 3.375 GiB and starts with nothing less.
        assert gib == max(4, room)
        assert told["EXPERT_CACHE_LOWERED"]["cache_gib"] == str(gib)
    assert made.assessment.verdict == (requirement_pb2.VERDICT_TIGHT if card < 80 else requirement_pb2.VERDICT_RUNS)


# The author's figure in GiB at a context, and what it is without any.
LINES = [
    (Q2, 65_536, 35.5),
    (Q2, 131_072, 36),
    (Q2, 262_144, 37),
    (Q2Q4, 65_536, 41.5),
    (Q2Q4, 131_072, 42),
    (Q2Q4, 262_144, 43),
    (Q4, 65_536, 79.5),
    (Q4, 131_072, 80),
    (Q4, 262_144, 81),
    (MXFP4, 65_536, 79.5),
    (MXFP4, 131_072, 80),
    (MXFP4, 262_144, 81),
    (GLM, 65_536, 57.15),
    (GLM, 131_072, 62.71),
]


@pytest.mark.parametrize(("model", "context", "gib"), LINES)
async def test_the_authors_line_is_carried_to_the_context(pair: Pair, model: str, context: int, gib: float) -> None:
    made = await plan(pair, model, declared("unified:128", "darwin/arm64"), context)
    told = notes(made)
    assert round(int(told["POLICY_RESIDENT"]["policy_bytes"]) / GIB, 2) == gib
    # 65,536 is GLM's cap: above it the author does not launch, and who wants it is told.
    assert ("ABOVE_LAUNCH_CONTEXT" in told) is (model == GLM and context > 65_536)
    # A resident launch keeps every second engine out: 96 GiB or more.
    resident = await plan(pair, model, declared("unified:512", "darwin/arm64"), context, stream_experts=False)
    assert int(notes(resident)["POLICY_RESIDENT"]["policy_bytes"]) == 96 * GIB


def own_manifest(folder: Path, name: str, figures: dict[str, int]) -> None:
    document = json.loads((weighbridge_catalog.MODELS / f"{Q2}.json").read_bytes())
    document |= {"id": name, "figures": figures}
    document.pop("$schema")
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests" / f"{name}.json").write_text(json.dumps(document))


WHOLE = {
    "resident_bytes": 36 * GIB,
    "expert_cache_bytes": 32 * GIB,
    "kv_bytes_per_token": 8192,
    "resident_context_tokens": 131_072,
}


@pytest.mark.parametrize(
    ("figures", "context", "gib"),
    [
        # A slope that swallows the footprint leaves nothing that is free of the context: 1 MiB x 65,536 tokens.
        (WHOLE | {"kv_bytes_per_token": 1 << 20}, 65_536, 64),
        # Without one of three figures nothing is carried to another context.
        ({**WHOLE, "kv_bytes_per_token": 0}, 262_144, 36),
        ({**WHOLE, "resident_context_tokens": 0}, 262_144, 36),
        # Without the author's figure: the file, at most 48 GiB.
        ({**WHOLE, "resident_bytes": 0}, 262_144, 48),
    ],
    ids=["slope", "no slope", "no context", "no figure"],
)
async def test_an_authors_line_is_not_guessed(
    tmp_path: Path, figures: dict[str, int], context: int, gib: float
) -> None:
    own_manifest(tmp_path, "my-ds4", {name: value for name, value in figures.items() if value})
    async with serving(tmp_path, "unified:128") as pair:
        made = await plan(pair, "my-ds4", declared("unified:128", "darwin/arm64"), context)
    assert int(notes(made)["POLICY_RESIDENT"]["policy_bytes"]) == gib * GIB


@pytest.mark.parametrize(
    ("model", "ram", "context"),
    [(Q2, 191, 131_072), (Q2, 192, 262_144), (Q2, 64, 131_072), (GLM, 64, 65_536), (GLM, 256, 65_536)],
)
async def test_the_context_that_nobody_chose(pair: Pair, model: str, ram: int, context: int) -> None:
    made = await plan(pair, model, declared(f"unified:{ram}", "darwin/arm64"))
    flags = list(made.launch.ds4.arguments)
    assert made.workload.chat.context_tokens == made.launch.ds4.context_tokens == context
    assert flags[flags.index("--ctx") + 1] == str(context)
