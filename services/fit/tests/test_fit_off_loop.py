"""Pricing beside the event loop: health checks and other callers are served meanwhile, and nobody's plan ends."""

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import weighbridge_catalog
from fit_fakes import FakeLedger, cpu, named
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sd_data import GIB, facts_of
from weighbridge_fit.asking import ModelDesk
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.model import Model
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.off_loop import Threads, is_abandoned, stop_if_abandoned
from weighbridge_fit.plans.sd import architecture, parts, weights
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_fit.plans.sd.remembered import MOST_KEYS, Remembered
from weighbridge_fit.reading import HeaderReader
from weighbridge_fit.servicer import FitServicer
from weighbridge_proto.channel import open_channel
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

CPU = Capacity(Pool.CPU, Ceiling(64 * GIB, 64 * GIB), Ceiling(64 * GIB, 64 * GIB))


class Held:
    """Work that stands still on its thread until it is let go."""

    def __init__(self) -> None:
        self._begun, self._go_on = threading.Event(), threading.Event()

    def here(self) -> None:
        self._begun.set()
        assert self._go_on.wait(30)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 30)

    def go_on(self) -> None:
        self._go_on.set()


async def is_serving(tmp_path: Path) -> bool:
    async with open_channel(f"unix:{tmp_path}/fit.sock") as channel:
        asked = health_pb2.HealthCheckRequest(service="weighbridge.fit.v1.FitService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def list_fits(fit: Any) -> Any:
    return fit.ListFits(pb.ListFitsRequest(catalog_ids=["sd-1.5"], machine=cpu(64 * GIB)))


def plan_model(fit: Any) -> Any:
    return fit.PlanModel(pb.PlanModelRequest(model=named("sd-1.5"), machine=cpu(64 * GIB)))


def solve_size(fit: Any) -> Any:
    return fit.SolveSize(pb.SolveSizeRequest(model=named("sd-1.5"), machine=cpu(64 * GIB)))


@pytest.mark.parametrize("rpc", [list_fits, plan_model, solve_size])
async def test_health_checks_are_answered_while_a_model_is_priced(
    fit: Any, ledger: FakeLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rpc: Callable[[Any], Any]
) -> None:
    held, real = Held(), SdFamily.plan

    def slow(self: SdFamily, *rest: Any) -> Any:
        held.here()
        return real(self, *rest)

    monkeypatch.setattr(SdFamily, "plan", slow)
    pricing = asyncio.ensure_future(rpc(fit))
    await held.begun()
    assert await is_serving(tmp_path)
    held.go_on()
    await pricing


async def test_a_plan_that_nobody_waits_for_ends_between_two_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice plans a dozen times: the caller leaves during the second, and there is no third."""
    root = ModelsRoot(tmp_path)
    reader = HeaderReader(root, 1)
    shelf = Shelf(Catalogue(weighbridge_catalog.MODELS, None), reader, root, tmp_path)
    ledger: Any = SmallMachine()
    servicer = FitServicer(ModelDesk(reader, shelf), shelf, ledger)
    real, loop, planned = SdFamily.plan, asyncio.get_running_loop(), 0

    def counted(self: SdFamily, *rest: Any) -> Any:
        nonlocal planned
        planned += 1
        if planned == 2:
            loop.call_soon_threadsafe(call.cancel)
            for _ in range(3000):
                if is_abandoned():
                    break
                threading.Event().wait(0.01)
            assert is_abandoned()
        return real(self, *rest)

    monkeypatch.setattr(SdFamily, "plan", counted)
    context: Any = None
    call = asyncio.create_task(servicer.PlanModel(pb.PlanModelRequest(model=named("sd-1.5")), context))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert planned == 2


class SmallMachine:
    """A ledger client that knows one machine, on which nothing of the catalogue runs."""

    async def capacity(self, machine: machine_pb2.Machine | None) -> machine_pb2.Capacity:
        ceiling = machine_pb2.Ceiling(automatic_bytes=GIB, effective_bytes=GIB)
        return machine_pb2.Capacity(pool=machine_pb2.POOL_KIND_CPU, host=ceiling, total=ceiling)


async def test_work_is_done_a_bounded_number_at_once_and_answers_or_raises() -> None:
    threads, running, most = Threads(2), 0, 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1
        stop_if_abandoned()
        return 10 // number

    assert await asyncio.gather(*(threads.run(partial(work, number)) for number in range(1, 9))) == [
        *(10, 5, 3, 2, 2, 1, 1, 1)
    ]
    assert most == 2
    with pytest.raises(ZeroDivisionError):
        await threads.run(partial(work, 0))
    assert not is_abandoned()


def test_outside_of_threads_nothing_is_abandoned() -> None:
    stop_if_abandoned()


# What is remembered of large facts.


def test_facts_of_a_request_leave_nothing_behind() -> None:
    model = Model(replace(facts_of("sd15", "F16"), name="given in a request"))
    kept = [parts._OF_MODEL, weights._HELD, architecture._BY_TENSORS]
    gc.collect()  # what other tests left behind must not go meanwhile
    before = [len(one) for one in kept]
    SdFamily().plan(model, SdRequest(), CPU)
    assert len(parts._OF_MODEL) == before[0] + 1
    del model
    gc.collect()
    assert [len(one) for one in kept] == before


class Owner:
    """Something that can be referred to weakly."""


def test_a_value_is_made_once_for_each_object_and_key() -> None:
    remembered: Remembered[int] = Remembered()
    one, other, made = Owner(), Owner(), []

    def make(value: int) -> int:
        made.append(value)
        return value

    for _ in range(3):
        assert remembered.get(one, "key", partial(make, 1)) == 1
        assert remembered.get(one, "other key", partial(make, 2)) == 2
        assert remembered.get(other, "key", partial(make, 3)) == 3
    assert made == [1, 2, 3]
    assert len(remembered) == 2


def test_ever_new_keys_do_not_fill_the_memory() -> None:
    remembered: Remembered[int] = Remembered()
    owner = Owner()
    for number in range(10 * MOST_KEYS):
        assert remembered.get(owner, number, lambda: 0) == 0
    assert len(remembered._kept[id(owner)][1]) <= MOST_KEYS
