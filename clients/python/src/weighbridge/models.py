"""Which model a person means."""

import os
from pathlib import Path

from weighbridge_proto.fit.v1 import weights_pb2


def path_here(text: str, here: Path | None = None) -> Path | None:
    """The absolute path of ``text`` if that file or folder exists here, seen from the current folder; else None."""
    if not text:
        return None  # a variable that a shell found empty, and not the current folder
    path = (here or Path.cwd()) / Path(text).expanduser()
    try:
        # normpath, not resolve: the service resolves symbolic links itself, under its own models root.
        return Path(os.path.normpath(path)) if path.exists() else None
    except (OSError, ValueError):  # a text too long or too strange for a path
        return None


def looks_like_path(text: str) -> bool:
    """Whether ``text`` can only be a path: it has a separator or starts with a dot or tilde."""
    return "/" in text or os.sep in text or text.startswith((".", "~"))


def model_at(path: str | Path) -> weights_pb2.ModelRef:
    """The model in the file or folder ``path``: absolute, or relative to the service's models root."""
    return weights_pb2.ModelRef(path=str(path))


def model_named(catalog_id: str) -> weights_pb2.ModelRef:
    """The model that the catalogue calls ``catalog_id``."""
    return weights_pb2.ModelRef(catalog_id=catalog_id)


def model_label(model: weights_pb2.ModelRef) -> str:
    """The model as it was named, for people."""
    return model.catalog_id or model.path or model.facts.name or "(none)"
