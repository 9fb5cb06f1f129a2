import sys
from pathlib import Path

import pytest
from weighbridge_engines.models import tiny_sd

# The helpers lie beside the tests, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from sd_subjects import Subject

from services.engines.standins.sd.program import HOW_TO_GET_IT, real_sd_server

REAL = pytest.param("real", marks=pytest.mark.skipif(real_sd_server() is None, reason=HOW_TO_GET_IT))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return tiny_sd.write(tmp_path_factory.mktemp("tiny-sd"), format="q4_0")


@pytest.fixture(scope="module", params=[REAL, "standin"])
def subject(request, tmp_path_factory):
    """The real sd-server, then its stand-in: both must pass the same tests."""
    return Subject(request.param, tmp_path_factory.mktemp(request.param))
