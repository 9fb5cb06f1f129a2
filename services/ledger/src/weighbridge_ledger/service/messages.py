"""Messages of the contract to values of the book, and back."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2, timestamp_pb2
from weighbridge_common.processes import ProcessIdentity
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2
from weighbridge_proto.memory.v1 import failure_pb2, process_pb2, requirement_pb2

from weighbridge_ledger.book.admission import Preview
from weighbridge_ledger.book.book import LeaseView
from weighbridge_ledger.book.events import REFUSAL_OF, ReleaseCause
from weighbridge_ledger.book.states import (
    NOBODY,
    Ask,
    Charge,
    Claim,
    Credential,
    DeviceWant,
    LeaseState,
    Moment,
    Observed,
    Purpose,
)
from weighbridge_ledger.book.waiting import WaitReason
from weighbridge_ledger.machine.model import LARGEST_RAM_BYTES
from weighbridge_ledger.service.clock import wall_of
from weighbridge_ledger.service.failures import code_of, failure_of
from weighbridge_ledger.store.interface import Observation

MAX_TEXT = 512
"""Longest id or name that is taken in. Names are kept, logged and sent to every watcher."""

MAX_DEVICES = 64
"""Cards in one claim: more than any machine has."""

MAX_HELD = 64
"""Leases that a caller may keep busy while it waits: as many as it may claim cards for."""

_STATES = {
    LeaseState.QUEUED: lease_pb2.LEASE_STATE_QUEUED,
    LeaseState.GRANTED: lease_pb2.LEASE_STATE_GRANTED,
    LeaseState.ACTIVE: lease_pb2.LEASE_STATE_ACTIVE,
    LeaseState.VACATING: lease_pb2.LEASE_STATE_VACATING,
    LeaseState.RELEASED: lease_pb2.LEASE_STATE_RELEASED,
}

_PRIORITIES = frozenset(lease_pb2.Priority.values())

_CAUSE_TEXTS: dict[str, str] = {
    ReleaseCause.HOLDER: "Its holder released it.",
    ReleaseCause.CANCELLED: "Its Admit call ended before it was activated.",
    ReleaseCause.NOT_ACTIVATED: "It was granted, and nobody activated it in time.",
    ReleaseCause.PROCESSES_DEAD: "All its processes have ended.",
    ReleaseCause.FENCED: "Its holder, in another container, was silent for so long that it has ended its engine.",
    ReleaseCause.WAITED_TOO_LONG: "It waited as long as its caller allowed.",
    ReleaseCause.EXCEEDS_CAPACITY: "While it waited, the limit fell below it.",
    ReleaseCause.WOULD_WAIT_FOR_USE: "Its caller keeps another lease in use, and it would have waited for one in use.",
    ReleaseCause.NOT_STORED: "The grant could not be written to disk.",
    ReleaseCause.OPERATOR: "An operator said that its processes are gone.",
}

if TYPE_CHECKING:
    from weighbridge_proto.ledger.v1.lease_pb2 import Lease as LeaseMessage


def timestamp(wall: float) -> timestamp_pb2.Timestamp:
    """Seconds since the epoch as a message."""
    seconds = int(wall)
    return timestamp_pb2.Timestamp(seconds=seconds, nanos=int((wall - seconds) * 1e9))


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a message."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


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
    _check_text("purpose.engine_kind", purpose.engine_kind)
    _check_text("purpose.model_name", purpose.model_name)
    _check_text("purpose.model_digest", purpose.model_digest)
    _check_text("purpose.engine_build", purpose.engine_build)
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


def claim_message(claim: Claim) -> requirement_pb2.Claim:
    """A claim as it was asked."""
    return requirement_pb2.Claim(
        host_bytes=claim.host_bytes,
        optional_host_bytes=claim.optional_host_bytes,
        devices=[
            requirement_pb2.DeviceClaim(
                device_id=want.device_id, required_bytes=want.required_bytes, optional_bytes=want.optional_bytes
            )
            for want in claim.devices
        ],
        source=requirement_pb2.FigureSource.ValueType(int(claim.source or "0")),
        cpu_only=claim.cpu_only,
    )


def charge_message(charge: Charge) -> requirement_pb2.Charge:
    """What is charged."""
    return requirement_pb2.Charge(
        host_bytes=charge.host_bytes,
        devices=[process_pb2.DeviceBytes(device_id=device, bytes=size) for device, size in charge.devices],
        optional_bytes=charge.optional_bytes,
        spilled_bytes=charge.spilled_bytes,
    )


def lease_message(
    view: LeaseView,
    now: Moment,
    node_id: str,
    wait_reasons: Iterable[WaitReason] = (),
    vacating: failure_pb2.Failure | None = None,
) -> "LeaseMessage":
    """A lease with what is known about it just now. Its secret is not among that.

    Args:
        view: what is known.
        now: this moment.
        node_id: the machine.
        wait_reasons: what it waits for, while it is queued.
        vacating: why it is to end, while it is vacating.
    """
    lease, purpose = view.lease, view.lease.purpose
    expires = view.deadline if lease.state.charged else None
    return lease_pb2.Lease(
        lease_id=lease.lease_id,
        state=_STATES[lease.state],
        suspect=lease.suspect,
        fence=lease.fence,
        holder=lease_pb2.Holder(
            name=lease.holder_name,
            process=None if lease.holder == NOBODY else lease.holder.to_message(),
            memory_limit_bytes=lease.memory_limit_bytes,
        ),
        purpose=lease_pb2.Purpose(
            engine_kind=purpose.engine_kind,
            model_name=purpose.model_name,
            model_digest=purpose.model_digest,
            engine_build=purpose.engine_build,
            shape=purpose.shape,
            planned_peak_bytes=purpose.planned_peak_bytes,
        ),
        claim=claim_message(lease.claim),
        charge=charge_message(lease.charge) if lease.state.charged else None,
        engine_processes=[process.to_message() for process in lease.engines],
        observed=None if view.observed is None else _observed_message(view.observed),
        priority=lease_pb2.Priority.ValueType(lease.priority),
        pinned=lease.pinned,
        uses=view.uses,
        queue_position=view.queue_position,
        create_time=_timestamp_of(lease.requested_wall),
        grant_time=_timestamp_of(lease.granted_wall),
        activate_time=_timestamp_of(lease.activated_wall),
        expire_time=None if expires is None else timestamp(wall_of(expires, now)),
        last_use_time=_timestamp_of(view.last_use_wall),
        release_time=_timestamp_of(view.released_wall),
        end_reason=_end_reason(view) if view.cause else vacating,
        connected=view.connected,
        node_id=node_id,
        exclusive=lease.charge.exclusive if lease.state.charged else lease.exclusive,
        request_id=lease.request_id,
        load_complete_time=_timestamp_of(lease.loaded_wall),
        processes_visible=not lease.foreign,
        replaces_lease_id=view.replaces,
        level=lease_pb2.Priority.ValueType(view.level or lease.priority),
        wait_reasons=[reason_message(reason) for reason in wait_reasons],
    )


def reason_message(reason: WaitReason) -> lease_pb2.WaitReason:
    """One thing a claim waits for."""
    return lease_pb2.WaitReason(
        code=reason.code.value,
        message=reason.message,
        lease_ids=reason.lease_ids,
        missing_bytes=reason.missing_bytes,
    )


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
        load_time=duration(one.load_s),
        observe_time=timestamp(one.observed_wall),
        node_id=one.node_id,
        lease_id=one.lease_id,
    )


def _timestamp_of(wall: float) -> timestamp_pb2.Timestamp | None:
    """0 is the book's way to say that it has not happened."""
    return timestamp(wall) if wall else None


def _end_reason(view: LeaseView) -> failure_pb2.Failure:
    """Why a lease ended. Code OK for an end that is none of failure's business: given back, or its processes ended."""
    reason = REFUSAL_OF.get(ReleaseCause(view.cause))
    return failure_pb2.Failure(
        code=0 if reason is None else code_of(reason).value[0],
        reason=reason.value if reason else view.cause,
        message=_CAUSE_TEXTS[view.cause],
    )


def _observed_message(observed: Observed) -> process_pb2.ObservedMemory:
    return process_pb2.ObservedMemory(
        host_bytes=observed.host_bytes,
        host_peak_bytes=observed.host_peak_bytes,
        devices=[process_pb2.DeviceBytes(device_id=device, bytes=size) for device, size in observed.devices],
        device_peaks=[process_pb2.DeviceBytes(device_id=device, bytes=size) for device, size in observed.device_peaks],
    )
