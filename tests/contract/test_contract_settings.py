"""docs/settings.md lists every setting with its variable and its default, and none that is not there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from weighbridge.pull import settings as pull_settings
from weighbridge_common.settings import ServiceSettings
from weighbridge_engines.settings import EngineSettings
from weighbridge_fit.settings import FitSettings
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_proto import targets

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
ROW = re.compile(
    r"^\| `(?P<variable>WEIGHBRIDGE_[A-Z0-9_*]+)` \| (?P<default>[^|]*) \| (?P<meaning>[^|]+) \|$", re.MULTILINE
)

SERVICES: tuple[type[ServiceSettings], ...] = (LedgerSettings, FitSettings, EngineSettings)


def settings() -> Iterator[tuple[str, str]]:
    """Every variable and its default as the page writes them; `*` stands for each service in those that all have."""
    shared = ServiceSettings.model_fields
    for field, info in shared.items():
        alias = info.validation_alias
        yield alias if isinstance(alias, str) else f"WEIGHBRIDGE_*_{field.upper()}", written(info.default)
    for service in SERVICES:
        for field, info in service.model_fields.items():
            if field not in shared:
                yield service.variable(field), written(info.default)
    for variable, default in pull_settings.DEFAULTS.items():
        yield variable, written(default)


def written(default: object) -> str:
    """A default the way a person types it; nothing for the empty one."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float) and default.is_integer():
        return f"`{int(default)}`"
    return "" if default in ("", None) else f"`{default}`"


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Variable → default, as the page has them."""
    return {row["variable"]: row["default"].strip() for row in ROW.finditer(PAGE.read_text())}


def test_every_setting_is_listed_with_its_default(rows: dict[str, str]) -> None:
    expected = dict(settings())
    assert {variable: rows.get(variable) for variable in expected} == expected


def test_nothing_is_listed_that_is_no_setting(rows: dict[str, str]) -> None:
    known = {variable for variable, _ in settings()} | {targets.target_variable(name) for name in targets.SERVICES}
    assert set(rows) - known == set()


def test_every_target_variable_is_listed(rows: dict[str, str]) -> None:
    assert {targets.target_variable(name) for name in targets.SERVICES} - set(rows) == set()
