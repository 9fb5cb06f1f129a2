"""Sizes every graph of `tests/data/sd/sizings.json.gz` again, with a build of the engine: about seven minutes.

    python services/fit/calibrate/sizing/resize.py BINARY            says where the build gives other bytes
    python services/fit/calibrate/sizing/resize.py BINARY --write BUILD DATE    and writes them

BINARY is `size_graphs.cpp` beside this file, compiled against the engine's source tree S, which its own CMake has built
into B (about five minutes on two cores):

    g++ -O1 -std=c++17 -DGGML_MAX_NAME=128 -DGGML_USE_CPU -IS/src -IS/include -IS/ggml/include -IS/thirdparty -IS
        size_graphs.cpp -o size_graphs B/libstable-diffusion.a B/ggml/src/libggml.a B/ggml/src/libggml-cpu.a
        B/ggml/src/libggml-base.a -lpthread -fopenmp -ldl

The source comes with the package stable-diffusion-cpp-python. No weights are needed: tensors' names and shapes are in
`tests/data/sd/tensors.json.gz`. After a change, run `services/fit/calibrate/sd.py`.
"""

import gzip
import io
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "tests" / "data" / "sd"
SIZINGS = DATA / "sizings.json.gz"
SECTIONS = ("autoencoder", "text", "diffusion", "held_out")
TENSOR_TABLES = {"flux1": "flux1dev", "flux2": "flux2dev", "qwen_image": "qwenedit", "sdxl_rescaled": "sdxl"}
"""Names of tensor tables that are another than the architecture's. Qwen's are those with the vision tower."""
PATCH_PX = 14


def main(arguments: Sequence[str]) -> int:
    binary, *rest = arguments
    document = _unpacked(SIZINGS)
    asked: dict[str, list[list[Any]]] = defaultdict(list)
    for section in SECTIONS:
        for row in document[section]:
            asked[TENSOR_TABLES.get(row[0], row[0])].append(row)
    changed = sum(_resize(binary, table, rows) for table, rows in sorted(asked.items()))
    print(f"{changed} of {sum(map(len, asked.values()))} graphs have another size")
    if rest[:1] == ["--write"]:
        document["build"], document["date"] = rest[1:]
        SIZINGS.write_bytes(packed(document))
    return 0


def _resize(binary: str, table: str, rows: list[list[Any]]) -> int:
    """Puts the build's bytes in the place of each row's last figure; returns how many changed."""
    tensors = _unpacked(DATA / "tensors.json.gz")["architectures"][table]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        for name, shape, kept in tensors:
            listed.write(f"{name} {kept.lower()} {len(shape)} {' '.join(map(str, reversed(shape)))}\n")
        listed.flush()
        requests = "".join(f"{request(row)}\n" for row in rows)
        done = subprocess.run([binary, table, listed.name], input=requests, capture_output=True, text=True, check=True)
    answers = [int(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    changed = 0
    for row, size in zip(rows, answers, strict=True):
        changed += row[-1] != size
        row[-1] = size
    return changed


def request(row: list[Any]) -> str:
    """A row of any section as the binary's line."""
    if len(row) == 4:
        _, graph, count, _ = row
        return f"vision {_patches(count)}" if graph == "vision" else f"{graph} {count}"
    if isinstance(row[1], str):
        _, graph, width, height, frames, direct, flash, _ = row
        return f"{graph} {width} {height} {frames} {direct} {flash}"
    _, width, height, frames, text, pictures, flash, _ = row
    sides = "".join(f" {wide} {high}" for wide, high in pictures)
    return f"diffusion {width} {height} {frames} {text} {flash}{sides}"


def _patches(count: int) -> str:
    """Sides in pixels with so many patches, as near to a square as pairs of patches allow."""
    rows = next(
        side for side in range(int(count**0.5), 0, -1) if count % side == 0 and side % 2 == count // side % 2 == 0
    )
    return f"{count // rows * PATCH_PX} {rows * PATCH_PX}"


def packed(document: dict[str, Any]) -> bytes:
    """The file: one row a line, and no time of packing in it."""
    head = {key: value for key, value in document.items() if key not in SECTIONS}
    text = json.dumps(head, indent=1)[:-2]
    for section in SECTIONS:
        lines = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in document[section])
        text += f',\n "{section}": [\n{lines}\n ]'
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=9) as file:
        file.write(f"{text}\n}}\n".encode())
    return buffer.getvalue()


def _unpacked(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
