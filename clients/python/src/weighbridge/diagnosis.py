"""What is found of the suite on this machine, what is missing, and the one next step."""

import asyncio
import os
import platform
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from weighbridge_proto import targets
from weighbridge_proto.errors import UNREACHABLE
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError
from weighbridge.findings import Check, State
from weighbridge.models import model_named
from weighbridge.pull.folder import LOCK_NAME, WORK_NAME
from weighbridge.reach import listener
from weighbridge.runtimes import check_runtime
from weighbridge.sizes import format_size
from weighbridge.supervision.lock import is_supervised
from weighbridge.supervision.services import ENGINE_KINDS
from weighbridge.version import DISTRIBUTIONS, installed_version

CLIENT_DISTRIBUTIONS = ("weighbridge", "weighbridge-proto")
START = "weighbridge up"
RESTART = "end the suite with Ctrl-C and start it again: weighbridge up"
INSTALL = "pip install 'weighbridge[suite]'"


def check_versions(found: Mapping[str, str | None], suite_answers: bool) -> list[Check]:
    """Whether the distributions (name to version) are complete and of one release."""
    checks = []
    own = found.get("weighbridge")
    for name, version in found.items():
        if version is None:
            needed = name in CLIENT_DISTRIBUTIONS
            # A client of a suite that runs elsewhere needs no services here.
            advice = "" if suite_answers and not needed else INSTALL
            state = State.BROKEN if needed else State.ABSENT
            checks.append(Check(name, state, "not installed", advice))
        elif own is not None and version != own:
            detail = f"{version}, but weighbridge is {own}"
            checks.append(Check(name, State.BROKEN, detail, f"pip install '{name}=={own}'"))
        else:
            checks.append(Check(name, State.OK, version))
    return checks


def check_run_folder(folder: Path, longest_socket: int = targets.MAX_SOCKET_PATH_BYTES) -> Check:
    """Whether the run folder can hold this user's sockets and nobody else can reach them."""
    name = "run folder"
    longest = max(len(os.fsencode(folder / f"{service}.sock")) for service in targets.SERVICES)
    if longest > longest_socket:
        return Check(
            name, State.BROKEN, f"{folder} is too long for sockets", "export WEIGHBRIDGE_RUN_DIR=/tmp/weighbridge"
        )
    try:
        status = folder.stat()
    except FileNotFoundError:
        return Check(name, State.OK, f"{folder} (will be made)")
    except OSError as error:
        return Check(name, State.BROKEN, f"{folder}: {error.strerror}", "export WEIGHBRIDGE_RUN_DIR=/a/folder/of/yours")
    if status.st_uid != os.getuid():
        return Check(
            name, State.BROKEN, f"{folder} belongs to another user", "export WEIGHBRIDGE_RUN_DIR=/a/folder/of/yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        return Check(name, State.BROKEN, f"{folder} is open to other users", f"chmod 700 {folder}")
    return Check(name, State.OK, str(folder))


async def check_service(suite: Suite, name: str, expected: bool) -> Check:
    """Whether service ``name`` answers and serves. ``expected``: a suite is up, so it should."""
    target = suite.target(name)
    try:
        health = await suite.health(name)
    except CallError as failed:
        process = listener(target) if failed.failure.reason == UNREACHABLE else None
        if process is not None:
            which = f"process {process}" if process else "the process there"
            found = f"does not answer at {target}: {which} listens and says nothing"
            return Check(name, State.BROKEN, found, f"kill -9 {process}" if process else RESTART)
        if expected:
            return Check(name, State.BROKEN, f"does not answer at {target}: {failed.failure.reason}", RESTART)
        return Check(name, State.ABSENT, "not running", START)
    stopped = [service for service, serves in health.items() if not serves]
    if stopped:
        return Check(name, State.BROKEN, f"not serving {', '.join(stopped)}", "weighbridge ps")
    return Check(name, State.OK, f"serves at {target}")


def check_machine(capacity: machine_pb2.Capacity) -> list[Check]:
    """What the machine can hold, and what about its readings should be known."""
    total = capacity.total
    detail = (
        f"{machine_pb2.PoolKind.Name(capacity.pool).removeprefix('POOL_KIND_').lower()}, "
        f"{format_size(capacity.total_ram_bytes)}, of it {format_size(total.effective_bytes)} for models, "
        f"{format_size(total.committed_bytes)} committed"
    )
    if total.effective_bytes <= 0:
        return [Check("machine", State.BROKEN, f"{detail}: no model can load", "weighbridge capacity")]
    return [Check("machine", State.OK, detail), *(Check("machine", State.OK, note) for note in capacity.notes)]


FACTS_DISAGREE = "FACTS_DISAGREE"
"""Code of the note that a plan has where files on disk are not those that their manifest describes."""


async def check_catalogue(suite: Suite) -> list[Check]:
    """The catalogue, and whether its models that are here are those that their manifests describe.

    Raises CallError when fit cannot be asked.
    """
    listed = await suite.list_models()
    here = [model for model in listed.models if model.on_disk]
    checks = [Check("catalogue", State.OK, f"{len(listed.models)} models, {len(here)} of them here")]
    checks += [Check("catalogue", State.BROKEN, note, "correct or remove the manifest") for note in listed.notes]
    checks += [check for model in listed.models if (check := check_download(model)) is not None]
    for model in here:
        name = f"model {model.catalog_id}"
        try:
            plan = await suite.plan_model(model_named(model.catalog_id))
        except CallError as failed:
            checks.append(Check(name, State.BROKEN, failed.failure.message, f"weighbridge pull {model.catalog_id}"))
            continue
        wrong = next((note.message for note in plan.notes if note.code == FACTS_DISAGREE), "")
        if wrong:
            checks.append(Check(name, State.BROKEN, wrong, f"weighbridge pull {model.catalog_id}"))
        else:
            pinned = "as its manifest says" if model.HasField("facts") else "its manifest pins no facts"
            checks.append(Check(name, State.OK, f"here, {pinned}"))
    return checks


def check_leftovers(model: fit_service_pb2.CatalogModel) -> Check | None:
    """A folder of `model` that holds files and is not whole: one is missing, or of another size than the manifest
    says."""
    folder = Path(model.folder)
    wrong = []
    found = False
    for file in model.files:
        path = folder / (file.path or file.name)
        try:
            size = path.stat().st_size
        except OSError:
            wrong.append(f"{file.path or file.name} is missing")
            continue
        found = True
        if size != file.size_bytes:
            wrong.append(f"{file.path or file.name} has {size:,} bytes instead of {file.size_bytes:,}")
    if not found:
        return None
    detail = f"its folder is there and not whole: {wrong[0]}" if wrong else "its folder is there and not whole"
    return Check(f"model {model.catalog_id}", State.BROKEN, detail, f"weighbridge pull {model.catalog_id}")


def check_download(model: fit_service_pb2.CatalogModel) -> Check | None:
    """What is left of a download of `model` that did not come to its end, or has not yet; None if nothing is."""
    work = Path(model.folder) / WORK_NAME
    if model.on_disk or not Path(model.folder).is_absolute():
        return None
    try:
        parts = [path.stat().st_size for path in work.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    except OSError:
        return None
    if not any(parts):
        return check_leftovers(model)
    detail = f"its download is under way or was broken off, {format_size(sum(parts))} of it wait"
    return Check(f"model {model.catalog_id}", State.ABSENT, detail, f"weighbridge pull {model.catalog_id}")


def _is_configured(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a suite that is up has the service ``name``. Which engines it has is for whoever started it to say."""
    if not name.startswith("engine-"):
        return True
    return targets.target_variable(name) in environ or targets.socket_path(name, environ).exists()


def _not_started(check: Check, running: Sequence[str]) -> Check:
    """An engine that a suite was started without, beside those ``running``, is nothing to do something about."""
    if check.state is not State.ABSENT:
        return check
    engines = ",".join(kind for kind in ENGINE_KINDS if f"engine-{kind}" in (*running, check.name))
    return Check(check.name, State.ABSENT, f"not started: weighbridge up --engines {engines}")


async def diagnose(suite: Suite, environ: Mapping[str, str]) -> list[Check]:
    """Look at everything. Starts and changes nothing."""
    folder = targets.run_dir(environ)
    folder_check = check_run_folder(folder)
    python = f"{platform.python_version()} at {sys.executable}"
    checks = [Check("python", State.OK, python)]
    services = ["ledger", "fit", *(f"engine-{kind}" for kind in ENGINE_KINDS)]
    try:
        for name in services:
            suite.target(name)
    except ValueError:  # told by the check of the run folder
        found = {name: installed_version(name) for name in DISTRIBUTIONS}
        return [*checks, *check_versions(found, suite_answers=False), folder_check]
    states = await asyncio.gather(*(check_service(suite, name, expected=False) for name in services))
    answering = any(check.state is not State.ABSENT for check in states)
    if answering or is_supervised(folder):
        states = await asyncio.gather(
            *(check_service(suite, name, expected=_is_configured(name, environ)) for name in services)
        )
        running = [check.name for check in states if check.state is not State.ABSENT]
        states = [_not_started(check, running) for check in states]
    found = {name: installed_version(name) for name in DISTRIBUTIONS}
    checks += [*check_versions(found, suite_answers=answering), folder_check, *states]
    for kind in ENGINE_KINDS:
        checks += await check_runtime(suite, kind)
    try:
        checks += check_machine((await suite.capacity()).capacity)
    except CallError:
        checks.append(Check("machine", State.ABSENT, "known once the ledger runs"))
    try:
        checks += await check_catalogue(suite)
    except CallError:
        checks.append(Check("catalogue", State.ABSENT, "known once fit runs"))
    return checks
