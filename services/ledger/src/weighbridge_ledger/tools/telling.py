"""What the tools print: lines for people, plain values for JSON."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import Charge, Lease, LeaseState
from weighbridge_ledger.machine.model import Machine, in_gib
from weighbridge_ledger.store.backup import Backup
from weighbridge_ledger.tools.audit import Finding
from weighbridge_ledger.tools.check import Report
from weighbridge_ledger.tools.recording import Playback
from weighbridge_ledger.tools.replay import Fate, Start

SHORT_ID = 8
"""Digits of a lease's id for people; --json has it whole."""


def backup_lines(made: Backup) -> list[str]:
    """A finished copy."""
    return [
        f"{made.target}: {_count(made.leases, 'lease')}, {made.size_bytes:,} bytes, verified, as of epoch "
        f"{made.epoch or 'none'}.",
    ]


def backup_json(made: Backup) -> dict[str, Any]:
    """A finished copy."""
    return {
        "database": str(made.source),
        "backup": str(made.target),
        "size_bytes": made.size_bytes,
        "leases": made.leases,
        "epoch": made.epoch,
    }


def report_lines(report: Report, machine: Machine) -> list[str]:
    """What a check found."""
    lines = [_head(report.path, report.schema, report.epoch)] if report.schema else []
    if report.schema:
        book = report.snapshot
        held = format_gib(sum(lease.charge.total_bytes for lease in book.leases))
        lines.append(
            f"{_count(len(book.leases), 'lease')} with {held}, {_count(len(book.tickets), 'kept place')}, "
            f"{_count(len(book.ended), 'ended request')}, {_count(report.observations, 'measured peak')}; held against "
            f"{_machine_words(machine)}."
        )
    lines += map(_finding_line, report.findings)
    faults = sum(finding.is_fault for finding in report.findings)
    if not faults:
        return [*lines, "Sound."]
    advice = "Do not start a ledger on it. Put a backup in its place, with the engines stopped, or report this."
    return [*lines, f"{_count(faults, 'fault')}. {advice}"]


def report_json(report: Report) -> dict[str, Any]:
    """What a check found."""
    return {
        "database": str(report.path),
        "sound": report.sound,
        "schema": report.schema,
        "epoch": report.epoch,
        "leases": len(report.snapshot.leases),
        "charged_bytes": sum(lease.charge.total_bytes for lease in report.snapshot.leases),
        "places": len(report.snapshot.tickets),
        "ended": len(report.snapshot.ended),
        "observations": report.observations,
        "findings": [_finding_json(one) for one in report.findings],
    }


def playback_lines(played: Playback) -> list[str]:
    """What a recording showed."""
    lines = [
        f"{_count(played.changes, 'change')} of {_count(len(played.epochs), 'run')} of the ledger, "
        f"{_count(played.gaps, 'gap')}."
    ]
    lines += [f"Most charged on {pool}: {format_gib(size)}." for pool, size in sorted(played.peaks.items())]
    lines += map(_finding_line, played.findings)
    if played.sound:
        return [*lines, "Every change kept the rules."]
    return [*lines, f"{_count(len(played.findings), 'fault')}. Please report this, with the recording."]


def playback_json(played: Playback) -> dict[str, Any]:
    """What a recording showed."""
    return {
        "sound": played.sound,
        "changes": played.changes,
        "epochs": played.epochs,
        "gaps": played.gaps,
        "peak_bytes": played.peaks,
        "findings": [_finding_json(one) for one in played.findings],
    }


def _finding_line(finding: Finding) -> str:
    subject = f"{finding.subject} " if finding.subject else ""
    return f"{'FAULT' if finding.is_fault else 'note '}  {finding.code}: {subject}{finding.message}"


def _finding_json(one: Finding) -> dict[str, Any]:
    return {"code": one.code, "fault": one.is_fault, "subject": one.subject, "message": one.message}


def start_lines(start: Start, machine: Machine) -> list[str]:
    """What a start would do."""
    limit = "no limit" if start.limit_bytes is None else f"limit {format_gib(start.limit_bytes)}"
    lines = [_head(start.path, start.schema, start.epoch), f"On {_machine_words(machine)}, {limit}, a start now:"]
    if start.fates:
        rows = [("  lease", "state", "charged", "holder", "model", "would")]
        rows += [
            (
                f"  {fate.lease.lease_id[:SHORT_ID]}",
                _state_words(fate.lease),
                format_gib(fate.lease.charge.total_bytes),
                f"{fate.lease.holder_name or 'process'} {fate.lease.holder.pid} ({_alive_word(fate.holder_alive)})",
                fate.lease.purpose.model_name,
                _fate_words(fate),
            )
            for fate in start.fates
        ]
        lines += _columns(rows)
    lines.append(
        f"would take up {_count(len(start.fates), 'lease')} with {format_gib(start.before.total_bytes)} and be left "
        f"with {format_gib(start.after.total_bytes)} of {format_gib(start.ceilings.total_bytes)} committed."
    )
    for number, place in enumerate(start.places, 1):
        asked = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.first_wall))
        lines.append(
            f"Place {number} is kept for a minute: {format_gib(place.claim.total_bytes)}, asked for {asked}, overtaken "
            f"{place.passes} times."
        )
    lines.append(
        f"{_count(start.ended, 'ended request')} would be remembered, {_count(len(start.writes), 'record')} changed. "
        "Nothing was."
    )
    return lines


def start_json(start: Start) -> dict[str, Any]:
    """What a start would do."""
    return {
        "database": str(start.path),
        "schema": start.schema,
        "epoch": start.epoch,
        "limit_bytes": start.limit_bytes,
        "ceiling_bytes": start.ceilings.total_bytes,
        "committed_bytes": {"before": start.before.total_bytes, "after": start.after.total_bytes},
        "leases": [_fate_json(fate) for fate in start.fates],
        "places": [
            {
                "request_id": place.request_id,
                "required_bytes": place.claim.total_bytes,
                "sequence": place.sequence,
                "passes": place.passes,
                "first_wall": place.first_wall,
            }
            for place in start.places
        ],
        "ended": start.ended,
        "writes": [type(write).__name__ for write in start.writes],
    }


def _fate_json(fate: Fate) -> dict[str, Any]:
    lease = fate.lease
    return {
        "lease_id": lease.lease_id,
        "request_id": lease.request_id,
        "state": lease.state.value,
        "suspect": lease.suspect,
        "fence": lease.fence,
        "sequence": lease.sequence,
        "charge": _charge_json(lease.charge),
        "holder": {"name": lease.holder_name, "pid": lease.holder.pid, "alive": fate.holder_alive},
        "engines": [
            {"pid": engine.pid, "alive": alive} for engine, alive in zip(lease.engines, fate.engines_alive, strict=True)
        ],
        "model": lease.purpose.model_name,
        "released": fate.released,
        "heard_of_within_s": None if fate.released or lease.suspect else list(fate.within_s),
    }


def _charge_json(charge: Charge) -> dict[str, Any]:
    return {
        "host_bytes": charge.host_bytes,
        "devices": dict(charge.devices),
        "spilled": dict(charge.spilled),
        "optional": {"host_bytes": charge.optional_host_bytes, "devices": dict(charge.optional_devices)},
        "occupies": list(charge.occupies),
        "exclusive": charge.exclusive,
        "total_bytes": charge.total_bytes,
    }


def _state_words(lease: Lease) -> str:
    marks = [word for word, is_so in (("silent", lease.suspect), ("alone", lease.charge.exclusive)) if is_so]
    return lease.state.value.lower() + (f" ({', '.join(marks)})" if marks else "")


def _fate_words(fate: Fate) -> str:
    if fate.released:
        return f"end: {fate.released.lower().replace('_', ' ')}"
    engines = sum(alive is not False for alive in fate.engines_alive)
    because = f"{_count(engines, 'engine process', 'es')} may live" if engines else "its holder may live"
    if fate.lease.suspect:
        return f"stay silent: {because}"
    if fate.lease.state is LeaseState.VACATING:
        return f"stay until its processes are gone: {because}"
    least, most = fate.within_s
    if fate.lease.state is LeaseState.GRANTED:
        return f"end in {least:.0f} s unless it is activated"
    return f"stay; silent unless renewed within {least:.0f} to {most:.0f} s"


def _alive_word(alive: bool | None) -> str:
    return "not visible from here" if alive is None else "alive" if alive else "gone"


def _head(path: object, schema: int, epoch: str) -> str:
    return f"{path}: schema {schema}, {f'last epoch {epoch}' if epoch else 'no epoch yet'}"


def _machine_words(machine: Machine) -> str:
    cards = "".join(f" + {in_gib(card.total_bytes)}" for card in machine.devices)
    return f"a {machine.pool.value} machine of {in_gib(machine.ram_bytes)}{cards} ({machine.source.value.lower()})"


def _count(number: int, what: str, more: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else more}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
