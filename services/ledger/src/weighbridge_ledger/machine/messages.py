"""Machine and capacity as messages of weighbridge.memory.v1, and back."""

import math

from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_ledger.machine.capacity import Capacity, CeilingRecord
from weighbridge_ledger.machine.model import (
    LARGEST_CARD_BYTES,
    LARGEST_RAM_BYTES,
    Device,
    Machine,
    Pool,
    Source,
    in_gib,
)

_POOL_TO_PROTO = {
    Pool.UNIFIED: machine_pb2.POOL_KIND_UNIFIED,
    Pool.DISCRETE: machine_pb2.POOL_KIND_DISCRETE,
    Pool.CPU: machine_pb2.POOL_KIND_CPU,
}
_POOL_FROM_PROTO = {number: pool for pool, number in _POOL_TO_PROTO.items()}
_SOURCE_TO_PROTO = {
    Source.DETECTED: machine_pb2.MACHINE_SOURCE_DETECTED,
    Source.DECLARED: machine_pb2.MACHINE_SOURCE_DECLARED,
    Source.INLINE: machine_pb2.MACHINE_SOURCE_INLINE,
}


LONGEST_PLATFORM = 64
"""Letters of the longest name that is still one, with room."""


class InvalidMachineError(ValueError):
    """A machine in a request that cannot be: `field` is where (relative to the machine), `description` says why."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


def machine_from_proto(message: machine_pb2.Machine) -> tuple[Machine, int | None]:
    """A what-if machine and its limit (None: automatic).

    Raises:
        InvalidMachineError: an amount that no machine has, cards where there can be none, no card where there must be
            one, or one card twice.
    """
    pool = _pool(message)
    _check_bytes("ram_bytes", message.ram_bytes, LARGEST_RAM_BYTES)
    if message.limit_bytes < 0:
        raise InvalidMachineError("limit_bytes", "must not be negative; leave it out for no limit")
    if pool is Pool.DISCRETE and not message.devices:
        raise InvalidMachineError("devices", "a machine with cards needs at least one")
    if pool is not Pool.DISCRETE and message.devices:
        raise InvalidMachineError("devices", f"a machine with {pool.value} memory has no cards of its own memory")
    devices = tuple(_device(index, device) for index, device in enumerate(message.devices))
    ids = [device.device_id for device in devices]
    for index, device_id in enumerate(ids):
        if device_id in ids[:index]:
            raise InvalidMachineError(f"devices[{index}].device_id", f'"{device_id}" is there twice')
    machine = Machine(
        node_id=message.node_id,
        pool=pool,
        ram_bytes=message.ram_bytes,
        devices=devices,
        source=Source.INLINE,
        platform=_platform(message.platform),
    )
    return machine, message.limit_bytes or None


def _platform(text: str) -> str:
    """Raises InvalidMachineError."""
    if len(text) > LONGEST_PLATFORM:
        raise InvalidMachineError("platform", "is no operating system and processor, such as darwin/arm64")
    return text


def _pool(message: machine_pb2.Machine) -> Pool:
    if message.pool == machine_pb2.POOL_KIND_UNSPECIFIED:
        return Pool.DISCRETE if message.devices else Pool.CPU
    pool = _POOL_FROM_PROTO.get(message.pool)
    if pool is None:
        raise InvalidMachineError("pool", "is no kind of memory that this ledger knows")
    return pool


def _device(index: int, message: machine_pb2.Device) -> Device:
    where = f"devices[{index}]"
    _check_bytes(f"{where}.total_bytes", message.total_bytes, LARGEST_CARD_BYTES)
    limit = message.allocation_limit_bytes
    if not 0 <= limit <= message.total_bytes:
        raise InvalidMachineError(
            f"{where}.allocation_limit_bytes", "must be between 0 (unknown) and the card's memory"
        )
    return Device(
        device_id=message.device_id or str(index),
        name=message.name or f"card {index}",
        total_bytes=message.total_bytes,
        allocation_limit_bytes=limit or None,
    )


def _check_bytes(field: str, size: int, largest: int) -> None:
    if not 0 < size <= largest:
        raise InvalidMachineError(field, f"must be more than 0 and at most {in_gib(largest)}")


def machine_to_proto(machine: Machine, limit_bytes: int | None = None) -> machine_pb2.Machine:
    """The machine, with the person's limit if there is one."""
    return machine_pb2.Machine(
        node_id=machine.node_id,
        pool=_POOL_TO_PROTO[machine.pool],
        ram_bytes=machine.ram_bytes,
        devices=[device_to_proto(device) for device in machine.devices],
        limit_bytes=limit_bytes or 0,
        platform=machine.platform,
    )


def device_to_proto(device: Device) -> machine_pb2.Device:
    """One card."""
    return machine_pb2.Device(
        device_id=device.device_id,
        name=device.name,
        total_bytes=device.total_bytes,
        allocation_limit_bytes=device.allocation_limit_bytes or 0,
    )


def capacity_to_proto(capacity: Capacity, *, epoch: str = "", revision: int = 0) -> machine_pb2.Capacity:
    """The capacity record. `epoch` and `revision` name the state of the book that was read."""
    machine = capacity.machine
    message = machine_pb2.Capacity(
        node_id=machine.node_id,
        pool=_POOL_TO_PROTO[machine.pool],
        source=_SOURCE_TO_PROTO[machine.source],
        total_ram_bytes=machine.ram_bytes,
        host=_ceiling_to_proto(capacity.host),
        devices=[
            machine_pb2.DeviceCapacity(device=device_to_proto(device), ceiling=_ceiling_to_proto(ceiling))
            for device, ceiling in capacity.devices
        ],
        total=_ceiling_to_proto(capacity.total),
        spill_allowed=capacity.spill_allowed,
        exclusive_heeded=capacity.exclusive_heeded,
        notes=capacity.notes,
        epoch=epoch,
        revision=revision,
        platform=machine.platform,
    )
    if capacity.measured_at is not None:
        seconds = math.floor(capacity.measured_at)
        message.measure_time.seconds = seconds
        message.measure_time.nanos = int((capacity.measured_at - seconds) * 1_000_000_000)
    return message


def _ceiling_to_proto(ceiling: CeilingRecord) -> machine_pb2.Ceiling:
    return machine_pb2.Ceiling(
        automatic_bytes=ceiling.automatic_bytes,
        limit_bytes=ceiling.limit_bytes,
        effective_bytes=ceiling.effective_bytes,
        committed_bytes=ceiling.committed_bytes,
        free_bytes=ceiling.free_bytes,
        external_bytes=ceiling.external_bytes,
    )
