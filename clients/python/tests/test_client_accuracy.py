"""`accuracy`: what launches were planned, claimed and granted as, beside what they took."""

import io
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from weighbridge import Suite
from weighbridge.accuracy import Accuracy, names_of, summarise
from weighbridge.cli import main
from weighbridge.cli.accuracy import print_accuracy
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["accuracy", *arguments])


def observed(peak_gib: float, planned_gib: float = 0, **more: Any) -> lease_pb2.Observation:
    made = lease_pb2.Observation(
        model_digest="a" * 64,
        engine_build="b" * 64,
        shape="context=8192",
        planned_bytes=int(planned_gib * GIB),
        peak_bytes=int(peak_gib * GIB),
    )
    made.MergeFrom(lease_pb2.Observation(**more))
    return made


def other(peak_gib: float, planned_gib: float = 0, **more: Any) -> lease_pb2.Observation:
    return observed(peak_gib, planned_gib, model_digest="c" * 64, **more)


def printed(found: list[Accuracy], width: int, names: dict[str, str] | None = None) -> str:
    out = io.StringIO()
    print_accuracy(Console(file=out, width=width), found, names or {})
    return out.getvalue()


# -- the figures ---------------------------------------------------------------------------------------------------


def test_launches_are_summed_up_by_model_build_and_shape() -> None:
    found = summarise(
        [observed(4, 5), other(1), observed(4, 5, engine_build="other"), observed(4, 5, shape="other"), observed(6, 5)]
    )
    assert sorted((one.model_digest[0], one.engine_build[0], one.shape, one.count) for one in found) == [
        ("a", "b", "context=8192", 2),
        ("a", "b", "other", 1),
        ("a", "o", "context=8192", 1),
        ("c", "b", "context=8192", 1),
    ]


def test_peaks_are_the_median_the_nearest_rank_and_the_highest() -> None:
    (found,) = summarise([observed(size) for size in range(20, 0, -1)])
    # Of 20, the nearest rank of 95 % is the 19th.
    assert (found.median_peak_bytes, found.p95_peak_bytes, found.max_peak_bytes) == (10.5 * GIB, 19 * GIB, 20 * GIB)


def test_what_was_planned_claimed_and_granted_is_of_the_latest_launch_that_says_it() -> None:
    (found,) = summarise(
        [
            observed(4, granted_bytes=9),
            observed(4, 6, claimed_bytes=7, granted_bytes=8),
            observed(4, 1, claimed_bytes=1, granted_bytes=1),
        ]
    )
    assert (found.planned_bytes, found.claimed_bytes, found.granted_bytes) == (6 * GIB, 7, 9)


@pytest.mark.parametrize(
    ("planned", "peaks", "error"),
    [(5, [4], 0.25), (3, [4], -0.25), (4, [4], 0.0), (4, [2, 4, 9], 0.0), (0, [4], None)],
)
def test_the_error_is_of_the_plan_against_the_median_peak(
    planned: float, peaks: list[float], error: float | None
) -> None:
    (found,) = summarise([observed(peak, planned) for peak in peaks])
    assert found.error == error


def test_the_worst_planned_come_first_and_those_without_a_plan_last() -> None:
    found = summarise(
        [
            observed(4, 5, shape="+25"),
            observed(4, 2, shape="-50"),
            observed(4, shape="none"),
            observed(4, 4, shape="0"),
            observed(4, 7, shape="+75"),
        ]
    )
    assert [one.shape for one in found] == ["+75", "-50", "+25", "0", "none"]


def test_models_are_called_what_the_latest_lease_calls_them() -> None:
    leases = [
        lease_pb2.Lease(purpose={"model_digest": digest, "model_name": name})
        for digest, name in (("d1", "old"), ("d1", "new"), ("d2", ""), ("", "nothing"))
    ]
    assert names_of(leases) == {"d1": "new"}


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(fake_suite):
    """A ledger that has measured two models, one of them of a lease that it still knows."""
    fake_suite.state.observations = [observed(4, 5, claimed_bytes=6 * GIB, granted_bytes=7 * GIB), other(2, 1)]
    lease = lease_pb2.Lease(lease_id="l", purpose={"model_digest": "a" * 64, "model_name": "Qwen3"})
    fake_suite.state.leases = [lease]
    return fake_suite


def test_a_row_tells_a_launch_and_its_error(measured) -> None:
    done = run()
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:3] == [
        "model build shape launches planned claimed granted median p95 max error",
        f"{'c' * 12} {'b' * 12} context=8192 1 1.00 - - 2.00 2.00 2.00 −50.0 %",
        f"Qwen3 {'b' * 12} context=8192 1 5.00 6.00 7.00 4.00 4.00 4.00 +25.0 %",
    ]
    assert measured.state.asked(pb.ListLeasesRequest)[0].include_released


def test_a_narrow_terminal_lists_the_launches_beneath_the_figures() -> None:
    shape = "mlx;context=8192;slots=1;" + "option=value;" * 12
    text = printed(summarise([observed(4, 5, shape=shape)]), 80, {"a" * 64: "Qwen3"})
    figures = next(line for line in text.splitlines() if line.startswith("1."))
    assert figures.split()[1:] == ["1", "5.00", "-", "-", "4.00", "4.00", "4.00", "+25.0", "%"]
    assert f"1.  Qwen3, build {'b' * 12}: " in text
    assert shape in "".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("width", [140, 100, 80])
def test_a_shape_is_broken_between_its_settings_and_never_within_one(width: int) -> None:
    # As the image planner writes it: settings, then one part after the other.
    settings = ["sd", "pool=discrete", "size=1024x1024", "batch=1", "flash=1", "offload=0", "tiling=0", "type=stored"]
    parts = [f"{name}:{'0123456789abcdef'}" for name in ("parts=diffusion_model", "text_encoder", "vae")]
    text = printed(summarise([observed(4, 5, shape=";".join([*settings, ",".join(parts)]))]), width, {"a" * 64: "Flux"})
    assert all(len(line) <= width for line in text.splitlines())
    rows = [line for line in text.splitlines() if "discrete" in line or "vae" in line]
    assert len(rows) == 2, "it is broken at all"
    assert all(any(one in line for line in text.splitlines()) for one in (*settings, *parts))


def test_one_model_can_be_asked_for_by_name_or_digest(measured) -> None:
    for wanted in ("Qwen3", "a" * 64, "a" * 12):
        found = json.loads(run("--model", wanted, "--json").stdout)["launches"]
        assert [one["model_name"] for one in found] == ["Qwen3"]


def test_a_model_that_is_named_otherwise_is_looked_up(measured, tmp_path) -> None:
    """The fake's weights all have the digest ddd…."""
    measured.state.observations.append(observed(1, model_digest="d" * 64))
    (tmp_path / "model").mkdir()
    found = json.loads(run("--model", str(tmp_path / "model"), "--json").stdout)["launches"]
    assert [one["model_digest"] for one in found] == ["d" * 64]


def test_nothing_measured_is_said(fake_suite) -> None:
    assert run().stdout == "Nothing was measured yet. A model is measured once it is loaded and ends.\n"
    assert json.loads(run("--json").stdout) == {"launches": []}
    # The fake's plan knows every model; of this one nothing was measured.
    assert run("--model", "./tiny").stdout.startswith("Nothing was measured of ./tiny yet.")


def test_programs_get_every_figure(measured) -> None:
    measured.state.observations[0].observe_time.FromSeconds(1_790_000_000)
    found = json.loads(run("--json").stdout)["launches"]
    assert found[1] == {
        "model_digest": "a" * 64,
        "model_name": "Qwen3",
        "engine_build": "b" * 64,
        "shape": "context=8192",
        "count": 1,
        "planned_bytes": str(5 * GIB),
        "claimed_bytes": str(6 * GIB),
        "granted_bytes": str(7 * GIB),
        "median_peak_bytes": str(4 * GIB),
        "p95_peak_bytes": str(4 * GIB),
        "max_peak_bytes": str(4 * GIB),
        "planned_error_percent": 25.0,
        "latest_time": "2026-09-21T14:13:20Z",
    }
    measured.state.observations = [observed(4)]
    assert json.loads(run("--json").stdout)["launches"][0]["planned_error_percent"] is None


def test_every_page_is_counted(measured) -> None:
    measured.state.observations = [observed(4, 5)] * 2345
    assert json.loads(run("--json").stdout)["launches"][0]["count"] == 2345
    assert [request.page_size for request in measured.state.asked(pb.ListObservationsRequest)] == [1000, 1000, 1000]


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (100, 100), (1500, 1500), (None, 2345)])
async def test_a_program_gets_as_many_as_it_asks_for(measured, limit: int | None, count: int) -> None:
    measured.state.observations = [observed(4, 5)] * 2345
    async with Suite() as suite:
        assert len(await suite.observations(limit=limit)) == count


def test_a_ledger_that_does_not_answer_is_said(run_dir) -> None:
    done = run()
    assert (done.exit_code, done.stdout) == (4, "")
