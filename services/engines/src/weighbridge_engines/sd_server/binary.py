"""Which sd-server is here: found, asked what it knows, and told apart from other builds."""

import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from weighbridge_engines.supervisor.environment import scrub

PROGRAM = "sd-server"

PROBE_TIMEOUT_S = 20.0
"""`--help` takes some 20 ms; the first start of a build for cards loads some hundred MB of libraries from disk."""

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


class BinaryMissingError(Exception):
    """There is no sd-server here, or none that answers; the text says what to do."""


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


def locate(setting: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The program that is to be used.

    Args:
        setting: a file, or a folder with the program in it or in its `bin`; empty: the first on PATH, else
            `~/.weighbridge/bin`.
        environ: for PATH and HOME.

    Raises:
        BinaryMissingError: it is not there.
    """
    if setting:
        named = Path(setting).expanduser()
        for candidate in (named, named / PROGRAM, named / "bin" / PROGRAM):
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate.resolve()
        raise BinaryMissingError(
            "WEIGHBRIDGE_ENGINES_SD_SERVER names no sd-server that can be executed. Name the program, or a folder that "
            "has it."
        )
    found = shutil.which(PROGRAM, path=environ.get("PATH"))
    own = Path(environ.get("HOME") or "~").expanduser() / ".weighbridge" / "bin" / PROGRAM
    if found is None and own.is_file() and os.access(own, os.X_OK):
        found = str(own)
    if found is None:
        raise BinaryMissingError(
            "sd-server of stable-diffusion.cpp is not on PATH. Install a build for this machine, or name it with "
            "WEIGHBRIDGE_ENGINES_SD_SERVER."
        )
    return Path(found).resolve()


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
        build = _build_of((path, *libraries))
    except OSError as error:
        raise BinaryMissingError(f"{path} cannot be read: {error.strerror}.") from error
    library_path = str(libraries[0].parent) if libraries else ""
    kept = None if cache is None else cache / f"{build}.json"
    if kept is not None and (known := _read(kept, path, library_path, build)) is not None:
        return known
    unprobed = SdBinary(path, library_path, "unknown", _backend_of((path, *libraries)), frozenset(), build)
    help_text = _output(unprobed, "--help")
    flags = frozenset(_FLAG.findall(help_text))
    if "--listen-port" not in flags:
        raise BinaryMissingError(f"{path} is no sd-server: its help names no --listen-port.")
    said = _VERSION.search(help_text)
    version = "unknown" if said is None else said["version"]
    if said is not None and version == "unknown" and said["commit"] != "unknown":
        version = said["commit"]
    found = SdBinary(path, library_path, version, unprobed.backend, flags, build)
    if kept is not None:
        _keep(kept, found)
    return found


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/weighbridge/sd-server``, by default below ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return root / "weighbridge" / "sd-server"


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


def _build_of(files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _backend_of(files: tuple[Path, ...]) -> str:
    for name, mark in _BACKEND_MARKS:
        if any(_contains(file, mark) for file in files):
            return name
    return "cpu"


def _contains(file: Path, mark: bytes) -> bool:
    with file.open("rb") as opened:
        if not opened.seek(0, os.SEEK_END):
            return False
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(mark) >= 0


def _output(binary: SdBinary, flag: str) -> str:
    try:
        done = subprocess.run(
            [str(binary.path), flag],
            env=binary.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise BinaryMissingError(f"{binary.path} cannot be started: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise BinaryMissingError(f"{binary.path} did not answer {flag} within {PROBE_TIMEOUT_S:.0f} s.") from error
    if done.returncode < 0:
        raise BinaryMissingError(
            f"{binary.path} died of signal {-done.returncode} when asked for {flag}: it may be built for another "
            "processor."
        )
    if not done.stdout:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise BinaryMissingError(f"{binary.path} does not start: {why[-1] if why else 'it said nothing'}.")
    return done.stdout.decode(errors="replace")


def _read(kept: Path, path: Path, library_path: str, build: str) -> SdBinary | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(kept.read_text())
        if found["cache_version"] == CACHE_VERSION:
            return SdBinary(
                path, library_path, str(found["version"]), str(found["backend"]), frozenset(found["flags"]), build
            )
    return None


def _keep(kept: Path, binary: SdBinary) -> None:
    content = {
        **asdict(binary),
        "path": str(binary.path),
        "flags": sorted(binary.flags),
        "cache_version": CACHE_VERSION,
    }
    with suppress(OSError):  # without a cache it is asked again next time
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(content))
        half.replace(kept)
