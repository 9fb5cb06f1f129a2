"""Where MLX keeps the CPU kernels that it compiles: a folder of this user's own, shared by all starts.

MLX writes them into ``$TMPDIR/mlx`` and loads whatever lies there. In a shared /tmp that is code that somebody else may
have put there; in a folder of the process's own every start compiles them again (measured on 2 cores, 2026-11-30: 2 to
4 s more until a tiny model is loaded, 3 to 10 s more for the first sampled answer).
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/weighbridge/mlx-kernels``, by default below ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return root / "weighbridge" / "mlx-kernels"


def private_folder(wanted: Path, fallback: Path) -> Path:
    """``wanted``, made if need be; ``fallback`` where it cannot be made or others could write into it."""
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = wanted.stat(follow_symlinks=False)
    except OSError:
        return fallback
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return wanted if is_private and os.access(wanted, os.W_OK) else fallback
