"""Bytes, as people read them."""

KIB = 2**10
MIB = 2**20
GIB = 2**30


def format_gib(size_bytes: float) -> str:
    """``1610612736`` → ``"1.50 GiB"``; an amount too small for two decimals says so instead of reading as nothing."""
    gib = size_bytes / GIB
    if 0 < gib < 0.01:
        return "less than 0.01 GiB"
    return f"{gib:.2f} GiB"
