"""Which sd-server is here: found, asked what it knows, and told apart from other builds."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weighbridge_engines.supervisor import program
from weighbridge_engines.supervisor.environment import scrub
from weighbridge_engines.supervisor.program import BinaryMissingError, Program

PROGRAM = Program("sd-server", "stable-diffusion.cpp", "WEIGHBRIDGE_ENGINES_SD_SERVER")

CACHE_VERSION = 1
"""Of the files that keep what was probed."""

FLAT_HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""One malloc arena, as each of its eight HTTP threads would keep one of its own; and a fixed threshold, as glibc's own
moves up to the 31 MiB of a text encoder's buffer, which then leave holes. Peak RSS after ten renders of a tiny model
at 64 x 64: 133 MiB with both, 339 with one arena alone, 409 with neither (glibc 2.36, 2026-11-30)."""

_FLAG = re.compile(r"(?m)^\s+(?:-\w+, +)?(--[a-z0-9][a-z0-9_-]*)")
_VERSION = re.compile(r"version (?P<version>\S+), commit (?P<commit>\S+)")

_BACKEND_MARKS = (
    ("cuda", b"ggml_backend_cuda_init"),
    ("vulkan", b"ggml_backend_vk_init"),
    ("metal", b"ggml_backend_metal_init"),
    ("hip", b"ggml_backend_hip_init"),
    ("sycl", b"ggml_backend_sycl_init"),
    ("opencl", b"ggml_backend_opencl_init"),
)
"""The function by which ggml enters each backend, as a name in the program or in a library beside it. Without any of
them it computes on the processor."""


@dataclass(frozen=True)
class SdBinary:
    """One build of sd-server.

    Attributes:
        path: the program.
        library_path: the folder of its own libraries, for the loader; empty: it finds them itself.
        version: as it says, "unknown" in many packages.
        backend: cpu, cuda, vulkan, metal, hip, sycl or opencl.
        flags: every long flag that its `--help` names.
        build: SHA-256 (hex) over the program and its libraries.
    """

    path: Path
    library_path: str
    version: str
    backend: str
    flags: frozenset[str]
    build: str

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on a card or another device of its own."""
        return self.backend != "cpu"

    def environ(self) -> dict[str, str]:
        """What it is started with: the service's environment scrubbed, its libraries, and a heap that stays flat."""
        # A failed assertion would call a debugger first, which takes seconds and may hang where there is one.
        extra = {**FLAT_HEAP, "GGML_NO_BACKTRACE": "1"}
        if self.library_path:
            name = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
            extra[name] = os.pathsep.join(filter(None, (self.library_path, os.environ.get(name, ""))))
        return scrub(extra=extra)


def probe(path: Path, cache: Path | None = None) -> SdBinary:
    """What a build is and knows. Asked once: what is found is kept by the hash of its files.

    Args:
        path: the program.
        cache: folder of what was found before; None: nothing is kept.

    Raises:
        BinaryMissingError: it cannot be read or does not answer, and why.
    """
    try:
        libraries = list(_libraries(path))
        build = program.build_of((path, *libraries))
    except OSError as error:
        raise BinaryMissingError(f"{path} cannot be read: {error.strerror}.") from error
    library_path = str(libraries[0].parent) if libraries else ""
    kept = None if cache is None else cache / f"{build}.json"
    if kept is not None and (known := _recall(kept, path, library_path, build)) is not None:
        return known
    unprobed = SdBinary(path, library_path, "unknown", _backend_of((path, *libraries)), frozenset(), build)
    help_text = program.ask(path, ("--help",), unprobed.environ(), program.PROBE_TIMEOUT_S)
    flags = frozenset(_FLAG.findall(help_text))
    if "--listen-port" not in flags:
        raise BinaryMissingError(f"{path} is no sd-server: its help names no --listen-port.")
    said = _VERSION.search(help_text)
    version = "unknown" if said is None else said["version"]
    if said is not None and version == "unknown" and said["commit"] != "unknown":
        version = said["commit"]
    found = SdBinary(path, library_path, version, unprobed.backend, flags, build)
    if kept is not None:
        content = {"version": version, "backend": found.backend, "flags": sorted(flags)}
        program.remember(kept, content, CACHE_VERSION)
    return found


def _libraries(path: Path) -> Iterator[Path]:
    """The build's own libraries: beside the program, or where packages put them."""
    home = path.parent
    for folder in (home, home.parent / "lib", home.parent / "stable_diffusion_cpp" / "lib"):
        found = sorted(
            entry
            for pattern in ("lib*.so*", "lib*.dylib")
            for entry in folder.glob(pattern)
            if entry.name.startswith(("libstable-diffusion", "libggml"))
        )
        if found:
            yield from found
            return


def _backend_of(files: tuple[Path, ...]) -> str:
    for name, mark in _BACKEND_MARKS:
        if any(program.contains(file, mark) for file in files):
            return name
    return "cpu"


def _recall(kept: Path, path: Path, library_path: str, build: str) -> SdBinary | None:
    found = program.recall(kept, CACHE_VERSION) or {}
    with suppress(KeyError, TypeError):
        return SdBinary(
            path, library_path, str(found["version"]), str(found["backend"]), frozenset(map(str, found["flags"])), build
        )
    return None
