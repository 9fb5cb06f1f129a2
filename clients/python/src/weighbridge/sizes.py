"""Bytes as people read and write them. GiB = 2^30."""

import re

from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": GIB, "GIB": GIB, "G": GIB, "MIB": MIB, "M": MIB, "KIB": KIB, "K": KIB, "B": 1}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


def format_size(size_bytes: int) -> str:
    """The size in the largest unit that keeps it at 1 or above: ``1.50 GiB``, ``96.3 MiB``, ``12.0 KiB``, ``7 B``."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if size >= GIB:
        return f"{sign}{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size} B"


def all_bytes(held: requirement_pb2.Charge | process_pb2.ObservedMemory) -> int:
    """Everything that is charged or was seen in use, on the host and on devices together."""
    return held.host_bytes + sum(device.bytes for device in held.devices)


def parse_size(text: str) -> int:
    """Bytes from ``16``, ``16GiB``, ``7.5 GiB`` or ``900MiB``. A bare number is GiB.

    Raises:
        ValueError: the text is no size, the unit is unknown, or nothing is left of it (below one byte).
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size. Write a number of GiB, such as 16 or 7.5, or a unit: 900MiB.")
    unit = match["unit"].upper()
    if unit not in _UNITS:
        raise ValueError(f"{match['unit']!r} is no unit of size. Use GiB, MiB or KiB (powers of 1024).")
    size = round(float(match["number"]) * _UNITS[unit])
    if not 0 < size < 1 << 62:
        raise ValueError(f"{text!r} is not a size that a machine can have.")
    return size
