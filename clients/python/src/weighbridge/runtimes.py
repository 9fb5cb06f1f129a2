"""Which runtimes the engines of this machine have: as each engine says itself, else as its own program looks for it."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from weighbridge_proto.engines.v1 import engine_service_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError
from weighbridge.findings import Check, State
from weighbridge.sizes import format_size
from weighbridge.supervision.services import is_installed
from weighbridge.version import installed_version

INSTALL_ENGINES = "pip install 'weighbridge[suite]'"
INSTALL_MLX = "pip install 'weighbridge-engines[mlx]'"
NAME_SD_SERVER = "put sd-server on PATH, or name it with WEIGHBRIDGE_ENGINES_SD_SERVER, and start the suite again"
NAME_DS4_SERVER = "put ds4-server on PATH, or name it with WEIGHBRIDGE_ENGINES_DS4_SERVER, and start the suite again"

RUNTIME_STEPS = {"mlx": INSTALL_MLX, "sd": NAME_SD_SERVER, "ds4": NAME_DS4_SERVER}
"""What to do about an engine that runs without its runtime."""

FINDERS = {"sd": "weighbridge_engines.sd_server", "ds4": "weighbridge_engines.ds4"}
"""Modules that print what is here for an engine, as JSON: services are not imported by a client, so they are run."""

FINDER_TIMEOUT_S = 60.0
"""The first time a finder hashes the program and its libraries, some hundred MB, and asks it for its flags."""

_SETTLED = (engine_service_pb2.ENGINE_STATE_EMPTY, engine_service_pb2.ENGINE_STATE_READY)
"""States in which it is known which process is the engine's."""


async def check_runtime(suite: Suite, kind: str) -> list[Check]:
    """Whether the engine ``kind`` can start its runtime, and what of it should be known."""
    engine = await _engine_or_none(suite, kind)
    found = None
    # What else there is to know of ds4 (who has its lock) no engine says.
    if kind in FINDERS and (engine is None or kind == "ds4") and is_installed("weighbridge_engines"):
        found = await _find(FINDERS[kind])
    if engine is not None:
        checks = [check_engine(engine, kind)]
    elif kind == "mlx":
        checks = [check_mlx()]
    else:
        checks = [] if found is None else [check_found(kind, found)]
    return checks if kind != "ds4" or found is None else [*checks, *check_ds4_room(found, engine)]


def check_engine(engine: engine_service_pb2.Engine, kind: str) -> Check:
    """Whether the engine ``kind``, which says so itself, can start its runtime."""
    name = f"{kind} runtime"
    if not engine.available:
        return Check(name, State.BROKEN, engine.unavailable_reason, RUNTIME_STEPS.get(kind, "weighbridge ps"))
    return Check(name, State.OK, engine.runtime_version)


def check_mlx() -> Check:
    """Whether MLX is installed here, for an engine that is not running."""
    version = installed_version("mlx-lm")
    if version is None or not is_installed("mlx"):
        return Check("mlx runtime", State.ABSENT, "mlx-lm is not installed", INSTALL_MLX)
    return Check("mlx runtime", State.OK, f"mlx-lm {version} is installed")


def check_found(kind: str, found: Mapping[str, Any]) -> Check:
    """Which program is here for the engine ``kind``, which does not run, by what its finder printed."""
    name = f"{kind} runtime"
    if not found:
        return Check(name, State.BROKEN, f"what is here for the engine {kind} cannot be told", INSTALL_ENGINES)
    if "missing" in found:
        return Check(name, State.ABSENT, found["missing"])  # only its models need it, and the text says what to do
    if kind == "sd":
        return Check(name, State.OK, f"stable-diffusion.cpp {found['version']}, {found['backend']}, at {found['path']}")
    return Check(name, State.OK, f"ds4 of {found['layout']} or later, {found['compute']}, at {found['path']}")


def check_ds4_room(found: Mapping[str, Any], engine: engine_service_pb2.Engine | None) -> list[Check]:
    """What stands in the way of ds4, and what it keeps on disk: flags, Metal's sources, its lock, its checkpoints.

    Args:
        found: what its finder printed.
        engine: as it says itself; None: it does not run.
    """
    checks: list[Check] = []
    if "missing" in found:
        return checks
    if lacks := found.get("lacks"):
        detail = f"this build does not know {', '.join(lacks)}: plans that need them are refused"
        checks.append(Check("ds4 flags", State.OK, detail))
    if found.get("compute") == "metal":
        folder = found.get("metal_sources")
        checks.append(
            Check("ds4 metal sources", State.OK, folder)
            if folder
            else Check(
                "ds4 metal sources",
                State.BROKEN if engine is not None else State.ABSENT,
                "the folder `metal` of its sources is not beside ds4-server, and it compiles them when it starts",
                "put ds4-server back into the folder that it was built in, or name that folder with "
                "WEIGHBRIDGE_ENGINES_DS4_SERVER",
            )
        )
    if (holder := found.get("lock_pid")) is not None and not _may_be_ours(holder, engine):
        detail = f"{found['lock_file']} is held by process {holder}, outside this suite: one machine runs one ds4"
        state = State.BROKEN if engine is not None else State.ABSENT
        checks.append(Check("ds4 lock", state, detail, f"end process {holder}"))
    if folder := found.get("kv_folder"):
        kept = format_size(int(found.get("kv_bytes", 0)))
        checks.append(Check("ds4 checkpoints", State.OK, f"{kept} of conversations in {folder}"))
    return checks


def _may_be_ours(holder: int, engine: engine_service_pb2.Engine | None) -> bool:
    """Whether process ``holder`` is, or may be just now, the engine's own."""
    if engine is None:
        return False
    return engine.state not in _SETTLED or engine.model.process.pid == holder


async def _engine_or_none(suite: Suite, kind: str) -> engine_service_pb2.Engine | None:
    try:
        return (await suite.engine(kind).describe()).engine
    except CallError:
        return None


async def _find(module: str) -> Mapping[str, Any]:
    """What ``module`` prints; empty: nothing that can be read."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(FINDER_TIMEOUT_S):
            printed, _ = await process.communicate()
        found = json.loads(printed)
    except (TimeoutError, ValueError):
        return {}
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return found if isinstance(found, dict) else {}
