"""Fixtures of the tests that need more than one service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Suite, make_model, running_suite

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models_root() -> Path:
    """The folder the models of this checkout are made in, once."""
    return REPOSITORY / ".cache" / "models"


@pytest.fixture(scope="session")
def demo_model(models_root: Path) -> Path:
    """A real small chat model."""
    return make_model("demo", models_root / "demo")


@pytest.fixture(scope="session")
def tiny_models(models_root: Path) -> Path:
    """A folder with tiny random models: tiny-qwen3-bf16, tiny-qwen35-bf16."""
    return make_model("tiny", models_root / "tiny")


@pytest.fixture(scope="module")
def suite(models_root: Path, demo_model: Path, tiny_models: Path) -> Iterator[Suite]:
    """A running suite for one module of tests. Each test leaves it empty."""
    with running_suite(models_root) as started:
        yield started
