"""Declared machines: a spec such as `unified:64`, `discrete:64+24+24`, `cpu:32`, or a file of recorded readings."""

import math
import re
from pathlib import Path

from weighbridge_ledger.machine.interpret import UnreadableMachineError, interpret
from weighbridge_ledger.machine.model import (
    GIB,
    LARGEST_CARD_BYTES,
    LARGEST_RAM_BYTES,
    UNMEASURED,
    Device,
    Interpretation,
    Machine,
    Pool,
    Source,
)
from weighbridge_ledger.machine.recorded import ReadingsError, from_json

EXAMPLES = "unified:64, discrete:64+24+24 or cpu:32 (GiB), or the path of a file of recorded readings"

# A recorded file holds a few KiB per device; this much leaves room for any machine and none for a mistake.
LARGEST_FILE_BYTES = 2**20

_POOLS = {pool.value: pool for pool in Pool}
_AMOUNT = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)


class MachineSpecError(ValueError):
    """A machine that cannot be declared like this; the message says what, where and what to do."""


def parse_spec(text: str, *, node_id: str = "", source: Source = Source.DECLARED) -> Machine:
    """A machine from `kind:ram` or `discrete:ram+card+card…`, amounts in GiB, decimals allowed.

    It has no platform: engines run on the system that is here, whatever memory was declared for it.

    Raises:
        MachineSpecError: anything else, or an amount that no machine has.
    """
    kind, colon, amounts = text.strip().partition(":")
    pool = _POOLS.get(kind.lower())
    if not colon or pool is None:
        raise MachineSpecError(f'"{text}" is no machine: write {EXAMPLES}')
    amounts, at, _ = amounts.partition("@")
    if at:
        raise MachineSpecError(
            f'"{text}" names a platform, which only a machine to plan for may have (--machine of the client). Loads '
            f"happen on the system that is here: write {kind.lower()}:{amounts}"
        )
    parts = amounts.split("+")
    ram = _bytes(parts[0], "the RAM", text, LARGEST_RAM_BYTES)
    cards = [_bytes(part, f"card {index}", text, LARGEST_CARD_BYTES) for index, part in enumerate(parts[1:], start=1)]
    if pool is Pool.DISCRETE and not cards:
        raise MachineSpecError(f'"{text}" names no card: add each card\'s memory, as in discrete:64+24')
    if pool is not Pool.DISCRETE and cards:
        raise MachineSpecError(f'"{text}" has cards beside {pool.value} memory: only discrete machines have cards')
    devices = tuple(Device(str(index), f"card {index}", card) for index, card in enumerate(cards))
    return Machine(node_id=node_id, pool=pool, ram_bytes=ram, devices=devices, source=source)


def _bytes(amount: str, what: str, text: str, largest: int) -> int:
    if _AMOUNT.fullmatch(amount.strip()) is None:
        raise MachineSpecError(f'"{text}": {what} is "{amount}", which is no number of GiB')
    size = math.floor(float(amount) * GIB)
    if not 0 < size <= largest:
        raise MachineSpecError(f'"{text}": {what} must be more than 0 and at most {largest // GIB} GiB')
    return size


def load_declared(text: str, *, node_id: str = "") -> Interpretation:
    """The machine of a setting: a spec, or the path of a file of recorded readings.

    The live part of recorded readings does not count: the result's live memory is unmeasured.

    Raises:
        MachineSpecError: neither a spec nor a readable file of recorded readings.
    """
    kind, colon, _ = text.strip().partition(":")
    if colon and kind.lower() in _POOLS:
        return Interpretation(parse_spec(text, node_id=node_id), UNMEASURED)
    path = Path(text.strip()).expanduser()
    if not text.strip() or not path.is_file():
        raise MachineSpecError(f'"{text}" is neither a machine nor a file: write {EXAMPLES}')
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise MachineSpecError(f"{path} is too large for recorded readings (at most 1 MiB)")
        return interpret(from_json(path.read_text(encoding="utf-8")), node_id=node_id, source=Source.DECLARED)
    except (OSError, UnicodeDecodeError) as error:
        raise MachineSpecError(f"{path} cannot be read: {error}") from error
    except ReadingsError as error:
        raise MachineSpecError(f"{path}: {error}") from error
    except UnreadableMachineError as error:
        raise MachineSpecError(f"{path} does not say how much memory the machine has") from error
