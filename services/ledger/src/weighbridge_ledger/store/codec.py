"""Records as JSON text and back. Written by hand, field by field: a row must still be readable by the next version.

What a version adds comes last, and is taken to be at its default in the rows of earlier ones. Version 0.2 (schema 2)
added Claim.cpu_only, what is optional, on the GPU and exclusive of a Charge, Lease.exclusive, loaded_wall and load_s,
and Observation.claimed_bytes.
"""

from typing import Any

import orjson
from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book.records import Ended, Ticket
from weighbridge_ledger.book.states import Charge, Claim, DeviceWant, Lease, LeaseState, Purpose
from weighbridge_ledger.store.interface import Observation


def encode_lease(lease: Lease) -> str:
    """One lease as JSON."""
    return _text(
        {
            "request_id": lease.request_id,
            "sequence": lease.sequence,
            "state": lease.state.value,
            "claim": _claim(lease.claim),
            "charge": _charge(lease.charge),
            "holder": _process(lease.holder),
            "engines": [_process(process) for process in lease.engines],
            "foreign": lease.foreign,
            "suspect": lease.suspect,
            "secret_digest": lease.secret_digest.hex(),
            "previous_digest": lease.previous_digest.hex(),
            "term_s": lease.term_s,
            "holder_name": lease.holder_name,
            "memory_limit_bytes": lease.memory_limit_bytes,
            "purpose": [
                lease.purpose.engine_kind,
                lease.purpose.model_name,
                lease.purpose.model_digest,
                lease.purpose.engine_build,
                lease.purpose.shape,
                lease.purpose.planned_peak_bytes,
            ],
            "priority": lease.priority,
            "pinned": lease.pinned,
            "requested": lease.requested_wall,
            "granted": lease.granted_wall,
            "activated": lease.activated_wall,
            "exclusive": lease.exclusive,
            "loaded": lease.loaded_wall,
            "load_s": lease.load_s,
        }
    )


def decode_lease(lease_id: str, fence: int, text: str) -> Lease:
    """What `encode_lease` wrote."""
    row = orjson.loads(text)
    return Lease(
        lease_id=lease_id,
        request_id=row["request_id"],
        fence=fence,
        sequence=row["sequence"],
        state=LeaseState(row["state"]),
        claim=_read_claim(row["claim"]),
        charge=_read_charge(row["charge"]),
        holder=_read_process(row["holder"]),
        engines=tuple(_read_process(process) for process in row["engines"]),
        foreign=row["foreign"],
        suspect=row["suspect"],
        secret_digest=bytes.fromhex(row["secret_digest"]),
        previous_digest=bytes.fromhex(row["previous_digest"]),
        term_s=row["term_s"],
        holder_name=row["holder_name"],
        memory_limit_bytes=row["memory_limit_bytes"],
        purpose=Purpose(*row["purpose"]),
        priority=row["priority"],
        pinned=row["pinned"],
        requested_wall=row["requested"],
        granted_wall=row["granted"],
        activated_wall=row["activated"],
        exclusive=row.get("exclusive", False),
        loaded_wall=row.get("loaded", 0.0),
        load_s=row.get("load_s", 0.0),
    )


def encode_ticket(ticket: Ticket) -> str:
    """One ticket as JSON."""
    return _text([_claim(ticket.claim), ticket.sequence, ticket.first_wall, ticket.passes])


def decode_ticket(request_id: str, text: str) -> Ticket:
    """What `encode_ticket` wrote."""
    claim, sequence, first_wall, passes = orjson.loads(text)
    return Ticket(request_id, _read_claim(claim), sequence, first_wall, passes)


def encode_ended(ended: Ended) -> str:
    """One ended lease as JSON."""
    return _text([ended.request_id, ended.secret_digest.hex(), ended.ended_wall])


def decode_ended(lease_id: str, text: str) -> Ended:
    """What `encode_ended` wrote."""
    request_id, digest, ended_wall = orjson.loads(text)
    return Ended(lease_id, request_id, bytes.fromhex(digest), ended_wall)


def encode_observation(one: Observation) -> str:
    """The figures of an observation as JSON; what it is looked up by stands in columns."""
    return _text(
        [
            one.planned_bytes,
            one.granted_bytes,
            one.peak_bytes,
            one.load_s,
            one.observed_wall,
            one.node_id,
            one.lease_id,
            one.claimed_bytes,
        ]
    )


def decode_observation(number: int, digest: str, build: str, shape: str, text: str) -> Observation:
    """What `encode_observation` wrote."""
    planned, granted, peak, load_s, observed_wall, node_id, lease_id, *added = orjson.loads(text)
    (claimed,) = added or (0,)
    return Observation(
        digest, build, shape, planned, granted, peak, load_s, observed_wall, node_id, lease_id, number, claimed
    )


def _text(row: Any) -> str:
    return orjson.dumps(row).decode()


def _claim(claim: Claim) -> list[Any]:
    devices = [[want.device_id, want.required_bytes, want.optional_bytes] for want in claim.devices]
    return [claim.host_bytes, devices, claim.optional_host_bytes, claim.source, claim.cpu_only]


def _read_claim(row: list[Any]) -> Claim:
    host_bytes, devices, optional_host_bytes, source, *added = row
    (cpu_only,) = added or (False,)
    return Claim(host_bytes, tuple(DeviceWant(*want) for want in devices), optional_host_bytes, source, cpu_only)


def _charge(charge: Charge) -> list[Any]:
    return [
        charge.host_bytes,
        charge.devices,
        charge.spilled,
        charge.optional_host_bytes,
        charge.optional_devices,
        charge.on_gpu,
        charge.exclusive,
    ]


def _read_charge(row: list[Any]) -> Charge:
    host_bytes, devices, spilled, *added = row
    # What was granted without a card by a version that did not ask may well be on the GPU of a unified machine: whoever
    # wants that for itself waits for it. Where there is no such GPU this says nothing.
    optional_host, optional_devices, on_gpu, exclusive = added or (0, [], not devices, False)
    return Charge(
        host_bytes, _pairs(devices), _pairs(spilled), optional_host, _pairs(optional_devices), on_gpu, exclusive
    )


def _pairs(rows: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((device, size) for device, size in rows)


def _process(process: ProcessIdentity) -> list[Any]:
    return [process.pid, process.start_time, process.boot_id, process.pid_namespace]


def _read_process(row: list[Any]) -> ProcessIdentity:
    return ProcessIdentity(*row)
