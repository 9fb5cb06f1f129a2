"""The command line of one sd-server: what the plan says, where it listens, and nothing that its build does not know."""

from collections.abc import Sequence
from pathlib import Path

import grpc
from weighbridge_proto.errors import RequestError

from weighbridge_engines.sd_server.binary import SdBinary

GIB = 2**30

WITHOUT_VALUE = frozenset(
    {"--diffusion-fa", "--vae-tiling", "--vae-conv-direct", "--diffusion-conv-direct", "--offload-to-cpu",
     "--clip-on-cpu", "--vae-on-cpu", "--mmap"}
)  # fmt: skip
"""Flags of a plan that stand alone; every other one is followed by its value."""

MAY_BE_LEFT_OUT = frozenset({"--threads", "--steps", "--mmap"})
"""Flags without which a plan still holds: they change how fast it is, or what a request says anyway."""


def command_line(
    binary: SdBinary, planned: Sequence[str], port: int, lora_folder: Path, device_bytes: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the program and its arguments, the planned flags that its build does not know and that are left out).

    Never verbose: it would print prompts. The folder of adapters is always named: its default is the current folder,
    which it would search with every request.

    Args:
        binary: the build.
        planned: the plan's arguments, flags of an allow-list with their values.
        port: where it listens, on 127.0.0.1.
        lora_folder: where it looks for adapters.
        device_bytes: what the claim has on cards. It bounds what a build for cards puts there where weights are
            offloaded; elsewhere the flag does nothing.

    Raises:
        RequestError: FAILED_PRECONDITION ENGINE_LACKS_FLAG: the build does not know a flag that the plan stands on.
    """
    made: list[str] = []
    left_out: list[str] = []
    for flag, value in _pairs(planned):
        if flag in binary.flags:
            made += [flag] if value is None else [flag, value]
        elif flag in MAY_BE_LEFT_OUT:
            left_out.append(flag)
        else:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "ENGINE_LACKS_FLAG",
                f"This build of sd-server does not know {flag}, which the plan needs. Another build, or other options, "
                "may do.",
                metadata={"flag": flag, "version": binary.version},
            )
    if "--offload-to-cpu" in made and binary.on_gpu and device_bytes and "--max-vram" in binary.flags:
        made += ["--max-vram", f"{device_bytes / GIB:.3f}"]
    where = ("--listen-ip", "127.0.0.1", "--listen-port", str(port), "--lora-model-dir", str(lora_folder))
    return (str(binary.path), *made, *where), tuple(left_out)


def _pairs(planned: Sequence[str]) -> list[tuple[str, str | None]]:
    waiting = iter(planned)
    return [(flag, None if flag in WITHOUT_VALUE else next(waiting)) for flag in waiting]
