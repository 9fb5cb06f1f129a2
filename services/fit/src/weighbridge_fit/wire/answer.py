"""Requirement, verdict, claim and notes as they travel."""

from collections.abc import Iterable

from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge_fit.claim import Claim
from weighbridge_fit.lines import Line, Range, Requirement, Source
from weighbridge_fit.plans.plan import Note
from weighbridge_fit.verdict import Assessment, Verdict

_SOURCES = {
    Source.MEASURED: requirement_pb2.FIGURE_SOURCE_MEASURED,
    Source.DERIVED: requirement_pb2.FIGURE_SOURCE_DERIVED,
    Source.ASSUMED: requirement_pb2.FIGURE_SOURCE_ASSUMED,
}
_VERDICTS = {
    Verdict.RUNS: requirement_pb2.VERDICT_RUNS,
    Verdict.TIGHT: requirement_pb2.VERDICT_TIGHT,
    Verdict.WONT_RUN: requirement_pb2.VERDICT_WONT_RUN,
    Verdict.UNKNOWN: requirement_pb2.VERDICT_UNKNOWN,
}


def requirement_message(requirement: Requirement) -> requirement_pb2.Requirement:
    """Lines and sums as they travel."""
    return requirement_pb2.Requirement(
        lines=map(_line_message, requirement.lines),
        total=range_message(requirement.total),
        device=range_message(requirement.device),
        device_peak=range_message(requirement.device_peak),
        largest_buffer=range_message(requirement.largest_buffer),
        peak_phase=requirement.peak_phase.value,
    )


def assessment_message(assessment: Assessment) -> requirement_pb2.Assessment:
    """The verdict as it travels."""
    return requirement_pb2.Assessment(
        verdict=_VERDICTS[assessment.verdict],
        reason_code=assessment.reason_code,
        reason=assessment.reason,
        help=assessment.help,
    )


def claim_message(claim: Claim, source: Source) -> requirement_pb2.Claim:
    """The claim as it travels."""
    return requirement_pb2.Claim(
        host_bytes=claim.host_bytes,
        optional_host_bytes=claim.optional_host_bytes,
        devices=[
            requirement_pb2.DeviceClaim(
                device_id=device.device_id, required_bytes=device.required_bytes, optional_bytes=device.optional_bytes
            )
            for device in claim.devices
        ],
        source=_SOURCES[source],
        cpu_only=claim.cpu_only,
    )


def note_messages(notes: Iterable[Note]) -> list[plan_pb2.PlanNote]:
    """Notes as they travel."""
    return [plan_pb2.PlanNote(code=note.code, message=note.message, metadata=note.metadata) for note in notes]


def _line_message(line: Line) -> requirement_pb2.RequirementLine:
    kind = requirement_pb2.PLACE_KIND_DEVICE if line.on_device else requirement_pb2.PLACE_KIND_HOST
    return requirement_pb2.RequirementLine(
        component=line.component,
        phase=line.phase.value,
        place=requirement_pb2.Place(kind=kind),
        low_bytes=line.bytes.low,
        expected_bytes=line.bytes.expected,
        high_bytes=line.bytes.high,
        source=_SOURCES[line.source],
        basis=line.basis,
    )


def range_message(value: Range) -> requirement_pb2.ByteRange:
    """Bytes with their uncertainty as they travel."""
    return requirement_pb2.ByteRange(low_bytes=value.low, expected_bytes=value.expected, high_bytes=value.high)
