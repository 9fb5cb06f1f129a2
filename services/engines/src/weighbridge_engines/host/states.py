"""Where a loaded model stands, where it may go from there, and what that makes of the engine. No I/O."""

from enum import Enum

from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb


class ResidencyState(Enum):
    """Where one model stands in one engine process. One way: a model that has ended is loaded anew."""

    STARTING = "starting"
    """Its lease is active; its process starts and loads."""
    READY = "ready"
    """It serves."""
    ENDING = "ending"
    """It takes no new use; requests in flight finish or are broken off, then its process ends."""
    GONE = "gone"
    """Its process has been waited for."""


_NEXT = {
    ResidencyState.STARTING: {ResidencyState.READY, ResidencyState.ENDING},
    ResidencyState.READY: {ResidencyState.ENDING},
    ResidencyState.ENDING: {ResidencyState.GONE},
    ResidencyState.GONE: set[ResidencyState](),
}


def advance(state: ResidencyState, to: ResidencyState) -> ResidencyState:
    """The state after a step.

    Raises:
        ValueError: there is no such step.
    """
    if to not in _NEXT[state]:
        raise ValueError(f"no step from {state.name} to {to.name}")
    return to


def engine_state(
    stopping: bool, current: ResidencyState | None, loads_in_progress: bool
) -> "engine_pb.EngineState.ValueType":
    """What an engine is doing, as its messages tell it.

    Args:
        stopping: its service ends.
        current: where the model stands that holds the engine; None: none does.
        loads_in_progress: some call's model is planned, waits for memory, or starts.
    """
    if stopping:
        return engine_pb.ENGINE_STATE_STOPPING
    if current is ResidencyState.READY:
        return engine_pb.ENGINE_STATE_READY
    if current in (ResidencyState.ENDING, ResidencyState.GONE):
        return engine_pb.ENGINE_STATE_UNLOADING
    return engine_pb.ENGINE_STATE_LOADING if loads_in_progress or current else engine_pb.ENGINE_STATE_EMPTY
