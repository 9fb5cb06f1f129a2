"""A machine that is no longer what it was when the ledger started. Pure.

Ceilings stay as they were: leases stand beneath them. What has gone counts as held by others, so that nothing is
granted out of it.
"""

from dataclasses import replace

from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.model import Interpretation, LiveDevice, LiveMemory, Machine, in_gib


def against_start(machine: Machine, now: Interpretation) -> LiveMemory:
    """Live memory as it counts for the machine that the ledger started on.

    A virtual machine whose host inflates a balloon loses memory (MemTotal shrinks), and so does a container whose limit
    is lowered while it runs: what is missing is as good as used. A card that stops answering is unknown, and stays; one
    that is plugged in, or made by partitioning another, is said.
    """
    live = now.live
    findings = list(live.findings)
    used = live.host_used_bytes
    gone = machine.ram_bytes - now.machine.ram_bytes
    if gone > 0:
        used = None if used is None else used + gone
        findings.append(
            Finding(
                "RAM_SHRANK",
                f"{in_gib(gone)} of the {in_gib(machine.ram_bytes)} that were here when the ledger started are gone (a "
                "balloon of the virtual machine, or a lower container limit); they count as held by other programs.",
            )
        )
    elif gone < 0:
        findings.append(
            Finding(
                "RAM_GREW",
                f"There are {in_gib(-gone)} more than the {in_gib(machine.ram_bytes)} that were here when the ledger "
                "started; restart it to hand them out.",
            )
        )
    seen = {device.device_id for device in live.devices}
    missing = [device for device in machine.devices if device.device_id not in seen]
    findings += [
        Finding("DEVICE_NOT_ANSWERING", f"{device.name} does not answer: other programs on it count as nothing.")
        for device in missing
    ]
    known = {device.device_id for device in machine.devices}
    findings += [
        Finding(
            "DEVICE_APPEARED",
            f"{device.name} was not here when the ledger started; restart it to load models there.",
        )
        for device in now.machine.devices
        if device.device_id not in known
    ]
    return replace(
        live,
        host_used_bytes=used,
        devices=(*live.devices, *(LiveDevice(device.device_id) for device in missing)),
        findings=tuple(findings),
    )
