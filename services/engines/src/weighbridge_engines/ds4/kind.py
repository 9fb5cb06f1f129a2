"""What the ds4 engine supplies to the host."""

from pathlib import Path

import grpc
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_engines.ds4 import binary, checkpoints, ends, lock, requests
from weighbridge_engines.ds4.arguments import command_line
from weighbridge_engines.ds4.client import Ds4Client
from weighbridge_engines.ds4.conversation import IDLE_LIMIT_S, Conversations
from weighbridge_engines.ds4.feed import OutputFeed
from weighbridge_engines.ds4.runtime import Ds4Runtime
from weighbridge_engines.ds4.served import Served
from weighbridge_engines.host.failures import ENGINE_LOCKED
from weighbridge_engines.host.kind import KindDescription, KindLaunch
from weighbridge_engines.supervisor.child import ChildSpec
from weighbridge_engines.supervisor.ports import free_loopback_port
from weighbridge_engines.supervisor.program import BinaryMissingError

START_TIMEOUT_S = 1800.0
"""518 GB, the largest published file, from a disk that gives 0.3 GB a second. 600 s is what others allow (August 2026),
whose largest model is 211 GB."""

STOP_GRACE_S = 30.0
"""After SIGTERM it ends its answer at the next token and writes the conversation to disk: 0.5 GB at 40,000 tokens."""

SECOND_TERM_AFTER_S = 25.0
"""On the first SIGTERM a prompt that is being read is read to its end, which may take a quarter of an hour. On the
second it ends at once, and writes nothing."""


class Ds4Kind:
    """See :class:`weighbridge_engines.host.kind.Kind`.

    Args:
        setting: where ds4-server is; empty: it is looked for.
        lock_file: instead of the lock that all ds4 processes of the machine share; empty: that one.
        checkpoints_root: where conversations are kept on disk; None: the default folder.
        idle_limit_s: how long an answer may be silent.
        cache: folder of what builds were found to be; None: the default one.
    """

    name = "ds4"
    title = ends.TITLE
    engine_kind = plan_pb2.ENGINE_KIND_DS4
    does_chat = True
    does_images = False
    exclusive = False
    least_start_timeout_s = START_TIMEOUT_S
    least_stop_grace_s = STOP_GRACE_S

    def __init__(
        self,
        setting: str = "",
        *,
        lock_file: str = "",
        checkpoints_root: Path | None = None,
        idle_limit_s: float = IDLE_LIMIT_S,
        cache: Path | None = None,
    ) -> None:
        self._setting = setting
        self._lock_file = lock_file
        self._checkpoints_root = checkpoints_root or checkpoints.default_root()
        self._idle_limit_s = idle_limit_s
        self._cache = cache or binary.PROGRAM.cache_folder()
        self._binary: binary.Ds4Binary | None = None
        self._missing = ""

    def describe(self) -> KindDescription:
        """Which build is here."""
        try:
            found = binary.probe(binary.PROGRAM.locate(self._setting), self._cache)
        except BinaryMissingError as error:
            self._missing = str(error)
            return KindDescription("ds4 (not here)", "", self._missing)
        version = f"ds4 {found.build[:12]}, {found.compute}"
        self._missing = _unable(found)
        if self._missing:
            return KindDescription(version, "", self._missing)
        self._binary = found
        return KindDescription(version, found.build)

    def check_options(self, options: plan_pb2.EngineOptions) -> None:
        """Refuse options of another engine."""
        engine = options.WhichOneof("engine")
        if engine not in (None, "ds4"):
            raise invalid_argument("options", f"are for {engine}, and this is the ds4 engine", "INVALID_OPTION")

    def complete_options(self, options: plan_pb2.EngineOptions) -> None:
        """What the build computes on and how it lays out its memory."""
        if self._binary is None:
            return
        if not options.ds4.HasField("compute"):
            options.ds4.compute = self._binary.compute
        if not options.ds4.HasField("engine_layout"):
            options.ds4.engine_layout = self._binary.layout

    def check_plan(self, plan: fit_pb.PlanModelResponse) -> None:
        """Refuse what is no launch of ds4, or none of this build, or none while another ds4 runs."""
        if plan.launch.WhichOneof("engine") != "ds4" or not plan.launch.ds4.arguments:
            raise _not_here(f"{plan.model_name} is not a model that ds4 loads")
        if not plan.resolved_path:
            raise _not_here("facts without files can be planned, not loaded")
        # Any port and any folder will do: it is only seen whether the build knows every flag.
        command_line(self._found(), plan.launch.ds4.arguments, 1, self._checkpoints_root)
        holder = lock.holder_outside(self._lock_file)
        if holder is not None:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                ENGINE_LOCKED,
                ends.lock_held(str(holder)),
                metadata={"pid": str(holder)},
            )

    def check_chat(self, request: chat_pb.ChatRequest) -> None:
        """Refuse what ds4 would ignore."""
        requests.check(request)

    def launch(self, plan: fit_pb.PlanModelResponse, workspace: Path) -> KindLaunch:
        """ds4-server on a free port. It finds out whether the port is still free only when the model is loaded."""
        found, launch = self._found(), plan.launch.ds4
        folder = None
        if "--kv-disk-space-mb" in launch.arguments:
            folder = checkpoints.folder(
                self._checkpoints_root,
                plan.model_digest,
                Path(plan.resolved_path),
                launch.prefill_chunk_tokens,
                launch.compute,
            )
        port = free_loopback_port()
        feed = OutputFeed()
        child = ChildSpec(
            name="ds4-server",
            argv=command_line(found, launch.arguments, port, folder),
            environ=found.environ(self._lock_file),
            cwd=found.metal_folder or workspace if found.compute == "metal" else workspace,
            classify=feed.take,
            explain=lambda facts: ends.explain_end(facts, feed.reader),
            second_term_after_s=SECOND_TERM_AFTER_S,
        )
        served = Served(
            model_name=plan.model_name,
            context_tokens=launch.context_tokens,
            sessions=self.slots(plan),
            sees=launch.vision,
            stops_on_disconnect=found.stops_on_disconnect,
            samples_while_thinking=found.samples_while_thinking,
        )

        def connect() -> Ds4Runtime:
            client = Ds4Client(port, launch.context_tokens)
            return Ds4Runtime(client, feed, Conversations(client, feed, served, self._idle_limit_s))

        return KindLaunch(child, connect)

    def slots(self, plan: fit_pb.PlanModelResponse) -> int:
        """One request for each conversation that it holds: what it cannot hold would wait within it, unseen."""
        return max(1, plan.launch.ds4.sessions)

    def _found(self) -> binary.Ds4Binary:
        if self._binary is None:
            raise RequestError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "ENGINE_UNAVAILABLE",
                self._missing or "ds4-server was not looked for.",
            )
        return self._binary


def _unable(found: binary.Ds4Binary) -> str:
    """Why a build that is here cannot be used."""
    if found.compute == "rocm":
        return f"{found.path} is built for ROCm, and what ds4 holds there is not known. Use a build for CUDA or Metal."
    if found.compute == "metal" and found.metal_folder is None:
        return (
            f"{found.path} finds no sources of its Metal kernels. Put the folder `metal` of the ds4 that it was built "
            "from beside it."
        )
    return ""


def _not_here(why: str) -> RequestError:
    return invalid_argument("model", why, "UNSUPPORTED_ARCHITECTURE")
