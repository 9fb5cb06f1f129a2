"""How an Admit stream ends without a lease: what it waited for last, and what to do about it (rules 6, 15, 25)."""

from dataclasses import dataclass, replace

from weighbridge_common.sizes import format_gib
from weighbridge_proto.errors import RequestError

from weighbridge_ledger.book import Ask, Reason, Refused, ReleaseCause
from weighbridge_ledger.book.events import REFUSAL_OF
from weighbridge_ledger.book.waiting import WaitCode, WaitReason
from weighbridge_ledger.service import failures
from weighbridge_ledger.service.keeper import Keeper
from weighbridge_ledger.service.naming import claim_name, name_of

HOLDERS_IN_A_SENTENCE = 3
"""So many are named; the metadata has all that the book named."""

UNKEPT_RETRY_S = 1.0
"""When to ask again after a grant that could not be written: about when the store is tried again."""


@dataclass(frozen=True, slots=True)
class Waited:
    """What a claim waited for when it was last looked at, and since when on the monotonic clock."""

    since: float
    reasons: tuple[WaitReason, ...]


def end_of(cause: ReleaseCause, ask: Ask, waited: Waited | None, keeper: Keeper) -> RequestError:
    """What a call is told whose lease ended for `cause` before it was activated.

    Args:
        cause: why.
        ask: what was asked.
        waited: what it waited for last; None: it never waited.
        keeper: whose book knows the holders that are named.
    """
    if cause is ReleaseCause.WAITED_TOO_LONG:
        return failures.error_of(_timed_out(ask, waited, keeper))
    if cause is ReleaseCause.WOULD_WAIT_FOR_USE:
        return failures.error_of(_would_wait_for_use(ask, waited, keeper))
    if cause is ReleaseCause.EXCEEDS_CAPACITY:
        return failures.error_of(_exceeds(ask, keeper))
    if cause is ReleaseCause.NOT_STORED:
        text = "The ledger cannot write its decisions to disk (is it full?). Nothing was granted."
        return failures.error_of(Refused(Reason.STORE_UNAVAILABLE, text, retry_after_s=UNKEPT_RETRY_S))
    if cause is ReleaseCause.NOT_ACTIVATED:
        text = "The grant was not activated in time, so its bytes were freed. Ask again."
    else:
        text = "The lease ended before it was activated. Ask again."
    return failures.error_of(Refused(REFUSAL_OF.get(cause, Reason.GRANT_NOT_ACTIVATED), text))


def _timed_out(ask: Ask, waited: Waited | None, keeper: Keeper) -> Refused:
    seconds = 0.0 if waited is None else max(0.0, keeper.clock().monotonic - waited.since)
    text = f"{claim_name(ask)} waited {seconds:.0f} s, as long as was allowed."
    figures = _figures(ask, waited) | {"waited_s": f"{seconds:.0f}"}
    return Refused(Reason.ADMISSION_TIMED_OUT, _with_reasons(text, waited, keeper), metadata=figures)


def _would_wait_for_use(ask: Ask, waited: Waited | None, keeper: Keeper) -> Refused:
    text = (
        f"{claim_name(ask)} is made while its caller keeps another lease in use, and "
        "would now wait for one that is in use, too. End that use or release that lease first, then ask again."
    )
    return Refused(Reason.WAIT_WHILE_HOLDING, _with_reasons(text, waited, keeper), metadata=_figures(ask, waited))


def _exceeds(ask: Ask, keeper: Keeper) -> Refused:
    """The figures are those of the claim as if it were made now; which leases it names does not matter to them."""
    text = "While the claim waited, the limit was set below it: it can no longer be granted."
    alone = replace(ask, request_id="", replaces=None, while_holding=())
    refusal = keeper.run(lambda book, now: book.preview(alone, now)).refusal
    if refusal is None:  # set back meanwhile
        return Refused(Reason.CLAIM_EXCEEDS_CAPACITY, text)
    return Refused(refusal.reason, f"{text} {refusal.message}", metadata=refusal.metadata, missing=refusal.missing)


def _with_reasons(text: str, waited: Waited | None, keeper: Keeper) -> str:
    if waited is None or not waited.reasons:
        return text
    return f"{text} What it waited for last: {' '.join(_sentence(reason, keeper) for reason in waited.reasons)}"


def _sentence(reason: WaitReason, keeper: Keeper) -> str:
    named = []
    for lease_id in reason.lease_ids[:HOLDERS_IN_A_SENTENCE]:
        view = keeper.book.view(lease_id)
        if view is not None:
            held = f" ({format_gib(view.lease.charge.total_bytes)})" if view.lease.state.charged else ""
            named.append(f"{name_of(view.lease)}{held}")
    more = len(reason.lease_ids) - HOLDERS_IN_A_SENTENCE
    if more > 0:
        named.append(f"{more} more")
    if not named:
        return reason.message
    how = "There:" if reason.code is WaitCode.EXCLUSIVE_USE else "Held by"
    return f"{reason.message} {how} {', '.join(named)}."


def _figures(ask: Ask, waited: Waited | None) -> dict[str, str]:
    figures = {"required_bytes": str(ask.claim.total_bytes)}
    if waited is not None and waited.reasons:
        figures["missing_bytes"] = str(max(reason.missing_bytes for reason in waited.reasons))
        figures["wait_codes"] = ",".join(reason.code.value for reason in waited.reasons)
        figures["lease_ids"] = ",".join(lease_id for reason in waited.reasons for lease_id in reason.lease_ids)
    return figures
