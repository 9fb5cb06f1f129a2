"""Findings: what readings could not say, and which of them were rejected."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A reading that was rejected or is not supported: a stable UPPER_SNAKE reason and a sentence for people."""

    reason: str
    message: str


def messages(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The findings' sentences, each once, in order."""
    return tuple(dict.fromkeys(finding.message for finding in findings))
