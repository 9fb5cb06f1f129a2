"""Facts in a manifest: the same as those of the file on disk, and refused where they contradict themselves."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fit_model_files import (
    CLIP_L,
    FLUX,
    LANGUAGE,
    LLAMA_GGUF,
    LORA,
    SD15,
    T5,
    VAE,
    write_gguf,
    write_json,
    write_pipeline,
    write_safetensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weighbridge_fit.describe import describe
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.pinned import PinnedFactsError, canonical_text, differences, pin, unpin
from weighbridge_fit.wire.facts import SORTED_AT_ONCE, UnpriceableFactsError, facts_from, facts_message
from weighbridge_proto.fit.v1 import weights_pb2

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def language(folder: Path) -> Path:
    write_safetensors(folder / "model.safetensors", LANGUAGE)
    write_json(folder / "config.json", QWEN3)
    return folder


def sharded(folder: Path) -> Path:
    weight_map = {}
    for number, (name, shape) in enumerate(LANGUAGE.items()):
        shard = f"model-{number + 1:05d}-of-00004.safetensors"
        write_safetensors(folder / shard, {name: shape})
        weight_map[name] = shard
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(folder / "config.json", QWEN3)
    return folder


def quantised(folder: Path) -> Path:
    write_safetensors(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": (8, 4)}, "uint32")
    write_json(folder / "config.json", {**QWEN3, "quantization": {"bits": 4, "group_size": 64}})
    return folder


def checkpoint(folder: Path) -> Path:
    torch = pytest.importorskip("torch")
    folder.mkdir(parents=True)
    torch.save({name: torch.zeros(shape) for name, shape in SD15.items()}, folder / "m.ckpt")
    return folder / "m.ckpt"


def parts(folder: Path) -> Path:
    write_gguf(folder / "flux-Q4.gguf", FLUX, "flux")
    write_safetensors(folder / "ae.safetensors", VAE)
    write_safetensors(folder / "clip_l.safetensors", CLIP_L)
    return folder


def drafter(folder: Path) -> Path:
    write_safetensors(folder / "model.safetensors", {"fc.weight": (8, 8)})
    write_json(folder / "config.json", {"architectures": ["Gemma4DSparkModel"], "base_model": "google/gemma-4"})
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "language": language,
    "sharded": sharded,
    "quantised": quantised,
    "gguf": lambda folder: write_gguf(folder / "m.gguf", LLAMA_GGUF),
    "checkpoint": checkpoint,
    "single": lambda folder: write_safetensors(folder / "m.safetensors", SD15),
    "parts": parts,
    "tree": lambda folder: write_pipeline(folder, "FluxPipeline", {"transformer": FLUX, "text_encoder": T5}),
    "adapter": lambda folder: write_safetensors(folder / "l.safetensors", LORA),
    "drafter": drafter,
    "projector": lambda folder: write_gguf(folder / "mmproj.gguf", {"v.patch": (4, 4)}, "clip", kind="mmproj"),
}


def facts_of(path: Path, root: Path) -> WeightFacts:
    return describe(path, ModelsRoot(root).contains)


@pytest.fixture
def facts(tmp_path: Path) -> WeightFacts:
    return facts_of(KINDS["single"](tmp_path / "m"), tmp_path)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_facts_from_a_manifest_and_from_disk_are_the_same(kind: str, tmp_path: Path) -> None:
    found = facts_of(KINDS[kind](tmp_path / "m"), tmp_path)
    text = canonical_text(pin(found))
    assert json.loads(text) == pin(found)
    again = unpin(json.loads(text))
    assert again == found
    assert differences(again, found) == ()
    # Written again it is the same text: a manifest changes when its model does.
    assert canonical_text(pin(again)) == text


_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
_SHAPES = st.dictionaries(_NAMES, st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=_SHAPES,
    dtype=st.sampled_from(["float16", "float32", "float64", "uint8", "int64"]),
    config=st.sampled_from([None, {"model_type": "other"}, {"_class_name": "AutoencoderKL"}]),
)
def test_any_tensors_come_back_from_a_manifest_as_they_were(
    shapes: dict[str, tuple[int, ...]], dtype: str, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    shapes.pop("__metadata__", None)
    folder = tmp_path / "m"
    write_safetensors(folder / "model.safetensors", shapes or {"a": (1,)}, dtype)
    (folder / "config.json").unlink(missing_ok=True)
    if config is not None:
        write_json(folder / "config.json", config)
    found = facts_of(folder, tmp_path)
    assert unpin(json.loads(canonical_text(pin(found)))) == found


def changed(part: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**part, "facts": {**part["facts"], **values}}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tensor_bytes": "7"}, "facts.tensor_bytes"),
        ({"tensor_count": "1"}, "facts.tensor_count"),
        ({"element_count": "1"}, "facts.element_count"),
        ({"largest_tensor_bytes": "1"}, "facts.largest_tensor_bytes"),
        ({"model_digest": "0" * 64}, "facts.model_digest"),
        ({"model_digest": ""}, "facts.model_digest"),
        ({"tensors": []}, "facts.tensors"),
        ({"file_bytes": "5"}, "facts.file_bytes"),
        ({"components": [{"component": "vae", "tensor_count": "1", "bytes": "1"}]}, "facts.components"),
        ({"precisions": [{"dtype": "F16", "tensor_count": "1", "bytes": "1"}]}, "facts.precisions"),
        ({"tensors": [{"name": "a", "dtype": "F16", "shape": ["-1"], "bytes": "2"}]}, "facts.tensors"),
        ({"tensors": [{"name": "a", "dtype": "F16", "shape": [str(2**50)] * 3, "bytes": "2"}]}, "facts.tensors"),
        ({"surprise": 1}, "facts"),
        ({"tensor_bytes": "many"}, "facts"),
        ({"tensor_bytes": 2**70}, "facts"),
    ],
)
def test_pinned_facts_that_contradict_themselves_are_refused(
    facts: WeightFacts, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(PinnedFactsError) as caught:
        unpin(changed(pin(facts), **values))
    assert caught.value.field == field


@pytest.mark.parametrize("part", [{}, {"version": 2, "facts": {}}, {"version": True, "facts": {}}, {"version": 1}])
def test_parts_of_another_version_or_kind_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(PinnedFactsError):
        unpin(part)


def test_a_changed_tensor_is_noticed_whatever_the_totals_say(facts: WeightFacts) -> None:
    part = pin(facts)
    part["facts"]["tensors"][0]["name"] += "x"
    with pytest.raises(PinnedFactsError) as caught:
        unpin(part)
    assert caught.value.field == "facts.model_digest"


def test_facts_without_tensors_are_not_pinned(facts: WeightFacts) -> None:
    with pytest.raises(PinnedFactsError):
        pin(replace(facts, tensors=()))


def test_what_differs_from_the_disk_is_said(tmp_path: Path) -> None:
    pinned = facts_of(write_safetensors(tmp_path / "a.safetensors", {"x": (4,), "y": (2,)}), tmp_path)
    found = facts_of(write_safetensors(tmp_path / "b.safetensors", {"x": (5,), "z": (2,)}), tmp_path)
    sentences = differences(pinned, found)
    assert [sentence.partition(":")[0] for sentence in sentences[:3]] == [
        "1 tensor(s) are missing",
        "1 tensor(s) are not pinned",
        "1 tensor(s) are other than pinned",
    ]
    assert differences(pinned, replace(pinned, architecture="sdxl")) == ("The architecture is sdxl, pinned is none.",)
    assert differences(pinned, replace(pinned, name="elsewhere")) == ()


# Facts given in a request.


def inline(facts: WeightFacts, **values: Any) -> WeightFacts:
    message = facts_message(facts, include_tensors=True)
    for name, value in values.items():
        if isinstance(value, list):
            del getattr(message, name)[:]
        else:
            setattr(message, name, value)
    return facts_from(message)


def test_inline_facts_with_tensors_need_nothing_else(facts: WeightFacts) -> None:
    empty = {"tensor_bytes": 0, "tensor_count": 0, "element_count": 0, "largest_tensor_bytes": 0, "file_bytes": 0}
    assert inline(facts, **empty, model_digest="", precisions=[], components=[]) == facts


@pytest.mark.parametrize(
    "field", ["tensor_bytes", "tensor_count", "element_count", "largest_tensor_bytes", "file_bytes"]
)
def test_inline_totals_must_agree_with_the_tensors(facts: WeightFacts, field: str) -> None:
    with pytest.raises(UnpriceableFactsError) as caught:
        inline(facts, **{field: 3})
    assert caught.value.field == f"model.facts.{field}"


def test_an_inline_digest_must_be_that_of_the_tensors(facts: WeightFacts) -> None:
    with pytest.raises(UnpriceableFactsError) as caught:
        inline(facts, model_digest="ab" * 32)
    assert caught.value.field == "model.facts.model_digest"


def test_tensors_of_a_request_may_come_in_any_order() -> None:
    """In more than one run of the sort."""
    count = 2 * SORTED_AT_ONCE + 100
    # 7,919 is prime, so that every number comes once.
    names = [f"layer.{number * 7919 % count:06d}" for number in range(count)]
    message = weights_pb2.WeightFacts(
        name="m", tensors=[weights_pb2.TensorFact(name=name, dtype="F16", shape=[4], bytes=8) for name in names]
    )
    found = facts_from(message)
    assert [tensor.name for _, tensor in found.tensors] == sorted(names)
    assert found.tensor_count == len(set(names)) == count
