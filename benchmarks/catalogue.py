"""The whole catalogue priced in one call, as a multiple of the smallest call of the same service."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from weighbridge.client import Suite
from weighbridge.local import local_services
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from benchmarks.measure import Comparison

ROUNDS = 40
WARMUP = 5
GIB = 1 << 30


async def _measure(scratch: Path) -> tuple[list[float], list[float], list[float], int]:
    """Milliseconds of ListFits, of one GetModel and of one PlanModel, taken in turn; and how many models there are."""
    environ = {**os.environ, "WEIGHBRIDGE_FIT_CATALOG_FOLDER": str(scratch)}
    whole: list[float] = []
    single: list[float] = []
    planned: list[float] = []
    machine = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_UNIFIED, ram_bytes=64 * GIB)
    async with local_services(environ) as services, Suite(services=services) as suite:
        count = len((await suite.list_fits(machine=machine)).fits)
        some = (await suite.list_fits(machine=machine)).fits[0].catalog_id
        for number in range(WARMUP + ROUNDS):
            start = time.perf_counter()
            await suite.fit.ListFits(fit_service_pb2.ListFitsRequest(machine=machine, page_size=1000))
            listed = time.perf_counter()
            await suite.fit.GetModel(fit_service_pb2.GetModelRequest(catalog_id=some))
            got = time.perf_counter()
            request = fit_service_pb2.PlanModelRequest(machine=machine)
            request.model.catalog_id = some
            await suite.fit.PlanModel(request)
            end = time.perf_counter()
            if number >= WARMUP:
                whole.append((listed - start) * 1e3)
                single.append((got - listed) * 1e3)
                planned.append((end - got) * 1e3)
    return whole, single, planned, count


def run() -> Iterator[Comparison]:
    """ListFits against one unary rpc that computes nothing, and against one plan."""
    with tempfile.TemporaryDirectory(prefix="wb-bench-") as name:
        whole, single, planned, count = asyncio.run(_measure(Path(name)))
    yield Comparison(
        f"ListFits of the whole catalogue ({count} models)", "ms", whole, "one GetModel of the same service", single,
        "", None,
    )  # fmt: skip
    yield Comparison(
        f"ListFits of the whole catalogue ({count} models)", "ms", whole, "one PlanModel of the same service", planned,
        f"less than {count}: cheaper than asking for each", lambda ratio: ratio < count,
    )  # fmt: skip
