"""Makes `weighbridge_fit/calibration/sd.json` from measured rows. Deterministic: the same rows give the same bytes.

    python services/fit/calibrate/sd.py            writes the file
    python services/fit/calibrate/sd.py --check    compares, and exits 1 where they differ

Input are `tests/data/sd/measurements.json.gz` (buffers and processes of an engine build) and beside it
`sizings.json.gz` (graphs of the same engine, sized by its own allocator). The latter's held-out section is never read
here.

Laws come from the engine's code (`laws.sd_shapes`, `laws.sd_buffers`); here their figures are found. Arithmetic is
plain Python floats in a fixed order, rounded at the end, so no version of a numerical library can change a digit.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_diffusion import diffusion_laws
from sd_parts import autoencoder_laws, encoder_laws, process_figures, vision_law, work_laws

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data" / "sd"
OUTPUT = HERE.parent / "src" / "weighbridge_fit" / "calibration" / "sd.json"


def main(arguments: Sequence[str]) -> int:
    text = document(*read())
    if "--check" in arguments:
        same = OUTPUT.read_text("utf-8") == text
        print("unchanged" if same else f"{OUTPUT} is not what the rows give: run this without --check")
        return 0 if same else 1
    OUTPUT.write_text(text, "utf-8")
    print(f"wrote {OUTPUT}")
    return 0


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """Measured rows and sized graphs."""
    return _unpacked("measurements.json.gz"), _unpacked("sizings.json.gz")


def _unpacked(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress((DATA / name).read_bytes()))
    return document


def document(measured: dict[str, Any], sized: dict[str, Any]) -> str:
    """The calibration as text: one law or figure a line."""
    rows = [row for row in measured["rows"] if row["kind"] == "compute" and "error" not in row]
    parts = {
        "engine": sized["engine"],
        "build": sized["build"],
        "date": sized["date"],
        "comment": "Made by services/fit/calibrate/sd.py from the rows in services/fit/tests/data/sd: edit those, not "
        "this file. Knots: attention tokens and bytes. low and high: factors of what is expected.",
        "diffusion": diffusion_laws(rows, sized["diffusion"]),
        "autoencoders": autoencoder_laws(sized["autoencoder"]),
        "encoders": encoder_laws(rows, sized["text"]),
        "encoder_spread": {"low": 0.85, "high": 1.05},
        "vision": vision_law(sized["text"]),
        "work": work_laws(rows),
        "figures": process_figures(measured["rows"]),
    }
    return _text(parts) + "\n"


def _text(value: Any, depth: int = 0) -> str:
    """JSON with one law or figure a line, so that a change of calibration can be read as a change."""
    if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
        pad = " " * (depth + 1)
        lines = [f"{pad}{json.dumps(key)}: {_text(inner, depth + 1)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
