import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# The fakes lie beside the tests, and pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run_dir():
    """A short private folder: socket paths may have 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="wb-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
