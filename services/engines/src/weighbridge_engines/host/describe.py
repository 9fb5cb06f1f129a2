"""An engine host as its messages tell it."""

from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb

from weighbridge_engines.host.engine_host import EngineHost
from weighbridge_engines.host.residency import Residency
from weighbridge_engines.host.states import ResidencyState


def describe_engine(host: EngineHost) -> engine_pb.Engine:
    """The engine as it stands."""
    current = host.current
    engine = engine_pb.Engine(
        kind=host.around.kind.engine_kind,
        runtime_version=host.description.runtime_version,
        engine_build=host.description.engine_build,
        available=not host.description.unavailable_reason,
        unavailable_reason=host.description.unavailable_reason,
        state=host.state,
        node_id=host.node_id,
    )
    if current is not None and current.was_ready:
        waiting = current.queue.waiting
        engine.requests_queued = waiting
        engine.requests_in_flight = len(current.use.stakes) - waiting
        engine.requests_draining = len(current.use.draining)
        engine.model.CopyFrom(describe_model(current))
    if host.last_failure is not None:
        engine.last_failure.CopyFrom(host.last_failure.to_message())
    return engine


def describe_model(residency: Residency) -> engine_pb.LoadedModel:
    """The model as it stands."""
    model = engine_pb.LoadedModel(
        model=residency.model,
        model_name=residency.plan.model_name,
        model_digest=residency.plan.model_digest,
        plan=residency.plan,
        lease=residency.hold.lease,
    )
    if residency.child is not None:
        model.process.CopyFrom(residency.child.engine.to_message())
    if residency.footprint is not None and (observed := residency.footprint.message()) is not None:
        model.observed.CopyFrom(observed)
    model.ready_time.FromNanoseconds(round(residency.ready_wall_s * 1e9))
    model.last_use_time.FromNanoseconds(round(residency.use.last_use_wall_s * 1e9))
    model.load_time.FromNanoseconds(round(residency.load_time_s * 1e9))
    idle_unload_s = residency.use.idle_unload_wall_s
    if residency.state is ResidencyState.READY and idle_unload_s is not None:
        model.idle_unload_time.FromNanoseconds(round(idle_unload_s * 1e9))
    return model
