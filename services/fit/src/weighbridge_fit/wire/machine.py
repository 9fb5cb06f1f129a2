"""The ledger's capacity as fit needs it."""

from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool

_POOLS = {
    machine_pb2.POOL_KIND_UNIFIED: Pool.UNIFIED,
    machine_pb2.POOL_KIND_DISCRETE: Pool.DISCRETE,
    machine_pb2.POOL_KIND_CPU: Pool.CPU,
}


def capacity_from(message: machine_pb2.Capacity) -> Capacity:
    """The ceilings of the ledger's answer."""
    return Capacity(
        pool=_POOLS.get(message.pool, Pool.CPU),
        host=_ceiling_from(message.host),
        total=_ceiling_from(message.total),
        devices=tuple(
            DeviceCeiling(
                device.device.device_id,
                _ceiling_from(device.ceiling),
                device.device.allocation_limit_bytes,
                device.device.total_bytes,
            )
            for device in message.devices
        ),
        total_ram=message.total_ram_bytes,
        platform=message.platform,
    )


def _ceiling_from(message: machine_pb2.Ceiling) -> Ceiling:
    limit = message.limit_bytes if message.HasField("limit_bytes") else None
    return Ceiling(message.automatic_bytes, message.effective_bytes, limit)
