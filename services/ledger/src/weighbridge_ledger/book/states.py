"""The words of the book: claims, charges, ceilings, leases. Frozen; sizes are bytes, times are `Moment`s."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from weighbridge_common.processes import ProcessIdentity

HOST = "host"
"""The pool of host memory (all memory, on a unified machine). Device pools are named by their device id."""


class Moment(NamedTuple):
    """One reading of both clocks: terms and deadlines run on the monotonic one, wall time is for people."""

    monotonic: float
    """Seconds of the monotonic clock."""
    wall: float
    """Seconds since the epoch."""


class LeaseState(enum.StrEnum):
    """Where a lease stands. The order QUEUED, GRANTED, ACTIVE, VACATING, RELEASED is never walked backwards."""

    QUEUED = "QUEUED"
    GRANTED = "GRANTED"
    ACTIVE = "ACTIVE"
    VACATING = "VACATING"
    RELEASED = "RELEASED"

    @property
    def charged(self) -> bool:
        """Whether a lease in this state holds its grant. VACATING does: its bytes may still be in use (rule 1)."""
        return self in _CHARGED


_CHARGED = frozenset({LeaseState.GRANTED, LeaseState.ACTIVE, LeaseState.VACATING})


@dataclass(frozen=True, slots=True)
class Home:
    """The kernel this ledger runs on: only its processes can be proven dead from here."""

    boot_id: str
    pid_namespace: str

    def sees(self, process: ProcessIdentity) -> bool:
        """Whether the death of this process can be known here (same boot, same pid namespace)."""
        return process.boot_id == self.boot_id and process.pid_namespace == self.pid_namespace


NOBODY = ProcessIdentity(0, 0, "", "")
"""The holder of a lease that ended too long ago for more than its id to be remembered."""


@dataclass(frozen=True, slots=True)
class DeviceWant:
    """Bytes wanted on one card."""

    device_id: str
    required_bytes: int
    optional_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """The bytes that a launch asks for. All places are granted together or none (rule 4)."""

    host_bytes: int
    devices: tuple[DeviceWant, ...] = ()
    optional_host_bytes: int = 0
    source: str = ""
    """How the amount was come by, as the claimant names it; carried, not interpreted."""

    @property
    def total_bytes(self) -> int:
        """Everything that is required, wherever it lives."""
        return self.host_bytes + sum(want.required_bytes for want in self.devices)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a lease is charged: a claim with places decided. Fixed at the grant, changed only by a resize."""

    host_bytes: int = 0
    """On the host, spilled bytes included."""
    devices: tuple[tuple[str, int], ...] = ()
    """(device id, bytes) on each card."""
    spilled: tuple[tuple[str, int], ...] = ()
    """(device id, bytes) that were wanted on that card and are charged to the host instead."""

    @property
    def total_bytes(self) -> int:
        """Everything charged, wherever it lives."""
        return self.host_bytes + sum(size for _, size in self.devices)

    @property
    def spilled_bytes(self) -> int:
        """The part of host_bytes that did not fit on its card."""
        return sum(size for _, size in self.spilled)

    def on(self, pool: str) -> int:
        """Bytes charged to one pool."""
        return self.host_bytes if pool == HOST else sum(size for device, size in self.devices if device == pool)

    @property
    def pools(self) -> frozenset[str]:
        """The pools in which at least one byte is charged."""
        touched = {device for device, size in self.devices if size > 0}
        return frozenset(touched | {HOST}) if self.host_bytes > 0 else frozenset(touched)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What one machine allows: the host share R, the usable part C_d of each card, the person's limit L over all."""

    host_bytes: int
    devices: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    limit_bytes: int | None = None
    spill_allowed: bool = False
    """Whether a claim may spill from a card that others are charged on. A lone one always may (rule 2)."""

    def pool_bytes(self, pool: str) -> int:
        """The ceiling of one pool, the person's limit included."""
        own = self.host_bytes if pool == HOST else self.devices.get(pool, 0)
        return own if self.limit_bytes is None else min(own, self.limit_bytes)

    @property
    def total_bytes(self) -> int:
        """Everything together: the pools added up, or the person's limit where that is lower."""
        pools = self.host_bytes + sum(self.devices.values())
        return pools if self.limit_bytes is None else min(pools, self.limit_bytes)


@dataclass(frozen=True, slots=True)
class External:
    """What programs outside the ledger were measured to hold (rule 3). Unmeasurable counts 0 and is said elsewhere."""

    host_bytes: int = 0
    devices: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def on(self, pool: str) -> int:
        """Bytes held from outside in one pool."""
        return self.host_bytes if pool == HOST else self.devices.get(pool, 0)


NO_EXTERNAL = External()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a claim does not fit just now, by its first missing pool."""

    pool: str
    """HOST or a device id."""
    missing_bytes: int
    cause: str
    """One of COMMITTED (leases hold it), EXTERNAL (programs outside do), LIMIT (the person's), SPILLED_DEVICE."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Memory a holder reports, now and at its peak since activation."""

    host_bytes: int = 0
    host_peak_bytes: int = 0
    devices: tuple[tuple[str, int], ...] = ()
    device_peaks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a lease is for. Carried for people, metrics and observations; the book does not interpret it."""

    engine_kind: str = ""
    model_name: str = ""
    model_digest: str = ""
    engine_build: str = ""
    shape: str = ""
    planned_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of Admit, as the book sees it."""

    request_id: str
    """The caller's name for the claim; empty: it cannot be retried."""
    holder: ProcessIdentity
    claim: Claim
    holder_name: str = ""
    memory_limit_bytes: int = 0
    """The holder's own limit on host memory; 0: none."""
    purpose: Purpose = Purpose()
    priority: int = 0
    pinned: bool = False
    term_s: float | None = None
    """Silence allowed, clamped to the policy's bounds; None: the policy's."""
    max_wait_s: float | None = None
    """None: the policy's; never longer than that."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The ledger's record of one claim, as it is committed. What may be lost in a crash stands in `entries.Entry`."""

    lease_id: str
    request_id: str
    fence: int
    """Store-wide counter, survives restarts; larger is later. 0 while queued."""
    sequence: int
    """Place in the order of asking (rule 15)."""
    state: LeaseState
    claim: Claim
    holder: ProcessIdentity
    charge: Charge = Charge()
    engines: tuple[ProcessIdentity, ...] = ()
    foreign: bool = False
    """The holder lives in another pid namespace or host: it fences itself when silent (rule 12)."""
    suspect: bool = False
    """Silent past its term: a mark beside the state, neither freed nor renewable (rule 10)."""
    secret_digest: bytes = b""
    """SHA-256 of the secret. The secret itself is never written (see `BookCore._renew_secret`)."""
    previous_digest: bytes = b""
    """The secret before that one: accepted by AttachLease alone, when the answer with the new one got lost, also by a
    ledger that was killed before it could give it."""
    term_s: float = 15.0
    holder_name: str = ""
    memory_limit_bytes: int = 0
    purpose: Purpose = Purpose()
    priority: int = 0
    pinned: bool = False
    requested_wall: float = 0.0
    granted_wall: float = 0.0
    activated_wall: float = 0.0

    @property
    def processes(self) -> tuple[ProcessIdentity, ...]:
        """Everyone whose death is needed as proof that the bytes are free (rule 12)."""
        return (self.holder, *self.engines)
