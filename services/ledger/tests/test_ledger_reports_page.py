"""docs/ledger-reports.md names tests that are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]
PAGE = (ROOT / "docs" / "ledger-reports.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([a-z_0-9]+)::([a-z_0-9]+)`", PAGE)
    assert len(named) > 100
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(
            rf"^(async )?def test_{name}\(",
            (TESTS / f"test_ledger_{file}.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert missing == []


def test_every_test_of_these_reports_is_on_the_page() -> None:
    """A row that is dropped from the page, or a test that is added, is noticed."""
    unnamed = [
        name
        for file in ("faults", "peer_reports", "peer_reports_cards", "peer_reports_service", "reference_broker")
        for name in re.findall(
            r"^(?:async )?def test_(\w+)\(",
            (TESTS / f"test_ledger_{file}.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        if f"`{file}::{name}`" not in PAGE
    ]
    assert unnamed == []


def test_paths_on_the_page_exist() -> None:
    paths = re.findall(r"`(services/[a-z_0-9/]+\.py)`", PAGE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
