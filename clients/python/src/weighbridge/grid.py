"""A model over two axes at once: context and slots, or size and what its weights become and its engine does."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2, weights_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

from weighbridge.client import Suite
from weighbridge.failures import CallError
from weighbridge.options import parse_options

CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
SLOTS = ("1", "2", "4", "8")
SIDES = (512, 768, 1024, 1280, 1536, 2048)
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Of the default size, where that is no square."""
SIDE_STEP_PX = 32
"""Scaled sides are multiples of this, as most models want them."""
AS_STORED = "stored"
PLAIN = "plain"
PRECISIONS = (AS_STORED, "f16", "q8_0", "q4_0")
"""Types that sd-server converts weights to at load; `stored` leaves them as they are."""
VARIANTS = (PLAIN, "tiled", "bfloat16+tiled", "float32+tiled")
VARIANTS_ON_CARDS = (PLAIN, "tiled", "model+tiled", "sequential+tiled")
"""What a diffusers pipeline can be asked for: offload helps where there is a card to leave."""

MAX_CELLS = 400
AT_ONCE = 4
"""Plans asked for at the same time: as many as fit reads headers of at once."""

_NOT_POSSIBLE = frozenset({"CONTEXT_TOO_LONG", "INVALID_OPTION", "SIZE_OUT_OF_RANGE"})
"""Reasons for which a cell stays empty."""
_WONT_RUN = frozenset({"MODEL_WONT_RUN", "EXPERT_CACHE_UNSAFE", "CLAIM_EXCEEDS_CAPACITY"})
"""Reasons that are a verdict without figures. Any other failure is the grid's."""

_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sd": {AS_STORED: ()},
    "generic": {
        PLAIN: (),
        "tiled": ("tiled_decode=on",),
        **{word: (f"offload={word}",) for word in ("none", "model", "sequential")},
        **{word: (f"load_dtype={word}",) for word in ("bfloat16", "float16", "float32")},
    },
}
"""Words that a column may be named by instead of NAME=VALUE."""
_SIZE = re.compile(r"([1-9]\d{0,4})[xX\u00d7]([1-9]\d{0,4})")
_NUMBER = re.compile(r"[1-9]\d{0,11}", re.ASCII)

Size = tuple[int, int]


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
class Cell:
    """One plan in short. `total` None: refused without figures."""

    verdict: "requirement_pb2.Verdict.ValueType"
    reason: str
    total: requirement_pb2.ByteRange | None


@dataclass(frozen=True, slots=True)
class Row:
    """A context in tokens, or a width and a height in pixels. `label` is it for people."""

    label: str
    context_tokens: int = 0
    size: Size = (0, 0)


@dataclass(frozen=True, slots=True)
class Column:
    """Slots (0: as every cell is asked for) and options on top of those that every cell has; `as_stored`: without a
    type that weights become. `label` is what it was asked by."""

    label: str
    slots: int = 0
    options: plan_pb2.EngineOptions | None = None
    as_stored: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """`cells` by row and column, None where the model cannot be asked for that. `row_name` and `column_name` are in
    words, with units. `notes` hold for every cell."""

    title: str
    row_name: str
    column_name: str
    rows: tuple["Row", ...]
    columns: tuple["Column", ...]
    cells: tuple[tuple[Cell | None, ...], ...] = field(repr=False)
    capacity: machine_pb2.Capacity = field(repr=False)
    notes: tuple[str, ...] = ()


async def make_grid(
    suite: Suite, asked: Ask, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None
) -> Grid:
    """Plans every cell.

    ``rows`` are contexts, or sides in pixels and sizes as ``768x512``. ``columns`` are slots, or precisions and
    variants; any of them may be ``NAME=VALUE``, and several of these joined by ``+``.

    Raises GridError for axes that cannot be, or a model without a price; CallError when fit fails.
    """
    first = await _plan(suite, asked, asked.workload, asked.options)
    kind = _kind(first, asked)
    axes = _Axes(first, kind, asked, rows, columns)
    turns = asyncio.Semaphore(AT_ONCE)

    async def cell(row: Row, column: Column) -> fit_service_pb2.PlanModelResponse | Cell | None:
        async with turns:
            try:
                return await _plan(suite, asked, _workload(asked, row, column), _options(asked, column))
            except CallError as failed:
                if failed.failure.reason in _NOT_POSSIBLE:
                    return None
                if failed.failure.reason in _WONT_RUN:
                    return Cell(requirement_pb2.VERDICT_WONT_RUN, failed.failure.message, None)
                raise

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [[group.create_task(cell(row, column)) for column in axes.columns] for row in axes.rows]
    except BaseExceptionGroup as failed:
        calls = failed.subgroup(CallError)
        if calls is None:
            raise
        raise calls.exceptions[0] from None  # the first one is told, the others were cancelled or say the same
    plans = [[task.result() for task in row] for row in tasks]
    # What the model cannot do at all is no row or column of its grid, unless somebody asked for it.
    kept_rows = [index for index, row in enumerate(plans) if rows or any(entry is not None for entry in row)]
    kept_columns = [
        index for index in range(len(axes.columns)) if columns or any(row[index] is not None for row in plans)
    ]
    if not kept_rows:
        raise GridError(f"{first.model_name} can be asked for none of these: choose rows with --rows.")
    return Grid(
        first.model_name,
        "context, tokens" if kind == "chat" else "size, pixels",
        axes.column_name,
        tuple(axes.rows[index] for index in kept_rows),
        tuple(axes.columns[index] for index in kept_columns),
        tuple(tuple(_cell(plans[row][column]) for column in kept_columns) for row in kept_rows),
        first.capacity,
        _common_notes(first, [plan for row in plans for plan in row]),
    )


class _Axes:
    """The rows and columns of a grid. Raises GridError."""

    def __init__(
        self,
        first: fit_service_pb2.PlanModelResponse,
        kind: str,
        asked: Ask,
        rows: Sequence[str] | None,
        columns: Sequence[str] | None,
    ) -> None:
        engine = _ENGINE_NAMES.get(first.engine_kind, "")
        given = asked.workload or plan_pb2.Workload()
        # What was asked for by itself is an axis of one: a default that contradicts it would not be what was asked.
        if kind == "chat":
            chat = given.chat
            default_rows = [str(chat.context_tokens)] if chat.context_tokens else [str(context) for context in CONTEXTS]
            default_columns: Sequence[str] = [str(chat.slots)] if chat.slots else SLOTS
            self.column_name = "slots"
        else:
            sized = given.image.width_px or given.image.quality
            planned = first.workload.image
            default_rows = [f"{planned.width_px}x{planned.height_px}"] if sized else _sizes(planned)
            default_columns, self.column_name = PRECISIONS, "precision"
            if asked.options is not None and asked.options.sd.weight_type:
                default_columns = [asked.options.sd.weight_type]
            if engine == "generic":
                cards = first.capacity.pool == machine_pb2.POOL_KIND_DISCRETE
                default_columns, self.column_name = VARIANTS_ON_CARDS if cards else VARIANTS, "variant"
        row_of = _context_row if kind == "chat" else _size_row
        made = {row.label: row for row in (row_of(text) for text in rows or default_rows)}
        self.rows = sorted(made.values(), key=lambda row: (row.context_tokens, row.size[0] * row.size[1], row.size))
        self.columns = list(
            {text: _column(text, kind, engine) for text in dict.fromkeys(columns or default_columns)}.values()
        )
        if columns and any("=" in column for column in columns):
            self.column_name = "variant"
        if len(self.rows) * len(self.columns) > MAX_CELLS:
            raise GridError(f"A grid has at most {MAX_CELLS} cells: choose fewer rows or columns.")


_ENGINE_NAMES = {
    plan_pb2.ENGINE_KIND_SD: "sd",
    plan_pb2.ENGINE_KIND_MLX: "mlx",
    plan_pb2.ENGINE_KIND_DS4: "ds4",
    plan_pb2.ENGINE_KIND_GENERIC: "generic",
}


def _kind(first: fit_service_pb2.PlanModelResponse, asked: Ask) -> str:
    """Chat or image. A model that is refused as a whole has no planned workload; its engine says what it is for. Raises
    GridError for a model that nobody has a price for."""
    kind = first.workload.WhichOneof("kind") or (asked.workload and asked.workload.WhichOneof("kind"))
    if kind and first.engine_kind:
        return str(kind)
    if first.engine_kind in (plan_pb2.ENGINE_KIND_MLX, plan_pb2.ENGINE_KIND_DS4):
        return "chat"
    if first.engine_kind == plan_pb2.ENGINE_KIND_SD:
        return "image"
    raise GridError(f"{first.model_name} has no price, so there is no grid of it: {first.assessment.reason}")


def _sizes(image: plan_pb2.ImageWorkload) -> list[str]:
    """Squares, unless the model's own size is none: then multiples of that."""
    width, height = image.width_px, image.height_px
    if width == height or not width or not height:
        return [str(side) for side in SIDES]
    step = SIDE_STEP_PX
    sizes = [(round(width * scale / step) * step, round(height * scale / step) * step) for scale in SCALES]
    return [f"{wide}x{high}" for wide, high in sizes if wide and high]


def _context_row(text: str) -> Row:
    if not _NUMBER.fullmatch(text):
        raise GridError(f"{text!r} is no context: the rows of a chat model's grid are numbers of tokens.")
    return Row(f"{int(text):,}", context_tokens=int(text))


def _size_row(text: str) -> Row:
    if _NUMBER.fullmatch(text) and len(text) <= 5:
        return Row(f"{int(text):,}", size=(int(text), int(text)))
    if (match := _SIZE.fullmatch(text)) is not None:
        return Row(f"{match[1]}x{match[2]}", size=(int(match[1]), int(match[2])))
    raise GridError(f"{text!r} is no size: the rows of this grid are sides in pixels, or sizes such as 768x512.")


def _column(text: str, kind: str, engine: str) -> Column:
    """A column by its text. Raises GridError."""
    slots, settings = 0, list[str]()
    words = [word.strip() for word in text.split("+")]
    as_stored = engine == "sd" and AS_STORED in words
    for word in words:
        known = _WORDS.get(engine, {}).get(word) if kind == "image" else None
        if known is not None:
            settings += known
        elif "=" in word:
            settings.append(word)
        elif kind == "chat" and _NUMBER.fullmatch(word) and len(word) <= 4 and not slots:
            slots = int(word)
        elif kind == "image" and engine == "sd" and word:
            settings.append(f"weight_type={word}")
        else:
            raise GridError(f"{text!r} is no column of this grid. {_columns_can_be(kind, engine)}")
    try:
        return Column(text, slots, parse_options(settings, engine or None), as_stored)
    except ValueError as wrong:
        raise GridError(f"{text!r} is no column of this grid. {wrong}") from None


def _columns_can_be(kind: str, engine: str) -> str:
    if kind == "chat":
        return "Columns are slots, options such as kv_bits=4, or both: 4+kv_bits=4."
    words = ", ".join(_WORDS.get(engine, {}))
    return f"Columns are {words or 'options'}, NAME=VALUE, or several of these with + between them."


def _workload(asked: Ask, row: Row, column: Column) -> plan_pb2.Workload:
    workload = plan_pb2.Workload()
    workload.CopyFrom(asked.workload or plan_pb2.Workload())
    if row.context_tokens:
        workload.chat.context_tokens = row.context_tokens
        if column.slots:
            workload.chat.slots = column.slots
        return workload
    workload.image.width_px, workload.image.height_px = row.size
    workload.image.quality = plan_pb2.QUALITY_TIER_UNSPECIFIED
    return workload


def _options(asked: Ask, column: Column) -> plan_pb2.EngineOptions | None:
    options = plan_pb2.EngineOptions()
    options.MergeFrom(asked.options or plan_pb2.EngineOptions())
    if column.as_stored and options.HasField("sd"):
        options.sd.ClearField("weight_type")
    options.MergeFrom(column.options or plan_pb2.EngineOptions())
    return options if options.WhichOneof("engine") else None


def _cell(plan: fit_service_pb2.PlanModelResponse | Cell | None) -> Cell | None:
    if plan is None or isinstance(plan, Cell):
        return plan
    return Cell(plan.assessment.verdict, plan.assessment.reason, plan.requirement.total)


def _common_notes(first: fit_service_pb2.PlanModelResponse, plans: Sequence[object]) -> tuple[str, ...]:
    """Notes that hold for the whole grid, in the order that the first plan has them."""
    told = [
        {note.message for note in plan.notes} for plan in plans if isinstance(plan, fit_service_pb2.PlanModelResponse)
    ]
    return tuple(note.message for note in first.notes if all(note.message in notes for notes in told))


async def _plan(
    suite: Suite, asked: Ask, workload: plan_pb2.Workload | None, options: plan_pb2.EngineOptions | None
) -> fit_service_pb2.PlanModelResponse:
    return await suite.plan_model(
        asked.model, workload=workload, options=options, machine=asked.machine, engine_kind=asked.engine_kind
    )
