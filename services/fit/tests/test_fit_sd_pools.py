"""Where sd-server keeps weights, by platform and kind of memory; what a card is charged for, what a launch claims."""

import pytest
from sd_data import GIB, MIB, facts, model_of
from weighbridge_fit.capacity import Capacity, Ceiling, DeviceCeiling, Pool
from weighbridge_fit.claim import Claim, DeviceClaim, claim_for
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.model import Model
from weighbridge_fit.observed import Observed, sharpen
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.sd.options import SdRequest, backend_of
from weighbridge_fit.plans.sd.pools import media_pool
from weighbridge_fit.verdict import Verdict
from weighbridge_fit.wire.answer import claim_message
from weighbridge_proto.fit.v1 import plan_pb2

SD = SdFamily()
CARD = (DeviceCeiling("0", Ceiling(24 * GIB, 24 * GIB)),)


def machine(pool: Pool, platform: str = "", devices: tuple[DeviceCeiling, ...] | None = None) -> Capacity:
    devices = (CARD if pool is Pool.DISCRETE else ()) if devices is None else devices
    host, total = Ceiling(64 * GIB, 64 * GIB), Ceiling(88 * GIB, 88 * GIB)
    return Capacity(pool, host, total if devices else host, devices, platform=platform)


@pytest.mark.parametrize(
    ("pool", "platform", "backend", "expected"),
    [
        # Metal on Apple Silicon, the processor on Intel Macs, whatever the machine is said to be.
        (Pool.UNIFIED, "darwin/arm64", "", Pool.UNIFIED),
        (Pool.CPU, "darwin/arm64", "metal", Pool.UNIFIED),
        (Pool.UNIFIED, "darwin/x86_64", "", Pool.CPU),
        (Pool.DISCRETE, "darwin/x86_64", "metal", Pool.CPU),
        # Windows on Arm computes on the processor unless the build is for a GPU.
        (Pool.DISCRETE, "windows/arm64", "", Pool.CPU),
        (Pool.UNIFIED, "win32/arm64", "", Pool.CPU),
        (Pool.UNIFIED, "windows/arm64", "cuda", Pool.UNIFIED),
        (Pool.DISCRETE, "windows/arm64", "cuda", Pool.DISCRETE),
        # Elsewhere by the kind of the machine.
        (Pool.DISCRETE, "windows/x86_64", "", Pool.DISCRETE),
        (Pool.DISCRETE, "linux/x86_64", "", Pool.DISCRETE),
        (Pool.UNIFIED, "linux/aarch64", "", Pool.UNIFIED),
        (Pool.CPU, "linux/x86_64", "", Pool.CPU),
        (Pool.DISCRETE, "", "", Pool.DISCRETE),
        (Pool.UNIFIED, "", "", Pool.UNIFIED),
        # A build for the processor computes there, whatever else there is.
        (Pool.DISCRETE, "linux/x86_64", "cpu", Pool.CPU),
        (Pool.UNIFIED, "darwin/arm64", "cpu", Pool.CPU),
        (Pool.UNIFIED, "linux/aarch64", "CPU", Pool.CPU),
        # One for a GPU finds none on a machine without.
        (Pool.CPU, "linux/x86_64", "vulkan", Pool.CPU),
        (Pool.DISCRETE, "linux/x86_64", "vulkan", Pool.DISCRETE),
        (Pool.DISCRETE, "linux/x86_64", "hip", Pool.DISCRETE),
    ],
)
def test_the_pool_by_platform_machine_and_build(pool: Pool, platform: str, backend: str, expected: Pool) -> None:
    made = SD.plan(model_of("sd15"), SdRequest(backend=backend), machine(pool, platform))
    assert made.shape.text().startswith(f"sd;pool={expected.value.lower()};")
    assert media_pool(machine(pool, platform), backend_of(SdRequest(backend=backend))) is expected


def test_a_build_that_nobody_makes_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match="cpu, cuda, hip, metal") as caught:
        SD.plan(model_of("sd15"), SdRequest(backend="cudaa"), machine(Pool.CPU))
    assert (caught.value.reason, caught.value.field) == ("INVALID_OPTION", "options.sd.backend")


def test_what_fit_was_set_to_counts_where_the_request_does_not_say() -> None:
    def pool(family: SdFamily, said: str | None) -> str:
        options = plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(backend=said))
        made = family.plan(model_of("sd15"), family.request(plan_pb2.Workload(), options), machine(Pool.DISCRETE))
        assert family.options(made).sd.backend == (said or family_backend)
        return made.shape.text().partition(";size")[0]

    family_backend = "cpu"
    assert pool(SdFamily("cpu"), None) == "sd;pool=cpu"
    assert pool(SdFamily("cpu"), "cuda") == "sd;pool=discrete"
    family_backend = ""
    assert pool(SdFamily(), None) == "sd;pool=discrete"
    assert pool(SdFamily(), "cpu") == "sd;pool=cpu"


def test_what_computes_on_the_processor_says_so_in_its_claim() -> None:
    """On unified memory, exclusive use of the GPU and its health do not concern it."""

    def claim(backend: str) -> Claim:
        asked = SdRequest(backend=backend)
        return answer(SD, model_of("sd15"), asked, machine(Pool.UNIFIED, "darwin/arm64")).claim

    assert claim("cpu").cpu_only
    assert not claim("metal").cpu_only
    assert not claim("").cpu_only
    assert claim_message(claim("cpu"), Source.DERIVED).cpu_only


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


@pytest.mark.parametrize(
    ("architecture", "pool", "asked", "tiles"),
    [
        # One buffer for a whole decode is 7 GiB at 1024 x 1024, and drivers give out a quarter to a half of a card in
        # one piece: the render fails in its last phase.
        ("sdxl", Pool.DISCRETE, SdRequest(), True),
        ("sdxl", Pool.DISCRETE, SdRequest(vae_tiling=False), False),
        ("sdxl", Pool.DISCRETE, SdRequest(vae_on_cpu=True), False),
        ("sdxl", Pool.CPU, SdRequest(), False),
        ("sdxl", Pool.UNIFIED, SdRequest(), False),
        # Its autoencoder is Krea 2's, whose tiles leave seams.
        ("qwenimage", Pool.DISCRETE, SdRequest(), False),
    ],
)
def test_on_a_card_a_model_that_nobody_knows_decodes_in_tiles_and_says_so(
    architecture: str, pool: Pool, asked: SdRequest, tiles: bool
) -> None:
    made = SD.plan(model_of(architecture, "Q8_0"), asked, machine(pool))
    assert ("--vae-tiling" in made.arguments) is tiles
    assert ("TILED" in {note.code for note in made.notes}) is tiles


# The reference system's rule: unified and cpu pools claim the requirement unchanged; on a card
# gpu = min(max(peak, weights), card) and all = max(all, gpu).

KLEIN_WEIGHTS, KLEIN_PEAK, LAPTOP_CARD = int(4.9 * GIB), int(9.4 * GIB), 12 * GIB
"""FLUX.2 klein at 1024 x 1024 on an RTX 5070 Ti Laptop (Vulkan, 2026-10-25)."""


def klein(on_card: bool) -> Requirement:
    buffer = KLEIN_PEAK - KLEIN_WEIGHTS
    return requirement(
        (
            Line("weights", Phase.RESIDENT, Range.exactly(KLEIN_WEIGHTS), Source.DERIVED, "-", on_device=on_card),
            Line("working_buffer", Phase.DENOISE, Range.exactly(buffer), Source.MEASURED, "-", on_device=on_card),
            Line("process", Phase.RESIDENT, Range.exactly(GIB // 10), Source.MEASURED, "-"),
        )
    )


def claimed(card: int) -> Claim:
    devices = (DeviceCeiling("0", Ceiling(card, card)),)
    return claim_for(klein(on_card=True), machine(Pool.DISCRETE, devices=devices), Verdict.RUNS)


def test_a_renders_claim_is_its_peak_and_not_its_weights() -> None:
    """A claim of the 4.9 GiB of weights let a chat model stay, and the render died at its first step."""
    made = claimed(LAPTOP_CARD)
    assert made.devices == (DeviceClaim("", KLEIN_PEAK),)
    chat_model = 4 * GIB
    assert KLEIN_WEIGHTS + chat_model < LAPTOP_CARD < made.devices[0].required_bytes + chat_model
    assert made.host_bytes == GIB // 10


def test_a_peak_beyond_the_card_claims_the_card_and_leaves_the_rest_to_the_host() -> None:
    made = claimed(8 * GIB)
    assert made.devices == (DeviceClaim("", 8 * GIB),)
    assert made.host_bytes == GIB // 10 + KLEIN_PEAK - 8 * GIB


@pytest.mark.parametrize("pool", [Pool.UNIFIED, Pool.CPU])
def test_one_memory_is_claimed_as_required(pool: Pool) -> None:
    needed = klein(on_card=False)
    made = claim_for(needed, machine(pool), Verdict.RUNS)
    assert (made.host_bytes, made.devices) == (KLEIN_PEAK + GIB // 10, ())


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
