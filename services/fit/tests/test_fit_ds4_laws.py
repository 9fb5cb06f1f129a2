"""ds4's laws against its own logs and published sizes: context buffers, experts, V4.1's sessions, checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_fit.calibration.ds4 import ds4
from weighbridge_fit.laws.ds4_context import (
    FLOAT32_BYTES,
    HALF_BYTES,
    ContextLayers,
    checkpoint_bytes,
    compressor_state_bytes,
    cpu_context,
    gpu_context,
)
from weighbridge_fit.laws.ds4_experts import ExpertSizes, largest_cache_gib
from weighbridge_fit.laws.ds4_v41 import metal_budget_bytes, needed_bytes

from services.fit.tests.fit_ds4_layout import FLASH_RATIOS, GIB, MIB

FLASH = ContextLayers(FLASH_RATIOS, row_size=512, indexer_size=128, window_tokens=128)
V41 = ds4().v41_session


def may(context: int) -> float:
    return gpu_context(FLASH, context, 2048, row_element_bytes=FLOAT32_BYTES, staging=False).total_bytes / MIB


def july_cuda(context: int) -> float:
    return gpu_context(FLASH, context, 4096, row_element_bytes=FLOAT32_BYTES, staging=True).total_bytes / MIB


def july_metal(context: int) -> float:
    return gpu_context(FLASH, context, 4096, row_element_bytes=HALF_BYTES, staging=True).total_bytes / MIB


def processor(context: int) -> float:
    return cpu_context(FLASH, context).total_bytes / MIB


@pytest.mark.parametrize(
    ("context", "logged"),
    [(163_840, 3797.75), (1_000_000, 21302.79)],
    ids=["ds4 issue 812", "ds4 issues 554 and 563"],
)
def test_context_buffers_equal_the_public_logs_to_a_hundredth_of_a_mebibyte(context: int, logged: float) -> None:
    assert abs(july_cuda(context) - logged) <= 0.01


@pytest.mark.parametrize(
    ("context", "of_may", "of_july", "of_july_on_metal", "on_the_processor"),
    [
        (32_768, 752, 1_054, 881, 441),
        (131_072, 2_426, 3_112, 2_420, 1_731),
        (262_144, 4_658, 5_856, 4_472, 3_451),
        (393_216, 6_890, 8_600, 6_524, 5_172),
        # 17,222.5 exactly, and half a MiB rounds up here.
        (1_000_000, 17_223, 21_303, 16_023, 13_136),
    ],
)
def test_context_buffers_of_every_layout_to_the_mebibyte(
    context: int, of_may: int, of_july: int, of_july_on_metal: int, on_the_processor: int
) -> None:
    for law, expected in (
        (may, of_may),
        (july_cuda, of_july),
        (july_metal, of_july_on_metal),
        (processor, on_the_processor),
    ):
        assert abs(law(context) - expected) <= 0.51, law.__name__


def test_the_rows_and_terms_of_a_logged_plan() -> None:
    # ds4: memory detail: ctx=131072, prefill_cap=4096, raw_kv_rows=4352, compressed_kv_rows=32770; 0.36 + 1.00 GiB of
    # cache and 1.00 GiB of buffers.
    buffers = gpu_context(FLASH, 131_072, 4096, row_element_bytes=HALF_BYTES, staging=True)
    assert (buffers.raw_rows, buffers.compressed_rows) == (4352, 32_770)
    assert round(buffers.raw_bytes / GIB, 2) == 0.36
    assert round(buffers.compressed_bytes / GIB, 2) == 1.00
    assert round(buffers.scratch_bytes / GIB, 2) == 1.00


@pytest.mark.parametrize(("element", "slope"), [(FLOAT32_BYTES, 13_760), (HALF_BYTES, 8_224)])
def test_a_token_costs_its_compressed_rows(element: int, slope: int) -> None:
    # 21 layers x (512 x element + 128 x 4) / 4 + 20 layers x 512 x element / 128, by hand.
    near = gpu_context(FLASH, 131_072, 4096, row_element_bytes=element, staging=True)
    far = gpu_context(FLASH, 262_144, 4096, row_element_bytes=element, staging=True)
    assert far.cache_bytes - near.cache_bytes == 131_072 * slope
    assert far.scratch_bytes - near.scratch_bytes == 131_072 * 2 * 4096


def test_compressor_states() -> None:
    # 21 x 2 x 8 rows x (1024 + 256) x 4 bytes and 20 x 2 x 128 rows x 512 x 4 bytes: 11.6 MiB.
    assert compressor_state_bytes(FLASH) == 21 * 2 * 8 * 1280 * 4 + 20 * 2 * 128 * 512 * 4
    assert round(compressor_state_bytes(FLASH) / MIB, 1) == 11.6


@pytest.mark.parametrize(("tokens", "mib"), [(512, 29.6), (4096, 76.7), (20_480, 291.8), (40_000, 548)])
def test_checkpoints_on_disk_have_the_sizes_that_were_seen(tokens: int, mib: float) -> None:
    size = checkpoint_bytes(FLASH, tokens, vocab_size=129_280)
    assert size / MIB == pytest.approx(mib, abs=0.25)


@pytest.mark.parametrize(("chunk", "gib"), [(2048, 1.95), (4096, 3.89)])
def test_the_prefill_workspace(chunk: int, gib: float) -> None:
    floats = ds4()["workspace_floats_per_token"].expected
    assert round(floats * FLOAT32_BYTES * chunk / GIB, 2) == gib


@pytest.mark.parametrize(
    ("expert_bytes", "mib", "headroom_gib", "smallest"),
    [(7_077_888, 6.75, 3.375, 4), (14_155_776, 13.5, 6.75, 7), (13_369_344, 12.75, 6.375, 7)],
    ids=["Q2", "Q4_K", "MXFP4"],
)
def test_an_expert_and_the_headroom_of_two_layers(
    expert_bytes: int, mib: float, headroom_gib: float, smallest: int
) -> None:
    experts = ExpertSizes(layers=43, experts=256, expert_bytes=expert_bytes, used=6)
    assert expert_bytes / MIB == mib
    assert experts.headroom_bytes / GIB == headroom_gib
    assert experts.smallest_cache_gib == smallest
    assert experts.warned_below_slots == 516
    # A budget of the headroom alone is refused, so the smallest holds at least one expert.
    assert experts.slots(smallest) >= 1 > experts.slots(smallest - 1)


def test_a_logged_cache_of_32_gib_keeps_28_62_gib_of_experts() -> None:
    experts = ExpertSizes(layers=43, experts=256, expert_bytes=7_077_888, used=6)
    assert round(experts.slots(32) * experts.expert_bytes / GIB, 2) == 28.62
    assert experts.slots(1000) == 11_008, "never more than the model has: 72.56 GiB"
    assert round(11_008 * 7_077_888 / GIB, 2) == 72.56


def test_ds4_lowers_a_budget_to_seven_eighths_less_the_context() -> None:
    # 7/8 of 96 GiB less 2.36 GiB: 81.6.
    assert largest_cache_gib(96 * GIB, int(2.36 * GIB)) == 81
    assert largest_cache_gib(2 * GIB, 3 * GIB) == 0


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (4096, 1_921_216_616),
        (32_768, 8_465_702_760),
        (131_072, 9_610_852_200),
        (393_216, 12_664_584_040),
        (1_048_576, 20_298_913_640),
    ],
)
def test_a_session_of_v41(context: int, expected: int) -> None:
    session = V41.session_bytes(context)
    assert (session.low, session.expected, session.high) == (expected,) * 3


def test_v41_costs_about_11_65_kb_for_a_token_above_the_step() -> None:
    assert float(V41.per_token) == pytest.approx(11_650, rel=1e-3)


@given(st.integers(1, 1 << 21), st.integers(1, 1 << 21))
def test_a_session_of_v41_grows_with_its_context(one: int, other: int) -> None:
    less, more = (V41.session_bytes(context) for context in sorted((one, other)))
    assert less.low <= more.low and less.expected <= more.expected and less.high <= more.high


def test_what_ds4_asks_for_before_it_starts_v41_at_32k() -> None:
    session, reserve = 8_465_702_760, 2 * GIB
    resident = needed_bytes(162_935_654_128, session, 1, reserve, 0)
    streamed = needed_bytes(10_061_367_744, session, 1, reserve, 7_644_119_040)
    assert -(-resident // MIB) == 165_510
    assert -(-streamed // MIB) == 27_007
    assert metal_budget_bytes(128 * GIB, 96 * GIB) == 96 * GIB
    assert metal_budget_bytes(128 * GIB, 120 * GIB) == 112 * GIB


def test_headrooms_of_v41() -> None:
    for expert_bytes, headroom in ((9_953_280, 7_644_119_040), (19_906_560, 15_288_238_080)):
        assert ExpertSizes(layers=40, experts=384, expert_bytes=expert_bytes, used=6).headroom_bytes == headroom


CONTEXTS = st.integers(1, 1 << 20)
CHUNKS = st.sampled_from([1, 256, 2048, 4096, 8192])


@given(CONTEXTS, CONTEXTS, CHUNKS, st.sampled_from([HALF_BYTES, FLOAT32_BYTES]), st.booleans())
def test_a_larger_context_never_takes_less(one: int, other: int, chunk: int, element: int, staging: bool) -> None:
    less, more = (
        gpu_context(FLASH, context, chunk, row_element_bytes=element, staging=staging)
        for context in sorted((one, other))
    )
    assert less.raw_bytes <= more.raw_bytes
    assert less.compressed_bytes <= more.compressed_bytes
    assert less.scratch_bytes <= more.scratch_bytes
    assert cpu_context(FLASH, min(one, other)).total_bytes <= cpu_context(FLASH, max(one, other)).total_bytes


@given(CONTEXTS, CHUNKS, CHUNKS)
def test_a_larger_chunk_never_takes_less(context: int, one: int, other: int) -> None:
    less, more = (
        gpu_context(FLASH, context, chunk, row_element_bytes=FLOAT32_BYTES, staging=True).total_bytes
        for chunk in sorted((one, other))
    )
    assert less <= more
