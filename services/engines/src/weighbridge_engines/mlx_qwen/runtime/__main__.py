"""Main of the MLX child process: ``python -m weighbridge_engines.mlx_qwen.runtime --socket PATH``.

It serves RuntimeService and health on the socket until SIGTERM or SIGINT (exit code 0), or until the other end of its
lifeline closes. Exit codes are in ``exits``.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pydantic_settings
from weighbridge_common.server import AsyncClosable, ServerContext, run_service
from weighbridge_common.settings import ServiceSettings, load
from weighbridge_proto.engines.v1 import runtime_service_pb2_grpc

from weighbridge_engines.mlx_qwen.runtime import lifeline, memory
from weighbridge_engines.mlx_qwen.runtime.exits import ExitCode
from weighbridge_engines.mlx_qwen.runtime.servicer import Runtime

NAME = "mlx-runtime"

# Nothing may be fetched: a model is what lies on this machine. Set before the libraries that read them are imported.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # The tokenizer's own threads gain nothing on one prompt at a time.
    "TOKENIZERS_PARALLELISM": "false",
}


class RuntimeSettings(ServiceSettings):
    """Settings of the child process; the host sets the socket by argument."""

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, env_prefix="WEIGHBRIDGE_MLX_RUNTIME_"
    )


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the process; ends it by SystemExit."""
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.mlx_qwen.runtime", description="MLX runtime of a weighbridge engine."
    )
    parser.add_argument("--socket", type=Path, required=True, help="the Unix socket to serve on")
    parser.add_argument(
        "--parent-fd",
        type=int,
        default=None,
        metavar="N",
        help="end at once when the other end of this descriptor closes (default: standard input, if it is a pipe)",
    )
    wanted = parser.parse_args(arguments)
    os.environ.update(_OFFLINE)
    memory.keep_large_blocks_out_of_the_heap()
    socket: Path = wanted.socket.absolute()
    _hold_lifeline(wanted.parent_fd, socket)
    settings = load(RuntimeSettings).model_copy(update={"listen": f"unix:{socket}"})

    async def build(context: ServerContext) -> AsyncClosable:
        runtime = Runtime(on_fatal=lambda error: _end_after(error, socket))
        try:
            await runtime.start()
        except BaseException:
            # Asked to stop while MLX was being imported: the owner thread must still end, or the process would not.
            await runtime.aclose()
            raise
        context.add(runtime_service_pb2_grpc.add_RuntimeServiceServicer_to_server, runtime)
        return runtime

    run_service(settings, NAME, build)


def _hold_lifeline(descriptor: int | None, socket: Path) -> None:
    if descriptor is None:
        if not lifeline.is_lifeline(lifeline.STDIN):
            return
        descriptor = lifeline.STDIN
    lifeline.watch(descriptor, lambda: _end(ExitCode.PARENT_GONE, "The host is gone.", socket))


def _end_after(error: BaseException, socket: Path) -> None:
    if isinstance(error, ImportError):
        _end(ExitCode.MLX_UNAVAILABLE, f"MLX cannot be imported here: {error}", socket)
    _end(ExitCode.FATAL, f"The MLX runtime failed ({type(error).__name__}).", socket)


def _end(code: ExitCode, why: str, socket: Path) -> NoReturn:
    """Ends the process at once, from any thread, without waiting for anything that computes."""
    with contextlib.suppress(OSError):
        socket.unlink()
    with contextlib.suppress(OSError, ValueError):
        print(f"weighbridge-{NAME} ends: {why}", file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
