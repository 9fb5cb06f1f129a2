"""What every engine family offers. The rules behind it are pure; only messages are touched beside them."""

from collections.abc import Mapping
from typing import Any, Protocol

from weighbridge_proto.fit.v1 import plan_pb2

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import Requirement
from weighbridge_fit.model import Model
from weighbridge_fit.plans.plan import Engine, Plan


class Family(Protocol):
    """One engine family. `Any` is its own request dataclass: workload and options as asked, None and zero defaults."""

    engine: Engine
    options_name: str
    """The member of EngineOptions that holds its options."""
    workload_name: str
    """The member of Workload that it is for: "chat" or "image"."""

    def recognises(self, model: Model) -> bool:
        """Whether a model whose engine nobody named is this family's."""

    def companions(self, options: plan_pb2.EngineOptions) -> Mapping[str, str]:
        """References of further files that the options name, by role. Raises PlanError INVALID_OPTION."""

    def request(self, workload: plan_pb2.Workload, options: plan_pb2.EngineOptions) -> Any:
        """What is asked for. Raises PlanError INVALID_OPTION."""

    def plan(self, model: Model, request: Any, capacity: Capacity) -> Plan:
        """Plans one model on one machine.

        Raises PlanError: UNSUPPORTED_ARCHITECTURE, CONTEXT_TOO_LONG, INVALID_OPTION, and what the family adds.
        """

    def advise(
        self, model: Model, request: Any, capacity: Capacity, plan: Plan, requirement: Requirement
    ) -> tuple[str, ...]:
        """What would turn a TIGHT or WONT_RUN into RUNS, a sentence each, with figures. `requirement` is the plan's,
        sharpened by what was measured."""

    def workload(self, plan: Plan) -> plan_pb2.Workload:
        """The workload as planned."""

    def options(self, plan: Plan) -> plan_pb2.EngineOptions:
        """The options as planned."""

    def launch(self, plan: Plan) -> plan_pb2.Launch | None:
        """How the engine is started; None where it is never started."""


class ChatFamily(Family, Protocol):
    """A family whose workload is a context."""

    def longest_context(self, model: Model) -> int:
        """The longest context that can be asked for, in tokens."""

    def with_context(self, request: Any, context_tokens: int) -> Any:
        """The same request at another context."""

    def context_of(self, plan: Plan) -> int:
        """The context that was planned, in tokens."""


class ImageFamily(Family, Protocol):
    """A family whose workload is a picture."""

    def with_size(self, request: Any, width_px: int, height_px: int) -> Any:
        """The same request at another size."""

    def size_of(self, plan: Plan) -> tuple[int, int]:
        """Width and height that were planned, in pixels, rounded as the engine rounds."""

    def side_step(self, model: Model) -> int:
        """The multiple of pixels that the engine rounds sides up to."""

    def side_range(self, model: Model) -> tuple[int, int]:
        """The smallest and the largest side that can be asked for, in pixels."""
