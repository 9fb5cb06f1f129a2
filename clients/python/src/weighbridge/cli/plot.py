"""A grid as a picture. matplotlib draws it: the field's own tool, and an extra of this package."""

from pathlib import Path
from typing import Any

from weighbridge_proto.memory.v1 import requirement_pb2

from weighbridge.cli.grid_table import LEGEND, MARKS, cell_words
from weighbridge.cli.tables import machine_words
from weighbridge.grid import Grid

FORMATS = (".png", ".svg")
# Told apart by people who do not tell red from green (Okabe and Ito's colours, lightened), and by the marks.
COLOURS = {
    requirement_pb2.VERDICT_RUNS: "#8fd3bd",
    requirement_pb2.VERDICT_TIGHT: "#f7e08b",
    requirement_pb2.VERDICT_WONT_RUN: "#eba58a",
}
NO_COLOUR = "#e6e6e6"
DOTS_PER_INCH = 150
CELL_INCHES = (1.15, 0.5)
LETTER_INCHES = 0.085
"""Width of a letter of the labels, about: columns are as wide as their names."""
SMALLEST_INCHES = 5.6
"""Width that the legend takes."""


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
    names = [column.label.replace("+", "+\n") for column in grid.columns]
    lines = [line for name in names for line in name.split("\n")]
    wide = max(CELL_INCHES[0], 0.3 + LETTER_INCHES * max(map(len, lines)))
    width = max(SMALLEST_INCHES, 2.2 + wide * columns)
    # Ids instead of random names, and text as text: the same grid is the same file, and can be searched.
    with matplotlib.rc_context({"svg.hashsalt": "weighbridge", "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, 1.9 + CELL_INCHES[1] * rows), layout="constrained")
        axes: Any = figure.add_subplot()
        for row, cells in enumerate(grid.cells):
            for column, cell in enumerate(cells):
                colour = COLOURS.get(cell.verdict, NO_COLOUR) if cell is not None else NO_COLOUR
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
                axes.text(column + 0.5, row + 0.5, cell_words(cell), ha="center", va="center", fontsize=9)
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        axes.set_xticks([index + 0.5 for index in range(columns)], names, parse_math=False)
        axes.set_yticks([index + 0.5 for index in range(rows)], [row.label for row in grid.rows])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel(grid.column_name)
        axes.set_ylabel(grid.row_name)
        # Names of models are no formulas, and whatever cannot be drawn must not break the drawing.
        title = "".join(letter if letter.isprintable() else "?" for letter in grid.title[:120])
        machine = machine_words(grid.capacity)
        figure.suptitle(f"{title}, GiB at the peak\non {machine}", fontsize=10, parse_math=False)
        figure.legend(
            handles=[
                Rectangle((0, 0), 1, 1, facecolor=colour, label=f"{mark} {word}".strip())
                for (mark, word), colour in zip(LEGEND, _legend_colours(), strict=True)
            ],
            loc="outside lower center",
            ncols=len(LEGEND),
            fontsize=8,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
        )
        figure.savefig(path, dpi=DOTS_PER_INCH, format=path.suffix[1:].lower(), metadata=_undated(path))


def _legend_colours() -> list[str]:
    by_mark = {mark: COLOURS.get(verdict, NO_COLOUR) for verdict, mark in MARKS.items()}
    return [by_mark.get(mark, NO_COLOUR) for mark, _ in LEGEND]


def _undated(path: Path) -> dict[str, None] | None:
    """No date in an SVG: the same grid is the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else None
