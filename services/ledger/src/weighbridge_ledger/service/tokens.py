"""Ids and secrets of leases: 128 random bits each, as hex. A secret is the authority over its lease; ids are for all
to see."""

import os

TOKEN_BYTES = 16
FETCHED_BYTES = 4096


class Tokens:
    """Random bits of the system, fetched for 256 tokens at a time: each fetch lets go of the interpreter, and on a busy
    ledger the thread of the store takes it, twice in the way of every grant (25 µs of an admission, November 2026)."""

    def __init__(self) -> None:
        self._fetched = b""
        self._used = 0

    def __call__(self) -> str:
        """The next one, never given before."""
        if self._used >= len(self._fetched):
            self._fetched = os.urandom(FETCHED_BYTES)
            self._used = 0
        start = self._used
        self._used = start + TOKEN_BYTES
        return self._fetched[start : self._used].hex()
