"""What the ledger counts of waiting and of making room."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from weighbridge_ledger.service import metrics

from services.ledger.tests.holders import RESIDENCY_S, loaded, next_of

GIB = 2**30


@pytest.fixture
async def counted(new_ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator:
    """A ledger of 24 GiB, and what it has measured so far by name."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    monkeypatch.setattr(metrics, "meter", lambda: meter)

    def points() -> dict[str, list[Any]]:
        data = reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}

    async with new_ledger(tmp_path).serve() as ledger:
        yield ledger, points


async def test_making_room_is_counted_with_the_age_of_who_goes_and_what_was_missing(counted) -> None:
    ledger, points = counted
    holder = await loaded(ledger, 20, 1)
    call = ledger.admit(10, 2)
    await call.read()
    await ledger.pass_time(RESIDENCY_S)
    await next_of(call, "reclaiming")
    await holder.release()
    await next_of(call, "granted")
    found = points()
    (reclaims,) = found["weighbridge.reclaims"]
    assert reclaims.value == 1
    # It was never used: its age counts from when it had loaded, at 0 s.
    (ages,) = found["weighbridge.eviction.age"]
    assert (ages.count, ages.sum) == (1, RESIDENCY_S)
    # 20 + 10 of 24 GiB.
    (deficits,) = found["weighbridge.admission.deficit"]
    assert (deficits.count, deficits.sum) == (1, 6 * GIB)
    (waits,) = found["weighbridge.admission.wait"]
    assert (waits.count, waits.sum) == (2, RESIDENCY_S)
    call.cancel()


async def test_a_claim_that_is_granted_at_once_missed_nothing(counted) -> None:
    ledger, points = counted
    await ledger.granted(10)
    found = points()
    assert "weighbridge.admission.deficit" not in found
    assert "weighbridge.reclaims" not in found
