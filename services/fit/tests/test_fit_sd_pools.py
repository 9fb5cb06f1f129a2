"""Where sd-server keeps weights, by platform and kind of memory; what a card is charged for, what a launch claims."""

import pytest
from sd_data import GIB, MIB, facts, model_of
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.lines import Phase, Range
from weighbridge_fit.model import Model
from weighbridge_fit.observed import Observed, sharpen
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_fit.plans.sd.pools import media_pool
from weighbridge_fit.verdict import Verdict

SD = SdFamily()
CARD = (DeviceCeiling("0", Ceiling(24 * GIB, 24 * GIB)),)


def machine(pool: Pool, platform: str = "", devices: tuple[DeviceCeiling, ...] | None = None) -> Capacity:
    devices = (CARD if pool is Pool.DISCRETE else ()) if devices is None else devices
    host, total = Ceiling(64 * GIB, 64 * GIB), Ceiling(88 * GIB, 88 * GIB)
    return Capacity(pool, host, total if devices else host, devices, platform=platform)


@pytest.mark.parametrize(
    ("pool", "platform", "cuda", "expected"),
    [
        # Metal on Apple Silicon, the processor on Intel Macs, whatever the machine is said to be.
        (Pool.UNIFIED, "darwin/arm64", False, Pool.UNIFIED),
        (Pool.CPU, "darwin/arm64", False, Pool.UNIFIED),
        (Pool.UNIFIED, "darwin/x86_64", False, Pool.CPU),
        (Pool.DISCRETE, "darwin/x86_64", False, Pool.CPU),
        # Windows on Arm computes on the processor unless the build is CUDA's.
        (Pool.DISCRETE, "windows/arm64", False, Pool.CPU),
        (Pool.UNIFIED, "win32/arm64", False, Pool.CPU),
        (Pool.UNIFIED, "windows/arm64", True, Pool.UNIFIED),
        (Pool.DISCRETE, "windows/arm64", True, Pool.DISCRETE),
        # Elsewhere by the kind of the machine.
        (Pool.DISCRETE, "windows/x86_64", False, Pool.DISCRETE),
        (Pool.DISCRETE, "linux/x86_64", False, Pool.DISCRETE),
        (Pool.UNIFIED, "linux/aarch64", False, Pool.UNIFIED),
        (Pool.CPU, "linux/x86_64", False, Pool.CPU),
        (Pool.DISCRETE, "", False, Pool.DISCRETE),
        (Pool.UNIFIED, "", False, Pool.UNIFIED),
    ],
)
def test_the_pool_by_platform_and_machine(pool: Pool, platform: str, cuda: bool, expected: Pool) -> None:
    assert media_pool(machine(pool, platform), cuda) is expected


def test_a_machine_said_to_have_cards_and_without_any_computes_on_the_cpu() -> None:
    assert media_pool(machine(Pool.DISCRETE, devices=())) is Pool.CPU


@pytest.mark.parametrize("pool", [Pool.UNIFIED, Pool.CPU])
def test_one_memory_holds_everything(pool: Pool) -> None:
    needed = SD.plan(model_of("sd15"), SdRequest(), machine(pool)).requirement
    assert needed.device_peak == Range(0, 0, 0)
    assert needed.host == needed.total
    assert not any(line.on_device for line in needed.lines)


def test_matrix_scratch_is_the_cpus_alone() -> None:
    def components(pool: Pool) -> set[str]:
        return {line.component for line in SD.plan(model_of("sd15"), SdRequest(), machine(pool)).requirement.lines}

    assert "cpu_work" in components(Pool.CPU)
    assert "cpu_work" not in components(Pool.UNIFIED)
    assert "cpu_work" not in components(Pool.DISCRETE)
    assert "driver" in components(Pool.DISCRETE)


def test_a_card_is_charged_for_weights_at_least_the_largest_component() -> None:
    needed = SD.plan(model_of("flux1dev", "Q4_0"), SdRequest(width_px=512, height_px=512), machine(Pool.DISCRETE))
    weights = {
        line.component: line.bytes.expected
        for line in needed.requirement.lines
        if line.phase is Phase.RESIDENT and line.on_device
    }
    assert set(weights) == {"diffusion_model", "clip_l", "t5xxl", "vae"}
    assert needed.requirement.device.low == weights["diffusion_model"]
    assert needed.requirement.device.expected == sum(weights.values())
    assert needed.requirement.device_peak.expected > needed.requirement.device.expected


def test_components_on_the_cpu_take_their_buffers_with_them() -> None:
    asked = SdRequest(width_px=512, height_px=512, text_encoder_on_cpu=True, vae_on_cpu=True)
    needed = SD.plan(model_of("flux1dev", "Q4_0"), asked, machine(Pool.DISCRETE)).requirement
    places = {(line.component, line.phase): line.on_device for line in needed.lines}
    assert places["vae", Phase.RESIDENT] is places["t5xxl", Phase.RESIDENT] is False
    assert places["working_buffer", Phase.IMAGE_DECODE] is places["working_buffer", Phase.TEXT_ENCODE] is False
    assert places["diffusion_model", Phase.RESIDENT] is places["working_buffer", Phase.DENOISE] is True


@pytest.mark.parametrize(
    ("gib", "moved"),
    [(24, False), (12, True), (8, True)],
)
def test_weights_leave_a_card_that_does_not_hold_them_with_their_buffers(gib: int, moved: bool) -> None:
    """FLUX.1 Q4_0: 9.0 GiB of weights; 2.3 of buffer at 1024 x 1024 without flash attention, 0.4 of a tile."""
    devices = (DeviceCeiling("0", Ceiling(int(0.95 * gib * GIB), int(0.95 * gib * GIB))),)
    asked = SdRequest(width_px=1024, height_px=1024, vae_tiling=True)
    made = SD.plan(model_of("flux1dev", "Q4_0"), asked, machine(Pool.DISCRETE, devices=devices))
    assert ("--offload-to-cpu" in made.arguments) is moved
    assert ("OFFLOADED" in {note.code for note in made.notes}) is moved
    kept = SD.plan(
        model_of("flux1dev", "Q4_0"),
        SdRequest(width_px=1024, height_px=1024, vae_tiling=True, offload_to_cpu=False),
        machine(Pool.DISCRETE, devices=devices),
    )
    assert "--offload-to-cpu" not in kept.arguments


def test_a_component_larger_than_the_card_is_said_to_be() -> None:
    devices = (DeviceCeiling("0", Ceiling(4 * GIB, 4 * GIB)),)
    made = SD.plan(model_of("flux1dev", "Q4_0"), SdRequest(), machine(Pool.DISCRETE, devices=devices))
    note = next(note for note in made.notes if note.code == "COMPONENT_EXCEEDS_CARD")
    assert note.metadata == {"component": "diffusion_model"}


@pytest.mark.parametrize("card", [8.9, 8.0])
def test_the_claim_is_the_peak_capped_at_the_card_and_the_host_gets_the_rest(card: float) -> None:
    """FLUX.1 Q4_0 offloaded: 6.24 GiB of diffusion model, 2.31 of buffer and 0.29 of context are 8.84 GiB at once."""
    size = int(card * GIB)
    capacity = machine(Pool.DISCRETE, devices=(DeviceCeiling("0", Ceiling(size, size)),))
    asked = SdRequest(width_px=1024, height_px=1024, vae_tiling=True)
    made = answer(SD, model_of("flux1dev", "Q4_0"), asked, capacity)
    peak = made.requirement.device_peak.expected
    assert peak / GIB == pytest.approx(8.84, abs=0.02)
    assert made.claim.devices[0].required_bytes == min(size, made.requirement.device.expected)
    assert made.claim.host_bytes == made.requirement.host.expected + max(0, peak - size)
    assert made.assessment.verdict is Verdict.TIGHT, "all weights are 8.96 GiB: no such card holds them"


def test_a_claim_that_the_card_holds_is_the_peak() -> None:
    made = answer(SD, model_of("flux1dev", "Q4_0"), SdRequest(vae_tiling=True), machine(Pool.DISCRETE))
    assert made.assessment.verdict is Verdict.RUNS
    assert made.claim.devices[0].required_bytes == made.requirement.device_peak.expected
    assert made.claim.host_bytes == made.requirement.host.expected < GIB


def test_the_largest_of_several_cards_decides() -> None:
    cards = tuple(DeviceCeiling(str(size), Ceiling(size * GIB, size * GIB)) for size in (4, 24, 8))
    made = answer(SD, model_of("flux1dev", "Q4_0"), SdRequest(), machine(Pool.DISCRETE, devices=cards))
    assert made.assessment.verdict is Verdict.RUNS


def test_what_was_measured_on_a_card_moves_the_hosts_share() -> None:
    """An observation is host and cards together; what the card holds is planned."""
    needed = SD.plan(model_of("sd15"), SdRequest(), machine(Pool.DISCRETE)).requirement
    seen = sharpen(needed, Observed(3, needed.total.expected + GIB))
    assert seen.total.expected == round((needed.total.expected + GIB) * 1.03)
    assert seen.host.expected == seen.total.expected - needed.device_peak.expected
    assert seen.device_peak == needed.device_peak
    low = sharpen(needed, Observed(3, 1))
    assert low.host.expected == needed.host.low


def test_card_choices_without_a_card_are_said_to_change_nothing() -> None:
    made = SD.plan(model_of("sd15"), SdRequest(offload_to_cpu=True, vae_on_cpu=True), machine(Pool.CPU))
    note = next(note for note in made.notes if note.code == "NO_CARD")
    assert note.metadata == {"options": "offload_to_cpu,vae_on_cpu"}
    assert made.requirement.total == SD.plan(model_of("sd15"), SdRequest(), machine(Pool.CPU)).requirement.total


def test_padding_on_a_card_is_at_most_a_drivers_alignment() -> None:
    whole = model_of("sd15")
    needed = SD.plan(whole, SdRequest(), machine(Pool.DISCRETE)).requirement
    assert 0 < needed.device.high - needed.device.expected <= 256 * len(whole.facts.tensors)
    one = Model(facts(whole.facts.tensors[:1]))
    assert one.facts.tensor_bytes < 256 * MIB
