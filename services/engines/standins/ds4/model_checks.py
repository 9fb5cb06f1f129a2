"""Whether a file is a model that this build can run: shapes, metadata and vocabulary, checked in ds4's order."""

from typing import Any

from weighbridge_common import ds4_layout as layout
from weighbridge_common.ds4_layout import TYPES, Tensor
from weighbridge_engines.models.sparse_ds4 import SPECIAL_TOKENS

from services.engines.standins.ds4.flags import MAY, SEPTEMBER
from services.engines.standins.ds4.model_file import ModelFile, Words, die

_ROUTED = ("IQ2_XXS", "Q2_K", "Q4_K")
_ROUTED_LATER = (*_ROUTED, "MXFP4")

# Metadata that must have one value, in the order in which it is compared (8d57664). All is looked up before any of it
# is compared, but for what stands behind the mark.
_SHAPE: dict[str, Any] = {
    "embedding_length": layout.HIDDEN,
    "vocab_size": layout.VOCABULARY,
    "attention.head_count": layout.HEADS,
    "attention.key_length": layout.HEAD_SIZE,
    "attention.head_count_kv": 1,
    "attention.value_length": layout.HEAD_SIZE,
    "rope.dimension_count": 64,
    "attention.output_group_count": layout.OUTPUT_GROUPS,
    "attention.q_lora_rank": layout.QUERY_RANK,
    "attention.output_lora_rank": layout.OUTPUT_RANK,
    "expert_count": layout.EXPERTS,
    "expert_used_count": layout.USED_EXPERTS,
    "expert_feed_forward_length": layout.EXPERT_SIZE,
    "expert_shared_count": 1,
    "hash_layer_count": layout.HASH_LAYERS,
}
_LATER_SHAPE: dict[str, Any] = {
    "attention.sliding_window": 128,
    "attention.indexer.head_count": layout.INDEXER_HEADS,
    "attention.indexer.key_length": layout.INDEXER_SIZE,
    "attention.indexer.top_k": 512,
    "hyper_connection.count": layout.STREAMS,
    "hyper_connection.sinkhorn_iterations": 20,
    "block_count": layout.LAYERS,
}
_MEASURES: dict[str, Any] = {
    "rope.scaling.original_context_length": 65_536,
    "rope.freq_base": 10_000.0,
    "rope.scaling.factor": 16.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.compress_rope_freq_base": 160_000.0,
    "expert_weights_scale": 1.5,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "hyper_connection.epsilon": 1e-6,
    "expert_weights_norm": True,
}
_DSPARK_PARTS = (".main_proj.", ".markov_head.", ".confidence_head.")
"""A support file with all of them is taken for DSpark, whatever its metadata says (7e3dbef)."""
_V41_KEYS = ("block_count", "embedding_length", "vocab_size", "expert_count", "expert_used_count")


def check_model(file: ModelFile, build: str) -> None:
    """Ends the process for a model that this build cannot run."""
    _check_vocabulary(file)
    if build == SEPTEMBER and file.architecture == "deepseek41":
        for key in _V41_KEYS:
            _required(file, f"deepseek41.{key}")
        _check_experts(file, layout.V41_LAYERS)
        return
    if build != MAY and file.architecture == "glm-dsa":
        _required(file, "glm-dsa.block_count")
        return
    _check_flash(file)
    _check_flash_tensors(file, _ROUTED if build == MAY else _ROUTED_LATER)


def check_head(file: ModelFile, build: str) -> None:
    """Ends the process for a support file that this build cannot draft with."""
    if build != MAY and all(any(part in name for name in file.tensors) for part in _DSPARK_PARTS):
        return
    for wanted in layout.legacy_head():
        found = file.tensors.get(wanted.name)
        if found is None:
            die(f"required tensor is missing: {wanted.name}")
        if "_exps" not in wanted.name:
            plain = ("F16", "F32") if wanted.name.endswith(("_fn.weight", "gate_inp.weight")) else (wanted.type,)
            _check_layout(found, wanted, plain)


def _check_vocabulary(file: ModelFile) -> None:
    for key, what in (("tokens", "token"), ("merges", "merge")):
        found = file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, Words | list) or (isinstance(found, list) and not all(_are_texts(found))):
            die(f"GGUF tokenizer {what} table is missing or invalid")
    for word in SPECIAL_TOKENS:
        if not file.has_word(word) and word not in (file.metadata["tokenizer.ggml.tokens"] or ()):
            die(f"required tokenizer token is missing: {word}")


def _are_texts(values: list[Any]) -> list[bool]:
    return [isinstance(value, str) for value in values]


def _check_flash(file: ModelFile) -> None:
    for key in ("block_count", *_SHAPE):
        _required(file, f"deepseek4.{key}")
    for key, wanted in _SHAPE.items():
        _expect(file, key, wanted)
    for key in ("expert_group_count", "expert_group_used_count"):
        if file.metadata.get(f"deepseek4.{key}", 0) != 0:
            _expect(file, key, 0)
    for key, wanted in _LATER_SHAPE.items():
        _expect(file, key, wanted)
    ratios = _array(file, "attention.compress_ratios", "int32/uint32")
    for layer, wanted in enumerate(layout.RATIOS):
        if ratios[layer] != wanted:
            what = "unexpected DeepSeek4 compression ratio at layer"
            die(f"{what} {layer}: got {ratios[layer]}, expected {wanted}")
    for value in _array(file, "swiglu_clamp_exp", "float")[: layout.LAYERS]:
        if abs(value - 10.0) > 1e-5:
            die(f"expected swiglu_clamp_exp=10 for DeepSeek4 Flash, got {value:.9g}")
    for key, wanted in _MEASURES.items():
        _expect(file, key, wanted)


def _array(file: ModelFile, key: str, of: str) -> list[Any]:
    found = file.metadata.get(f"deepseek4.{key}")
    if not isinstance(found, list):
        die(f"required {of} array metadata key is missing: deepseek4.{key}")
    if len(found) < layout.LAYERS:
        die(f"deepseek4.{key} is shorter than the layer count")
    return found


def _required(file: ModelFile, key: str) -> Any:
    if key not in file.metadata:
        die(f"required metadata key is missing: {key}")
    return file.metadata[key]


def _expect(file: ModelFile, key: str, wanted: Any) -> None:
    got = _required(file, f"deepseek4.{key}")
    close = abs(wanted) * 1e-6 if isinstance(wanted, float) and abs(wanted) > 1 else 1e-6
    if abs(got - wanted) > (close if isinstance(wanted, float) else 0):
        die(f"expected {key}={_written(wanted)} for DeepSeek4 Flash, got {_written(got)}")


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _check_flash_tensors(file: ModelFile, routed: tuple[str, ...]) -> None:
    optional = "exp_probs_b.bias"
    wanted = layout.flash()
    for tensor in wanted:
        if tensor.name not in file.tensors and not tensor.name.endswith(optional):
            die(f"required tensor is missing: {tensor.name}")
    for tensor in wanted:
        found = file.tensors.get(tensor.name)
        if found is not None:
            _check_layout(found, tensor, routed if "_exps." in tensor.name else (tensor.type,))


def _check_layout(found: Tensor, wanted: Tensor, types: tuple[str, ...]) -> None:
    if found.type not in types:
        if "_exps." in found.name:
            named = f"{TYPES[found.type][0]} ({_later_name(found.type)})"
            die(f"tensor {found.name} has type {named}, expected a routed expert quant type")
        expected = types[0].lower() if len(types) == 1 else "F16 or F32"
        die(f"tensor {found.name} has type {found.type.lower()}, expected {expected}")
    if len(found.shape) != len(wanted.shape):
        die(f"tensor {found.name} has {len(found.shape)} dimensions, expected {len(wanted.shape)}")
    for number, (got, expected_size) in enumerate(zip(found.shape, wanted.shape, strict=True)):
        if got != expected_size:
            die(f"tensor {found.name} has dim[{number}]={got}, expected {expected_size}")


def _later_name(type_: str) -> str:
    """MXFP4 is refused only by builds that have no name for it."""
    return "unknown" if type_ == "MXFP4" else type_.lower()


def _check_experts(file: ModelFile, layers: int) -> None:
    for layer in range(layers):
        for part in ("gate", "up", "down"):
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            if name not in file.tensors:
                die(f"required tensor is missing: {name}")
