"""A grid as a coloured table, and as JSON."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.cli.tables import machine_words, plain_table
from weighbridge.grid import Cell, Column, Grid, Row
from weighbridge.sizes import GIB

STYLES = {
    requirement_pb2.VERDICT_RUNS: "green",
    requirement_pb2.VERDICT_TIGHT: "yellow",
    requirement_pb2.VERDICT_WONT_RUN: "red",
}
MARKS = {
    requirement_pb2.VERDICT_RUNS: "",
    requirement_pb2.VERDICT_TIGHT: "~",
    requirement_pb2.VERDICT_WONT_RUN: "x",
    requirement_pb2.VERDICT_UNKNOWN: "?",
}
"""Beside the figure, for those who see no colours."""


LEGEND = (("", "runs"), ("~", "tight"), ("x", "won't run"), ("?", "unknown"), ("-", "not possible"))
_LEGEND_STYLES = ("green", "yellow", "red", "dim", "dim")


def print_grid(to: Console, grid: Grid) -> None:
    """GiB at the peak in every cell, coloured by the verdict. A terminal too narrow for all columns gets them in
    several tables."""
    to.print(f"{grid.title} on {machine_words(grid.capacity)}: GiB expected at the peak")
    head = f"{grid.row_name} \\ {grid.column_name}"
    rows = [[cell_text(cell) for cell in cells] for cells in grid.cells]
    first_width = max(len(head), *(len(row.label) for row in grid.rows))
    if first_width > to.width // 2:
        head, first_width = grid.row_name, max(len(grid.row_name), *(len(row.label) for row in grid.rows))
        to.print(f"columns: {grid.column_name}")
    widths = [
        max(len(column.label), *(text.cell_len for text in texts))
        for column, texts in zip(grid.columns, zip(*rows, strict=True), strict=True)
    ]
    for start, end in _spans(widths, to.width - first_width):
        to.print()
        table = plain_table((), (head, *(column.label for column in grid.columns[start:end])))
        for row, texts in zip(grid.rows, rows, strict=True):
            table.add_row(row.label, *texts[start:end])
        to.print(table)
    to.print()
    legend = Text()
    for (mark, word), style in zip(LEGEND, _LEGEND_STYLES, strict=True):
        legend.append(", " if legend else "").append(f"{mark} {word}".strip(), style=style)
    to.print(legend)
    for note in grid.notes:
        to.print(f"Note: {note}")


def _spans(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Runs of columns that fit side by side, each with two blanks before it; at least one in each run."""
    spans, start, used = [], 0, 0
    for index, width in enumerate(widths):
        if index > start and used + width + 2 > room:
            spans.append((start, index))
            start, used = index, 0
        used += width + 2
    return [*spans, (start, len(widths))]


def cell_text(cell: Cell | None) -> Text:
    """One cell."""
    if cell is None:
        return Text("-", style="dim")
    return Text(cell_words(cell), style=STYLES.get(cell.verdict, "dim"))


def cell_words(cell: Cell | None) -> str:
    """One cell without colours: the verdict's mark, and GiB where there are figures."""
    if cell is None:
        return "-"
    figure = f"{cell.total.expected_bytes / GIB:.2f}" if cell.total is not None else ""
    return f"{MARKS.get(cell.verdict, '?')} {figure}".strip()


def grid_json(grid: Grid) -> dict[str, Any]:
    """The grid for programs: axes, and each cell's verdict and bytes, with the names and types of the contract (64-bit
    integers as strings)."""
    return {
        "model_name": grid.title,
        "row_name": grid.row_name,
        "column_name": grid.column_name,
        "rows": [_row_json(row) for row in grid.rows],
        "columns": [_column_json(column) for column in grid.columns],
        "cells": [[_cell_json(cell) for cell in row] for row in grid.cells],
        "notes": list(grid.notes),
    }


def _row_json(row: Row) -> dict[str, Any]:
    if row.context_tokens:
        return {"context_tokens": str(row.context_tokens)}
    return {"width_px": row.size[0], "height_px": row.size[1]}


def _column_json(column: Column) -> dict[str, Any]:
    options = MessageToDict(column.options, preserving_proto_field_name=True) if column.options is not None else {}
    return {"name": column.label, **({"slots": column.slots} if column.slots else {}), "options": options}


def _cell_json(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    total = cell.total
    return {
        "verdict": requirement_pb2.Verdict.Name(cell.verdict),
        "reason": cell.reason,
        "total": {
            "low_bytes": str(total.low_bytes),
            "expected_bytes": str(total.expected_bytes),
            "high_bytes": str(total.high_bytes),
        }
        if total is not None
        else None,
    }
