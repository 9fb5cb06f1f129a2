"""The directory of a zip archive as torch writes it: which records there are, how large, and that they are apart.

Only the directory at the end is read. Sizes of tensors come from it, so it is held against the file first: every record
must lie inside the file, in front of the directory, and share no byte with another one.
"""

from struct import Struct, error, unpack_from
from typing import NamedTuple

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.files import RegularFile

LOCAL_MAGIC = b"PK\x03\x04"
# Real checkpoints have a record per storage: below 5,000, optimizer included.
MAX_RECORDS = 1 << 17
MAX_DIRECTORY_BYTES = 16 << 20
STORED, DEFLATED = 0, 8

# Field sizes as PKWARE's APPNOTE 6.3.10 gives them (4.3.7, 4.3.12, 4.3.14, 4.3.15, 4.3.16).
_LOCAL = Struct("<4sHHHHHIIIHH")
_ENTRY = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_END64 = Struct("<4sQHHIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_MAX_COMMENT = 0xFFFF
_ALL_16, _ALL_32 = 0xFFFF, 0xFFFF_FFFF
_ZIP64_EXTRA = 1
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_ENTRIES_PER_TICK = 1 << 12


class Record(NamedTuple):
    """One file of the archive: where its local header is, how it is packed, its bytes in the archive and unpacked."""

    offset: int
    method: int
    packed_bytes: int
    size: int


class Archive(NamedTuple):
    """The records under the archive's own folder, by their name in it, and the bytes of the directory."""

    folder: bytes
    records: dict[bytes, Record]
    directory_offset: int
    directory_bytes: int


def read_archive(file: RegularFile, budget: ParseBudget) -> Archive:
    """The archive's directory. Raises ARCHIVE_INVALID, TRUNCATED, DUPLICATE_KEY, COUNT_EXCEEDS_FILE, BAD_OFFSETS,
    HEADER_TOO_LARGE or PARSE_BUDGET."""
    count, size, offset = _end_of_directory(file)
    if count * _ENTRY.size > size:
        message = f"the archive claims {count} records, which its directory of {size} bytes cannot hold"
        raise WeightError(WeightReason.COUNT_EXCEEDS_FILE, message, offset=offset)
    if size > MAX_DIRECTORY_BYTES or count > MAX_RECORDS:
        message = f"the archive has {count} records in a directory of {size} bytes, more than are read"
        raise WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=offset)
    budget.grow(size)
    directory = file.read_exactly(offset, size)
    records: dict[bytes, Record] = {}
    extents: list[tuple[int, int]] = []
    position = 0
    for index in range(count):
        if index % _ENTRIES_PER_TICK == 0:
            budget.check(offset + position)
        name, record, following = _entry(directory, position, offset)
        if name in records:
            raise WeightError(
                WeightReason.DUPLICATE_KEY, f"the archive holds {shown(name)} twice", offset=offset + position
            )
        records[name] = record
        extents.append((record.offset, record.offset + _LOCAL.size + len(name) + record.packed_bytes))
        position = following
    if position != size:
        message = "the archive's directory is longer than its entries"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=offset + position)
    _check_apart(extents, offset)
    # torch takes the folder of the first record as the archive's own and looks for everything in there.
    folder = next(iter(records), b"").partition(b"/")[0] + b"/"
    inside = {name[len(folder) :]: record for name, record in records.items() if name.startswith(folder)}
    return Archive(folder, inside, offset, size)


def data_offset(file: RegularFile, archive: Archive, name: bytes) -> int:
    """Where a record's bytes begin: behind its local header, whose lengths may differ from the directory's."""
    record = archive.records[name]
    header = file.read_exactly(record.offset, _LOCAL.size)
    magic, *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
    full_name = archive.folder + name
    start = record.offset + _LOCAL.size
    if (
        magic != LOCAL_MAGIC
        or name_bytes != len(full_name)
        or start + name_bytes + extra_bytes + record.packed_bytes > archive.directory_offset
        or file.read_exactly(start, name_bytes) != full_name
    ):
        message = f"the archive's record {shown(full_name)} is not where its directory says"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=record.offset)
    return start + int(name_bytes) + int(extra_bytes)


def _end_of_directory(file: RegularFile) -> tuple[int, int, int]:
    """Number of entries, bytes and offset of the directory."""
    tail_bytes = min(file.size, _END.size + _MAX_COMMENT)
    tail_start = file.size - tail_bytes
    tail = file.read_exactly(tail_start, tail_bytes)
    at = tail.rfind(b"PK\x05\x06")
    # The end record is the one whose comment ends with the file; the bytes may also stand in a comment.
    while at >= 0 and not _ends_file(tail, at):
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        raise WeightError(
            WeightReason.TRUNCATED, "the archive has no directory at its end: it is cut short", offset=file.size
        )
    _, disk, first_disk, disk_count, count, size, offset, _ = _END.unpack_from(tail, at)
    end = tail_start + at
    wide = _wide_end(file, end)
    if wide is not None:
        for narrow, full, unknown in (
            (count, wide[0], _ALL_16), (size, wide[1], _ALL_32), (offset, wide[2], _ALL_32),
        ):  # fmt: skip
            if narrow not in (full, unknown):
                raise WeightError(WeightReason.ARCHIVE_INVALID, "the archive's two directory ends disagree", offset=end)
        count, size, offset, end = wide
    elif disk or first_disk or disk_count != count:
        raise WeightError(WeightReason.ARCHIVE_INVALID, "archives in several parts are not read", offset=end)
    if offset + size != end:
        message = f"the archive's directory of {size} bytes is not where its end says"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=end)
    return count, size, offset


def _ends_file(tail: bytes, at: int) -> bool:
    return len(tail) - at >= _END.size and at + _END.size + _END.unpack_from(tail, at)[7] == len(tail)


def _wide_end(file: RegularFile, end: int) -> tuple[int, int, int, int] | None:
    """Entries, bytes and offset of the directory, and where it ends, from a zip64 end record; None without one."""
    locator_at = end - _LOCATOR.size
    if locator_at < _END64.size:
        return None
    magic, disk, at, disks = _LOCATOR.unpack(file.read_exactly(locator_at, _LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    if at > locator_at - _END64.size:
        raise WeightError(WeightReason.ARCHIVE_INVALID, "the archive's zip64 end lies elsewhere", offset=locator_at)
    fields = _END64.unpack(file.read_exactly(at, _END64.size))
    magic, length, _, _, this_disk, first_disk, disk_count, count, size, offset = fields
    if magic != b"PK\x06\x06" or at + 12 + length != locator_at:
        raise WeightError(WeightReason.ARCHIVE_INVALID, "the archive's zip64 end is malformed", offset=at)
    if disk or this_disk or first_disk or disks > 1 or disk_count != count:
        raise WeightError(WeightReason.ARCHIVE_INVALID, "archives in several parts are not read", offset=at)
    return count, size, offset, at


def _entry(directory: bytes, position: int, start: int) -> tuple[bytes, Record, int]:
    """Name and record of the directory entry at `position`, and where the next one begins."""
    try:
        fields = _ENTRY.unpack_from(directory, position)
    except error:
        message = "the archive's directory ends inside an entry"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=start + position) from None
    magic, _, _, flags, method, _, _, _, packed, size, name_bytes, extra_bytes, comment_bytes, disk, _, _, at = fields
    names = position + _ENTRY.size
    following = names + name_bytes + extra_bytes + comment_bytes
    if magic != b"PK\x01\x02" or following > len(directory):
        message = "an entry of the archive's directory is malformed"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=start + position)
    name = directory[names : names + name_bytes]
    if _ALL_32 in (packed, size, at):
        extra = directory[names + name_bytes : names + name_bytes + extra_bytes]
        packed, size, at = _widened(extra, packed, size, at, start + position)
    if flags & _ENCRYPTED or disk not in (0, _ALL_16):
        message = f"the archive's record {shown(name)} is encrypted or in another part"
        raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=start + position)
    if method == STORED and packed != size:
        message = f"the archive's record {shown(name)} is stored in {packed} bytes but holds {size}"
        raise WeightError(WeightReason.SIZE_MISMATCH, message, offset=start + position)
    return name, Record(at, method, packed, size), following


def _widened(extra: bytes, packed: int, size: int, at: int, offset: int) -> tuple[int, int, int]:
    """The sizes and the offset with those that need 64 bits taken from the zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = unpack_from("<HH", extra, position)
        if kind == _ZIP64_EXTRA:
            field = extra[position + 4 : position + 4 + length]
            values = iter(unpack_from(f"<{len(field) // 8}Q", field))
            try:
                # In this order, and only those that did not fit (APPNOTE 4.5.3).
                size = next(values) if size == _ALL_32 else size
                packed = next(values) if packed == _ALL_32 else packed
                at = next(values) if at == _ALL_32 else at
            except StopIteration:
                break
            return packed, size, at
        position += 4 + length
    raise WeightError(WeightReason.ARCHIVE_INVALID, "a record's zip64 sizes are missing", offset=offset)


def _check_apart(extents: list[tuple[int, int]], directory_offset: int) -> None:
    """Records that share bytes are how small archives claim large contents."""
    free_from = 0
    for begin, end in sorted(extents):
        if begin < free_from:
            raise WeightError(WeightReason.BAD_OFFSETS, "two records of the archive overlap", offset=begin)
        free_from = end
    if free_from > directory_offset:
        message = "a record of the archive reaches into its directory"
        raise WeightError(WeightReason.BAD_OFFSETS, message, offset=directory_offset)
