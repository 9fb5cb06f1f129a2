"""What the MLX Qwen engine supplies to the host."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.targets import check_socket_path

from weighbridge_engines.host.kind import KindDescription, KindLaunch
from weighbridge_engines.mlx_qwen import kernel_cache
from weighbridge_engines.mlx_qwen.build_hash import engine_build, package_version
from weighbridge_engines.mlx_qwen.client import MlxRuntimeClient
from weighbridge_engines.mlx_qwen.runtime import requests
from weighbridge_engines.mlx_qwen.runtime.exits import ExitCode
from weighbridge_engines.supervisor.child import ChildSpec
from weighbridge_engines.supervisor.environment import scrub
from weighbridge_engines.supervisor.exits import ExitCause, FatalLine

RUNTIME_COMMAND = (sys.executable, "-m", "weighbridge_engines.mlx_qwen.runtime")

PASSED_ON = ("WEIGHBRIDGE_OTLP_ENDPOINT", "MLX_DISABLE_COMPILE")
"""The child's spans belong to the same trace; and where its files allow no execution (containers), MLX cannot load the
CPU kernels that it compiles there, and must be told not to."""

EXIT_MEANINGS: Mapping[int, str] = {
    ExitCode.MLX_UNAVAILABLE: "MLX or mlx-lm cannot be imported here",
    ExitCode.FATAL: "the runtime failed; its log says where",
    ExitCode.PARENT_GONE: "it lost its host",
}

FATAL_TEXTS: Mapping[str, ExitCause] = {
    "[METAL] Command buffer execution failed: Insufficient Memory": ExitCause.OUT_OF_MEMORY,
    "kIOGPUCommandBufferCallbackErrorOutOfMemory": ExitCause.OUT_OF_MEMORY,
    "std::bad_alloc": ExitCause.OUT_OF_MEMORY,
    "CUDA out of memory": ExitCause.OUT_OF_MEMORY,
}
"""On Metal a lack of memory is raised on a completion thread and ends the process (MLX 0.32, October 2026)."""


PRICED_ONLY = (
    "adapters",
    "draft_model",
    "draft_head",
    "draft_tokens",
    "prompt_cache_bytes",
    "expert_slab_bytes",
    "split_lane",
)
"""Options that fit prices and the runtime does not have: a launch that asks for them is refused, never started without
them."""


class MlxKind:
    """See :class:`weighbridge_engines.host.kind.Kind`.

    Args:
        command: starts the runtime; ``--socket PATH`` is added. Another one in tests.
        environ: of the child, on top of what every engine gets.
        kernels: folder for the kernels that MLX compiles; None: the default one.
    """

    name = "mlx"
    title = "The MLX engine"
    engine_kind = plan_pb2.ENGINE_KIND_MLX
    does_chat = True
    does_images = False
    exclusive = False
    least_start_timeout_s = 0.0
    least_stop_grace_s = 0.0

    def __init__(
        self,
        command: Sequence[str] = RUNTIME_COMMAND,
        log_level: str = "info",
        environ: Mapping[str, str] | None = None,
        kernels: Path | None = None,
    ) -> None:
        self._command = tuple(command)
        self._kernels = kernels or kernel_cache.default_folder()
        self._environ = {
            # What was in flight has ended, or is to be cut, by the time the child is asked to end.
            "WEIGHBRIDGE_MLX_RUNTIME_GRACE_S": "0",
            "WEIGHBRIDGE_MLX_RUNTIME_LOG_LEVEL": log_level,
            "PYTHONUNBUFFERED": "1",
            **(environ or {}),
        }

    def describe(self) -> KindDescription:
        """What is installed."""
        version = package_version("mlx-lm")
        missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
        if version is None or missing:
            return KindDescription(
                "mlx-lm (not installed)",
                "",
                "mlx-lm is not installed beside this service. Install it with: pip install 'weighbridge-engines[mlx]'",
            )
        return KindDescription(f"mlx-lm {version}, mlx {package_version('mlx')}", engine_build())

    def check_options(self, options: plan_pb2.EngineOptions) -> None:
        """Refuse options of another engine, and those that are priced and that this version does not have."""
        engine = options.WhichOneof("engine")
        if engine not in (None, "mlx"):
            raise invalid_argument("options", f"are for {engine}, and this is the MLX engine", "INVALID_OPTION")
        missing = [name for name in PRICED_ONLY if _asked(options.mlx, name)]
        if missing:
            raise RequestError(
                grpc.StatusCode.UNIMPLEMENTED,
                "OPTION_NOT_IMPLEMENTED",
                f"The MLX engine of this version has no {', '.join(missing)}. What they cost can be planned; to load "
                "the model, leave them out.",
                metadata={"options": ",".join(missing)},
            )

    def complete_options(self, options: plan_pb2.EngineOptions) -> None:
        """There is nothing to add."""

    def check_plan(self, plan: fit_pb.PlanModelResponse) -> None:
        """Refuse what is no MLX launch of files on this machine."""
        if plan.launch.WhichOneof("engine") != "mlx":
            raise _not_here(f"{plan.model_name} is not a model that the MLX engine loads")
        if not plan.resolved_path:
            raise _not_here("facts without files can be planned, not loaded")

    def check_chat(self, request: chat_pb.ChatRequest) -> None:
        """By the runtime's own check, which it makes again."""
        requests.chat_spec(request)

    def launch(self, plan: fit_pb.PlanModelResponse, workspace: Path) -> KindLaunch:
        """The runtime on a private socket; it hears of the model only when it is ready."""
        # So short that its path fits wherever that of the service's own socket does.
        socket = check_socket_path(workspace / "rt")
        temporary = kernel_cache.private_folder(self._kernels, workspace)
        child = ChildSpec(
            name="mlx-runtime",
            argv=(*self._command, "--socket", str(socket)),
            environ=scrub(also=PASSED_ON, extra={"TMPDIR": str(temporary), **self._environ}),
            cwd=workspace,
            classify=classify,
            exit_meanings=EXIT_MEANINGS,
        )
        return KindLaunch(child, lambda: MlxRuntimeClient(socket))

    def slots(self, plan: fit_pb.PlanModelResponse) -> int:
        """As many conversations as were planned for."""
        return max(1, plan.launch.mlx.slots)


def _asked(options: plan_pb2.MlxOptions, name: str) -> bool:
    """Whether an option is set to something other than what the runtime does anyway."""
    value = getattr(options, name)
    return bool(value) and value != "none"


def classify(line: str, from_stderr: bool = True) -> FatalLine | None:
    """Whether a line of the runtime's output means that it cannot go on."""
    for text, cause in FATAL_TEXTS.items():
        if text in line:
            return FatalLine(cause, line)
    return None


def _not_here(why: str) -> RequestError:
    return invalid_argument("model", why, "UNSUPPORTED_ARCHITECTURE")
