"""Where a ds4 keeps its conversations on disk: one folder for each model, chunk and backend.

ds4 looks a checkpoint up by the text of its conversation and stores nothing of the model that made it (antirez/ds4, May
to September 2026). In a folder that two models share, one would go on from the other's state. The digest that fit gives
a model is of its tensors' names and shapes, which a revision shares with the file before it, so the file's content
counts too. Checkpoints hold the text of conversations in the clear: nobody else may look into them.
"""

import hashlib
import os
import stat
from pathlib import Path

import grpc
from weighbridge_proto.errors import RequestError

from weighbridge_engines.supervisor.program import cache_root

SAMPLES = 16
SAMPLE_BYTES = 16 * 2**10
"""Pieces of a model file that tell its revisions apart, evenly spread: reading 500 GB would take minutes."""


def default_root() -> Path:
    """``~/.cache/weighbridge/ds4/kv``."""
    return cache_root() / "ds4" / "kv"


def fingerprint(model: Path) -> str:
    """SHA-256 (hex) over a file's size and samples of its content, the first and the last bytes among them.

    Raises:
        OSError: it cannot be read.
    """
    with model.open("rb", buffering=0) as opened:
        size = opened.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        last = max(0, size - SAMPLE_BYTES)
        for number in range(SAMPLES):
            opened.seek(last * number // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def folder(root: Path, model_digest: str, model: Path, chunk_tokens: int, compute: str) -> Path:
    """The folder for one model, made where it is not there, that only this user may look into.

    Args:
        root: where all of them lie. Likewise for this user alone: the names in it tell which models are used.
        model_digest: of the model's tensors, as fit names it.
        model: its file.
        chunk_tokens: how many tokens of a prompt are evaluated in one go. A checkpoint fits no other number.
        compute: metal, cuda or cpu. Likewise.

    Raises:
        RequestError: INTERNAL ENGINE_START_FAILED: it cannot be made, is another user's, or the model is not readable.
    """
    try:
        revision = fingerprint(model)
    except OSError as error:
        raise RequestError(
            grpc.StatusCode.INTERNAL,
            "ENGINE_START_FAILED",
            f"The model file {model} cannot be read ({error.strerror}). See to its disk, or pull it again.",
        ) from error
    try:
        whose = hashlib.sha256(f"{model_digest}\n{revision}".encode()).hexdigest()[:24]
        made = root / f"{whose}-{chunk_tokens}-{compute}"
        # A root may be a link to another disk. One that others own could be changed under us.
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(root, root.stat())
        made.mkdir(mode=0o700, exist_ok=True)
        _make_private(made, made.lstat())
    except OSError as error:
        raise _unusable(f"cannot be used ({error.strerror})") from error
    return made


def _make_private(folder: Path, status: os.stat_result) -> None:
    """Raises RequestError, OSError."""
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise _unusable("is another user's, or a link")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


def _unusable(why: str) -> RequestError:
    return RequestError(
        grpc.StatusCode.INTERNAL,
        "ENGINE_START_FAILED",
        f"The folder for ds4's conversations on disk {why}. Name another with WEIGHBRIDGE_ENGINES_DS4_KV_DIR, or load "
        "with disk_kv=false.",
    )
