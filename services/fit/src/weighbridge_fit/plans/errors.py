"""A plan that cannot be made, and which field of the request is to blame."""

from weighbridge_fit.lines import Requirement

# The one reason that lies in the model and not in the request.
UNSUPPORTED_ARCHITECTURE = "UNSUPPORTED_ARCHITECTURE"
# Reasons that lie in the machine: it is too small, however little else is running.
REFUSED_BY_MACHINE = frozenset({"EXPERT_CACHE_UNSAFE"})


class PlanError(Exception):
    """`reason` is a stable UPPER_SNAKE name, `field` the request's field, the message a sentence for people.

    `least`: for a machine that is too small, the least that the model would start with.
    """

    def __init__(self, reason: str, field: str, message: str, least: Requirement | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.message = message
        self.least = least
