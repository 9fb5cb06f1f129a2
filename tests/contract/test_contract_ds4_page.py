"""docs/engines/ds4.md has the table of machines and models that fit gives, written and checked by this file; and every
reason that a page of an engine names is one of the contracts' or the code's.

``python tests/contract/test_contract_ds4_page.py`` prints the table, for the page.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import weighbridge_catalog
from weighbridge_fit.capacity import Capacity
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.families.ds4 import Ds4Family
from weighbridge_fit.model import Model
from weighbridge_fit.planning import answer
from weighbridge_fit.plans.ds4.options import Ds4Request
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.wire.machine import capacity_from
from weighbridge_ledger.machine.capacity import assemble
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.messages import capacity_to_proto

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines" / "ds4.md"
DS4 = Ds4Family()
UNIFIED = (64, 96, 128, 192, 256, 512)
CARDS = (24, 48, 80, 141)
# How settings, switches of a build and of an image begin.
NO_REASONS = ("WEIGHBRIDGE_", "SD_", "BASE_")
# Published files of V4.1 Flash, which the catalogue has no entry for.
V41_BYTES = {"V4.1 Flash Q2": 365_713_686_528, "V4.1 Flash Q4": 518_596_067_328}


def models() -> Iterator[tuple[str, Model]]:
    entries = Catalogue(weighbridge_catalog.MODELS, None).snapshot().entries.values()
    known = [known_by_sizes(entry) for entry in entries if entry.engine is Engine.DS4]
    for model in known:
        assert model.entry is not None
        yield f"`{model.entry.catalog_id}`", model
    for name, size in V41_BYTES.items():
        facts = replace(known[0].facts, file_bytes=size, tensor_bytes=size, architecture="deepseek41", name=name)
        yield name, Model(facts)


def capacity(spec: str, platform: str) -> Capacity:
    return capacity_from(capacity_to_proto(assemble(replace(parse_spec(spec), platform=platform), limit_bytes=None)))


def machines() -> Iterator[tuple[str, Capacity]]:
    for ram in UNIFIED:
        yield f"{ram} GiB Mac", capacity(f"unified:{ram}", "darwin/arm64")
    for card in CARDS:
        yield f"{card} GiB card", capacity(f"discrete:128+{card}", "linux/x86_64")


def cell(model: Model, where: Capacity) -> str:
    """Resident where that may be asked for and runs, else streamed, as it is planned unasked."""
    tried = [_launch(model, where, stream_experts) for stream_experts in (False, None)]
    whole = tried[0]
    return whole if whole.startswith("resident") and whole.endswith(("runs", "tight")) else tried[1]


def _launch(model: Model, where: Capacity, stream_experts: bool | None) -> str:
    try:
        made = answer(DS4, model, Ds4Request(stream_experts=stream_experts), where, advise=False)
    except PlanError as refused:
        assert refused.reason == "EXPERT_CACHE_UNSAFE"
        return "no"
    ds4 = DS4.options(made.plan).ds4
    how = f"cache {ds4.expert_cache_gib}" if ds4.stream_experts else "resident"
    context = DS4.workload(made.plan).chat.context_tokens // 1024
    verdict = {"RUNS": "runs", "TIGHT": "tight", "WONT_RUN": "no"}[made.assessment.verdict.name]
    return "no" if verdict == "no" else f"{how}, {context}K, {verdict}"


def table() -> str:
    columns = list(models())
    rows = [f"| machine | {' | '.join(name for name, _ in columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for name, where in machines():
        rows.append(f"| {name} | {' | '.join(cell(model, where) for _, model in columns)} |")
    return "\n".join(rows)


def test_the_page_has_the_machines_and_models_that_fit_gives() -> None:
    wanted = table()
    found = f"\n\n{wanted}\n\n" in f"{PAGE.read_text()}\n"
    assert found, f"the table in docs/engines/ds4.md must be this one:\n{wanted}"


@pytest.mark.parametrize("page", sorted(PAGE.parent.glob("*.md")), ids=lambda page: page.stem)
def test_every_reason_of_a_page_is_one_of_the_contracts_or_the_codes(page: Path) -> None:
    text = page.read_text("utf-8")
    assert "## What errors mean" in text
    named = {name for name in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", text) if not name.startswith(NO_REASONS)}
    assert len(named) > 10
    sources = [*ROOT.glob("proto/weighbridge/**/*.proto"), *ROOT.glob("services/*/src/**/*.py")]
    known = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", "\n".join(source.read_text("utf-8") for source in sources)))
    assert named <= known, named - known


if __name__ == "__main__":
    print(table())
