"""A grid as a coloured table, and as JSON."""

from typing import Any

from rich.console import Console
from rich.text import Text
from weighbridge_proto.fit.v1 import fit_service_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.cli.tables import machine_words, plain_table
from weighbridge.grid import Grid
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


def print_grid(to: Console, grid: Grid) -> None:
    """GiB at the peak in every cell, coloured by the verdict."""
    to.print(f"{grid.title} on {machine_words(grid.capacity)}: GiB expected at the peak")
    to.print()
    table = plain_table((), (f"{grid.row_name} \\ {grid.column_name}", *grid.columns))
    for row, cells in zip(grid.rows, grid.cells, strict=True):
        table.add_row(f"{row:,}", *(cell_text(cell) for cell in cells))
    to.print(table)
    to.print()
    to.print(
        Text.assemble(
            ("runs", "green"), ", ", ("~ tight", "yellow"), ", ", ("x won't run", "red"), ", ? unknown, - not possible"
        )
    )


def cell_text(plan: fit_service_pb2.PlanModelResponse | None) -> Text:
    """One cell."""
    if plan is None:
        return Text("-", style="dim")
    verdict = plan.assessment.verdict
    mark = MARKS.get(verdict, "?")
    figure = f"{plan.requirement.total.expected_bytes / GIB:.2f}"
    return Text(f"{mark} {figure}".strip(), style=STYLES.get(verdict, "dim"))


def grid_json(grid: Grid) -> dict[str, Any]:
    """The grid for programs: axes, and each cell's verdict and bytes (64-bit integers as strings)."""
    return {
        "model_name": grid.title,
        "row_name": grid.row_name,
        "column_name": grid.column_name,
        "rows": list(grid.rows),
        "columns": list(grid.columns),
        "cells": [[_cell_json(cell) for cell in row] for row in grid.cells],
    }


def _cell_json(plan: fit_service_pb2.PlanModelResponse | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    total = plan.requirement.total
    return {
        "verdict": requirement_pb2.Verdict.Name(plan.assessment.verdict),
        "total": {
            "low_bytes": str(total.low_bytes),
            "expected_bytes": str(total.expected_bytes),
            "high_bytes": str(total.high_bytes),
        },
    }
