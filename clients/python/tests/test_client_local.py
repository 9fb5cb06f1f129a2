"""`facts` and `fit` with no suite running: the real services, in the command's own process."""

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from weighbridge.cli import main

pytest.importorskip("weighbridge_fit")
pytest.importorskip("weighbridge_ledger")

HIDDEN, LAYERS, VOCABULARY, HEADS, HEAD_SIZE = 64, 2, 512, 4, 16


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Qwen3 checkpoint of BF16 zeros, small enough to write by hand."""
    folder = tmp_path / "tiny-qwen3"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    offset = 0
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": [HIDDEN, HIDDEN] for name in "qkvo"}
    for name, shape in shapes.items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(offset))
    return folder


# Embedding, norm, and four square projections in each layer, two bytes an element.
TENSOR_BYTES = 2 * (VOCABULARY * HIDDEN + HIDDEN + LAYERS * 4 * HIDDEN * HIDDEN)


def test_facts_are_the_bytes_of_the_header_and_nothing_else_is_on_stdout(run_dir: Path, model: Path) -> None:
    result = run("facts", str(model), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["facts"]["tensor_bytes"] == str(TENSOR_BYTES)
    assert result.stderr.strip() == "No suite is running; worked out here."
    assert list(run_dir.iterdir()) == [], "it listens in a folder of its own"


def test_a_model_named_from_the_current_folder(run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    printed = json.loads(run("fit", model.name, "--json").stdout)
    assert printed["resolved_path"] == str(model.resolve())
    assert printed["capacity"]["source"] == "MACHINE_SOURCE_DETECTED"


def test_the_verdict_on_a_what_if_machine_decides_the_exit_code(run_dir: Path, model: Path) -> None:
    small = run("fit", str(model), "--machine", "cpu:0.05", "--json")
    assert small.exit_code == 3, small.output
    assert json.loads(small.stdout)["assessment"]["verdict"] == "VERDICT_WONT_RUN"
    large = run("fit", str(model), "--machine", "unified:64", "--json")
    assert large.exit_code == 0
    plan = json.loads(large.stdout)
    assert plan["assessment"]["verdict"] == "VERDICT_RUNS"
    assert plan["capacity"]["source"] == "MACHINE_SOURCE_INLINE"
    lines = plan["requirement"]["lines"]
    resident = sum(int(line["expected_bytes"]) for line in lines if line["phase"] == "resident")
    phases: dict[str, int] = {}
    for line in lines:
        if line["phase"] != "resident":
            phases[line["phase"]] = phases.get(line["phase"], 0) + int(line["expected_bytes"])
    assert resident + max(phases.values()) == int(plan["requirement"]["total"]["expected_bytes"])


def test_bad_input_gets_a_clear_message_and_exit_code_1(run_dir: Path, tmp_path: Path, model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    truncated, four = tmp_path / "truncated.safetensors", tmp_path / "four.gguf"
    truncated.write_bytes(whole[:-1])
    four.write_bytes(b"GGUF")
    for file in (truncated, four):
        result = run("facts", str(file))
        assert result.exit_code == 1
        assert "MALFORMED_WEIGHTS" in result.stderr
        assert file.name in result.stderr
    absent = run("facts", str(tmp_path / "absent"))
    assert absent.exit_code == 1
    assert "MODEL_NOT_FOUND" in absent.stderr
    too_long = run("fit", str(model), "--context", "5000")
    assert too_long.exit_code == 1
    assert "CONTEXT_TOO_LONG" in too_long.stderr


def test_a_wrong_setting_is_named_and_is_a_usage_error(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_LEDGER_MACHINE", "abacus:64")
    result = run("fit", str(model))
    assert result.exit_code == 2
    assert "WEIGHBRIDGE_LEDGER_MACHINE" in result.stderr
    assert "unified:64" in result.stderr, "what can be written instead"


def test_a_fit_service_that_was_named_is_not_replaced_by_another(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_FIT_TARGET", f"unix:{run_dir}/elsewhere.sock")
    result = run("facts", str(model))
    assert result.exit_code == 4
    assert "elsewhere.sock" in result.stderr


def test_an_installation_without_services_says_what_to_do(
    run_dir: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighbridge.cli.standalone.is_installed", lambda module: False)
    result = run("facts", str(model))
    assert result.exit_code == 4
    assert "weighbridge[local]" in result.stderr
    assert "weighbridge up" in result.stderr
