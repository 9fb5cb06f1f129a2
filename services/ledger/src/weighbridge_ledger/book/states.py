"""The words of the book: claims, charges, ceilings, leases. Frozen; sizes are bytes, times are `Moment`s."""

import enum
from collections.abc import Mapping
from dataclasses import field, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from weighbridge_common.immutable import immutable
from weighbridge_common.processes import ProcessIdentity

HOST = "host"
"""The pool of host memory (all memory, on a unified machine). Device pools are named by their device id."""

GPU = "gpu"
"""The GPU of a unified machine, as a device that a lease may be alone on. No pool: its memory is the host's."""


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


@immutable
class Home:
    """The kernel this ledger runs on: only its processes can be proven dead from here."""

    boot_id: str
    pid_namespace: str

    def sees(self, process: ProcessIdentity) -> bool:
        """Whether the death of this process can be known here (same boot, same pid namespace)."""
        return process.boot_id == self.boot_id and process.pid_namespace == self.pid_namespace


NOBODY = ProcessIdentity(0, 0, "", "")
"""The holder of a lease that ended too long ago for more than its id to be remembered."""


@immutable
class DeviceWant:
    """Bytes wanted on one card."""

    device_id: str
    required_bytes: int
    optional_bytes: int = 0


@immutable
class Claim:
    """The bytes that a launch asks for. All places are granted together or none (rule 4)."""

    host_bytes: int
    devices: tuple[DeviceWant, ...] = ()
    optional_host_bytes: int = 0
    source: str = ""
    """How the amount was come by, as the claimant names it; carried, not interpreted."""
    cpu_only: bool = False
    """It runs on the processor alone: not on the GPU of a unified machine."""

    @property
    def total_bytes(self) -> int:
        """Everything that is required, wherever it lives."""
        return self.host_bytes + sum(want.required_bytes for want in self.devices)

    @property
    def optional_bytes(self) -> int:
        """Everything that is useful on top."""
        return self.optional_host_bytes + sum(want.optional_bytes for want in self.devices)

    @property
    def floating(self) -> bool:
        """Whether it takes whichever card fits (rule 17)."""
        return any(not want.device_id for want in self.devices)


@immutable
class Charge:
    """What a lease is charged: a claim with places decided. Fixed at the grant, changed only by a resize."""

    host_bytes: int = 0
    """On the host, spilled bytes included."""
    devices: tuple[tuple[str, int], ...] = ()
    """(device id, bytes) on each card."""
    spilled: tuple[tuple[str, int], ...] = ()
    """(device id, bytes) that were wanted on that card and are charged to the host instead."""
    optional_host_bytes: int = 0
    """The part of host_bytes that was optional."""
    optional_devices: tuple[tuple[str, int], ...] = ()
    """(device id, bytes): the part of each card's bytes that was optional."""
    on_gpu: bool = False
    """It is on the GPU of a unified machine (rule 26)."""
    exclusive: bool = False
    """Nobody else may be on its devices (rule 26)."""

    @property
    def occupies(self) -> tuple[str, ...]:
        """The devices that the lease is on: its cards, or the GPU of a unified machine."""
        cards = tuple(device for device, _ in self.devices)
        return (*cards, GPU) if self.on_gpu else cards

    @property
    def optional_bytes(self) -> int:
        """Everything that was granted on top of what is required."""
        return self.optional_host_bytes + sum(size for _, size in self.optional_devices)

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


@immutable
class Ceilings:
    """What one machine allows: the host share R, the usable part C_d of each card, the person's limit L over all."""

    host_bytes: int
    devices: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    limit_bytes: int | None = None
    spill_allowed: bool = False
    """Whether a claim may spill from a card that others are charged on. A lone one always may (rule 2)."""
    has_shared_gpu: bool = False
    """Unified memory: claims of host memory are on the GPU unless they run on the processor alone (rule 26)."""
    exclusive_heeded: bool = True
    """Whether claims for exclusive use count (rule 26). Where engines coexist they do not."""
    one_start_at_a_time: bool = False
    """Whether a load waits for the one before: two that are mapped for Metal at once can panic macOS."""
    ram_bytes: int = 0
    """The memory that host_bytes is a part of, for people; 0: not known."""

    def pool_bytes(self, pool: str) -> int:
        """The ceiling of one pool, the person's limit included."""
        own = self.host_bytes if pool == HOST else self.devices.get(pool, 0)
        return own if self.limit_bytes is None else min(own, self.limit_bytes)

    @property
    def total_bytes(self) -> int:
        """Everything together: the pools added up, or the person's limit where that is lower."""
        pools = self.host_bytes + sum(self.devices.values())
        return pools if self.limit_bytes is None else min(pools, self.limit_bytes)


@immutable
class Hold:
    """Why nothing may be loaded on a device for a while: its health, or a panic that was not long ago."""

    code: str
    """DEVICE_UNHEALTHY or GPU_PANIC."""
    message: str
    """A sentence for people."""
    refuses_use: bool = False
    """Whether what is loaded there may not be used either."""
    retry_after_s: float = 5.0
    """When the answer can be another one."""
    lasts: bool = True
    """Whether it may last: who waits for that keeps memory from nobody meanwhile. The next start's turn does not."""


@immutable
class External:
    """What programs outside the ledger were measured to hold (rule 3). Unmeasurable counts 0 and is said elsewhere."""

    host_bytes: int = 0
    devices: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def on(self, pool: str) -> int:
        """Bytes held from outside in one pool."""
        return self.host_bytes if pool == HOST else self.devices.get(pool, 0)


NO_EXTERNAL = External()


@immutable
class Shortage:
    """Why a claim does not fit just now, by its first missing pool."""

    pool: str
    """HOST or a device id."""
    missing_bytes: int
    cause: str
    """One of COMMITTED (leases hold it), EXTERNAL (programs outside do), LIMIT (the person's), SPILLED_DEVICE,
    EXCLUSIVE (no bytes: somebody is there, or somebody there is alone), HOLDER (the holder's own limit)."""


@immutable
class Observed:
    """Memory a holder reports, now and at its peak since activation."""

    host_bytes: int = 0
    host_peak_bytes: int = 0
    devices: tuple[tuple[str, int], ...] = ()
    device_peaks: tuple[tuple[str, int], ...] = ()


@immutable
class Purpose:
    """What a lease is for. Carried for people, metrics and observations; the book does not interpret it."""

    engine_kind: str = ""
    model_name: str = ""
    model_digest: str = ""
    engine_build: str = ""
    shape: str = ""
    planned_peak_bytes: int = 0


@immutable
class Credential:
    """A lease and the authority over it."""

    lease_id: str
    secret: str


@immutable
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
    """Background 1, normal 2, interactive 3, as in the contract."""
    pinned: bool = False
    exclusive: bool = False
    """Nobody else may be on its devices (rule 26)."""
    replaces: "Credential | None" = None
    """The caller's own lease that this one takes the place of (rule 24)."""
    while_holding: "tuple[Credential, ...]" = ()
    """The caller's own leases that it keeps busy meanwhile (rule 25)."""
    term_s: float | None = None
    """Silence allowed, clamped to the policy's bounds; None: the policy's."""
    max_wait_s: float | None = None
    """None: the policy's; never longer than that."""


@immutable
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
    exclusive: bool = False
    requested_wall: float = 0.0
    granted_wall: float = 0.0
    activated_wall: float = 0.0
    loaded_wall: float = 0.0
    """When its engine had finished loading, as its holder said; 0: it has not."""
    load_s: float = 0.0
    """How long that took, from its activation on."""

    @property
    def processes(self) -> tuple[ProcessIdentity, ...]:
        """Everyone whose death is needed as proof that the bytes are free (rule 12)."""
        return (self.holder, *self.engines)


_PLACES = {one.name: place for place, one in enumerate(fields(Lease))}
_values_of = attrgetter(*_PLACES)


def changed(lease: Lease, **changes: Any) -> Lease:
    """What `dataclasses.replace` makes, in half the time: a lease has many fields, and each of its steps is in the way
    of somebody who waits for it."""
    values = list(_values_of(lease))
    for name, value in changes.items():
        values[_PLACES[name]] = value
    return Lease(*values)
