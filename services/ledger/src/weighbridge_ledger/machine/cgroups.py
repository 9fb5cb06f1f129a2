"""Control groups: where the memory files of this process are, and what they say. Pure: texts in, figures out.

A container's limit is nowhere but here: /proc/meminfo shows the host even in a container limited to 200 MiB.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.readings import CgroupLevel

V2_FILES = ("memory.max", "memory.high", "memory.current", "memory.stat")
V1_FILES = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.memsw.usage_in_bytes",
    "memory.stat",
)

# Version 1 writes "no limit" as LONG_MAX rounded down to a page (9223372036854771712 with 4 KiB pages, less with
# larger ones). Nobody sets a limit of 2^62 bytes on purpose.
NO_LIMIT_FROM_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class CgroupDirectory:
    """A directory that may hold memory files of this process's hierarchy."""

    version: int
    path: str


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """What a hierarchy allows (None: no limit) and what is left beneath it (None: no limit, or unknown)."""

    limit_bytes: int | None
    free_bytes: int | None
    findings: tuple[Finding, ...] = ()


def memory_directories(proc_self_cgroup: str, mountinfo: str) -> tuple[CgroupDirectory, ...]:
    """Directories from this process's own cgroup up to the mount, per mounted memory hierarchy, leaf first.

    Both versions are looked at: on hybrid systems version 2 is mounted without the memory controller. Mount points are
    taken from mountinfo, never assumed. Where the process's path lies outside what the mount shows (a container
    without its own cgroup namespace), the mount's root is the container's own group.
    """
    paths = _own_paths(proc_self_cgroup)
    directories: list[CgroupDirectory] = []
    for version, root, mount_point in _mounts(mountinfo):
        path = paths.get(version)
        if path is None:
            continue
        top = PurePosixPath(mount_point)
        leaf = top.joinpath(*_relative(path, root))
        directories.append(CgroupDirectory(version, str(leaf)))
        while leaf != top:
            leaf = leaf.parent
            directories.append(CgroupDirectory(version, str(leaf)))
    return tuple(dict.fromkeys(directories))


def _own_paths(proc_self_cgroup: str) -> dict[int, str]:
    paths: dict[int, str] = {}
    for line in proc_self_cgroup.splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        hierarchy, controllers, path = parts
        if hierarchy == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(mountinfo: str) -> list[tuple[int, str, str]]:
    """(version, root within the hierarchy, mount point) of each mount that can hold memory files."""
    mounts = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        root, mount_point = _unescape(fields[3]), _unescape(fields[4])
        if kind[0] == "cgroup2":
            mounts.append((2, root, mount_point))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts.append((1, root, mount_point))
    return mounts


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as \\ooo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _relative(path: str, root: str) -> tuple[str, ...]:
    own, top = PurePosixPath(path), PurePosixPath(root)
    if ".." in own.parts or not own.is_relative_to(top):
        return ()
    return own.relative_to(top).parts


def interpret_cgroups(levels: tuple[CgroupLevel, ...]) -> CgroupMemory:
    """The lowest limit along the hierarchy, and the least that is left beneath any limit in it.

    memory.high counts like memory.max: a group above it is throttled until it is below again. Page cache on the file
    lists and kernel objects that can be reclaimed can be dropped and are not used memory (the kernel's own MemAvailable
    counts them the same way). Swap is no memory: what a group has swapped out under version 2 (memory.swap.current) is
    neither used nor free here. Version 1 can limit memory and swap together; what was swapped out takes room beneath
    that limit, so it counts as a second one.
    """
    limits: list[int] = []
    frees: list[int | None] = []
    findings: list[Finding] = []
    for level in levels:
        limit = _lowest_limit(level, findings)
        if limit is not None:
            limits.append(limit)
            used = _used_bytes(level, "memory.current" if level.version == 2 else "memory.usage_in_bytes")
            frees.append(None if used is None else max(0, limit - used))
        with_swap = _limit_with_swap(level, findings)
        if with_swap is not None:
            limits.append(with_swap)
            used = _used_bytes(level, "memory.memsw.usage_in_bytes")
            frees.append(None if used is None else max(0, with_swap - used))
    if not limits:
        return CgroupMemory(None, None, tuple(findings))
    if any(free is None for free in frees):
        findings.append(
            Finding("CGROUP_USAGE_UNREADABLE", "What the container uses of its memory limit cannot be read here.")
        )
        return CgroupMemory(min(limits), None, tuple(findings))
    return CgroupMemory(min(limits), min(free for free in frees if free is not None), tuple(findings))


def _lowest_limit(level: CgroupLevel, findings: list[Finding]) -> int | None:
    if level.version == 2:
        texts = [level.files.get("memory.max"), level.files.get("memory.high")]
    else:
        # hierarchical_memory_limit reaches past the mount's root, to ancestors that a container cannot see.
        inherited = _stat(level).get("hierarchical_memory_limit")
        texts = [level.files.get("memory.limit_in_bytes"), None if inherited is None else str(inherited)]
    limits = [limit for text in texts if text is not None and (limit := _limit(text, findings)) is not None]
    return min(limits, default=None)


def _limit_with_swap(level: CgroupLevel, findings: list[Finding]) -> int | None:
    """Version 1's limit over memory and swap; None as well where swap is not accounted."""
    if "memory.memsw.usage_in_bytes" not in level.files:
        return None
    inherited = _stat(level).get("hierarchical_memsw_limit")
    texts = [level.files.get("memory.memsw.limit_in_bytes"), None if inherited is None else str(inherited)]
    limits = [limit for text in texts if text is not None and (limit := _limit(text, findings)) is not None]
    return min(limits, default=None)


def _limit(text: str, findings: list[Finding]) -> int | None:
    value = text.strip()
    if value in ("max", "-1"):
        return None
    if not value.isascii() or not value.isdigit():
        findings.append(
            Finding("CGROUP_LIMIT_UNREADABLE", "The container's memory limit is not a number; it counts as none.")
        )
        return None
    limit = int(value)
    if limit >= NO_LIMIT_FROM_BYTES:
        return None
    if limit == 0:
        findings.append(
            Finding("CGROUP_LIMIT_NOT_POSITIVE", "The container's memory limit is zero; it counts as none.")
        )
        return None
    return limit


def _used_bytes(level: CgroupLevel, name: str) -> int | None:
    text = level.files.get(name, "").strip()
    if not text.isascii() or not text.isdigit():
        return None
    # Version 1 counts the group alone under the bare names and the whole subtree, as the usage does, under total_*.
    prefix = "" if level.version == 2 else "total_"
    stat = _stat(level)
    droppable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    droppable += stat.get("slab_reclaimable", 0)  # version 1 has no such line
    return max(0, int(text) - droppable)


def _stat(level: CgroupLevel) -> dict[str, int]:
    pairs = (line.split() for line in level.files.get("memory.stat", "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isascii() and pair[1].isdigit()}
