"""Main of an engine service: ``python -m weighbridge_engines mlx``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from weighbridge_common.server import AsyncClosable, ServerContext, run_service
from weighbridge_common.settings import USAGE_EXIT_CODE, load

from weighbridge_engines.host.kind import Kind
from weighbridge_engines.host.service import build_engine_service
from weighbridge_engines.settings import EngineSettings

KINDS = ("mlx", "sd", "ds4")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the engine service of the kind named; ends the process by SystemExit."""
    wanted = list(sys.argv[1:] if arguments is None else arguments)
    if len(wanted) != 1 or wanted[0] not in KINDS:
        print(f"Usage: python -m weighbridge_engines {{{','.join(KINDS)}}}", file=sys.stderr)
        raise SystemExit(USAGE_EXIT_CODE)
    settings = load(EngineSettings)

    async def build(context: ServerContext) -> AsyncClosable:
        return await build_engine_service(context, _kind(wanted[0], settings), settings)

    run_service(settings, f"engine-{wanted[0]}", build)


def _kind(name: str, settings: EngineSettings) -> Kind:
    """What is imported is what is needed: each kind brings libraries of its own."""
    if name == "sd":
        from weighbridge_engines.sd_server.kind import SdKind

        return SdKind(settings.sd_server)
    if name == "ds4":
        from weighbridge_engines.ds4.kind import Ds4Kind

        return Ds4Kind(
            settings.ds4_server,
            lock_file=settings.ds4_lock_file,
            checkpoints_root=Path(settings.ds4_kv_dir).expanduser() if settings.ds4_kv_dir else None,
            idle_limit_s=settings.ds4_idle_limit_s,
        )
    from weighbridge_engines.mlx_qwen.kind import MlxKind

    return MlxKind(log_level=settings.log_level)


if __name__ == "__main__":
    main()
