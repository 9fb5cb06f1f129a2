"""The platforms' own texts: /proc/meminfo on Linux, vm_stat on macOS. Pure: texts in, figures or None out."""

import re
from dataclasses import dataclass


def meminfo_bytes(text: str, name: str) -> int | None:
    """One line of /proc/meminfo in bytes (its kB are KiB), or None where it is missing."""
    match = re.search(rf"^{re.escape(name)}:\s+(\d+) kB\s*$", text, re.MULTILINE)
    return None if match is None else int(match.group(1)) * 1024


@dataclass(frozen=True, slots=True)
class VmStat:
    """macOS page counts, in bytes. None where the line is missing."""

    free_bytes: int
    inactive_bytes: int | None
    speculative_bytes: int | None
    purgeable_bytes: int | None
    file_backed_bytes: int | None

    @property
    def reclaimable_bytes(self) -> int:
        """Free, inactive, speculative, purgeable and file-backed together. The categories overlap: an upper bound."""
        parts = (self.inactive_bytes, self.speculative_bytes, self.purgeable_bytes, self.file_backed_bytes)
        return self.free_bytes + sum(part for part in parts if part is not None)

    @property
    def cached_bytes(self) -> int | None:
        """Cache that can be dropped: file-backed and purgeable pages. None unless both are known."""
        if self.file_backed_bytes is None or self.purgeable_bytes is None:
            return None
        return self.file_backed_bytes + self.purgeable_bytes


def parse_vm_stat(text: str) -> VmStat | None:
    """The output of vm_stat, or None for any other text."""
    header = re.search(r"page size of (\d+) bytes", text)
    if header is None:
        return None
    page = int(header.group(1))

    def size(name: str) -> int | None:
        match = re.search(rf"^{re.escape(name)}:\s+(\d+)\.?\s*$", text, re.MULTILINE)
        return None if match is None else int(match.group(1)) * page

    free = size("Pages free")
    if free is None or page == 0:
        return None
    return VmStat(
        free_bytes=free,
        inactive_bytes=size("Pages inactive"),
        speculative_bytes=size("Pages speculative"),
        purgeable_bytes=size("Pages purgeable"),
        file_backed_bytes=size("File-backed pages"),
    )
