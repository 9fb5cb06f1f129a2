"""Machines as people write them on a command line."""

import re

from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.sizes import parse_size

EXAMPLES = "unified:64, discrete:64+24, discrete:64+24+24 or cpu:32 (GiB; the first number is the host's memory)"
PLATFORM = re.compile(r"[a-z0-9]{1,16}/[a-z0-9_]{1,16}", re.ASCII)
"""Operating system and processor."""


def parse_machine(text: str) -> machine_pb2.Machine:
    """A what-if machine from ``unified:64``, ``discrete:64+24+24`` or ``cpu:32``.

    The first size is the host's memory, each further one a card of a discrete machine; bare numbers are GiB. A platform
    may follow: ``unified:64@darwin/arm64``.

    Raises:
        ValueError: the text names no machine. The message says what is wrong and shows what can be written.
    """
    memory, at, machine_platform = text.strip().partition("@")
    if at and not PLATFORM.fullmatch(machine_platform):
        raise ValueError(
            f"{machine_platform!r} is no platform. Write system and processor: darwin/arm64, linux/x86_64."
        )
    kind, colon, sizes_text = memory.partition(":")
    kind = kind.strip().lower()
    if kind not in _POOLS:
        raise ValueError(f"{kind or text!r} is no kind of machine. Write {EXAMPLES}.")
    if not colon or not sizes_text.strip():
        raise ValueError(f"{text!r} lacks the memory. Write {EXAMPLES}.")
    try:
        ram, *cards = [parse_size(part) for part in sizes_text.split("+")]
    except ValueError as wrong:
        raise ValueError(f"{text!r}: {wrong} Write {EXAMPLES}.") from None
    if kind == "discrete" and not cards:
        raise ValueError(f"{text!r} has no card. Write the cards after the host's memory: discrete:64+24.")
    if kind != "discrete" and cards:
        raise ValueError(f"A {kind} machine has no cards of its own: {text!r}. Cards belong to discrete machines.")
    return machine_pb2.Machine(
        pool=_POOLS[kind],
        ram_bytes=ram,
        platform=machine_platform,
        devices=[
            machine_pb2.Device(device_id=str(index), name=f"card {index}", total_bytes=size)
            for index, size in enumerate(cards)
        ],
    )


_POOLS = {
    "unified": machine_pb2.POOL_KIND_UNIFIED,
    "discrete": machine_pb2.POOL_KIND_DISCRETE,
    "cpu": machine_pb2.POOL_KIND_CPU,
}
