"""Models of every kind that ds4 loads, as files of holes with true headers, and machines to plan them on."""

from collections.abc import Callable, Mapping
from pathlib import Path

from weighbridge_fit.facts import TensorFact
from weighbridge_proto.memory.v1 import machine_pb2

from services.fit.tests.fit_ds4_layout import GIB, companion, flash, glm, pro, slim, tensor, v41, write_sparse

MODELS: Mapping[str, tuple[str, Callable[[], tuple[TensorFact, ...]]]] = {
    "V4": ("deepseek4", lambda: slim(flash())),
    "V4.1": ("deepseek41", v41),
    "GLM": ("glm-dsa", glm),
    "PRO": ("deepseek4", pro),
    # Loaded by ds4, and of no family whose rules are known: what nobody knows, ds4 is taken to abort at.
    "unknown": ("laguna", lambda: slim(flash())),
}
DSPARK_BYTES = 5_991_479_541
"""5.58 GiB, as reported (ds4 issue 724)."""
V41_DSPARK_BYTES = int(8.04 * GIB)
LEGACY_BYTES = 3_865_470_566
"""3.6 GiB: the one-stage draft head of V4 Flash."""
DSPARK_TENSORS = (
    "mtp.0.main_proj.weight", "mtp.2.markov_head.markov_w1.weight", "mtp.2.confidence_head.proj.weight",
)  # fmt: skip
"""Those that ds4 knows it by (July 2026)."""
DSPARK, LEGACY, VISION = "dspark.gguf", "legacy.gguf", "vision.gguf"
METAL, CUDA, CPU = "metal", "cuda", "cpu"


def write_models(root: Path) -> None:
    """Every model as `NAME.gguf` and, with a draft block of its own, as `NAME-block.gguf`; and companions."""
    for name, (architecture, tensors) in MODELS.items():
        write_sparse(root / f"{name}.gguf", tensors(), architecture)
        block = tensor("blk.3.nextn.eh_proj.weight", "F16", 1024, 1024)
        write_sparse(root / f"{name}-block.gguf", (*tensors(), block), architecture)
    write_sparse(root / "nobody.gguf", slim(flash()), "deepseek9")
    companions = {
        DSPARK: companion(DSPARK_BYTES, *DSPARK_TENSORS),
        f"v41-{DSPARK}": companion(V41_DSPARK_BYTES, *DSPARK_TENSORS),
        LEGACY: companion(LEGACY_BYTES, "mtp.0.e_proj.weight"),
        VISION: companion(934_155_386, "v.patch_embd.weight"),
    }
    for name, facts in companions.items():
        write_sparse(root / name, [each for _, each in facts.tensors], "")


def machine(compute: str, ram_gib: float, cards: tuple[int, ...] = (), platform: str = "") -> machine_pb2.Machine:
    """A machine that ds4 computes on in this way: a Mac, a GB10, a processor alone; a PC with cards where some are
    given."""
    pool = machine_pb2.POOL_KIND_CPU if compute == CPU else machine_pb2.POOL_KIND_UNIFIED
    usual = {METAL: "darwin/arm64", CUDA: "linux/arm64", CPU: "linux/x86_64"}[compute]
    if cards:
        pool, usual = machine_pb2.POOL_KIND_DISCRETE, "linux/x86_64"
    devices = [
        machine_pb2.Device(device_id=str(number), name="card", total_bytes=size * GIB)
        for number, size in enumerate(cards)
    ]
    return machine_pb2.Machine(pool=pool, ram_bytes=int(ram_gib * GIB), devices=devices, platform=platform or usual)
