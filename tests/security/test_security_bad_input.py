"""Bad input through the command, against a running suite: a clear message, the right exit code, nothing left behind."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Suite, running_suite

pytestmark = pytest.mark.mlx

REFUSED, FAILED, USAGE = 3, 1, 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A models root with the demo model and malformed files beside it."""
    root = tmp_path_factory.mktemp("models")
    (root / "demo").symlink_to(demo_model)  # leads out of the root: must look absent
    real = root / "real"
    real.mkdir()
    for file in demo_model.iterdir():
        (real / file.name).hardlink_to(file)

    header = json.dumps({"a": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    (root / "truncated.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
    (root / "four.gguf").write_bytes(b"GGUF")
    # version 3, 2^63 tensors, 2^62 metadata entries: counts that no file of 24 bytes can hold
    (root / "absurd.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 1 << 62))
    (root.parent / "outside.gguf").write_bytes(b"GGUF")
    return root


@pytest.fixture(scope="module")
def bad_suite(root: Path) -> Iterator[Suite]:
    with running_suite(root) as suite:
        yield suite
        assert suite.stop() == 0


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """No lease and no engine process is left behind by a refusal."""
    yield
    if "bad_suite" in request.fixturenames:
        suite: Suite = request.getfixturevalue("bad_suite")
        assert suite.committed_bytes() == 0
        assert suite.json("leases").get("leases", []) == []
        assert not [p for p in suite.processes() if "mlx_qwen.runtime" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("file", "says"),
    [("truncated.safetensors", "truncated"), ("four.gguf", "four.gguf"), ("absurd.gguf", "absurd.gguf")],
)
@pytest.mark.parametrize("command", ["facts", "fit", "load", "chat"])
def test_a_malformed_file(bad_suite: Suite, root: Path, command: str, file: str, says: str) -> None:
    more = ["hello"] if command == "chat" else []
    done = bad_suite.cli(command, str(root / file), *more, check=False)
    assert done.returncode == FAILED
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_outside_the_models_root_looks_absent(bad_suite: Suite, root: Path) -> None:
    told = {}
    for path in (root.parent / "outside.gguf", root / "absent.gguf", root / "demo"):
        done = bad_suite.cli("load", str(path), check=False)
        assert done.returncode == FAILED
        told[path] = done.stderr.replace(str(path), "PATH")
    assert len(set(told.values())) == 1, "absent and forbidden must look alike"


def test_an_unknown_model(bad_suite: Suite) -> None:
    done = bad_suite.cli("load", "no-such-model", check=False)
    assert done.returncode == FAILED
    assert "no-such-model" in done.stderr


def test_a_context_that_the_model_was_not_made_for(bad_suite: Suite, root: Path) -> None:
    done = bad_suite.cli("load", str(root / "real"), "--context", "1000000", check=False)
    assert done.returncode == FAILED
    assert "8192" in done.stderr.replace(",", "").replace(" ", "")


def test_a_machine_too_small(root: Path) -> None:
    """cpu:0.2 has a share of 0.12 GiB; the demo model needs about 0.3 GiB."""
    with running_suite(root, WEIGHBRIDGE_LEDGER_MACHINE="cpu:0.2") as suite:
        assert suite.cli("fit", str(root / "real"), check=False).returncode == REFUSED
        done = suite.cli("load", str(root / "real"), check=False)
        assert done.returncode == REFUSED
        assert "GiB" in done.stderr
        assert suite.json("leases").get("leases", []) == []
        assert suite.stop() == 0


@pytest.mark.parametrize(
    ("module", "variable", "value"),
    [
        (["weighbridge_ledger"], "WEIGHBRIDGE_LEDGER_MACHINE", "banana"),
        (["weighbridge_ledger"], "WEIGHBRIDGE_LEDGER_TERM_S", "soon"),
        (["weighbridge_fit"], "WEIGHBRIDGE_FIT_GRACE_S", "-1"),
        (["weighbridge_engines", "mlx"], "WEIGHBRIDGE_ENGINES_IDLE_TIMEOUT_S", "never"),
    ],
)
def test_a_wrong_setting_stops_the_start(tmp_path: Path, module: list[str], variable: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *module],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WEIGHBRIDGE_RUN_DIR": str(tmp_path), variable: value},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == USAGE
    assert variable in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("*.sock")) == []
