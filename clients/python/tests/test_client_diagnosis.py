"""`doctor`: what it finds, and the one next step it names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from weighbridge import Suite
from weighbridge.cli import main
from weighbridge.diagnosis import check_catalogue, check_machine, check_run_folder, check_versions, diagnose
from weighbridge.findings import Check, State, next_step
from weighbridge.pull.folder import WORK_NAME
from weighbridge.runtimes import check_ds4_room, check_found, check_runtime
from weighbridge.supervision.lock import RunLock
from weighbridge_proto.engines.v1 import engine_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_what_is_broken_goes_before_what_is_absent() -> None:
    fine = Check("a", State.OK, "")
    absent = Check("b", State.ABSENT, "", "start it")
    broken = Check("c", State.BROKEN, "", "mend it")
    assert next_step([fine, absent, broken]) == "mend it"
    assert next_step([fine, absent]) == "start it"
    assert next_step([fine]) == ""


def test_versions_must_be_there_and_of_one_release() -> None:
    found = by_name(check_versions({"weighbridge": "1.0", "weighbridge-fit": "0.9", "weighbridge-ledger": None}, False))
    assert found["weighbridge"].state is State.OK
    assert (found["weighbridge-fit"].state, found["weighbridge-fit"].next_step) == (
        State.BROKEN,
        "pip install 'weighbridge-fit==1.0'",
    )
    assert found["weighbridge-ledger"].state is State.ABSENT
    assert "weighbridge[suite]" in found["weighbridge-ledger"].next_step
    client_alone = by_name(check_versions({"weighbridge": "1.0", "weighbridge-ledger": None}, True))
    assert client_alone["weighbridge-ledger"].next_step == "", "a suite that answers needs no services here"


def test_the_run_folder_must_be_private_and_short(short_dir: Path) -> None:
    assert check_run_folder(short_dir).state is State.OK
    assert check_run_folder(short_dir / "later").state is State.OK
    short_dir.chmod(0o755)
    assert check_run_folder(short_dir).next_step == f"chmod 700 {short_dir}"
    assert check_run_folder(Path("/" + "x" * 100)).state is State.BROKEN


def test_a_machine_that_can_hold_nothing_is_broken() -> None:
    assert check_machine(machine_pb2.Capacity(total=machine_pb2.Ceiling(effective_bytes=1)))[0].state is State.OK
    assert check_machine(machine_pb2.Capacity(notes=["No memory."]))[0].state is State.BROKEN


async def test_a_running_suite_is_found_whole(fake_suite: Any) -> None:
    async with Suite() as suite:
        found = by_name(await diagnose(suite, os.environ))
    assert [found[name].state for name in ("ledger", "fit", "engine-mlx", "mlx runtime", "machine")] == [State.OK] * 5
    assert found["mlx runtime"].detail == "mlx-lm 0.32.2"


async def test_services_missing_from_a_suite_that_is_up_are_broken_and_else_only_absent(run_dir: Path) -> None:
    async with Suite() as suite:
        assert by_name(await diagnose(suite, os.environ))["ledger"].state is State.ABSENT
        lock = RunLock(run_dir)
        lock.acquire()
        try:
            assert by_name(await diagnose(suite, os.environ))["ledger"].state is State.BROKEN
        finally:
            lock.release()


async def test_an_engine_that_a_suite_was_started_without_is_nothing_to_mend(fake_suite: Any) -> None:
    async with Suite() as suite:
        found = by_name(await diagnose(suite, os.environ))
        assert (found["engine-sd"].state, found["engine-sd"].next_step) == (State.ABSENT, "")
        assert "weighbridge up --engines mlx,sd" in found["engine-sd"].detail
        (fake_suite.run_dir / "engine-sd.sock").touch()
        assert by_name(await diagnose(suite, os.environ))["engine-sd"].state is State.BROKEN


async def test_an_engine_that_runs_says_which_sd_server_it_found(image_suite: Any) -> None:
    state = image_suite.state
    async with Suite() as suite:
        state.runtime = ("stable-diffusion.cpp 1a2b3c, vulkan", "")
        found = by_name(await diagnose(suite, os.environ))["sd runtime"]
        assert (found.state, found.detail) == (State.OK, "stable-diffusion.cpp 1a2b3c, vulkan")
        state.runtime = ("stable-diffusion.cpp (not here)", "It is not on PATH.")
        found = by_name(await diagnose(suite, os.environ))["sd runtime"]
        assert (found.state, found.detail) == (State.BROKEN, "It is not on PATH.")
        assert "WEIGHBRIDGE_ENGINES_SD_SERVER" in found.next_step


async def test_without_an_engine_sd_server_is_looked_for_as_the_engine_would(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHBRIDGE_ENGINES_SD_SERVER", str(tmp_path))
    async with Suite() as suite:
        (missing,) = await check_runtime(suite, "sd")
    assert (missing.state, missing.next_step) == (State.ABSENT, ""), "chats need none"
    assert "WEIGHBRIDGE_ENGINES_SD_SERVER" in missing.detail
    program = tmp_path / "sd-server"
    program.write_text("#!/bin/sh\necho 'stable-diffusion.cpp version v9, commit abc'\necho '  --listen-port N'\n")
    program.chmod(0o755)
    async with Suite() as suite:
        (there,) = await check_runtime(suite, "sd")
    assert (there.state, there.detail) == (State.OK, f"stable-diffusion.cpp v9, cpu, at {program}")


FOUND_DS4 = {
    "path": "/opt/ds4/ds4-server",
    "layout": "2026-07",
    "compute": "metal",
    "lacks": [],
    "metal_sources": "/opt/ds4",
    "lock_file": "/tmp/ds4.lock",
    "lock_pid": None,
    "kv_folder": "/home/me/kv",
    "kv_bytes": 3 << 30,
}
"""What the finder prints of a Mac where all is well."""


def ds4_engine(state: str = "READY", pid: int = 77) -> engine_service_pb2.Engine:
    engine = engine_service_pb2.Engine(state=engine_service_pb2.EngineState.Value(f"ENGINE_STATE_{state}"))
    engine.model.process.pid = pid
    return engine


def test_a_ds4_server_is_told_with_its_sources_and_its_checkpoints() -> None:
    runtime = check_found("ds4", FOUND_DS4)
    assert (runtime.state, runtime.detail) == (State.OK, "ds4 of 2026-07 or later, metal, at /opt/ds4/ds4-server")
    found = by_name(check_ds4_room(FOUND_DS4, None))
    assert set(found) == {"ds4 metal sources", "ds4 checkpoints"}
    assert found["ds4 checkpoints"].detail == "3.00 GiB of conversations in /home/me/kv"


def test_what_a_ds4_build_lacks_is_told_before_a_plan_is_refused() -> None:
    found = by_name(check_ds4_room({**FOUND_DS4, "lacks": ["--dspark", "--vision"]}, None))
    assert "--dspark, --vision" in found["ds4 flags"].detail


@pytest.mark.parametrize(("engine", "state"), [(None, State.ABSENT), (ds4_engine(), State.BROKEN)])
def test_metal_without_its_sources_cannot_start(engine: Any, state: State) -> None:
    found = by_name(check_ds4_room({**FOUND_DS4, "metal_sources": None}, engine))
    assert found["ds4 metal sources"].state is state
    assert "WEIGHBRIDGE_ENGINES_DS4_SERVER" in found["ds4 metal sources"].next_step
    assert "ds4 metal sources" not in by_name(check_ds4_room({**FOUND_DS4, "compute": "cuda"}, engine))


@pytest.mark.parametrize(
    ("engine", "holder", "state"),
    [
        (None, 4321, State.ABSENT),
        (ds4_engine(pid=77), 4321, State.BROKEN),
        (ds4_engine(pid=77), 77, None),
        (ds4_engine("LOADING", pid=0), 4321, None),
        (ds4_engine("EMPTY", pid=0), 4321, State.BROKEN),
    ],
)
def test_a_lock_is_in_the_way_unless_it_is_this_suite_s_own(engine: Any, holder: int, state: State | None) -> None:
    check = by_name(check_ds4_room({**FOUND_DS4, "lock_pid": holder}, engine)).get("ds4 lock")
    assert (None if check is None else check.state) is state
    if check is not None:
        assert f"process {holder}" in check.detail


async def test_ds4_is_looked_for_by_the_engine_s_own_finder(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHBRIDGE_ENGINES_DS4_SERVER", str(tmp_path))
    monkeypatch.setenv("WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE", str(tmp_path / "lock"))
    async with Suite() as suite:
        (missing,) = await check_runtime(suite, "ds4")
        assert (missing.state, missing.next_step) == (State.ABSENT, ""), "other chats need none"
        program = tmp_path / "ds4-server"
        program.write_text("#!/bin/sh\necho '  --ctx N'\necho '  --kv-disk-dir DIR'\n")
        program.chmod(0o755)
        found = by_name(await check_runtime(suite, "ds4"))
    assert found["ds4 runtime"].detail == f"ds4 of 2026-05 or later, cpu, at {program}"
    assert "--ssd-streaming" in found["ds4 flags"].detail


def test_a_finder_that_says_nothing_is_an_installation_to_mend() -> None:
    assert (check_found("ds4", {}).state, check_found("sd", {}).state) == (State.BROKEN, State.BROKEN)


async def test_a_download_that_did_not_end_and_a_manifest_left_out_are_found(fake_suite: Any, tmp_path: Path) -> None:
    state = fake_suite.state
    state.models = [
        fit_service_pb2.CatalogModel(catalog_id=name, folder=folder)
        for name, folder in (("half", str(tmp_path / "half")), ("none", str(tmp_path / "none")), ("odd", "relative"))
    ]
    (tmp_path / "half" / WORK_NAME / "hub").mkdir(parents=True)
    (tmp_path / "half" / WORK_NAME / "lock").write_text("")
    (tmp_path / "half" / WORK_NAME / "a.part").write_bytes(b"x" * 3072)
    (tmp_path / "none" / WORK_NAME).mkdir(parents=True)
    (tmp_path / "none" / WORK_NAME / "lock").write_text("")
    state.fits.notes.append("mine.json, name: Field required.")
    async with Suite() as suite:
        checks = await check_catalogue(suite)
    assert [(check.name, check.state) for check in checks] == [
        ("catalogue", State.OK),
        ("catalogue", State.BROKEN),
        ("model half", State.ABSENT),
    ]
    assert checks[1].detail == "mine.json, name: Field required."
    assert "3.0 KiB" in checks[2].detail
    assert checks[2].next_step == "weighbridge pull half"


def test_the_command_prints_it_for_people_and_programs(fake_suite: Any) -> None:
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "serves at unix:" in shown.stdout
    printed = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert {check["name"] for check in printed["checks"]} >= {"python", "weighbridge", "ledger", "machine"}
    assert "next_step" in printed


def test_the_command_exits_1_when_something_is_broken(fake_suite: Any) -> None:
    fake_suite.run_dir.chmod(0o755)
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == 1
    assert f"Next step: chmod 700 {fake_suite.run_dir}" in shown.stdout
    fake_suite.run_dir.chmod(0o700)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
