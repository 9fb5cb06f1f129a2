"""Messages of the contract to values of the book, and back."""

from collections.abc import Iterable

from weighbridge_common.processes import ProcessIdentity
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

from weighbridge_ledger.book.admission import Preview
from weighbridge_ledger.book.states import (
    Ask,
    Claim,
    Credential,
    DeviceWant,
    Observed,
    Purpose,
)
from weighbridge_ledger.machine.model import LARGEST_RAM_BYTES
from weighbridge_ledger.service import times
from weighbridge_ledger.service.failures import failure_of
from weighbridge_ledger.service.lease_messages import charge_message, reason_message
from weighbridge_ledger.store.interface import Observation

MAX_TEXT = 512
"""Longest id or name that is taken in. Names are kept, logged and sent to every watcher."""

MAX_DEVICES = 64
"""Cards in one claim: more than any machine has."""

MAX_HELD = 64
"""Leases that a caller may keep busy while it waits: as many as it may claim cards for."""

_PRIORITIES = frozenset(lease_pb2.Priority.values())

# -- in ------------------------------------------------------------------------------------------------------------


def ask_of(request: ledger_service_pb2.AdmitRequest, time_left_s: float | None) -> Ask:
    """A call of Admit, checked. `time_left_s` is the call's own deadline.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    # Each field is read once: in the way of every admission, reading a message is dearer than looking at what it says.
    request_id, priority, holder = request.request_id, request.priority, request.holder
    holder_name, memory_limit_bytes = holder.name, holder.memory_limit_bytes
    purpose = _purpose_of(request.purpose)
    _check_text("request_id", request_id)
    _check_text("holder.name", holder_name)
    if memory_limit_bytes < 0:
        raise invalid_argument("holder.memory_limit_bytes", "must not be negative; leave it out for no limit")
    wait = [request.max_wait.ToNanoseconds() / 1e9] if request.HasField("max_wait") else []
    if wait and wait[0] < 0:
        raise invalid_argument("max_wait", "must not be negative")
    if priority not in _PRIORITIES:
        raise invalid_argument("priority", "is no priority that this ledger knows")
    if len(request.while_holding) > MAX_HELD:
        raise invalid_argument("while_holding", f"must name at most {MAX_HELD} leases")
    if time_left_s is not None:
        wait.append(time_left_s)
    return Ask(
        request_id=request_id,
        holder=process_of("holder.process", holder.process),
        claim=claim_of("claim", request.claim),
        holder_name=holder_name,
        memory_limit_bytes=memory_limit_bytes,
        purpose=purpose,
        priority=priority or lease_pb2.PRIORITY_NORMAL,
        pinned=request.pinned,
        exclusive=request.exclusive,
        replaces=_credential_of("replaces_lease", request.replaces_lease)
        if request.HasField("replaces_lease")
        else None,
        while_holding=tuple(
            _credential_of(f"while_holding[{index}]", credential)
            for index, credential in enumerate(request.while_holding)
        ),
        term_s=request.term.ToNanoseconds() / 1e9 if request.HasField("term") else None,
        max_wait_s=min(wait) if wait else None,
    )


def _purpose_of(message: lease_pb2.Purpose) -> Purpose:
    purpose = Purpose(
        message.engine_kind,
        message.model_name,
        message.model_digest,
        message.engine_build,
        message.shape,
        message.planned_peak_bytes,
    )
    for name in ("engine_kind", "model_name", "model_digest", "engine_build"):
        if len(getattr(purpose, name)) > MAX_TEXT:
            raise _too_long(f"purpose.{name}")
    _check_text("purpose.shape", purpose.shape, 4 * MAX_TEXT)
    return purpose


def claim_of(field: str, message: requirement_pb2.Claim) -> Claim:
    """A claim, checked.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    devices = message.devices
    if len(devices) > MAX_DEVICES:
        raise invalid_argument(f"{field}.devices", f"must name at most {MAX_DEVICES} cards")
    claim = Claim(
        message.host_bytes,
        tuple(DeviceWant(device.device_id, device.required_bytes, device.optional_bytes) for device in devices),
        message.optional_host_bytes,
        str(int(message.source)),
        message.cpu_only,
    )
    if claim.host_bytes < 0:
        raise invalid_argument(f"{field}.host_bytes", "must not be negative")
    if claim.optional_host_bytes < 0:
        raise invalid_argument(f"{field}.optional_host_bytes", "must not be negative")
    for index, want in enumerate(claim.devices):
        _check_text(f"{field}.devices[{index}].device_id", want.device_id)
        if want.required_bytes < 0:
            raise invalid_argument(f"{field}.devices[{index}].required_bytes", "must not be negative")
        if want.optional_bytes < 0:
            raise invalid_argument(f"{field}.devices[{index}].optional_bytes", "must not be negative")
    return claim


def _credential_of(field: str, message: ledger_service_pb2.LeaseCredential) -> Credential:
    if not message.lease_id:
        raise invalid_argument(f"{field}.lease_id", "must name a lease")
    _check_text(f"{field}.lease_id", message.lease_id)
    _check_text(f"{field}.secret", message.secret)
    return Credential(message.lease_id, message.secret)


def process_of(field: str, message: process_pb2.ProcessIdentity) -> ProcessIdentity:
    """A process, checked.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    process = ProcessIdentity.from_message(message)
    if process.pid <= 0 or process.start_time <= 0:
        raise invalid_argument(field, "must name a process by pid and start time")
    if len(process.boot_id) > MAX_TEXT:
        raise _too_long(f"{field}.boot_id")
    if len(process.pid_namespace) > MAX_TEXT:
        raise _too_long(f"{field}.pid_namespace")
    return process


def processes_of(field: str, messages: Iterable[process_pb2.ProcessIdentity]) -> tuple[ProcessIdentity, ...]:
    """Several processes, checked.

    Raises:
        RequestError: INVALID_ARGUMENT.
    """
    return tuple(process_of(f"{field}[{index}]", message) for index, message in enumerate(messages))


def observed_of(message: process_pb2.ObservedMemory) -> Observed:
    """What a holder reports. Amounts below zero count as zero, and so does a device without a name. More than any
    machine has counts as that much: sums of it must still fit the 64 bits of a message."""
    return Observed(
        _amount(message.host_bytes),
        _amount(message.host_peak_bytes),
        tuple((one.device_id, _amount(one.bytes)) for one in message.devices[:MAX_DEVICES] if one.device_id),
        tuple((one.device_id, _amount(one.bytes)) for one in message.device_peaks[:MAX_DEVICES] if one.device_id),
    )


def _amount(reported: int) -> int:
    return min(max(0, reported), LARGEST_RAM_BYTES)


def _check_text(field: str, text: str, longest: int = MAX_TEXT) -> None:
    if len(text) > longest:
        raise _too_long(field, longest)


def _too_long(field: str, longest: int = MAX_TEXT) -> RequestError:
    return invalid_argument(field, f"must have at most {longest} characters")


# -- out -----------------------------------------------------------------------------------------------------------


def preview_message(preview: Preview) -> ledger_service_pb2.AdmitPreview:
    """How a claim would fare."""
    if preview.refusal is not None:
        return ledger_service_pb2.AdmitPreview(
            outcome=lease_pb2.OUTCOME_NEVER, failure=failure_of(preview.refusal).to_message()
        )
    if preview.charge is not None:
        return ledger_service_pb2.AdmitPreview(
            outcome=lease_pb2.OUTCOME_AFTER_EVICTION if preview.evict else lease_pb2.OUTCOME_NOW,
            charge=charge_message(preview.charge),
            would_evict_lease_ids=preview.evict,
        )
    return ledger_service_pb2.AdmitPreview(
        outcome=lease_pb2.OUTCOME_MUST_WAIT, reasons=[reason_message(reason) for reason in preview.reasons]
    )


def observation_message(one: Observation) -> lease_pb2.Observation:
    """A measured peak."""
    return lease_pb2.Observation(
        observation_id=str(one.number),
        model_digest=one.model_digest,
        engine_build=one.engine_build,
        shape=one.shape,
        planned_bytes=one.planned_bytes,
        granted_bytes=one.granted_bytes,
        claimed_bytes=one.claimed_bytes,
        peak_bytes=one.peak_bytes,
        load_time=times.duration(one.load_s),
        observe_time=times.timestamp(one.observed_wall),
        node_id=one.node_id,
        lease_id=one.lease_id,
    )
