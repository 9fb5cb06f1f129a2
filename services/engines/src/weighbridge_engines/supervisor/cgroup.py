"""What the control group of this process says: its memory limit, and how often the kernel killed in it for memory."""

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 2**62
"""cgroup v1 writes "no limit" as the largest multiple of the page size, a little below 2^63."""


def memory_limit_bytes(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The lowest memory limit from this process's group up to the root; None where there is none (or no cgroups)."""
    limits = []
    for folder in _folders(root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text is not None and text.isdigit() and int(text) < _V1_UNLIMITED:  # "max" is no number
                limits.append(int(text))
    return min(limits, default=None)


def oom_kills(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processes of this process's group the kernel killed for want of memory; None where it cannot be told."""
    for folder in _folders(root, membership):
        for name in ("memory.events", "memory.oom_control"):
            for line in (_read(folder / name) or "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
    return None


def _folders(root: Path, membership: Path) -> list[Path]:
    """The group's folders, innermost first. Inside a container the path may not exist; its own root then counts."""
    text = _read(membership)
    if text is None:
        return []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        inner = base / path.strip("/")
        chain = [inner, *inner.parents]
        folders = [folder for folder in chain if folder == base or base in folder.parents]
        if any((folder / name).exists() for folder in folders for name in ("memory.max", "memory.limit_in_bytes")):
            return folders
    return []


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
