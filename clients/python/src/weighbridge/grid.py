"""A model over two axes at once: context and slots, or size and precision."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
SLOTS = ("1", "2", "4", "8")
SIDES = (512, 768, 1024, 1280, 1536, 2048)
AS_STORED = "stored"
PRECISIONS = (AS_STORED, "f16", "q8_0", "q4_0")
"""Types that sd-server converts weights to at load; `stored` leaves them as they are."""

MAX_CELLS = 400
AT_ONCE = 4
"""Plans asked for at the same time: as many as fit reads headers of at once."""

_NOT_POSSIBLE = frozenset({"CONTEXT_TOO_LONG", "INVALID_OPTION", "SIZE_OUT_OF_RANGE"})
"""Reasons for which a cell stays empty; any other failure is the grid's."""


class GridError(Exception):
    """A grid that cannot be made; a sentence for the person who asked."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What every cell has in common. `options` and `workload` None: the engine's defaults."""

    model: weights_pb2.ModelRef
    engine_kind: "plan_pb2.EngineKind.ValueType"
    workload: plan_pb2.Workload | None
    options: plan_pb2.EngineOptions | None
    machine: machine_pb2.Machine | None


@dataclass(frozen=True, slots=True)
class Grid:
    """`cells` by row and column, None where the model cannot be asked for that. `row_name` and `column_name` are in
    words, with units."""

    title: str
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[fit_service_pb2.PlanModelResponse | None, ...], ...] = field(repr=False)
    capacity: machine_pb2.Capacity = field(repr=False)


async def make_grid(
    suite: Suite, asked: Ask, rows: Sequence[int] | None = None, columns: Sequence[str] | None = None
) -> Grid:
    """Plans every cell.

    Raises GridError for axes that cannot be, or a model without a price; CallError when fit fails.
    """
    first = await _plan(suite, asked, asked.workload, asked.options)
    kind = first.workload.WhichOneof("kind")
    if kind is None:
        raise GridError(f"{first.model_name} has no price, so there is no grid of it: {first.assessment.reason}")
    chat = kind == "chat"
    row_values = tuple(sorted(set(rows or (CONTEXTS if chat else SIDES))))
    column_values = tuple(dict.fromkeys(columns or (SLOTS if chat else PRECISIONS)))
    if len(row_values) * len(column_values) > MAX_CELLS:
        raise GridError(f"A grid has at most {MAX_CELLS} cells: choose fewer rows or columns.")
    if chat and not all(column.isascii() and column.isdigit() and int(column) for column in column_values):
        raise GridError("The columns of a chat model's grid are slots: numbers from 1 on, with commas between them.")
    turns = asyncio.Semaphore(AT_ONCE)

    async def cell(row: int, column: str) -> fit_service_pb2.PlanModelResponse | None:
        workload, options = _cell_request(first, asked, row, column)
        async with turns:
            try:
                return await _plan(suite, asked, workload, options)
            except CallError as failed:
                if failed.failure.reason in _NOT_POSSIBLE:
                    return None
                raise

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [[group.create_task(cell(row, column)) for column in column_values] for row in row_values]
    except BaseExceptionGroup as failed:
        calls = failed.subgroup(CallError)
        if calls is None:
            raise
        raise calls.exceptions[0] from None  # the first one is told, the others were cancelled or say the same
    cells = tuple(tuple(task.result() for task in row) for row in tasks)
    # What the model cannot do at all is no row of its grid.
    kept = [index for index, row in enumerate(cells) if rows or any(entry is not None for entry in row)]
    return Grid(
        first.model_name,
        "context, tokens" if chat else "size, pixels",
        "slots" if chat else "precision",
        tuple(row_values[index] for index in kept),
        column_values,
        tuple(cells[index] for index in kept),
        first.capacity,
    )


def _cell_request(
    first: fit_service_pb2.PlanModelResponse, asked: Ask, row: int, column: str
) -> tuple[plan_pb2.Workload, plan_pb2.EngineOptions | None]:
    workload = plan_pb2.Workload()
    workload.CopyFrom(asked.workload or plan_pb2.Workload())
    if first.workload.HasField("chat"):
        workload.chat.context_tokens, workload.chat.slots = row, int(column)
        return workload, asked.options
    workload.image.width_px = workload.image.height_px = row
    workload.image.quality = plan_pb2.QUALITY_TIER_UNSPECIFIED
    options = plan_pb2.EngineOptions()
    options.CopyFrom(asked.options or plan_pb2.EngineOptions())
    if column != AS_STORED:
        options.sd.weight_type = column
    return workload, options if options.WhichOneof("engine") else None


async def _plan(
    suite: Suite, asked: Ask, workload: plan_pb2.Workload | None, options: plan_pb2.EngineOptions | None
) -> fit_service_pb2.PlanModelResponse:
    return await suite.plan_model(
        asked.model, workload=workload, options=options, machine=asked.machine, engine_kind=asked.engine_kind
    )
