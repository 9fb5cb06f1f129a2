"""Main of an engine service: ``python -m weighbridge_engines mlx``."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from weighbridge_common.server import AsyncClosable, ServerContext, run_service
from weighbridge_common.settings import USAGE_EXIT_CODE, load

from weighbridge_engines.host.kind import Kind
from weighbridge_engines.host.service import build_engine_service
from weighbridge_engines.settings import EngineSettings

KINDS = ("mlx", "sd")
LATER_KINDS = {"ds4": "DeepSeek-class chat by ds4"}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the engine service of the kind named; ends the process by SystemExit."""
    wanted = list(sys.argv[1:] if arguments is None else arguments)
    if len(wanted) != 1 or wanted[0] not in KINDS:
        print(_usage(wanted), file=sys.stderr)
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
    from weighbridge_engines.mlx_qwen.kind import MlxKind

    return MlxKind(log_level=settings.log_level)


def _usage(wanted: list[str]) -> str:
    if len(wanted) == 1 and wanted[0] in LATER_KINDS:
        what = LATER_KINDS[wanted[0]]
        return f"The engine {wanted[0]} ({what}) is not available in this version. Available: {', '.join(KINDS)}."
    return f"Usage: python -m weighbridge_engines {{{','.join(KINDS)}}}"


if __name__ == "__main__":
    main()
