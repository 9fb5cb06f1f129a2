"""Device health through the whole ledger: recorded machines that get hot and cool down, with a clock that only the test
moves."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from weighbridge_ledger.health.policy import HealthPolicy, Mode
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import LiveMemory, Source
from weighbridge_ledger.machine.probe import MachineProbe
from weighbridge_ledger.machine.readings import DeviceReading, DrmReading
from weighbridge_ledger.machine.recorded import from_json
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
Code = grpc.StatusCode
RECORDED = Path(__file__).parent / "machine_readings"
START_WALL = 1_000_000.0
L40S, RTX_4090, RX_7900 = "GPU-0a0b0c0d", "GPU-5d1c7a90-2222-4444-8888-0123456789ab", "GPU-9e8d7c6b5a493827"
GUARD = HealthPolicy(mode=Mode.GUARD)


class Replayed:
    """A recorded machine under a ledger. What its probe reads is what stands in `readings` then."""

    def __init__(self, ledger, name: str, *, panicked_ago_s: float | None = None) -> None:
        self.ledger = ledger
        self.readings = from_json((RECORDED / f"{name}.json").read_text())
        if panicked_ago_s is not None:
            reports = (
                replace(report, modified_at=START_WALL - panicked_ago_s) for report in self.readings.crash_reports
            )
            self.readings = replace(self.readings, crash_reports=tuple(reports))

    def plug_in(self) -> "Replayed":
        """Let the ledger start on it."""
        self.ledger.probe = MachineProbe(
            interpret(self.readings, node_id="node", source=Source.DETECTED),
            lambda: self.readings,
            clock=lambda: self.ledger.time,
            wall_clock=lambda: START_WALL + self.ledger.time,
        )
        return self

    def warm(self, celsius: float, device: str = "") -> "Replayed":
        """Give the devices with this in their name another temperature; they do not slow themselves down."""
        self.readings = replace(
            self.readings,
            devices=tuple(_warm(one, celsius) if device in one.name else one for one in self.readings.devices),
            drm=tuple(_warm_drm(one, celsius) if device in one.product else one for one in self.readings.drm),
        )
        return self

    def fill(self, gib: int) -> None:
        """Other programs hold so much of its memory."""
        assert self.readings.meminfo is not None
        total = re.search(r"MemTotal: *(\d+) kB", self.readings.meminfo)
        assert total is not None
        available = f"MemAvailable: {int(total[1]) - gib * 2**20} kB"
        self.readings = replace(self.readings, meminfo=re.sub("MemAvailable:.*", available, self.readings.meminfo))

    def without_sensors(self) -> None:
        """Its sensors fall silent."""
        self.readings = replace(
            self.readings,
            devices=tuple(replace(one, temperatures=(), slowdown_reasons=None) for one in self.readings.devices),
        )

    async def sample(self, celsius: float, after_s: float = 5.0) -> None:
        """A measurement, so much later."""
        self.warm(celsius)
        await self.look(after_s)

    async def look(self, after_s: float) -> None:
        await self.ledger.pass_time(after_s)
        await self.ledger.stub.GetCapacity(pb.GetCapacityRequest())


def _warm(device: DeviceReading, celsius: float) -> DeviceReading:
    cores = tuple(replace(one, celsius=celsius) for one in device.temperatures)
    return replace(device, temperatures=cores, slowdown_reasons=0)


def _warm_drm(card: DrmReading, celsius: float) -> DrmReading:
    files = {name: f"{celsius * 1000:.0f}\n" if name.endswith("_input") else text for name, text in card.files.items()}
    return replace(card, files=files)


@pytest.fixture
def guarded(new_ledger, tmp_path):
    """A ledger that guards devices."""
    ledger = new_ledger(tmp_path)
    ledger.health = GUARD
    return ledger


def claim(ledger, pid: int, device_id: str | None, gib: int = 8, **more) -> pb.AdmitRequest:
    """A claim on a card, any card ("") or the host (None)."""
    request = ledger.request(0 if device_id is not None else gib, pid, **more)
    request.term.FromSeconds(600)
    if device_id is not None:
        request.claim.devices.add(device_id=device_id, required_bytes=gib * GIB)
    return request


class HangsAfterStart:
    """A probe that answers when the ledger starts, and never again."""

    def __init__(self, probe: MachineProbe) -> None:
        self.machine, self.findings = probe.machine, probe.findings
        self._answer = probe.live
        self._answered = False

    async def live(self) -> LiveMemory:
        if self._answered:
            await asyncio.Event().wait()
        self._answered = True
        return await self._answer()


async def last_failure(ledger, call) -> RpcFailure:
    """How a call ends, whatever is told before."""

    async def end() -> None:
        while True:
            await call.read()

    return await ledger.failure(end())


async def granted(call) -> pb.AdmitGranted:
    """The grant of a call, whatever is told before."""
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF
        if response.HasField("granted"):
            return response.granted


async def waits_for(call) -> lease_pb2.WaitReason:
    """The first reason of a call that waits."""
    response = await call.read()
    assert response.HasField("queued"), response
    return response.queued.reasons[0]


async def active(ledger, pid: int, device_id: str | None) -> dict[str, str]:
    """The credential of an activated lease."""
    call = ledger.stub.Admit(claim(ledger, pid, device_id))
    grant = await granted(call)
    credential = {"lease_id": grant.lease.lease_id, "secret": grant.secret}
    await ledger.stub.ActivateLease(pb.ActivateLeaseRequest(**credential, process=ledger.process(pid)))
    return credential


async def state(ledger, pid: int) -> str:
    (lease,) = (lease for lease in await ledger.leases() if lease.holder.process.pid == pid)
    return lease_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_")


# -- guard -------------------------------------------------------------------------------------------------------------


async def test_a_claim_on_a_hot_card_waits_until_three_samples_are_well(guarded) -> None:
    machine = Replayed(guarded, "nvidia-l40s-hot").plug_in()
    async with guarded.serve() as ledger:
        # 86 °C, slow-down at 91, and the driver slows it down: measured before anybody could ask.
        call = ledger.stub.Admit(claim(ledger, 1, L40S))
        reason = await waits_for(call)
        assert reason.code == "DEVICE_UNHEALTHY"
        assert "NVIDIA L40S" in reason.message
        assert "86 °C" in reason.message
        for celsius in (78, 75, 75):  # cool enough to start on, not to resume; then well, twice
            await machine.sample(celsius)
            assert await state(ledger, 1) == "QUEUED"
        await machine.sample(75, after_s=4)  # looked at by somebody in between: no sample of its own
        assert await state(ledger, 1) == "QUEUED"
        await machine.sample(75, after_s=1)
        assert (await granted(call)).lease.charge.devices[0].device_id == L40S


async def test_a_claim_on_another_card_or_the_host_does_not_wait(guarded) -> None:
    Replayed(guarded, "two-vendors").warm(91, "4090").plug_in()
    async with guarded.serve() as ledger:
        held, other, any_card, host = (
            ledger.stub.Admit(claim(ledger, pid, device)) for pid, device in enumerate([RTX_4090, RX_7900, "", None], 1)
        )
        assert (await waits_for(held)).code == "DEVICE_UNHEALTHY"
        for call in (other, any_card):
            assert (await granted(call)).lease.charge.devices[0].device_id == RX_7900
        await granted(host)


async def test_warm_integrated_graphics_beside_a_card_hold_nobody(guarded) -> None:
    Replayed(guarded, "two-vendors").warm(95, "AMD Radeon Graphics").plug_in()
    async with guarded.serve() as ledger:
        for pid, device in enumerate([RTX_4090, RX_7900, None], 1):
            await granted(ledger.stub.Admit(claim(ledger, pid, device)))


async def test_on_a_unified_machine_only_who_uses_the_gpu_waits(guarded) -> None:
    Replayed(guarded, "strix-halo-raised").warm(91).plug_in()
    async with guarded.serve() as ledger:
        assert (await waits_for(ledger.stub.Admit(claim(ledger, 1, None)))).code == "DEVICE_UNHEALTHY"
        on_the_processor = claim(ledger, 2, None)
        on_the_processor.claim.cpu_only = True
        await granted(ledger.stub.Admit(on_the_processor))


async def test_what_is_loaded_on_a_hot_card_is_not_used_until_it_is_well(guarded) -> None:
    machine = Replayed(guarded, "nvidia-l40s-hot").warm(60).plug_in()
    async with guarded.serve() as ledger:
        credential = await active(ledger, 1, L40S)
        running = (await ledger.stub.BeginUse(pb.BeginUseRequest(**credential))).use_id
        await machine.sample(90)
        failure = await ledger.failure(ledger.stub.BeginUse(pb.BeginUseRequest(**credential)))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "DEVICE_UNHEALTHY")
        assert failure.retry_after_s == 5.0
        assert "90 °C" in failure.message
        # What runs goes on and ends as usual.
        ended = await ledger.stub.EndUse(pb.EndUseRequest(**credential, use_id=running))
        assert ended.uses == 0
        for _ in range(3):
            await machine.sample(70)
        await ledger.stub.BeginUse(pb.BeginUseRequest(**credential))


async def test_sensors_that_fall_silent_hold_nobody(guarded) -> None:
    machine = Replayed(guarded, "nvidia-l40s-hot").plug_in()
    async with guarded.serve() as ledger:
        call = ledger.stub.Admit(claim(ledger, 1, L40S))
        await waits_for(call)
        machine.without_sensors()
        await machine.look(after_s=15)
        assert await state(ledger, 1) == "QUEUED"
        await machine.look(after_s=1)
        await granted(call)


async def test_memory_that_comes_free_is_not_given_out_on_a_gpu_that_has_just_become_hot(guarded) -> None:
    machine = Replayed(guarded, "strix-halo-raised").plug_in()
    machine.fill(60)
    async with guarded.serve() as ledger:
        call = ledger.stub.Admit(claim(ledger, 1, None, gib=100))
        assert (await waits_for(call)).code == "EXTERNAL_USE"
        machine.fill(10)
        await machine.sample(90)
        assert await state(ledger, 1) == "QUEUED"


async def test_a_gpu_that_is_well_again_is_not_given_out_beyond_what_was_measured_with_it(guarded) -> None:
    machine = Replayed(guarded, "strix-halo-raised").warm(90).plug_in()
    machine.fill(10)
    async with guarded.serve() as ledger:
        call = ledger.stub.Admit(claim(ledger, 1, None, gib=100))
        assert (await waits_for(call)).code == "DEVICE_UNHEALTHY"
        for _ in range(2):
            await machine.sample(70)
        machine.fill(60)
        await machine.sample(70)
        assert await state(ledger, 1) == "QUEUED"
        machine.fill(10)
        await machine.sample(70)
        await granted(call)


async def test_a_hold_ends_by_time_alone_while_the_probe_hangs(guarded) -> None:
    # Nothing is measured any more, so no measurement can end it.
    Replayed(guarded, "nvidia-l40s-hot").plug_in()
    guarded.probe = HangsAfterStart(guarded.probe)
    async with guarded.serve() as ledger:
        call = ledger.stub.Admit(claim(ledger, 1, L40S))
        await waits_for(call)
        await ledger.pass_time(16)
        await granted(call)


async def test_who_waited_for_a_device_in_vain_is_told_so(guarded) -> None:
    machine = Replayed(guarded, "nvidia-l40s-hot").plug_in()
    async with guarded.serve() as ledger:
        request = claim(ledger, 1, L40S, purpose={"model_name": "Flux Dev"})
        request.max_wait.FromSeconds(30)
        call = ledger.stub.Admit(request)
        await waits_for(call)
        for _ in range(3):
            await machine.look(after_s=10)
        failure = await last_failure(ledger, call)
        assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, "ADMISSION_TIMED_OUT")
        for said in ("Flux Dev", "waited 30 s", "NVIDIA L40S", "86 °C"):
            assert said in failure.message


# -- the other modes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "celsius", "waits"),
    [
        (Mode.OFF, 106, False),
        (Mode.OBSERVE, 90, False),
        (Mode.OBSERVE, 106, True),
        (Mode.GUARD, 90, True),
        (Mode.GUARD, 80, False),
    ],
)
async def test_what_a_mode_makes_of_a_warm_card(guarded, mode: Mode, celsius: float, waits: bool) -> None:
    guarded.health = HealthPolicy(mode=mode)
    Replayed(guarded, "nvidia-l40s-hot").warm(celsius).plug_in()
    async with guarded.serve() as ledger:
        response = await ledger.stub.Admit(claim(ledger, 1, L40S)).read()
        assert response.WhichOneof("event") == ("queued" if waits else "granted")


# -- panics ------------------------------------------------------------------------------------------------------------

PANICKED = "mac-m3-ultra-96-panicked"


def load(ledger, pid: int, **more) -> grpc.aio.UnaryStreamCall:
    """A claim that fits beside what else runs on that Mac."""
    return ledger.stub.Admit(claim(ledger, pid, None, gib=2, **more))


@pytest.mark.parametrize("mode", list(Mode))
async def test_after_a_panic_loads_rest_in_every_mode(guarded, mode: Mode) -> None:
    guarded.health = HealthPolicy(mode=mode)
    Replayed(guarded, PANICKED, panicked_ago_s=720).plug_in()
    async with guarded.serve() as ledger:
        reason = await waits_for(load(ledger, 1))
        assert reason.code == "GPU_PANIC"
        assert "12 min ago; loads start again in 48 min" in reason.message


async def test_the_rest_survives_a_restart_and_ends_with_its_hour(guarded) -> None:
    Replayed(guarded, PANICKED, panicked_ago_s=3_500).plug_in()
    async with guarded.serve() as ledger:
        assert (await waits_for(load(ledger, 1))).code == "GPU_PANIC"
    guarded.time += 40
    async with guarded.serve() as ledger:
        call = load(ledger, 1)
        assert (await waits_for(call)).code == "GPU_PANIC"
        await ledger.pass_time(59)
        assert await state(ledger, 1) == "QUEUED"
        await ledger.pass_time(1)
        await granted(call)


async def test_after_a_panic_what_runs_goes_on_and_the_processor_may_load(guarded) -> None:
    machine = Replayed(guarded, PANICKED, panicked_ago_s=0)
    panicked, machine.readings = machine.readings, replace(machine.readings, crash_reports=())
    machine.plug_in()
    async with guarded.serve() as ledger:
        grant = await granted(load(ledger, 1))
        credential = {"lease_id": grant.lease.lease_id, "secret": grant.secret}
        await ledger.stub.ActivateLease(pb.ActivateLeaseRequest(**credential, process=ledger.process(1)))
        machine.readings = panicked
        await machine.look(after_s=5)
        await ledger.stub.BeginUse(pb.BeginUseRequest(**credential))
        assert (await waits_for(load(ledger, 2))).code == "GPU_PANIC"
        on_the_processor = claim(ledger, 3, None, gib=1)
        on_the_processor.claim.cpu_only = True
        await granted(ledger.stub.Admit(on_the_processor))


async def test_the_rest_can_be_switched_off(guarded) -> None:
    guarded.health = HealthPolicy(panic_rest_s=0)
    Replayed(guarded, PANICKED, panicked_ago_s=60).plug_in()
    async with guarded.serve() as ledger:
        await granted(load(ledger, 1))
