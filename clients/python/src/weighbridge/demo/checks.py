"""What the demo must have shown. Each function returns what is wrong, a sentence each; nothing wrong is nothing."""

from collections.abc import Iterable, Sequence

from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.breakdown import add_up, amounts
from weighbridge.demo.trace_tree import Forest
from weighbridge.sizes import all_bytes, format_size

TRACED_SERVICES = ("weighbridge-cli", "weighbridge-engine-mlx", "weighbridge-fit", "weighbridge-ledger")
"""Who must have taken part in the request: client, engine, fit and ledger."""


def check_sums(requirement: requirement_pb2.Requirement) -> list[str]:
    """The lines must add up to the total that the service states."""
    stated, summed = amounts(requirement.total), add_up(requirement.lines).total
    return [] if stated == summed else [f"The plan's lines add up to {summed} bytes, and its total says {stated}."]


def check_verdict(assessment: requirement_pb2.Assessment) -> list[str]:
    """The demo model must be able to run here."""
    if assessment.verdict in (requirement_pb2.VERDICT_RUNS, requirement_pb2.VERDICT_TIGHT):
        return []
    return [f"The verdict on the demo model is {requirement_pb2.Verdict.Name(assessment.verdict)}."]


def check_answer(text: str, expected: str) -> list[str]:
    """The answer must name what was asked for."""
    return [] if expected in text else [f"The answer does not name {expected}: {text!r}"]


def check_held(capacity: machine_pb2.Capacity, leases: Sequence[lease_pb2.Lease]) -> list[str]:
    """While the model is loaded one active lease must hold bytes, and they must be the committed ones."""
    active = [lease for lease in leases if lease.state == lease_pb2.LEASE_STATE_ACTIVE]
    charged = sum(all_bytes(lease.charge) for lease in active)
    problems = []
    if len(active) != 1 or charged <= 0:
        problems.append(f"While the model is loaded there are {len(active)} active leases with {charged} bytes.")
    if capacity.total.committed_bytes != charged:
        problems.append(f"The ledger has committed {capacity.total.committed_bytes} bytes, the leases hold {charged}.")
    return problems


def check_given_back(capacity: machine_pb2.Capacity, leases: Sequence[lease_pb2.Lease]) -> list[str]:
    """After the unload nothing may be committed, and no lease be left."""
    problems = []
    if committed := capacity.total.committed_bytes:
        problems.append(f"After the unload {format_size(committed)} are still committed.")
    if leases:
        problems.append(f"After the unload {len(leases)} leases are left.")
    return problems


def check_trace(forest: Forest, trace_id: str, services: Iterable[str] = TRACED_SERVICES) -> list[str]:
    """The request's trace must be one tree with spans of every service, and no trace may have an orphan."""
    problems = [
        f"An orphan span: {node.span.name} of {node.span.service} names a parent that never arrived."
        for node in forest.orphans
    ]
    request = forest.of_trace(trace_id)
    if len(request.roots) != 1:
        problems.append(f"The request's trace has {len(request.roots)} roots instead of one.")
    seen = {span.service for root in request.roots for span in root.walk()}
    missing = [service for service in services if service not in seen]
    if missing:
        problems.append(f"The request's trace has no span from {', '.join(missing)}.")
    return problems
