"""Leases and claims in sentences for people: named after their model and holder, whatever those call themselves."""

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import Ask, Lease

MAX_NAME = 48
"""Letters of one name in a sentence. Names may be ten times as long, and a sentence may name several."""

SHORT_ID = 8
"""Digits of a lease's id where it has no other name."""


def name_of(lease: Lease) -> str:
    """`tiny of engine-mlx`, or as much of that as is known."""
    names = [_shown(name) for name in (lease.purpose.model_name, lease.holder_name) if name]
    return " of ".join(names) if names else f"lease {lease.lease_id[:SHORT_ID]}"


def claim_name(ask: Ask) -> str:
    """`The claim of tiny for 8.00 GiB`, or as much of that as is known."""
    model = ask.purpose.model_name
    return f"The claim{f' of {_shown(model)}' if model else ''} for {format_gib(ask.claim.total_bytes)}"


def _shown(name: str) -> str:
    """Short and printable: it stands on terminals and in logs."""
    cut = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
