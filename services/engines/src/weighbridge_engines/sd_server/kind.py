"""What the sd-server engine supplies to the host."""

import secrets
from pathlib import Path

import grpc
import structlog
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_engines.host.kind import KindDescription, KindLaunch
from weighbridge_engines.sd_server import binary, ends
from weighbridge_engines.sd_server.arguments import command_line
from weighbridge_engines.sd_server.client import SdServerClient
from weighbridge_engines.sd_server.runtime import OutputFeed, SdRuntime
from weighbridge_engines.supervisor.child import ChildSpec
from weighbridge_engines.supervisor.exits import ExitExplanation, ExitFacts, FatalLine
from weighbridge_engines.supervisor.ports import free_loopback_port
from weighbridge_engines.supervisor.program import BinaryMissingError

TITLE = ends.TITLE

_log = structlog.get_logger(__name__)


class SdKind:
    """See :class:`weighbridge_engines.host.kind.Kind`.

    Args:
        setting: where sd-server is; empty: it is looked for.
        cache: folder of what builds were found to be; None: the default one.
    """

    name = "sd"
    title = TITLE
    engine_kind = plan_pb2.ENGINE_KIND_SD
    does_chat = False
    does_images = True
    exclusive = True
    least_start_timeout_s = 0.0
    least_stop_grace_s = 0.0

    def __init__(self, setting: str = "", cache: Path | None = None) -> None:
        self._setting = setting
        self._cache = cache or binary.PROGRAM.cache_folder()
        self._binary: binary.SdBinary | None = None
        self._missing = ""

    def describe(self) -> KindDescription:
        """Which build is here."""
        try:
            self._binary = binary.probe(binary.PROGRAM.locate(self._setting), self._cache)
        except BinaryMissingError as error:
            self._missing = str(error)
            return KindDescription("stable-diffusion.cpp (not here)", "", self._missing)
        found = self._binary
        return KindDescription(f"stable-diffusion.cpp {found.version}, {found.backend}", found.build)

    def check_options(self, options: plan_pb2.EngineOptions) -> None:
        """Refuse options of another engine."""
        engine = options.WhichOneof("engine")
        if engine not in (None, "sd"):
            raise invalid_argument("options", f"are for {engine}, and this is the sd-server engine", "INVALID_OPTION")
        if options.sd.parts.get("lora"):
            raise RequestError(
                grpc.StatusCode.UNIMPLEMENTED,
                "OPTION_NOT_IMPLEMENTED",
                "The sd-server engine of this version mounts no adapters. What they cost can be planned; to load the "
                "model, leave them out.",
                metadata={"options": "parts.lora"},
            )

    def complete_options(self, options: plan_pb2.EngineOptions) -> None:
        """What the binary was built for decides where weights and working buffers lie."""
        if self._binary is not None and not options.sd.HasField("backend"):
            options.sd.backend = self._binary.backend

    def check_plan(self, plan: fit_pb.PlanModelResponse) -> None:
        """Refuse what is no launch of sd-server, or none of this build."""
        if plan.launch.WhichOneof("engine") != "sd" or not plan.launch.sd.arguments:
            raise _not_here(f"{plan.model_name} is not a model that sd-server loads")
        if not plan.resolved_path:
            raise _not_here("facts without files can be planned, not loaded")
        self._command(plan, 0, Path())

    def check_chat(self, request: chat_pb.ChatRequest) -> None:
        """It does not chat; the host has refused already."""
        raise invalid_argument("model", "sd-server does not chat", "UNSUPPORTED_ARCHITECTURE")

    def launch(self, plan: fit_pb.PlanModelResponse, workspace: Path) -> KindLaunch:
        """sd-server on a free port, with a file by whose name it is known."""
        found = self._found()
        token = f"weighbridge-{secrets.token_hex(16)}"
        adapters = workspace / "adapters"
        adapters.mkdir(mode=0o700)
        (adapters / f"{token}.safetensors").touch()
        port = free_loopback_port()
        arguments, left_out = self._command(plan, port, adapters)
        if left_out:
            _log.warning("flags_left_out", flags=list(left_out), version=found.version)
        feed = OutputFeed(_classify)
        child = ChildSpec(
            name="sd-server",
            argv=arguments,
            environ=found.environ(),
            cwd=workspace,
            classify=feed.take,
            explain=lambda facts: _explain(facts, feed),
        )
        return KindLaunch(child, lambda: SdRuntime(SdServerClient(port, token), feed))

    def slots(self, plan: fit_pb.PlanModelResponse) -> int:
        """It renders one request at a time."""
        return 1

    def _command(
        self, plan: fit_pb.PlanModelResponse, port: int, adapters: Path
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        device_bytes = sum(device.required_bytes for device in plan.claim.devices)
        return command_line(self._found(), plan.launch.sd.arguments, port, adapters, device_bytes)

    def _found(self) -> binary.SdBinary:
        if self._binary is None:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "ENGINE_UNAVAILABLE",
                self._missing or "sd-server was not looked for.",
            )
        return self._binary


def _classify(line: str, from_stderr: bool) -> FatalLine | None:
    return ends.fatal_line(line, from_stderr=from_stderr)


def _explain(facts: ExitFacts, feed: OutputFeed) -> ExitExplanation:
    return ends.explain_end(facts, feed.reader)


def _not_here(why: str) -> RequestError:
    return invalid_argument("model", why, "UNSUPPORTED_ARCHITECTURE")
