"""The rules of renders without an engine: turns in a queue, how long one has yet to go, what a lease must cover."""

import asyncio
import contextlib
import random

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weighbridge_engines.host.footprint import grown
from weighbridge_engines.host.metrics import HostMetrics, mark_image_span
from weighbridge_engines.host.pace import DECODE_STEPS, RenderPace
from weighbridge_engines.host.requests import RequestQueue
from weighbridge_engines.sd_server.jobs import RenderJob, RenderProgress
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import process_pb2, requirement_pb2

# -- turns --


class Visitor:
    """One request in a queue."""

    def __init__(self, queue, *number):
        self.places = []
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(queue, *number))

    async def _run(self, queue, *number):
        async with queue.slot(self.places.append, *number):
            self.inside.set()
            await self.leave.wait()

    async def cancel(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_turns_come_in_order_and_each_change_of_place_is_told():
    queue = RequestQueue(slots=1, limit=9)
    first, second, third = (Visitor(queue) for _ in range(3))
    await settle()
    assert [visitor.inside.is_set() for visitor in (first, second, third)] == [True, False, False]
    first.leave.set()
    await settle()
    assert [visitor.inside.is_set() for visitor in (first, second, third)] == [True, True, False]
    assert (first.places, second.places, third.places) == ([], [1], [2, 1])
    await second.cancel()
    await settle()
    assert third.inside.is_set()


async def test_a_turn_that_comes_to_one_who_leaves_at_that_moment_goes_to_the_next():
    queue = RequestQueue(slots=1, limit=9)
    first, second, third = (Visitor(queue) for _ in range(3))
    await settle()
    first.leave.set()
    await asyncio.sleep(0)  # its turn is given, and not yet taken
    second.task.cancel()
    await settle()
    assert not second.inside.is_set()
    assert third.inside.is_set()


async def test_who_came_before_an_engine_was_started_again_keeps_the_place_before_those_who_came_later():
    queue = RequestQueue(slots=1, limit=9)
    Visitor(queue, 0)
    await settle()
    third, first, unnumbered, second = Visitor(queue, 3), Visitor(queue, 1), Visitor(queue), Visitor(queue, 2)
    await settle()
    assert (first.places, second.places) == ([1], [2])
    assert third.places == [1, 2, 3]
    assert unnumbered.places == [3, 4]


async def test_a_full_queue_refuses_unless_somebody_leaves():
    queue = RequestQueue(slots=1, limit=1)
    inside, waiting = Visitor(queue), Visitor(queue)
    await settle()
    with pytest.raises(RequestError, match="1 requests wait"):
        async with queue.slot():
            pass
    await waiting.cancel()
    assert queue.waiting == 0
    later = Visitor(queue)
    await settle()
    inside.leave.set()
    await settle()
    assert later.inside.is_set()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slots", [1, 3])
async def test_however_requests_come_leave_and_are_cancelled_no_turn_is_lost_or_given_twice(seed, slots):
    chance, queue, visitors = random.Random(seed), RequestQueue(slots, 100), []
    for _ in range(200):
        living = [visitor for visitor in visitors if not visitor.task.done()]
        match chance.randrange(4):
            case 0:
                visitors.append(Visitor(queue))
            case 1 if living:
                chance.choice(living).task.cancel()
            case 2 if living:
                chance.choice(living).leave.set()
            case 3:
                await asyncio.sleep(0)
        assert sum(visitor.inside.is_set() and not visitor.task.done() for visitor in visitors) <= slots
    for visitor in visitors:
        visitor.leave.set()
    await asyncio.wait([visitor.task for visitor in visitors])
    last = [Visitor(queue) for _ in range(slots + 1)]
    await settle()
    assert sum(visitor.inside.is_set() for visitor in last) == slots


# -- pace --


def pace_of(images, *heard):
    pace = RenderPace(images)
    for phase, done, total, now_s in heard:
        pace.heard(RenderProgress(phase, done, total), now_s)
    return pace


def test_nothing_is_known_before_the_first_step():
    assert RenderPace(1).seconds_left(0.0) is None
    assert pace_of(1, ("text_encode", 1, 1, 5.0), ("sampling", 0, 4, 5.0)).seconds_left(9.0) is None


def test_the_steps_that_were_taken_tell_how_long_the_others_take():
    sampling = pace_of(1, ("sampling", 0, 10, 100.0), ("sampling", 2, 10, 104.0))  # 2 s each
    assert sampling.seconds_left(104.0) == 8 * 2 + DECODE_STEPS * 2
    assert sampling.seconds_left(105.0) == 8 * 2 - 1 + DECODE_STEPS * 2
    assert sampling.seconds_left(1000.0) == DECODE_STEPS * 2


def test_each_image_of_a_batch_is_decoded():
    sampled = pace_of(3, ("sampling", 0, 12, 0.0), ("sampling", 12, 12, 12.0))  # 1 s each
    assert sampled.seconds_left(12.0) == 3 * DECODE_STEPS
    assert sampled.seconds_left(14.0) == 3 * DECODE_STEPS - 2


def test_a_decode_tells_its_own_pace():
    decoding = pace_of(
        1, ("sampling", 0, 4, 0.0), ("sampling", 4, 4, 4.0), ("decode", 0, 9, 5.0), ("decode", 3, 9, 11.0)
    )
    assert decoding.seconds_left(11.0) == 6 * 2
    assert decoding.seconds_left(30.0) == 0


# -- what a lease must cover --


def lease(claim, charge):
    return lease_pb2.Lease(claim=claim, charge=charge)


def claim(host=0, card=0, optional=0, device_id="", **fields):
    devices = [requirement_pb2.DeviceClaim(device_id=device_id, required_bytes=card)] if card else []
    return requirement_pb2.Claim(host_bytes=host, optional_host_bytes=optional, devices=devices, **fields)


def charge(host=0, card=0, optional=0, spilled=0):
    devices = [process_pb2.DeviceBytes(device_id="card-7", bytes=card)] if card else []
    return requirement_pb2.Charge(host_bytes=host, devices=devices, optional_bytes=optional, spilled_bytes=spilled)


def test_what_a_lease_covers_changes_nothing():
    held = lease(claim(host=100, optional=20), charge(host=120, optional=20))
    assert grown(held, claim(host=100)) is None
    assert grown(held, claim(host=120)) is None  # optional bytes that were granted count
    assert grown(held, claim(host=5)) is None


def test_what_it_does_not_cover_is_asked_for_and_nothing_given_back():
    held = lease(claim(host=100, optional=20, cpu_only=True), charge(host=120, optional=20))
    assert grown(held, claim(host=121, source=requirement_pb2.FIGURE_SOURCE_DERIVED)) == claim(
        host=121, optional=20, cpu_only=True, source=requirement_pb2.FIGURE_SOURCE_DERIVED
    )


def test_on_a_card_it_grows_on_the_card_that_it_is_on():
    held = lease(claim(host=50, card=100), charge(host=50, card=100))
    assert grown(held, claim(host=40, card=100)) is None
    assert grown(held, claim(host=40, card=130)) == claim(host=50, card=130, device_id="card-7")
    assert grown(held, claim(host=60, card=90)) == claim(host=60, card=100, device_id="card-7")


def test_what_spilled_from_a_card_counts_for_the_card():
    held = lease(claim(host=50, card=100), charge(host=80, card=70, spilled=30))
    assert grown(held, claim(host=50, card=100)) is None
    assert grown(held, claim(host=51, card=100)) == claim(host=51, card=100, device_id="card-7")


# -- what is told --


def test_a_renders_span_and_metrics_tell_how_much_and_not_what(monkeypatch):
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    job = RenderJob("secret prompt", "secret wish", 512, 768, 2, 20, None, 7, source_png=b"secret picture")
    with provider.get_tracer("test").start_as_current_span("image"):
        mark_image_span("sd", "demo", "lease-1", job)
    host = HostMetrics("sd")
    host.rendered("demo", 12.5, None)
    host.rendered("", 0.1, "INVALID_IMAGE")
    [span] = exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.model"] == "demo"
    shape = {
        name.removeprefix("weighbridge.image."): told for name, told in span.attributes.items() if ".image." in name
    }
    assert shape == {"width": 512, "height": 768, "batch": 2, "steps": 20}
    data = reader.get_metrics_data()
    points = {metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    good, bad = sorted(points["weighbridge.engine.render.duration"], key=lambda point: -point.sum)
    assert (good.sum, good.attributes["gen_ai.request.model"]) == (pytest.approx(12.5), "demo")
    assert bad.attributes["error.type"] == "INVALID_IMAGE"
    assert "gen_ai.request.model" not in bad.attributes
    assert "secret" not in data.to_json() + span.to_json()
