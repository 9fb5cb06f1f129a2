"""Every ds4 decision about drafting, through PlanModel: what is asked, what it computes on, whether experts are
streamed, which model, whether a drafter fits, and what there is to draft with.

The grids are the rules, written down by hand (ds4's refusals as of September 2026, and the policy of gezel 1.0.5):
told off; nothing to draft with; what no build does (a processor, a model that takes no such drafter); streamed, which
ds4 aborts at for every model but V4.1; no room, which is weighed after residency; asked for; and unasked only where
it was measured to gain: a resident CUDA launch with a DSpark drafter.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

from tests.contract.ds4_models import (
    CPU,
    CUDA,
    DSPARK,
    DSPARK_BYTES,
    LEGACY,
    LEGACY_BYTES,
    METAL,
    MODELS,
    V41_DSPARK_BYTES,
    machine,
    write_models,
)
from tests.contract.fit_and_ledger import Pair, serving

# One letter for each launch: backend by backend, each resident with room, resident without, streamed with room,
# streamed without. On a processor nothing is streamed, whatever is asked.
#   D drafts   N nothing to draft with   P processor   M the model takes no such drafter   S streamed   R no room
# and only where nobody asked:   a streamed   m not CUDA   g too slight a gain
#            metal  CUDA   CPU
GRIDS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("V4", "on"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "DRSS   DRSS   PPPP",
        "legacy": "DRSS   DRSS   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    ("V4", "auto"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "mRSS   DRSS   PPPP",
        "legacy": "mRSS   gRSS   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    ("V4.1", "on"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "DRDR   DRDR   PPPP",
        "legacy": "DRDR   DRDR   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    ("V4.1", "auto"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "mRaR   DRaR   PPPP",
        "legacy": "mRaR   gRaR   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    # The block is in the model's own file: where the weights have room, it has.
    ("GLM", "on"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "MMMM   MMMM   PPPP",
        "legacy": "MMMM   MMMM   PPPP",
        "block": " DDSS   DDSS   PPPP",
    },
    ("GLM", "auto"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "MMMM   MMMM   PPPP",
        "legacy": "MMMM   MMMM   PPPP",
        "block": " mmSS   ggSS   PPPP",
    },
    ("PRO", "on"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "MMMM   MMMM   PPPP",
        "legacy": "MMMM   MMMM   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    ("PRO", "auto"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "MMMM   MMMM   PPPP",
        "legacy": "MMMM   MMMM   PPPP",
        "block": " NNNN   NNNN   NNNN",
    },
    ("unknown", "on"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "DRSS   DRSS   PPPP",
        "legacy": "DRSS   DRSS   PPPP",
        "block": " DDSS   DDSS   PPPP",
    },
    ("unknown", "auto"): {
        "none": "  NNNN   NNNN   NNNN",
        "dspark": "mRSS   DRSS   PPPP",
        "legacy": "mRSS   gRSS   PPPP",
        "block": " mmSS   ggSS   PPPP",
    },
}
# The note's reason by letter, and words that a person must find in its sentence.
SAID = {
    "N": ("NO_DRAFTER", "drafter_file"),
    "P": ("PROCESSOR", "Metal and CUDA only"),
    "M": ("MODEL_REFUSES", "no drafter file for this model"),
    "S": ("STREAMING", "stream_experts=false"),
    "R": ("NO_ROOM", "does not fit"),
    "a": ("AUTO_STREAMED", "draft_policy=on"),
    "m": ("AUTO_NOT_CUDA", "draft_policy=on"),
    "g": ("AUTO_SLIGHT_GAIN", "draft_policy=on"),
}
SUPPORT = ("none", "dspark", "legacy", "block")
COLUMNS = [
    (compute, streams, fits) for compute in (METAL, CUDA, CPU) for streams in (False, True) for fits in (True, False)
]
# Physical memory in GiB with room for a drafter and without, resident and streamed. Resident: the file (V4.1 without
# its tables), 32 GiB for the system, and the drafter's file, for V4.1 64 MiB more. V4: 80.8 + 32 + 5.58 = 118.3, and
# with the legacy head of 3.6 GiB 116.4. V4.1: 151.7 + 32 + 8.1 = 191.8, with the legacy head 187.4. GLM: 193.6 + 32,
# PRO as laid out here: 111.3 + 32, and both take no drafter whatever the room.
RESIDENT = {"V4": (128, 115), "V4.1": (193, 186), "GLM": (256, 227), "PRO": (192, 147), "unknown": (128, 115)}
# Streamed, V4.1 at 131,072 tokens: 8 GiB of cache (two layers take 7.12), 9.37 of weights, 8.95 of session, 2 for
# ds4, 32 for the system, and 2 of driver on Metal and 8 on CUDA: 62.4 and 68.4, with a drafter of 8.1 GiB 70.5 and
# 76.5, with one of 3.66 66.0 and 72.0. For the others room changes nothing.
STREAMED = {METAL: (128, 65), CUDA: (128, 71)}
STREAMED_OTHERS = (192, 96)


def ram_gib(model: str, compute: str, streams: bool, fits: bool) -> int:
    if compute == CPU:
        return 256 if fits else 160
    sizes = RESIDENT[model] if not streams else STREAMED[compute] if model == "V4.1" else STREAMED_OTHERS
    return sizes[0 if fits else 1]


def asked(model: str, support: str, **options: Any) -> dict[str, Any]:
    own = f"v41-{DSPARK}" if model == "V4.1" else DSPARK
    path = f"{model}-block.gguf" if support == "block" else f"{model}.gguf"
    ds4 = plan_pb2.Ds4Options(**options)
    if support in ("dspark", "legacy"):
        ds4.drafter_file = own if support == "dspark" else LEGACY
    return {"model": weights_pb2.ModelRef(path=path), "options": plan_pb2.EngineOptions(ds4=ds4)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture
async def pair(tmp_path: Path, models: Path) -> AsyncIterator[Pair]:
    (tmp_path / "models").symlink_to(models)
    async with serving(tmp_path, "unified:128") as both:
        yield both


def drafting_notes(plan: pb.PlanModelResponse) -> list[plan_pb2.PlanNote]:
    return [note for note in plan.notes if note.code.startswith("DRAFT")]


def drafts_with(plan: pb.PlanModelResponse) -> Iterator[str]:
    """The parts of a launch by which it drafts: flags, their files, a line of memory."""
    flags = list(plan.launch.ds4.arguments)
    yield from (flag for flag in flags if flag in ("--dspark", "--mtp-model", "--glm-mtp", "--mtp-draft"))
    if "--mtp-model" in flags:
        yield Path(flags[flags.index("--mtp-model") + 1]).name
    yield from (line.component for line in plan.requirement.lines if line.component == "drafter")


def expected_parts(model: str, support: str) -> list[str]:
    if support == "block":
        return ["--glm-mtp", "drafter"]
    if support == "legacy":
        return ["--mtp-model", "--mtp-draft", LEGACY, "drafter"]
    return ["--dspark", "--mtp-model", f"v41-{DSPARK}" if model == "V4.1" else DSPARK, "drafter"]


def wrong(plan: pb.PlanModelResponse, model: str, policy: str, support: str, streams: bool, letter: str) -> str:
    """What of a plan is not as the grid says; "" where all is."""
    flags, notes = list(plan.launch.ds4.arguments), drafting_notes(plan)
    if not flags:
        return f"no launch: {plan.assessment.reason}"
    if ("--ssd-streaming" in flags) is not streams or plan.options.ds4.stream_experts is not streams:
        return "streams otherwise"
    parts = expected_parts(model, support) if letter == "D" else []
    if list(drafts_with(plan)) != parts:
        return f"drafts with {list(drafts_with(plan))}"
    silent = letter in ("D", "off") or (letter == "N" and policy == "auto")
    if silent:
        return f"notes {notes}" if notes else ""
    reason, words = SAID[letter]
    code = "DRAFT_UNMET" if policy == "on" else "DRAFT_NOT_USED"
    told = [(note.code, dict(note.metadata), words in note.message) for note in notes]
    return "" if told == [(code, {"reason": reason}, True)] else f"notes {notes}"


@pytest.mark.parametrize("policy", ["off", "on", "auto"])
@pytest.mark.parametrize("model", MODELS)
async def test_every_decision_and_what_is_said_of_it(pair: Pair, model: str, policy: str) -> None:
    found = []
    for support in SUPPORT:
        letters = ["off"] * 12 if policy == "off" else list(GRIDS[model, policy][support].replace(" ", ""))
        for (compute, streams, fits), letter in zip(COLUMNS, letters, strict=True):
            where = machine(compute, ram_gib(model, compute, streams, fits))
            request = asked(model, support, stream_experts=streams, draft_policy=policy)
            plan = await pair.fit.PlanModel(pb.PlanModelRequest(machine=where, **request))
            fault = wrong(plan, model, policy, support, streams and compute != CPU, letter)
            if fault:
                found.append(f"{support} on {compute}, streams {streams}, fits {fits}: {letter}, but {fault}")
    assert not found, "\n".join(found)


def test_the_grids_have_every_cell() -> None:
    assert GRIDS.keys() == {(model, policy) for model in MODELS for policy in ("on", "auto")}
    for grid in GRIDS.values():
        assert tuple(grid) == SUPPORT
        assert all(len(row.replace(" ", "")) == len(COLUMNS) for row in grid.values())


async def test_a_policy_that_nobody_set_is_auto(pair: Pair) -> None:
    for support in ("dspark", "legacy"):
        said, unsaid = [
            await pair.fit.PlanModel(
                pb.PlanModelRequest(machine=machine(CUDA, 128), **asked("V4", support, stream_experts=False, **policy))
            )
            for policy in ({"draft_policy": "auto"}, {})
        ]
        assert said == unsaid


@pytest.mark.parametrize("compute", [METAL, CUDA, CPU])
async def test_a_model_that_ds4_does_not_load_is_refused_in_every_mode(pair: Pair, compute: str) -> None:
    for policy in ("off", "on", "auto"):
        for streams in (False, True):
            request = asked("nobody", "dspark", stream_experts=streams, draft_policy=policy)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pair.fit.PlanModel(pb.PlanModelRequest(machine=machine(compute, 256), **request))
            failure = RpcFailure.from_rpc_error(refused.value)
            assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE")
            assert "deepseek9" in failure.message


# What a companion's header may take beside its tensors.
HEADER = 4096


@pytest.mark.parametrize(
    ("model", "support", "size", "runtime"),
    [
        ("V4", "dspark", DSPARK_BYTES, 0),
        ("V4", "legacy", LEGACY_BYTES, 0),
        # ds4 charges a V4.1 drafter's file and 64 MiB.
        ("V4.1", "dspark", V41_DSPARK_BYTES, 64 << 20),
    ],
)
async def test_residency_never_yields_to_a_drafter(
    pair: Pair, model: str, support: str, size: int, runtime: int
) -> None:
    """It drafts where the weights, its own bytes and the system's 32 GiB have room, and stays resident where not."""

    async def planned(ram_bytes: int) -> pb.PlanModelResponse:
        where = machine(CUDA, 0)
        where.ram_bytes = ram_bytes
        request = asked(model, support, stream_experts=False, draft_policy="on")
        made: pb.PlanModelResponse = await pair.fit.PlanModel(pb.PlanModelRequest(machine=where, **request))
        return made

    weights = next(each for each in (await planned(512 << 30)).requirement.lines if each.component == "model")
    least = weights.expected_bytes + size + runtime + (32 << 30)
    drafting = await planned(least + HEADER)
    assert wrong(drafting, model, "on", support, streams=False, letter="D") == ""
    drafter = next(each for each in drafting.requirement.lines if each.component == "drafter")
    assert size + runtime <= drafter.low_bytes <= size + runtime + HEADER
    assert wrong(await planned(least - 1), model, "on", support, streams=False, letter="R") == ""
