"""What a kind of engine supplies; everything else is the host's."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_engines.supervisor.child import ChildSpec


@dataclass(frozen=True)
class KindDescription:
    """What an engine is here.

    Attributes:
        runtime_version: name and version, for people.
        engine_build: hash of the engine's binary and version; empty where there is no engine.
        unavailable_reason: why it cannot be started here and what to do; empty: it can.
    """

    runtime_version: str
    engine_build: str
    unavailable_reason: str = ""


class EngineLostError(Exception):
    """A call to the engine broke off without a word of the engine's: it is gone, or the connection to it was closed."""


class EngineBrokenError(Exception):
    """The engine answers and can serve no more: its process is to be ended. The text says what was seen."""


@dataclass(frozen=True)
class MemoryAnnounced:
    """What an engine says, while it loads, that it will hold.

    Its lease is raised to that where it is more than was granted; if it cannot be, the engine is ended (OUT_OF_GRANT).

    Attributes:
        total_bytes: on whichever place the plan puts the model: its device, else the host.
    """

    total_bytes: int


class Runtime(Protocol):
    """A started engine process, as the host talks to it."""

    async def is_ready(self) -> bool:
        """Whether it can take :meth:`load` now. May raise: that means no."""
        ...

    async def is_alive(self) -> bool:
        """Whether it still answers, however busy it is. May raise: that means no."""
        ...

    def load(self, plan: fit_pb.PlanModelResponse) -> AsyncGenerator[engine_pb.LoadStarting | MemoryAnnounced, None]:
        """Load as planned; ends when the model can be used.

        Raises:
            RequestError: the engine refuses the model, and why.
            EngineLostError: see there.
        """
        ...

    def chat(self, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        """One answer. Closing the iterator stops the computation, or leaves it to :meth:`settle`.

        Raises:
            RequestError: the engine refuses the request, or failed in it.
            EngineLostError: see there.
            EngineBrokenError: see there.
        """
        ...

    async def settle(self) -> None:
        """Return when nothing that was given up is computed any more: at once where closing :meth:`chat` stops it.

        Raises as :meth:`chat`.
        """
        ...

    async def aclose(self) -> None:
        """Give back what the host's side holds (connections)."""
        ...


@dataclass(frozen=True)
class KindLaunch:
    """How a kind starts one planned model.

    Attributes:
        child: the process.
        connect: makes the runtime's client; called when the gate is open.
    """

    child: ChildSpec
    connect: Callable[[], Runtime]


class Kind(Protocol):
    """One kind of engine."""

    @property
    def name(self) -> str:
        """Its word: mlx, sd, ds4."""
        ...

    @property
    def title(self) -> str:
        """What messages call it, such as "The MLX engine"."""
        ...

    @property
    def engine_kind(self) -> "plan_pb2.EngineKind.ValueType":
        """Its number in the contracts."""
        ...

    @property
    def does_chat(self) -> bool:
        """Whether it answers chats."""
        ...

    @property
    def does_images(self) -> bool:
        """Whether it renders images: then its runtimes are :class:`weighbridge_engines.sd_server.jobs.ImageRuntime`."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether its claims are for devices that nobody else is on, where a load does not say otherwise.

        Those of engines for images and video are: beside another engine a render's peak has no room on a small machine.
        Those of engines for chats are not; they share a device by bytes.
        """
        ...

    @property
    def least_start_timeout_s(self) -> float:
        """How long a start may take at least, whatever the default says; 0: the default will do.

        A time that somebody has set (``start_timeout_s``) stands, however short.
        """
        ...

    @property
    def least_stop_grace_s(self) -> float:
        """How long the process may take to end after SIGTERM at least, whatever the default says; 0: the default.

        A time that somebody has set (``stop_grace_s``) stands, however short.
        """
        ...

    def describe(self) -> KindDescription:
        """What it is here. Called once, in a thread."""
        ...

    def check_options(self, options: plan_pb2.EngineOptions) -> None:
        """Refuse options of another engine.

        Raises:
            RequestError: INVALID_ARGUMENT INVALID_OPTION.
        """
        ...

    def complete_options(self, options: plan_pb2.EngineOptions) -> None:
        """Add what the engine knows of itself and a plan depends on, such as what its binary was built for."""
        ...

    def check_plan(self, plan: fit_pb.PlanModelResponse) -> None:
        """Refuse a plan that this engine cannot start, before anything is claimed for it.

        Raises:
            RequestError: why not.
        """
        ...

    def check_chat(self, request: chat_pb.ChatRequest) -> None:
        """Refuse a chat that this engine cannot answer whatever the model, before one is loaded for it.

        Raises:
            RequestError: why not.
        """
        ...

    def launch(self, plan: fit_pb.PlanModelResponse, workspace: Path) -> KindLaunch:
        """How to start the planned model. Called in a thread of its own: it may read files.

        Args:
            workspace: an empty private folder that exists as long as the process.
        """
        ...

    def slots(self, plan: fit_pb.PlanModelResponse) -> int:
        """How many requests the engine may be given at once under this plan."""
        ...
