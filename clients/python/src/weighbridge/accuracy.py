"""How well launches were planned: measured peaks beside what was planned, claimed and granted for them."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from google.protobuf import timestamp_pb2
from weighbridge_proto.ledger.v1 import lease_pb2


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The launches of one model by one engine's build in one shape. Sizes are bytes, 0: not known."""

    model_digest: str
    engine_build: str
    shape: str
    count: int
    planned_bytes: int
    """What the latest of them that had a plan was planned as; so for what was claimed and granted."""
    claimed_bytes: int
    granted_bytes: int
    median_peak_bytes: int
    p95_peak_bytes: int
    """Nearest rank, as fit counts it."""
    max_peak_bytes: int
    latest: timestamp_pb2.Timestamp

    @property
    def error(self) -> float | None:
        """How far the plan was from the median peak, as a part of that: 0.25 for a quarter too much, below 0 for too
        little. None: there was no plan."""
        if not self.planned_bytes:
            return None
        return (self.planned_bytes - self.median_peak_bytes) / self.median_peak_bytes

    def as_json(self, names: Mapping[str, str]) -> dict[str, Any]:
        """For programs: byte counts as strings, as in all JSON of the command."""
        return {
            "model_digest": self.model_digest,
            "model_name": names.get(self.model_digest, ""),
            "engine_build": self.engine_build,
            "shape": self.shape,
            "count": self.count,
            "planned_bytes": str(self.planned_bytes),
            "claimed_bytes": str(self.claimed_bytes),
            "granted_bytes": str(self.granted_bytes),
            "median_peak_bytes": str(self.median_peak_bytes),
            "p95_peak_bytes": str(self.p95_peak_bytes),
            "max_peak_bytes": str(self.max_peak_bytes),
            "planned_error_percent": None if self.error is None else round(100 * self.error, 2),
            "latest_time": self.latest.ToJsonString(),
        }


def summarise(observations: Iterable[lease_pb2.Observation]) -> list[Accuracy]:
    """One summary for each model, build and shape; the worst planned first, those without a plan last.

    Args:
        observations: latest first, as the ledger lists them.
    """
    launches: dict[tuple[str, str, str], list[lease_pb2.Observation]] = {}
    for one in observations:
        if one.peak_bytes > 0:
            launches.setdefault((one.model_digest, one.engine_build, one.shape), []).append(one)
    return sorted(map(_summary, launches.values()), key=_badness)


def names_of(leases: Iterable[lease_pb2.Lease]) -> dict[str, str]:
    """What models are called, by digest, as far as leases say; the latest lease says it."""
    return {
        lease.purpose.model_digest: lease.purpose.model_name
        for lease in leases
        if lease.purpose.model_digest and lease.purpose.model_name
    }


def _summary(latest_first: list[lease_pb2.Observation]) -> Accuracy:
    latest = latest_first[0]
    peaks = sorted(one.peak_bytes for one in latest_first)
    return Accuracy(
        latest.model_digest,
        latest.engine_build,
        latest.shape,
        len(peaks),
        next((one.planned_bytes for one in latest_first if one.planned_bytes), 0),
        next((one.claimed_bytes for one in latest_first if one.claimed_bytes), 0),
        next((one.granted_bytes for one in latest_first if one.granted_bytes), 0),
        round(statistics.median(peaks)),
        peaks[ceil(0.95 * len(peaks)) - 1],
        peaks[-1],
        latest.observe_time,
    )


def _badness(one: Accuracy) -> tuple[bool, float, str, str, str]:
    return one.error is None, -abs(one.error or 0.0), one.model_digest, one.engine_build, one.shape
