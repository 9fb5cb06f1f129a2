"""docs/engines/sd-server.md has the launch profiles that fit has, in tables that this file writes and checks.

``python tests/contract/test_contract_sd_profiles.py`` prints the tables, for the page.
"""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import weighbridge_catalog
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_proto.fit.v1 import plan_pb2

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines" / "sd-server.md"
SD = SdFamily()
_PLENTY = Ceiling(1 << 40, 1 << 40)
MACHINE = Capacity(Pool.CPU, _PLENTY, _PLENTY)
_YES = {True: "yes", False: "no", None: "not known"}


def tables() -> tuple[str, str]:
    """The catalogue's models; and what is known of others, by architecture and file."""
    return "\n".join(_table(MODEL_COLUMNS, _models())), "\n".join(_table(OTHER_COLUMNS, _others()))


MODEL_COLUMNS = (
    "model",
    "loads as",
    "sides",
    "made for",
    "steps",
    "at launch",
    "guidance",
    "tiles",
    "starts from a picture",
)
OTHER_COLUMNS = ("architecture", "file", "made for", "steps", "at launch", "guidance", "tiles")


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _models() -> Iterator[tuple[str, ...]]:
    for entry in Catalogue(weighbridge_catalog.MODELS, None).snapshot().entries.values():
        if entry.engine is not Engine.SD:
            continue
        made = SD.plan(known_by_sizes(entry), SdRequest(), MACHINE)
        launch = SD.launch(made)
        assert launch is not None
        asked = launch.sd.rendering
        explicit, assessed = (
            getattr(asked, field) if asked.HasField(field) else None
            for field in ("starts_from_source", "assessed_starts_from_source")
        )
        yield (
            f"`{entry.catalog_id}`",
            asked.weights_kind,
            f"{asked.min_side} to {asked.max_width}",
            f"{asked.default_width} × {asked.default_height}",
            str(asked.steps),
            "yes" if "--steps" in made.arguments else "",
            _guidance(asked),
            _tiles("--vae-tiling" in made.arguments, any(note.code == "TILING_SEAMS" for note in _tiled(entry))),
            _YES[assessed if explicit is None else explicit],
        )


def _tiled(entry: Any) -> tuple[Any, ...]:
    return SD.plan(known_by_sizes(entry), SdRequest(vae_tiling=True), MACHINE).notes


def _guidance(asked: plan_pb2.SdRendering) -> str:
    return f"{asked.guidance:g}" if asked.HasField("guidance") else "the server's"


def _tiles(on: bool | None, seams: bool) -> str:
    return "on a card" if on is None else "yes" if on else "no: seams" if seams else "no"


def _others() -> Iterator[tuple[str, ...]]:
    text = resources.files("weighbridge_fit.calibration").joinpath("sd_profiles.json").read_text("utf-8")
    document = json.loads(text)
    for architecture, values in document["architectures"].items():
        yield (f"`{architecture}`", "any", *_values(document["default"] | values))
    for variant in document["variants"]:
        for architecture in variant.get("architectures", [""]):
            base = document["default"] | document["architectures"].get(architecture, {})
            steps = {"steps": "as named"} if "(?P<steps>" in variant.get("name", "") else {}
            shown = f"`{architecture}`" if architecture else "any"
            yield (shown, variant["file"], *_values(base | variant["values"] | steps))
    yield ("any other", "any", *_values(document["default"]))


def _values(values: dict[str, Any]) -> tuple[str, ...]:
    guidance = values["cfg_scale"]
    side = values["default_side_px"] or 1024
    return (
        f"{side} × {side}",
        str(values["steps"]),
        "yes" if values["distilled"] else "",
        "the server's" if guidance is None else f"{guidance:g}",
        _tiles(values["vae_tiling"], values["tiling_seams"]),
    )


@pytest.mark.parametrize("number", [0, 1], ids=["models", "others"])
def test_the_page_has_every_profile_and_none_that_is_no_more(number: int) -> None:
    table = tables()[number]
    found = f"\n\n{table}\n\n" in f"{PAGE.read_text()}\n"
    assert found, f"the table in docs/engines/sd-server.md must be this one:\n{table}"


if __name__ == "__main__":
    print("\n\n".join(tables()))
