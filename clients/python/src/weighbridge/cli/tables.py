"""The tables that people read."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from weighbridge_proto.engines.v1 import engine_service_pb2
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.breakdown import add_up, figures
from weighbridge.models import model_label
from weighbridge.sizes import all_bytes, format_size

WIDTH_WITH_BASIS = 120
"""Columns from which a plan's table has room for what its figures rest on; below, that is listed under the table."""

AVAILABILITY_WORDS = {
    fit_service_pb2.AVAILABILITY_NOW: "there is room",
    fit_service_pb2.AVAILABILITY_AFTER_EVICTION: "there is room once idle models have made it",
    fit_service_pb2.AVAILABILITY_MUST_WAIT: "it would have to wait for others to finish",
    fit_service_pb2.AVAILABILITY_NEVER: "it can never load here",
}
"""How a plan stands against what is loaded."""


def enum_word(enum: object, value: int, prefix: str) -> str:
    """An enum value in words of people: ``VERDICT_WONT_RUN`` → ``wont run``."""
    name = str(enum.Name(value)) if value in enum.values() else str(value)  # type: ignore[attr-defined] # enums have no public type
    return name.removeprefix(prefix).replace("_", " ").lower()


def plain_table(texts: Sequence[str] = (), figures: Sequence[str] = ()) -> Table:
    """The style of every table here: columns of text, which a narrow terminal folds, then figures, which stay whole."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def name_value_table() -> Table:
    """A table without a head: names, and what is said of each."""
    table = plain_table(("", ""))
    table.show_header = False
    table.columns[0].no_wrap = True
    return table


def print_facts(to: Console, facts: weights_pb2.WeightFacts) -> None:
    """What weight files hold."""
    table = name_value_table()
    table.columns[0].style = "bold"
    rows = [
        ("name", facts.name),
        ("format", enum_word(weights_pb2.WeightFormat, facts.format, "WEIGHT_FORMAT_")),
        ("architecture", facts.architecture or "unknown"),
        ("quantisation", facts.quantization or "none"),
        *([("role", enum_word(weights_pb2.WeightRole, facts.role, "WEIGHT_ROLE_"))] if facts.role else []),
        *([("made for", facts.made_for)] if facts.made_for else []),
        ("files", f"{len(facts.files)}, {format_size(facts.file_bytes)}"),
        ("tensors", f"{facts.tensor_count:,}, {facts.tensor_bytes:,} bytes ({format_size(facts.tensor_bytes)})"),
        ("elements", f"{facts.element_count:,} as stored"),
        ("digest", facts.model_digest),
    ]
    if facts.HasField("geometry"):
        rows.append(("geometry", _geometry(facts.geometry)))
    for name, value in rows:
        table.add_row(name, value)
    to.print(table)
    to.print()
    precisions = plain_table(("component", "precision"), ("tensors", "elements", "bytes", "size"))
    groups = [(part.component or "(root)", part.precisions) for part in facts.components]
    for component, tallies in groups or [("", facts.precisions)]:
        for tally in tallies:
            precisions.add_row(
                component,
                tally.dtype,
                f"{tally.tensor_count:,}",
                f"{tally.element_count:,}",
                f"{tally.bytes:,}",
                format_size(tally.bytes),
            )
    to.print(precisions)
    if facts.tensors:
        to.print()
        tensors = plain_table(("component", "tensor", "precision", "shape"), ("bytes",))
        for tensor in facts.tensors:
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            tensors.add_row(tensor.component, tensor.name, tensor.dtype, shape, f"{tensor.bytes:,}")
        to.print(tensors)
    for note in facts.notes:
        to.print(f"Note: {note}")


def _geometry(geometry: weights_pb2.ModelGeometry) -> str:
    parts = [f"{len(geometry.layers)} layers", f"width {geometry.hidden_size}"]
    if geometry.attention_heads:
        parts.append(f"{geometry.attention_heads} heads on {geometry.kv_heads} key/value heads of {geometry.head_size}")
    if geometry.experts:
        parts.append(f"{geometry.experts_per_token} of {geometry.experts} experts")
    if geometry.max_context_tokens:
        parts.append(f"context up to {geometry.max_context_tokens:,} tokens")
    return ", ".join(parts)


def print_plan(to: Console, plan: fit_service_pb2.PlanModelResponse) -> None:
    """A plan: every line of memory, the sums, the verdict and what should be known."""
    to.print(f"{plan.model_name} on {machine_words(plan.capacity)}, {workload_words(plan)}")
    to.print()
    print_requirement(to, plan.requirement)
    to.print()
    assessment = plan.assessment
    verdict = requirement_pb2.Verdict.Name(assessment.verdict).removeprefix("VERDICT_")
    to.print(f"{verdict}: {assessment.reason}" if assessment.reason else verdict)
    for text in assessment.help:
        to.print(f"  {text}")
    for note in plan.notes:
        to.print(f"Note: {note.message}")
    if plan.HasField("claim") and assessment.verdict != requirement_pb2.VERDICT_WONT_RUN:
        to.print(f"A launch would claim {claim_words(plan.claim)}.")
    if plan.observations.count:
        seen = plan.observations
        times = "once" if seen.count == 1 else f"{seen.count} times"
        to.print(f"Seen {times} before: peak {format_size(seen.p95_peak_bytes)} (95th percentile).")
    if plan.availability:
        to.print(f"At this moment: {AVAILABILITY_WORDS.get(plan.availability, 'unknown')}.")


def print_requirement(to: Console, requirement: requirement_pb2.Requirement) -> None:
    """The lines of a requirement and their sums, as a table that adds up and ends with what counts."""
    shown = figures(requirement)
    phases = add_up(requirement.lines).phases
    peak = max(phases, key=lambda phase: phases[phase][1], default="")
    wide = to.width >= WIDTH_WITH_BASIS
    table = plain_table(("component", "phase", "place"), ("low MiB", "expected MiB", "high MiB"))
    table.columns[0].no_wrap = True
    table.add_column("source")
    if wide:
        table.add_column("basis", overflow="fold")

    def add_sum(name: str, phase: str, amounts: tuple[str, str, str], basis: str, style: str = "") -> None:
        table.add_row(name, phase, "", *amounts, "", *([basis] if wide else []), style=style)

    for line, amounts in zip(requirement.lines, shown.lines, strict=True):
        source = enum_word(requirement_pb2.FigureSource, line.source, "FIGURE_SOURCE_")
        basis = [line.basis] if wide else []
        table.add_row(line.component, line.phase, place_word(line.place), *amounts, source, *basis)
    add_sum("resident", "", shown.resident, "sum of the resident lines")
    add_sum("largest phase", peak, shown.largest_phase, "the phase that needs most on top")
    add_sum("total", "", shown.total, "resident + largest phase: the peak", "" if shown.stated else "bold")
    if shown.stated:
        add_sum(
            "measured before",
            "",
            shown.stated,
            "what earlier launches took, never below the low figure; counts instead of the total",
            "bold",
        )
    to.print(table)
    if not wide:
        bases = name_value_table()
        for line in requirement.lines:
            bases.add_row(line.component, line.basis)
        to.print()
        to.print(bases)


def place_word(place: requirement_pb2.Place) -> str:
    """``host``, ``device`` or ``device 0``."""
    if place.kind != requirement_pb2.PLACE_KIND_DEVICE:
        return "host"
    return f"device {place.device_id}".strip()


def machine_words(capacity: machine_pb2.Capacity) -> str:
    """A machine in a few words."""
    pool = enum_word(machine_pb2.PoolKind, capacity.pool, "POOL_KIND_").replace("cpu", "CPU")
    parts = [f"{pool} machine with {format_size(capacity.total_ram_bytes)}"]
    parts += [f"{format_size(card.device.total_bytes)} on {card.device.name}" for card in capacity.devices]
    source = enum_word(machine_pb2.MachineSource, capacity.source, "MACHINE_SOURCE_")
    kind = {"inline": "what-if ", "declared": "declared "}.get(source, "")
    return f"a {kind}{' + '.join(parts)}"


def workload_words(plan: fit_service_pb2.PlanModelResponse) -> str:
    """What a plan is for, in a few words."""
    engine = enum_word(plan_pb2.EngineKind, plan.engine_kind, "ENGINE_KIND_")
    if plan.workload.HasField("image"):
        image = plan.workload.image
        parts = [f"engine {engine}", f"{image.width_px}×{image.height_px} pixels"]
        parts += [f"{image.frames} frames"] if image.frames > 1 else []
        parts += [f"{image.batch} at once"] if image.batch > 1 else []
        return ", ".join(parts)
    if not plan.workload.HasField("chat"):
        return f"engine {engine}"  # a guess: no engine of ours, no workload
    chat = plan.workload.chat
    slots = "1 slot" if chat.slots == 1 else f"{chat.slots} slots"
    return f"engine {engine}, context {chat.context_tokens:,} tokens × {slots}"


def claim_words(claim: requirement_pb2.Claim) -> str:
    """A claim in a few words."""
    parts = []
    if claim.host_bytes or not claim.devices:
        parts.append(f"{format_size(claim.host_bytes)} of host memory")
    if claim.optional_host_bytes:
        parts.append(f"{format_size(claim.optional_host_bytes)} on top if there is room")
    for device in claim.devices:
        where = f"device {device.device_id}" if device.device_id else "a device"
        parts.append(f"{format_size(device.required_bytes)} on {where}")
    return ", ".join(parts)


def print_capacity(to: Console, capacity: machine_pb2.Capacity) -> None:
    """Ceilings, and what is committed beneath them."""
    words = machine_words(capacity).removeprefix("a ")
    to.print(f"{words[:1].upper()}{words[1:]}")
    table = plain_table(("place",), ("automatic", "limit", "ceiling", "committed", "free", "other programs"))
    for name, ceiling in [
        ("host", capacity.host),
        *((f"{card.device.name or 'device'} ({card.device.device_id})", card.ceiling) for card in capacity.devices),
        ("total", capacity.total),
    ]:
        table.add_row(
            name,
            format_size(ceiling.automatic_bytes),
            format_size(ceiling.limit_bytes) if ceiling.HasField("limit_bytes") else "automatic",
            format_size(ceiling.effective_bytes),
            format_size(ceiling.committed_bytes),
            format_size(ceiling.free_bytes) if ceiling.HasField("free_bytes") else "not measured",
            format_size(ceiling.external_bytes) if ceiling.HasField("external_bytes") else "not measured",
        )
    to.print(table)
    for note in capacity.notes:
        to.print(f"Note: {note}")


def print_limit(to: Console, capacity: machine_pb2.Capacity, asked: int | None = None) -> None:
    """The person's limit, and what follows from it; ``asked``: what it was just set to."""
    total = capacity.total
    if total.HasField("limit_bytes"):
        to.print(
            f"Limit: {format_size(total.limit_bytes)}. The machine alone allows {format_size(total.automatic_bytes)}."
        )
    else:
        to.print(f"Limit: automatic, which is {format_size(total.automatic_bytes)} here.")
    if capacity.devices:
        to.print(
            "A model may take host memory for what does not fit on a card beside others."
            if capacity.spill_allowed
            else "A model that does not fit on a card beside others waits (--spill lets it take host memory)."
        )
    if asked is not None and asked >= total.automatic_bytes:
        to.print("It is not below what the machine allows, so it limits nothing.")
    if total.committed_bytes > total.effective_bytes:
        to.print(
            f"{format_size(total.committed_bytes)} are committed. Nobody is evicted: nothing is granted until they are "
            "below it. `weighbridge unload` gives memory back."
        )


def print_engines(to: Console, engines: Sequence[engine_service_pb2.Engine], now_s: float | None = None) -> None:
    """The engines and what each has loaded."""
    now = time.time() if now_s is None else now_s
    texts, amounts = ("engine", "runtime", "state", "model"), ("charged", "observed", "busy", "waiting", "unload in")
    table = plain_table(texts, amounts)
    for engine in engines:
        model = engine.model
        loaded = engine.HasField("model")
        left = model.idle_unload_time.ToNanoseconds() / 1e9 - now if model.HasField("idle_unload_time") else None
        observed = all_bytes(model.observed)
        table.add_row(
            enum_word(plan_pb2.EngineKind, engine.kind, "ENGINE_KIND_"),
            engine.runtime_version,
            enum_word(engine_service_pb2.EngineState, engine.state, "ENGINE_STATE_"),
            (model.model_name or model_label(model.model)) if loaded else "",
            format_size(all_bytes(model.lease.charge)) if loaded else "",
            format_size(observed) if observed else "",
            str(engine.requests_in_flight),
            str(engine.requests_queued),
            f"{max(0.0, left):.0f} s" if left is not None else "",
        )
    to.print(table)
    for engine in engines:
        name = enum_word(plan_pb2.EngineKind, engine.kind, "ENGINE_KIND_")
        if not engine.available:
            to.print(f"{name} cannot start here: {engine.unavailable_reason}")
        if given_up := engine.requests_draining:
            to.print(f"{name} still works on {draining_words(given_up)}, and takes the next one when that is over.")
        if engine.HasField("last_failure"):
            to.print(f"{name}, last failure: {engine.last_failure.message} [{engine.last_failure.reason}]")


def draining_words(count: int) -> str:
    """Requests that were given up and that the engine cannot be stopped in."""
    return "a request that was cancelled" if count == 1 else f"{count} requests that were cancelled"
