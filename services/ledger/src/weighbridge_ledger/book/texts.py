"""What the book tells people about memory: why a claim is refused, why it waits. Pure: values in, sentences out.

Each sentence says what is asked, what there is, and what helps. Sizes are in GiB; no byte counts, no names of settings,
no ids of cards (those stand in the figures beside the sentence).
"""

from dataclasses import replace

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book.charging import Usage, price
from weighbridge_ledger.book.states import HOST, Ceilings, Charge, Claim, External, Shortage

SMALLER = "A smaller context or quantisation would help."

SPILLING_IS_OFF = (
    "A part of it could be in host memory instead, which is slower and not allowed here: wait, or allow spilling."
)
"""The advice where memory exists and only the rule of the card is in the way. A smaller model is no part of it."""


def exceeds_text(claim: Claim, shortage: Shortage, ceilings: Ceilings) -> str:
    """Why a claim can never be granted on this machine, even with nothing else loaded (rule 2).

    Args:
        claim: what was asked, with its cards decided.
        shortage: what it misses on the empty machine.
        ceilings: the machine's, with the person's limit.
    """
    if shortage.cause == "LIMIT" and ceilings.limit_bytes is not None:
        # Nothing else was missing, and a limit makes more spill, not less: without it the claim fits.
        return (
            f"It needs {format_gib(claim.total_bytes)}, and the limit that was set allows models "
            f"{format_gib(ceilings.limit_bytes)} in all, even with nothing else loaded. A higher limit, or a smaller "
            "context or quantisation, would help."
        )
    ceilings = replace(ceilings, limit_bytes=None)  # it is not what is in the way
    if claim.devices:
        needs = f"{format_gib(sum(want.required_bytes for want in claim.devices))} of graphics memory"
        if claim.host_bytes > 0:
            needs += f" and {format_gib(claim.host_bytes)} of host memory"
        where = "on that card" if len(claim.devices) == 1 else "on those cards"
        cards = sum(_card(want.device_id, ceilings) for want in claim.devices)
        has = f"{format_gib(cards)} of graphics memory {where} and {_host_of(ceilings)} of host memory"
    elif ceilings.devices:
        needs = f"{format_gib(claim.host_bytes)} of host memory"
        has = f"{_host_of(ceilings)} of it"
    else:
        needs, has = format_gib(claim.host_bytes), _host_of(ceilings)
        if ceilings.ram_bytes > 0:
            part = _percent(ceilings.pool_bytes(HOST), ceilings.ram_bytes)
            has += f" ({part} % of its {format_gib(ceilings.ram_bytes)})"
    return f"It needs {needs}. This machine gives models {has}, even with nothing else loaded. {SMALLER}"


def waits_text(claim: Claim, shortage: Shortage, ceilings: Ceilings, external: External, usage: Usage) -> str:
    """What a claim waits for: what others hold of what there is, and what would let it in sooner.

    Args:
        claim: what was asked, with its cards decided.
        shortage: what it misses just now.
        ceilings: the machine's, with the person's limit.
        external: what programs outside hold now.
        usage: what is charged now.
    """
    missing = format_gib(shortage.missing_bytes)
    where = _where(shortage.pool, ceilings)
    match shortage.cause:
        case "EXTERNAL":
            return (
                f"Programs outside the ledger hold {missing} {where} that it needs. It waits until they give that back."
            )
        case "LIMIT" if ceilings.limit_bytes is None:
            # More is charged than the cards that are left can hold: one of them is gone.
            return (
                f"{missing} must be given back first: other models hold {format_gib(usage.total_bytes)} of the "
                f"{format_gib(ceilings.total_bytes)} that this machine has left for models in all."
            )
        case "LIMIT":
            return (
                f"{missing} must be given back first: other models hold {format_gib(usage.total_bytes)} of the "
                f"{format_gib(ceilings.total_bytes)} that the limit allows in all. A higher limit would help, too."
            )
        case "EXCLUSIVE":
            return "Its device is in use and one of those who want it must be alone there. It waits for its turn."
        case "SPILLED_DEVICE":
            text = "A model that is too large for the card is on it, and nothing may join it there."
        case _:
            held, ceiling = usage.on(shortage.pool), ceilings.pool_bytes(shortage.pool)
            text = (
                f"{missing} {where} must be given back first: other models hold {format_gib(held)} of "
                f"{format_gib(ceiling)} there."
            )
    return f"{text} {SPILLING_IS_OFF}" if _fits_with_spilling(claim, ceilings, external, usage) else text


def _fits_with_spilling(claim: Claim, ceilings: Ceilings, external: External, usage: Usage) -> bool:
    """Whether only the rule that nobody joins others on a card to spill keeps the claim waiting."""
    if ceilings.spill_allowed or not claim.devices:
        return False
    return isinstance(price(claim, replace(ceilings, spill_allowed=True), external, usage), Charge)


def _where(pool: str, ceilings: Ceilings) -> str:
    if pool != HOST:
        return "on its card"
    return "of host memory" if ceilings.devices else "of memory"


def _card(device: str, ceilings: Ceilings) -> int:
    """The ceiling of one card; of the largest, where any card will do."""
    return ceilings.pool_bytes(device) if device else max(map(ceilings.pool_bytes, ceilings.devices), default=0)


def _host_of(ceilings: Ceilings) -> str:
    return format_gib(ceilings.pool_bytes(HOST))


def _percent(part: int, whole: int) -> int:
    """Rounded half up: 10 of 16 are 63."""
    return (200 * part + whole) // (2 * whole)
