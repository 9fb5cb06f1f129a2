"""The failures that a host states itself, each worded once."""

from dataclasses import replace

import grpc
from weighbridge_common.sizes import format_gib
from weighbridge_proto.errors import RequestError, RpcFailure, unavailable
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.supervisor.exits import ExitCause, ExitExplanation

RENDER_CANCELLED = "RENDER_CANCELLED"
"""Why an engine ends in the midst of a render that nobody waits for. Requests in its queue have it loaded again."""

ENGINE_LOCKED = "ENGINE_LOCKED"
"""Why an engine cannot start beside one that runs outside the suite. Nothing of ours has failed."""

ENGINE_RECYCLED = "ENGINE_RECYCLED"
"""Why an engine ends that answers and can serve no more. Requests in its queue have it loaded again."""


def ledger_unreachable() -> RequestError:
    """The ledger does not answer."""
    return unavailable(
        "LEDGER_UNREACHABLE",
        "The ledger does not answer, and nothing is loaded or used without its leave. Is the suite running?",
        retry_after_s=2.0,
    )


def fit_unreachable() -> RequestError:
    """fit does not answer."""
    return unavailable(
        "FIT_UNREACHABLE",
        "The fit service does not answer, and nothing is loaded without a plan. Is the suite running?",
        retry_after_s=2.0,
    )


def wont_run(plan: fit_pb.PlanModelResponse) -> RequestError:
    """The plan says that it cannot run here."""
    advice = " ".join(plan.assessment.help)
    return RequestError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "MODEL_WONT_RUN",
        f"{plan.assessment.reason} {advice}".strip(),
        metadata={
            "reason_code": plan.assessment.reason_code,
            "low_bytes": plan.requirement.total.low_bytes,
            "expected_bytes": plan.requirement.total.expected_bytes,
            "ceiling_bytes": plan.capacity.total.effective_bytes,
        },
    )


def not_on_disk(plan: fit_pb.PlanModelResponse) -> RequestError:
    """A model of the catalogue can be planned before its files are here, and loaded only after."""
    named = plan.model_name
    message = f"The files of {named} are not on this machine. weighbridge pull {named} gets them."
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, "CATALOG_MODEL_NOT_ON_DISK", message)


def engine_stopping(title: str) -> RequestError:
    """The service ends."""
    return unavailable("ENGINE_STOPPING", f"{title} is stopping.", retry_after_s=2.0)


def superseded() -> RequestError:
    """Somebody unloaded what was being loaded."""
    return RequestError(
        grpc.StatusCode.ABORTED, "LOAD_SUPERSEDED", "The load was stopped, because the model was unloaded meanwhile."
    )


def model_unloaded() -> RpcFailure:
    """Somebody unloaded the model without waiting for its requests."""
    return RpcFailure(
        grpc.StatusCode.ABORTED, "MODEL_UNLOADED", "The model was unloaded before the answer was complete."
    )


def no_model_loaded(ending: bool) -> RequestError:
    """A request names no model, and none is there; or it is ``ending``."""
    message = "No model is loaded, and the request names none."
    if ending:
        message = "The model that was loaded is ending. Name it to have it loaded again, in its turn."
    return RequestError(grpc.StatusCode.FAILED_PRECONDITION, "NO_MODEL_LOADED", message)


def warm_up_loads_nothing() -> RequestError:
    """A warm-up names a model that is not loaded."""
    return RequestError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_MODEL_LOADED",
        "The model is not loaded, and to warm it up loads none. Load it first, or ask it something.",
    )


def warm_up_gives_way(why: str) -> RequestError:
    """A warm-up is refused, or gives up its place to a request."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", f"The warm-up was dropped: {why}.", retry_after_s=5.0
    )


def too_many_requests(waiting: int, retry_after_s: float) -> RequestError:
    """The queue is full."""
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_REQUESTS",
        f"{waiting} requests wait for the engine already. Try again later.",
        metadata={"requests_queued": waiting},
        retry_after_s=retry_after_s,
    )


def out_of_grant(footprint_text: str, grant_text: str, footprint_bytes: int, grant_bytes: int) -> RpcFailure:
    """The engine holds more than it was granted."""
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OUT_OF_GRANT",
        f"The engine holds {footprint_text}, more than the {grant_text} that it was granted.",
        {"footprint_bytes": str(footprint_bytes), "grant_bytes": str(grant_bytes)},
        retry_after_s=5.0,
    )


def announced_too_much(title: str, announced_bytes: int, granted_bytes: int, why: str) -> RpcFailure:
    """The engine says that it will hold more than the ledger can grant. ``why``: the ledger's words."""
    return RpcFailure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "OUT_OF_GRANT",
        f"{title} says that it will hold {format_gib(announced_bytes)} for this model, more than the "
        f"{format_gib(granted_bytes)} that it was granted, and was ended: {why} Unload another model, or load this one "
        "with a smaller context or cache.",
        {"announced_bytes": str(announced_bytes), "grant_bytes": str(granted_bytes)},
        retry_after_s=5.0,
    )


def render_too_large(plan: fit_pb.PlanModelResponse) -> RequestError:
    """A render is expected to need more host memory than can ever be granted here."""
    expected, granted = plan.requirement.total.expected_bytes, plan.claim.host_bytes
    advice = " ".join(plan.assessment.help)
    return RequestError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "RENDER_TOO_LARGE",
        f"This render of {plan.model_name} is expected to need {format_gib(expected)}, and at most "
        f"{format_gib(granted)} can be granted here: it would be ended before its last step. Ask for a smaller "
        f"image. {advice}".strip(),
        metadata={"expected_bytes": expected, "grantable_bytes": granted},
    )


def no_room_to_render(refused: RpcFailure) -> RequestError:
    """The ledger has no room for a larger lease now. ``refused``: its word, to which this adds what to do."""
    message = (
        f"There is no room for a render of this size now. {refused.message} Ask for a smaller image, or unload another "
        "model: `weighbridge leases` shows who holds memory."
    )
    return RequestError.from_failure(replace(refused, message=message))


def engine_recycled(title: str, what: str) -> RpcFailure:
    """The engine answers and can serve no more. ``what``: what was seen, as a sentence."""
    return RpcFailure(
        grpc.StatusCode.UNAVAILABLE,
        ENGINE_RECYCLED,
        f"{title} could serve no more and was ended: {what} The next request loads the model again.",
        retry_after_s=0.5,
    )


def render_cancelled() -> RpcFailure:
    """The engine is ended with a render that nobody waits for."""
    return RpcFailure(
        grpc.StatusCode.ABORTED,
        RENDER_CANCELLED,
        "The engine was ended, because a cancelled render would have held it.",
    )


def start_failed(explanation: ExitExplanation) -> RpcFailure:
    """The engine ended before its model was ready."""
    if explanation.cause is ExitCause.OUT_OF_MEMORY:
        return RpcFailure(
            grpc.StatusCode.RESOURCE_EXHAUSTED, "ENGINE_OUT_OF_MEMORY", explanation.message, explanation.metadata
        )
    if explanation.cause is ExitCause.LOCK_HELD:
        return RpcFailure(grpc.StatusCode.FAILED_PRECONDITION, ENGINE_LOCKED, explanation.message, explanation.metadata)
    return RpcFailure(grpc.StatusCode.INTERNAL, "ENGINE_START_FAILED", explanation.message, explanation.metadata)


def engine_died(explanation: ExitExplanation) -> RpcFailure:
    """The engine ended while its model was in use."""
    return RpcFailure(
        grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED", explanation.message, explanation.metadata, retry_after_s=0.5
    )


def run_dir_unusable(what: str, error: OSError) -> RequestError:
    """The run folder is full, gone or not ours."""
    return RequestError(
        grpc.StatusCode.INTERNAL,
        "ENGINE_START_FAILED",
        f"The run folder {what}: {error.strerror}. Free space in it, or start the suite again if it was removed.",
    )


def start_timed_out(title: str, seconds: float) -> RpcFailure:
    """The engine did not become ready."""
    return RpcFailure(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "ENGINE_START_TIMED_OUT",
        f"{title} was not ready after {seconds:.0f} s and was ended. Its log may say what it was at.",
        {"start_timeout_seconds": f"{seconds:.0f}"},
    )


def budget_exhausted(title: str, retry_after_s: float, last: str) -> RequestError:
    """The engine ended too often just now, by itself or by somebody's hand. ``last``: how it did the last time."""
    return unavailable(
        "RESTART_BUDGET_EXHAUSTED",
        f"{title} has ended unasked too often within a minute and is left alone for {retry_after_s:.0f} s. The last "
        f"time: {last}",
        retry_after_s=retry_after_s,
    )
