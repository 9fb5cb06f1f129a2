import sys
from pathlib import Path

import pytest
from weighbridge_engines.models import sparse_ds4

# The helpers lie beside the tests, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from ds4_subjects import Subject

from services.engines.standins.ds4.program import HOW_TO_GET_IT, real_ds4_server

REAL = pytest.param("real", marks=pytest.mark.skipif(real_ds4_server() is None, reason=HOW_TO_GET_IT))


@pytest.fixture(scope="session")
def flash_model(tmp_path_factory):
    """V4 Flash Q2 without weights."""
    return sparse_ds4.write(tmp_path_factory.mktemp("flash") / "flash.gguf")


@pytest.fixture(scope="session")
def v41_model(tmp_path_factory):
    """V4.1 Flash Q2 without weights."""
    return sparse_ds4.write(tmp_path_factory.mktemp("v41") / "v41.gguf", "v41-q2")


@pytest.fixture(params=[REAL, "standin"])
def subject(request, tmp_path):
    """The real ds4-server, then its stand-in: both must pass the same tests."""
    return Subject(request.param, tmp_path)


@pytest.fixture
def standin(tmp_path):
    """The stand-in alone, where a real one would need a card or real weights."""
    return Subject("standin", tmp_path)
