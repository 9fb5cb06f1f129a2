"""The policy of a ds4 launch against its worked rows: residency, expert cache, resident line, context, drafting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_fit.calibration.ds4 import Compute
from weighbridge_fit.plans.ds4.decisions import figures_of
from weighbridge_fit.plans.ds4.drafting import Drafter, DraftPolicy, DraftReason, decide
from weighbridge_fit.plans.ds4.policy import (
    AuthorFigures,
    full_residency_allowed,
    launch_context,
    plan_cache,
    reservation,
)

from services.fit.tests.fit_ds4_layout import GIB, listed

Q2, Q2Q4, Q4, MXFP4, GLM = (
    "deepseek-v4-flash-284b-q2",
    "deepseek-v4-flash-284b-q2q4",
    "deepseek-v4-flash-284b-q4",
    "deepseek-v4-flash-284b-mxfp4",
    "glm-5.2-754b-q2",
)


def figures(catalog_id: str) -> AuthorFigures:
    return figures_of(listed(catalog_id))


@pytest.mark.parametrize(
    ("catalog_id", "threshold_gib"), [(Q2, 112.8), (Q2Q4, 122.9), (MXFP4, 177.3), (Q4, 185.3), (GLM, 228.6)]
)
def test_the_memory_from_which_a_model_may_stay_whole(catalog_id: str, threshold_gib: float) -> None:
    size = listed(catalog_id).facts.file_bytes
    exact = size + 32 * GIB
    assert round(exact / GIB, 1) == threshold_gib
    assert full_residency_allowed(ram_bytes=exact, arm=True, weight_bytes=size)
    assert not full_residency_allowed(ram_bytes=exact - 1, arm=True, weight_bytes=size)


@pytest.mark.parametrize(
    ("size_gib", "ram_gib", "arm", "allowed"),
    [
        (81, 128, True, True),
        (153, 128, True, False),
        (153, 256, True, True),
        (81, 256, False, False),
        (0, 128, True, False),
    ],
    ids=["81 on 128", "153 on 128", "153 on 256", "x86-64", "size not known"],
)
def test_full_residency(size_gib: int, ram_gib: int, arm: bool, allowed: bool) -> None:
    assert full_residency_allowed(ram_bytes=ram_gib * GIB, arm=arm, weight_bytes=size_gib * GIB) is allowed


def test_a_companion_is_weighed_beside_the_weights() -> None:
    for companion, fits in ((15 * GIB, True), (16 * GIB, False)):
        assert (
            full_residency_allowed(ram_bytes=128 * GIB, arm=True, weight_bytes=81 * GIB, companion_bytes=companion)
            is fits
        )


# GiB of cache by memory; a star marks one cut down, None a refusal.
CACHES = {
    Q2: {32: None, 48: "12*", 64: "28*", 96: "32", 128: "32", 192: "32", 256: "32"},
    Q2Q4: {32: None, 48: "10*", 64: "26*", 96: "36", 128: "36", 192: "36", 256: "36"},
    Q4: {32: None, 48: None, 64: "16*", 96: "48*", 128: "64", 192: "64", 256: "64"},
    MXFP4: {32: None, 48: None, 64: "16*", 96: "48*", 128: "64", 192: "64", 256: "64"},
    GLM: {32: None, 48: None, 64: "6*", 96: "32", 128: "32", 192: "32", 256: "32"},
}


@pytest.mark.parametrize(
    ("catalog_id", "ram_gib", "expected"),
    [(name, ram, want) for name, row in CACHES.items() for ram, want in row.items()],
)
def test_the_expert_cache_of_the_catalogue(catalog_id: str, ram_gib: int, expected: str | None) -> None:
    given_figures = figures(catalog_id)
    plan = plan_cache(
        ram_bytes=ram_gib * GIB,
        fixed_bytes=given_figures.fixed_bytes,
        author_cache_bytes=given_figures.expert_cache_bytes,
    )
    if expected is None:
        assert (plan.cache_gib, plan.clamped, plan.safe) == (1, True, False)
    else:
        assert plan.safe
        assert f"{plan.cache_gib}{'*' if plan.clamped else ''}" == expected


def test_a_configured_cache_is_cut_down_too() -> None:
    plan = plan_cache(ram_bytes=128 * GIB, fixed_bytes=(80 - 64) * GIB, configured_gib=96, author_cache_bytes=64 * GIB)
    assert (plan.cache_gib, plan.clamped, plan.safe) == (80, True, True)
    plan = plan_cache(ram_bytes=128 * GIB, fixed_bytes=4 * GIB, author_cache_bytes=32 * GIB)
    assert (plan.cache_gib, plan.clamped, plan.safe) == (32, False, True)


@pytest.mark.parametrize(("ram_gib", "cache"), [(119, 48), (120, 64), (88, 48), (87, 32), (70, 32)])
def test_the_cache_where_nobody_says_one(ram_gib: int, cache: int) -> None:
    assert plan_cache(ram_bytes=ram_gib * GIB, fixed_bytes=0).cache_gib == cache


@given(st.integers(0, 1024), st.integers(0, 256), st.integers(1, 512))
def test_a_safe_cache_leaves_the_system_its_32_gib(ram_gib: int, fixed_gib: int, configured: int) -> None:
    plan = plan_cache(ram_bytes=ram_gib * GIB, fixed_bytes=fixed_gib * GIB, configured_gib=configured)
    if plan.safe:
        assert plan.cache_gib + fixed_gib + 32 <= ram_gib
        assert 1 <= plan.cache_gib <= max(1, configured)
    else:
        assert ram_gib < fixed_gib + 32 + 1


# GiB by catalogue model: resident, fixed, context-free, and the line at 64K, 128K and 256K.
LINES = [
    (Q2, 36, 4, 35, 35.5, 36, 37),
    (Q2Q4, 42, 6, 41, 41.5, 42, 43),
    (Q4, 80, 16, 79, 79.5, 80, 81),
    (MXFP4, 80, 16, 79, 79.5, 80, 81),
    (GLM, 57.15, 25.15, 51.59, 57.15, 62.71, None),
]


@pytest.mark.parametrize(("catalog_id", "resident", "fixed", "free", "at_64k", "at_128k", "at_256k"), LINES)
def test_the_resident_line_of_the_catalogue(
    catalog_id: str, resident: float, fixed: float, free: float, at_64k: float, at_128k: float, at_256k: float | None
) -> None:
    said = figures(catalog_id)
    assert round(said.resident_bytes / GIB, 2) == resident
    assert round(said.fixed_bytes / GIB, 2) == fixed
    assert said.context_free_bytes is not None
    assert round(said.context_free_bytes / GIB, 2) == free
    for context, expected in ((65_536, at_64k), (131_072, at_128k), (262_144, at_256k)):
        line = said.resident_at(context)
        assert line is not None
        if expected is not None:
            assert round(line / GIB, 2) == expected
    if catalog_id == GLM:
        assert said.max_launch_context_tokens == 65_536


def test_a_slope_that_swallows_the_footprint_leaves_nothing_free() -> None:
    said = AuthorFigures(resident_bytes=GIB, kv_bytes_per_token=1 << 20, resident_context_tokens=131_072)
    assert said.context_free_bytes == 0
    assert said.resident_at(-5) == 0


@pytest.mark.parametrize("missing", ["resident_bytes", "kv_bytes_per_token", "resident_context_tokens"])
def test_the_line_is_not_guessed(missing: str) -> None:
    said = {"resident_bytes": GIB, "kv_bytes_per_token": 8192, "resident_context_tokens": 131_072} | {missing: 0}
    assert AuthorFigures(**said).resident_at(4096) is None


def test_what_the_policy_itself_would_reserve() -> None:
    q2 = figures(Q2)
    assert reservation(q2, 131_072, 81 * GIB, streams=True) == 36 * GIB
    assert reservation(q2, 262_144, 81 * GIB, streams=True) == 37 * GIB
    # A resident launch keeps every second engine out.
    assert reservation(q2, 131_072, 81 * GIB, streams=False) == 96 * GIB
    # Without an author: the file, at most 48 GiB.
    assert reservation(AuthorFigures(), 131_072, 87 * GIB, streams=True) == 48 * GIB
    assert reservation(AuthorFigures(), 131_072, 10 * GIB, streams=True) == 10 * GIB


@pytest.mark.parametrize(
    ("ram_gib", "cap", "longest", "expected"),
    [
        (191, 0, 1_000_000, 131_072),
        (192, 0, 1_000_000, 262_144),
        (192, 65_536, 1_048_576, 65_536),
        (64, 0, 32_768, 32_768),
        (64, 16_384, 1_000_000, 16_384),
    ],
)
def test_the_context_of_a_launch_that_nobody_chose_one_for(ram_gib: int, cap: int, longest: int, expected: int) -> None:
    assert launch_context(ram_bytes=ram_gib * GIB, author_cap=cap, model_longest=longest) == expected


METAL, CUDA = Compute.METAL, Compute.CUDA
NONE, DSPARK, LEGACY = Drafter.NONE, Drafter.DSPARK, Drafter.LEGACY_HEAD
R = DraftReason
# policy, drafter, compute, streams, V4.1, fits, refusal -> drafts, reason, unmet request; in the order of the rules.
DRAFTING = [
    ("off", DSPARK, CUDA, False, False, True, None, False, R.OFF, False),
    ("off", NONE, METAL, True, False, False, R.PROCESSOR, False, R.OFF, False),
    ("on", NONE, CUDA, False, False, True, None, False, R.NO_DRAFTER, True),
    ("auto", NONE, CUDA, False, False, True, None, False, R.NO_DRAFTER, False),
    ("on", DSPARK, CUDA, True, False, False, R.SESSIONS, False, R.SESSIONS, True),
    ("auto", DSPARK, CUDA, True, False, False, R.SESSIONS, False, R.SESSIONS, False),
    ("on", DSPARK, CUDA, True, False, False, None, False, R.STREAMING, True),
    ("auto", DSPARK, CUDA, True, False, True, None, False, R.STREAMING, False),
    ("on", DSPARK, METAL, True, True, False, None, False, R.NO_ROOM, True),
    ("on", DSPARK, CUDA, False, False, False, None, False, R.NO_ROOM, True),
    ("auto", DSPARK, CUDA, False, False, False, None, False, R.NO_ROOM, False),
    ("on", DSPARK, METAL, False, False, True, None, True, R.ASKED, False),
    ("on", DSPARK, CUDA, True, True, True, None, True, R.ASKED, False),
    ("on", LEGACY, METAL, False, False, True, None, True, R.ASKED, False),
    ("auto", DSPARK, CUDA, True, True, True, None, False, R.AUTO_STREAMED, False),
    ("auto", DSPARK, METAL, True, True, True, None, False, R.AUTO_STREAMED, False),
    ("auto", DSPARK, METAL, False, True, True, None, False, R.AUTO_NOT_CUDA, False),
    ("auto", LEGACY, CUDA, False, False, True, None, False, R.AUTO_SLIGHT_GAIN, False),
    ("auto", DSPARK, CUDA, False, False, True, None, True, R.AUTO_RESIDENT_CUDA, False),
    ("auto", DSPARK, CUDA, False, True, True, None, True, R.AUTO_RESIDENT_CUDA, False),
]


@pytest.mark.parametrize(
    ("policy", "drafter", "compute", "streams", "v41", "fits", "refusal", "enabled", "reason", "unmet"), DRAFTING
)
def test_the_order_of_the_drafting_rules(
    policy: str,
    drafter: Drafter,
    compute: Compute,
    streams: bool,
    v41: bool,
    fits: bool,
    refusal: DraftReason | None,
    enabled: bool,
    reason: DraftReason,
    unmet: bool,
) -> None:
    made = decide(
        DraftPolicy(policy),
        drafter,
        compute=compute,
        streams=streams,
        streamed_drafting=v41,
        fits=fits,
        refusal=refusal,
    )
    assert (made.enabled, made.reason, made.unmet) == (enabled, reason, unmet)
    assert bool(made.sentence) == (not enabled and reason is not R.OFF), "who is refused is told why"
