"""`doctor`: what it finds, and the one next step it names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from weighbridge import Suite
from weighbridge.cli import main
from weighbridge.diagnosis import (
    Check,
    State,
    check_catalogue,
    check_machine,
    check_run_folder,
    check_sd_server,
    check_versions,
    diagnose,
    next_step,
)
from weighbridge.pull.folder import WORK_NAME
from weighbridge.supervision.lock import RunLock
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
    missing = await check_sd_server()
    assert missing is not None
    assert (missing.state, missing.next_step) == (State.ABSENT, ""), "chats need none"
    assert "WEIGHBRIDGE_ENGINES_SD_SERVER" in missing.detail
    program = tmp_path / "sd-server"
    program.write_text("#!/bin/sh\necho 'stable-diffusion.cpp version v9, commit abc'\necho '  --listen-port N'\n")
    program.chmod(0o755)
    there = await check_sd_server()
    assert there is not None
    assert (there.state, there.detail) == (State.OK, f"stable-diffusion.cpp v9, cpu, at {program}")


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
