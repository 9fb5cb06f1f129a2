"""What there is for ds4 here, as one JSON object: ``python -m weighbridge_engines.ds4``.

`weighbridge doctor` asks, whether the engine service runs or not. Either ``missing`` (why there is no ds4-server, and
what to do), or ``path``, ``layout``, ``compute``, ``lacks`` (flags of plans that the build does not know) and
``metal_sources`` (the folder that it must be started in, null where there is none). In both cases ``lock_file``,
``lock_pid`` (the process that holds the lock that all ds4 share; null: none, or it cannot be told), ``kv_folder`` and
``kv_bytes``.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weighbridge_engines.ds4 import binary, checkpoints, lock
from weighbridge_engines.ds4.arguments import COMPUTE, WITH_VALUE, WITHOUT_VALUE
from weighbridge_engines.ds4.binary import Ds4Binary
from weighbridge_engines.supervisor.program import BinaryMissingError


def main() -> None:
    """Look, and print what is found."""
    print(json.dumps({**_program(os.environ), **_lock(os.environ), **_checkpoints(os.environ)}))


def lacking(build: Ds4Binary) -> list[str]:
    """The flags that a plan may need and that ``build`` does not know."""
    drafting = {"--mtp-model": build.drafter_flag, "--glm-mtp": build.draft_block_flag}
    # Without those that choose what it computes on: a plan asks for what the build was made for.
    others = (WITH_VALUE | WITHOUT_VALUE) - drafting.keys() - COMPUTE
    return sorted(others - build.flags) + [flag for flag, known in drafting.items() if known is None]


def _program(environ: Mapping[str, str]) -> dict[str, object]:
    try:
        path = binary.PROGRAM.locate(environ.get("WEIGHBRIDGE_ENGINES_DS4_SERVER", ""), environ)
        build = binary.probe(path, binary.PROGRAM.cache_folder(environ))
    except BinaryMissingError as missing:
        return {"missing": str(missing)}
    folder = build.metal_folder
    return {
        "path": str(build.path),
        "layout": build.layout,
        "compute": build.compute,
        "lacks": lacking(build),
        "metal_sources": None if folder is None else str(folder),
    }


def _lock(environ: Mapping[str, str]) -> dict[str, object]:
    file = environ.get("WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE", "")
    return {"lock_file": file or lock.DEFAULT_LOCK_FILE, "lock_pid": lock.holder(file)}


def _checkpoints(environ: Mapping[str, str]) -> dict[str, object]:
    named = environ.get("WEIGHBRIDGE_ENGINES_DS4_KV_DIR", "")
    folder = Path(named).expanduser() if named else checkpoints.default_root()
    kept = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # ds4 replaces its files while somebody counts
            kept += file.stat().st_size if file.is_file() else 0
    return {"kv_folder": str(folder), "kv_bytes": kept}


if __name__ == "__main__":
    main()
