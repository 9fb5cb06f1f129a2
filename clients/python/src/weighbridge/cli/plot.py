"""A grid as a picture. matplotlib draws it: the field's own tool, and an extra of this package."""

from pathlib import Path
from typing import Any

from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.cli.grid_table import MARKS
from weighbridge.cli.tables import machine_words
from weighbridge.grid import Grid
from weighbridge.sizes import GIB

FORMATS = (".png", ".svg")
# Told apart by people who do not tell red from green (Okabe and Ito's colours, lightened), and by the marks.
COLOURS = {
    requirement_pb2.VERDICT_RUNS: "#8fd3bd",
    requirement_pb2.VERDICT_TIGHT: "#f7e08b",
    requirement_pb2.VERDICT_WONT_RUN: "#eba58a",
}
NO_COLOUR = "#e6e6e6"
DOTS_PER_INCH = 150


def write_plot(grid: Grid, path: Path) -> None:
    """Draws `grid` into `path`, a PNG or an SVG by its name.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows, columns = len(grid.rows), len(grid.columns)
    # Ids instead of random names, and text as text: the same grid is the same file, and can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "weighbridge", "svg.fonttype": "none"}):
        figure = Figure(figsize=(2.2 + 1.15 * columns, 1.5 + 0.5 * rows), layout="constrained")
        axes: Any = figure.add_subplot()
        for row, cells in enumerate(grid.cells):
            for column, plan in enumerate(cells):
                verdict = plan.assessment.verdict if plan else requirement_pb2.VERDICT_UNSPECIFIED
                colour = COLOURS.get(verdict, NO_COLOUR)
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
                label = f"{MARKS.get(verdict, '')} {plan.requirement.total.expected_bytes / GIB:.2f}" if plan else "-"
                axes.text(column + 0.5, row + 0.5, label.strip(), ha="center", va="center", fontsize=9)
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks([index + 0.5 for index in range(columns)], grid.columns)
        axes.set_yticks([index + 0.5 for index in range(rows)], [f"{row:,}" for row in grid.rows])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(grid.column_name)
        axes.set_ylabel(grid.row_name)
        axes.set_title(f"{grid.title}, GiB at the peak\non {machine_words(grid.capacity)}", fontsize=10)
        figure.supxlabel("green: runs   ~ yellow: tight   x red: won't run   grey: unknown, - not possible", fontsize=8)
        figure.savefig(path, dpi=DOTS_PER_INCH, format=path.suffix[1:].lower(), metadata=_undated(path))


def _undated(path: Path) -> dict[str, None] | None:
    """No date in an SVG: the same grid is the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else None
