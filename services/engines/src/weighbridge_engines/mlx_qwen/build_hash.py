"""Which build of the MLX engine this is: a hash over what computes, so that one build's measurements stay its own."""

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

ENGINE_PACKAGES = ("mlx", "mlx-cpu", "mlx-cuda", "mlx-metal", "mlx-lm")
"""Distributions that decide what is computed and how much memory it takes. Absent ones are skipped."""

RUNTIME_FOLDER = Path(__file__).with_name("runtime")


def engine_build(packages: Iterable[str] = ENGINE_PACKAGES, runtime: Path = RUNTIME_FOLDER) -> str:
    """SHA-256 (hex) over name, version and installed-file hashes of the packages, and over our runtime's source.

    The file hashes are those of pip's RECORD, written at installation: reading some hundred MB of libraries again at
    each start would tell the same.
    """
    digest = hashlib.sha256()
    for name in packages:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        digest.update(f"{name} {distribution.version}\n".encode())
        digest.update((distribution.read_text("RECORD") or "").encode())
    for source in sorted(runtime.rglob("*.py")):
        digest.update(str(source.relative_to(runtime)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def package_version(name: str) -> str | None:
    """Installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
