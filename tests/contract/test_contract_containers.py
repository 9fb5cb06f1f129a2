"""The container files name what exists, and keep the promises of docs/containers.md. No container engine is needed."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from weighbridge_engines.ds4.kind import Ds4Kind
from weighbridge_engines.settings import EngineSettings

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = Path(sys.executable).with_name("docker-compose")

DOCKERFILES = sorted(
    str(path.relative_to(REPOSITORY))
    for pattern in ("services/*/Dockerfile", "clients/*/Dockerfile")
    for path in REPOSITORY.glob(pattern)
)
SERVICES = ("ledger", "fit", "engines")

Instruction = tuple[str, str]


def instructions(dockerfile: str) -> list[Instruction]:
    """Every instruction of a Dockerfile with its argument, continued lines joined and comments left out."""
    joined = ""
    found = []
    for line in (REPOSITORY / dockerfile).read_text().splitlines():
        if line.lstrip().startswith("#") or not line.strip():
            continue
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            word, _, argument = joined.strip().partition(" ")
            found.append((word, argument))
            joined = ""
    return found


def last_stage(dockerfile: str) -> list[Instruction]:
    steps = instructions(dockerfile)
    return steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]


@pytest.fixture(scope="module")
def compose() -> Mapping[str, Any]:
    """docker-compose.yml with anchors, defaults and every profile resolved."""
    done = subprocess.run(
        [COMPOSE, "--profile", "*", "config", "--format", "json"],
        cwd=REPOSITORY,
        env={**os.environ, "DOCKER_HOST": "unix:///dev/null"},
        capture_output=True,
        check=True,
    )
    loaded: Mapping[str, Any] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_a_dockerfile(service: str) -> None:
    assert f"services/{service}/Dockerfile" in DOCKERFILES


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_a_dockerfile_copies_what_exists(dockerfile: str) -> None:
    copied = [shlex.split(argument)[:-1] for word, argument in instructions(dockerfile) if word == "COPY"]
    sources = [source for one in copied if not one[0].startswith("--from") for source in one]
    assert sources
    assert [source for source in sources if not (REPOSITORY / source).exists()] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_an_image_builds_without_buildkit(dockerfile: str) -> None:
    commands = [argument for word, argument in instructions(dockerfile) if word == "RUN"]
    assert commands
    assert [command for command in commands if "--mount" in command or "<<" in command] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_an_image_runs_as_an_ordinary_user_that_gets_its_signals(dockerfile: str) -> None:
    steps = dict(last_stage(dockerfile))
    assert steps["USER"] == "10001:10001"
    assert steps["STOPSIGNAL"] == "SIGTERM"
    assert isinstance(json.loads(steps["ENTRYPOINT"]), list), "a shell in between would swallow SIGTERM"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_starts_and_checks_a_module_that_exists(service: str) -> None:
    steps = dict(last_stage(f"services/{service}/Dockerfile"))
    entrypoint = json.loads(steps["ENTRYPOINT"])
    assert entrypoint == ["python", "-m", f"weighbridge_{service}"]
    check = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    assert check[:2] == ["python", "-m"]
    for module in (f"{entrypoint[2]}.__main__", check[2]):
        assert importlib.util.find_spec(module) is not None, module


def test_compose_builds_from_dockerfiles_that_exist(compose: Mapping[str, Any]) -> None:
    named = {one["build"]["dockerfile"] for one in compose["services"].values() if "build" in one}
    assert named == set(DOCKERFILES)


def test_compose_mounts_files_that_exist(compose: Mapping[str, Any]) -> None:
    mounted = [
        Path(volume["source"])
        for one in compose["services"].values()
        for volume in one.get("volumes", [])
        if volume["type"] == "bind"
    ]
    assert mounted
    assert [path for path in mounted if not path.exists()] == []


def test_a_health_check_asks_the_engine_that_its_container_runs(compose: Mapping[str, Any]) -> None:
    default = json.loads(dict(last_stage("services/engines/Dockerfile"))["HEALTHCHECK"].partition("CMD ")[2])
    engines = {name: one for name, one in compose["services"].items() if name.startswith("engine-")}
    assert set(engines) == {"engine-mlx", "engine-sd", "engine-ds4"}
    for name, one in engines.items():
        check = one["healthcheck"]["test"][1:] if "healthcheck" in one else default
        assert (check[-1], one["command"]) == (name, [name.removeprefix("engine-")])


@pytest.mark.parametrize("kind", ["sd", "ds4"])
def test_an_engine_gets_its_program_read_only_and_only_when_it_is_asked_for(
    compose: Mapping[str, Any], kind: str
) -> None:
    engine = compose["services"][f"engine-{kind}"]
    (program,) = (volume for volume in engine["volumes"] if volume["type"] == "bind")
    setting = f"WEIGHBRIDGE_ENGINES_{kind.upper()}_SERVER"
    assert (program["target"], program["read_only"]) == (engine["environment"][setting], True)
    assert engine["profiles"] == [kind], "whoever has no such program starts the rest as before"
    assert kind in engine["build"]["args"]["EXTRAS"].split(",")


def test_ds4_has_a_place_for_conversations_and_the_time_to_write_them(compose: Mapping[str, Any]) -> None:
    engine = compose["services"]["engine-ds4"]
    folder = engine["environment"]["WEIGHBRIDGE_ENGINES_DS4_KV_DIR"]
    (volume,) = (volume for volume in engine["volumes"] if volume["target"] == folder)
    assert volume["type"] == "volume" and not volume.get("read_only"), "everything else in the container is read-only"
    made = dict(last_stage("services/engines/Dockerfile"))["RUN"]
    assert f"-m 0700 /run/weighbridge {folder}" in made, "a new volume takes its owner from the image"
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", engine["stop_grace_period"]).groups(default="0")  # type: ignore[union-attr]
    calls_s = EngineSettings.model_fields["grace_s"].default
    assert 60 * int(minutes) + int(seconds) > calls_s + Ds4Kind.least_stop_grace_s


def test_every_container_is_locked_down(compose: Mapping[str, Any]) -> None:
    for name, one in compose["services"].items():
        assert one["read_only"] is True, name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert int(one["mem_limit"]) > 0, name
        assert one["pids_limit"] > 0, name


def test_nothing_reaches_outside_and_nothing_is_published(compose: Mapping[str, Any]) -> None:
    assert all(network["internal"] for network in compose["networks"].values())
    assert [name for name, one in compose["services"].items() if one.get("ports")] == []
    assert {one["network_mode"] for one in compose["services"].values() if "network_mode" in one} == {"none"}


def test_the_ledger_sees_the_processes_it_books_and_hands_out_what_their_container_has(
    compose: Mapping[str, Any],
) -> None:
    ledger = compose["services"]["ledger"]
    for engine in (compose["services"][f"engine-{kind}"] for kind in ("mlx", "sd", "ds4")):
        assert ledger["pid"] == engine["pid"] == "service:processes"
        assert ledger["mem_limit"] == engine["mem_limit"]
