"""What a call wants to have loaded."""

from dataclasses import dataclass, field

from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

from weighbridge_engines.host.ledger import ClaimTerms


@dataclass(frozen=True)
class Wish:
    """What a call wants to have loaded.

    Attributes:
        model: which; None: whatever is loaded.
        any_shape: whether a loaded model will do whatever it was loaded for (chat), or only as asked (LoadModel).
        terms: of the claim, if one is made.
        idle_timeout_s: None: the host's default.
    """

    model: weights_pb2.ModelRef | None
    workload: plan_pb2.Workload = field(default_factory=plan_pb2.Workload)
    options: plan_pb2.EngineOptions = field(default_factory=plan_pb2.EngineOptions)
    any_shape: bool = False
    terms: ClaimTerms = field(default_factory=ClaimTerms)
    idle_timeout_s: float | None = None
