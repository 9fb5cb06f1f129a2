"""What a claim waits for, in words (rule 15), and who was asked for it."""

import enum

from weighbridge_common.immutable import immutable
from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import passing
from weighbridge_ledger.book.core import BookCore
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.states import Shortage
from weighbridge_ledger.book.texts import waits_text

HOLDERS_NAMED = 8
"""At most so many holders are named to a waiter: enough to act on, bounded for a machine full of small leases."""


class WaitCode(enum.StrEnum):
    """Why a claim waits."""

    BYTES_HELD = "BYTES_HELD"
    EXTERNAL_USE = "EXTERNAL_USE"
    EARLIER_CLAIM = "EARLIER_CLAIM"
    HOLDER_DID_NOT_VACATE = "HOLDER_DID_NOT_VACATE"
    EXCLUSIVE_USE = "EXCLUSIVE_USE"
    DEVICE_UNHEALTHY = "DEVICE_UNHEALTHY"
    GPU_PANIC = "GPU_PANIC"
    LOADS_ONE_AT_A_TIME = "LOADS_ONE_AT_A_TIME"


@immutable
class WaitReason:
    """One thing a claim waits for."""

    code: WaitCode
    message: str
    lease_ids: tuple[str, ...] = ()
    missing_bytes: int = 0


class WaitVerbs(BookCore):
    """What can be told to those who wait."""

    def waiting_for(self, lease_id: str) -> tuple[int, float, tuple[WaitReason, ...]] | None:
        """(position from 1, moment on the monotonic clock since when, reasons) of a queued claim; None if it is not."""
        waiter = self._waiter(lease_id)
        if waiter is None:
            return None
        return self._queue.position(waiter.key), waiter.since, self._reasons(waiter)

    def asked_for(self, lease_id: str) -> tuple[tuple[str, ...], float] | None:
        """(the leases that were asked to vacate for a waiting claim and still hold their bytes, their deadline on the
        monotonic clock); None if there are none."""
        waiter = self._waiter(lease_id)
        asked = () if waiter is None else tuple(one for one in waiter.asked if one in self._entries)
        return (asked, waiter.asked_until) if waiter is not None and asked else None

    def _reasons(self, waiter: Waiter) -> tuple[WaitReason, ...]:
        """What a claim waits for just now."""
        hold = self._held(waiter.lease.claim, waiter.claim)
        held: tuple[WaitReason, ...] = () if hold is None else (WaitReason(WaitCode(hold.code), hold.message),)
        if waiter.replaces and (replaced := self._entries.get(waiter.replaces)) is not None:
            usage = self._usage.copy()
            usage.remove(replaced.lease.charge)
        else:
            replaced, usage = None, self._usage
        priced = passing.price_of(waiter, waiter.claim, self._ceilings, self._external, usage)
        late = self._late_for(waiter, priced if isinstance(priced, Shortage) else None)
        if late:
            size = sum(self._entries[one].lease.charge.total_bytes for one in late)
            text = (
                f"{len(late)} holder{'s' if len(late) != 1 else ''} of {format_gib(size)} did not vacate in time. An "
                "operator can end what hangs."
            )
            held += (WaitReason(WaitCode.HOLDER_DID_NOT_VACATE, text, late[:HOLDERS_NAMED], size),)
        if isinstance(priced, Shortage):
            return (*held, self._shortage_reason(waiter, priced))
        if replaced is not None:
            text = "Waits for the lease that it replaces to end."
            return (*held, WaitReason(WaitCode.BYTES_HELD, text, (waiter.replaces,)))
        ahead = self._queue.position(waiter.key) - 1
        if held or not ahead:
            return held
        text = f"Waits for {ahead} earlier claim{'s' if ahead != 1 else ''}."
        return (WaitReason(WaitCode.EARLIER_CLAIM, text),)

    def _late_for(self, waiter: Waiter, shortage: Shortage | None) -> tuple[str, ...]:
        """Holders in its way that are overdue: those who were asked for it, and where bytes are missing those who were
        asked for another, or gave their lease back and whose engine hangs."""
        if shortage is None:
            return tuple(one for one in self._overdue if one in waiter.asked)
        in_its_way = self._overdue if shortage.cause == "LIMIT" else self._by_pool.get(shortage.pool, {})
        return tuple(one for one in self._overdue if one in waiter.asked or one in in_its_way)

    def _shortage_reason(self, waiter: Waiter, shortage: Shortage) -> WaitReason:
        text = waits_text(waiter.claim, shortage, self._ceilings, self._external, self._usage)
        if shortage.cause == "EXTERNAL":
            return WaitReason(WaitCode.EXTERNAL_USE, text, (), shortage.missing_bytes)
        holders = tuple(self._by_pool.get(shortage.pool, {}))[:HOLDERS_NAMED] if shortage.cause != "LIMIT" else ()
        code = WaitCode.EXCLUSIVE_USE if shortage.cause == "EXCLUSIVE" else WaitCode.BYTES_HELD
        return WaitReason(code, text, holders, shortage.missing_bytes)
