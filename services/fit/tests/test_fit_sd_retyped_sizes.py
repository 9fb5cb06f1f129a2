"""Files of which only sizes are known, retyped on loading: the range holds what the engine really allocated.

Resident MiB are measured (stable-diffusion-cpp-python 0.4.7, CPU, 2026-11-30): text encoders, diffusion model and
autoencoder of a checkpoint at F16, and the same file started with a type.
"""

import pytest
from weighbridge_fit.laws.sd_resident import Family, Retyping
from weighbridge_fit.plans.sd.parts import LoadedPart
from weighbridge_fit.plans.sd.weights import held_bytes

MIB = 1 << 20
FAMILY = next(iter(Family))


def held(component: str, file_mib: float, quantization: str, to: str):
    part = LoadedPart(component, (), int(file_mib * MIB), quantization)
    return held_bytes(part, FAMILY, Retyping(to), False).bytes


@pytest.mark.parametrize(
    ("component", "file_mib", "to", "resident_mib"),
    [
        # SDXL in one file: 1,564 + 4,900 + 160 at F16.
        ("model", 6624, "Q8_0", 835 + 2904 + 160),
        ("model", 6624, "Q4_0", 447 + 1839 + 160),
        ("diffusion_model", 22706, "Q8_0", 12068),  # FLUX.1
        ("diffusion_model", 22706, "Q4_0", 6395),
        ("diffusion_model", 38979, "Q8_0", 20717),  # Qwen-Image
        ("diffusion_model", 38979, "Q4_0", 10978),
        ("llm", 7673, "Q8_0", 4076),  # Qwen3-4B
        ("llm", 7673, "Q4_0", 2158),
        ("vae", 160, "Q4_0", 160),
    ],
)
def test_the_usual_file_is_expected_within_a_sixteenth(
    component: str, file_mib: int, to: str, resident_mib: int
) -> None:
    size = held(component, file_mib, "F16", to)
    assert size.low - MIB < resident_mib * MIB <= size.high  # the figures are whole MiB
    assert size.expected == pytest.approx(resident_mib * MIB, rel=1 / 16)


@pytest.mark.parametrize(("to", "resident_mib"), [("Q8_0", 1399), ("Q4_0", 1270)])
def test_a_unet_of_kernels_stays_within_the_range(to: str, resident_mib: int) -> None:
    """SD 1.5's UNet, 1,640 MiB at F16: two thirds of it are kernels."""
    size = held("diffusion_model", 1640, "F16", to)
    assert size.low <= resident_mib * MIB <= size.high


def test_retyping_upwards_costs_more_and_downwards_less() -> None:
    stored = held("diffusion_model", 1000, "Q4_0", "")
    assert held("diffusion_model", 1000, "Q4_0", "F16").expected > 2 * stored.expected
    assert held("diffusion_model", 1000, "F16", "Q4_0").expected < held("diffusion_model", 1000, "F16", "").expected


def test_a_file_of_unknown_type_can_become_anything() -> None:
    size = held("vae", 100, "", "Q8_0")
    assert size.low < 30 * MIB and size.high > 200 * MIB
