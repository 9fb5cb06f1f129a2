"""How the book says no: a stable reason, a sentence for people, figures beside it. Which gRPC code it becomes is the
service's business."""

import enum
from collections.abc import Mapping


class Reason(enum.StrEnum):
    """Stable names of causes, for programs."""

    CLAIM_EMPTY = "CLAIM_EMPTY"
    CLAIM_EXCEEDS_CAPACITY = "CLAIM_EXCEEDS_CAPACITY"
    DEVICE_UNKNOWN = "DEVICE_UNKNOWN"
    QUEUE_FULL = "QUEUE_FULL"
    ADMISSION_TIMED_OUT = "ADMISSION_TIMED_OUT"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    REQUEST_IN_USE = "REQUEST_IN_USE"
    REQUEST_ENDED = "REQUEST_ENDED"
    REQUEST_TAKEN_OVER = "REQUEST_TAKEN_OVER"
    GRANT_NOT_ACTIVATED = "GRANT_NOT_ACTIVATED"
    LEASE_NOT_FOUND = "LEASE_NOT_FOUND"
    LEASE_SECRET_MISMATCH = "LEASE_SECRET_MISMATCH"  # noqa: S105 - the name of a cause
    LEASE_STATE = "LEASE_STATE"
    LEASE_SUSPECT = "LEASE_SUSPECT"
    LEASE_VACATING = "LEASE_VACATING"
    CANNOT_GROW = "CANNOT_GROW"
    WAIT_WHILE_HOLDING = "WAIT_WHILE_HOLDING"
    DEVICE_UNHEALTHY = "DEVICE_UNHEALTHY"
    OUT_OF_GRANT = "OUT_OF_GRANT"
    PROCESS_ALIVE = "PROCESS_ALIVE"
    TOO_MANY_PROCESSES = "TOO_MANY_PROCESSES"
    TOO_MANY_USES = "TOO_MANY_USES"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A verb that changed nothing (beyond what time had already moved).

    Attributes:
        reason: stable name of the cause.
        message: what, where, what to do; sizes in GiB.
        metadata: figures behind the message, as decimal strings.
        missing: (pool, sentence) where bytes are missing.
        retry_after_s: when trying again makes sense, else None.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        missing: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.missing = missing
        self.retry_after_s = retry_after_s
