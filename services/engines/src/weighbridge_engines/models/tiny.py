"""Makes tiny random Qwen3 and Qwen3.5 (hybrid) checkpoints with a tokenizer of their own, for tests.

They have every structure of the real ones (grouped-query attention; three gated-delta layers to one of full attention),
load in a fraction of a second, and talk nonsense. Their sizes are those of the measurements that the memory formulas
were checked with, so the tests can compare with known bytes.

Run it with ``python -m weighbridge_engines.models.tiny OUT_DIR [--quantized]``; it needs ``weighbridge-engines[mlx]``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 2048
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END_OF_TEXT, _END_OF_TURN = 0, 2
_CONTEXT = 32768
_SEED = 7

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Text to learn the merges from: docstrings that every Python carries.
_CORPUS_MODULES = ("argparse", "asyncio", "collections", "decimal", "email.message", "json", "logging", "os", "pathlib",
                   "pickle", "random", "socket", "statistics", "string", "subprocess", "threading")  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """One tiny checkpoint: its folder's name and its config.json."""

    name: str
    config: dict[str, Any]


QWEN3 = TinyModel(
    "tiny-qwen3",
    {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": _CONTEXT,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": _END_OF_TURN,
    },
)

QWEN35 = TinyModel(
    "tiny-qwen35",
    {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "eos_token_id": _END_OF_TURN,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": _CONTEXT,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
        },
    },
)


def make(out_dir: Path, *, quantized: bool = False) -> list[Path]:
    """Makes the bf16 checkpoints (and 4-bit twins if quantized) in out_dir and returns their folders.

    A folder whose config.json exists is complete (it is written last) and is left as it is.
    """
    made = []
    for model in (QWEN3, QWEN35):
        dense = out_dir / f"{model.name}-bf16"
        if not (dense / "config.json").is_file():
            _make_dense(model, dense)
        made.append(dense)
        if quantized:
            packed = out_dir / f"{model.name}-4bit"
            if not (packed / "config.json").is_file():
                _make_quantized(dense, packed)
            made.append(packed)
    return made


def _make_dense(tiny: TinyModel, folder: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import save_model

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    classes = importlib.import_module(f"mlx_lm.models.{tiny.config['model_type']}")
    mx.random.seed(_SEED)
    model = classes.Model(classes.ModelArgs.from_dict(_copy(tiny.config)))
    keep_f32 = getattr(model, "cast_predicate", None)

    def to_bf16(path: str, value: Any) -> Any:
        castable = mx.issubdtype(value.dtype, mx.floating) and (keep_f32 is None or keep_f32(path))
        return value.astype(mx.bfloat16) if castable else value

    model.update(tree_map_with_path(to_bf16, model.parameters()))
    mx.eval(model.parameters())
    save_model(folder, model)
    _write_json(folder / "generation_config.json", {"eos_token_id": [_END_OF_TURN, _END_OF_TEXT]})
    _write_json(folder / "config.json", tiny.config)


def _make_quantized(dense: Path, folder: Path) -> None:
    mlx_lm: Any = importlib.import_module("mlx_lm.utils")
    model, tokenizer, config = mlx_lm.load(os.fspath(dense), return_config=True, lazy=True)
    model, config = mlx_lm.quantize_model(model, config, 64, 4)
    mlx_lm.save(folder, os.fspath(dense), model, tokenizer, config)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the docstrings gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    tokenizer.save(os.fspath(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL_TOKENS[_END_OF_TURN],
            "pad_token": _SPECIAL_TOKENS[_END_OF_TEXT],
            "chat_template": _CHAT_TEMPLATE,
            "model_max_length": _CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )


def _corpus() -> Iterator[str]:
    for name in _CORPUS_MODULES:
        module = importlib.import_module(name)
        yield module.__doc__ or ""
        for member in list(vars(module).values()):
            yield from (text for text in _docstrings(member) if isinstance(text, str))


def _docstrings(member: object) -> Iterator[object]:
    yield getattr(member, "__doc__", None)
    if isinstance(member, type):
        for attribute in vars(member).values():
            yield getattr(attribute, "__doc__", None)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))
    return copied


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.models.tiny", description="Make tiny random Qwen checkpoints for tests."
    )
    parser.add_argument("out_dir", type=Path, help="the folder that holds one folder per checkpoint")
    parser.add_argument("--quantized", action="store_true", help="make 4-bit twins too")
    wanted = parser.parse_args(arguments)
    for folder in make(wanted.out_dir, quantized=wanted.quantized):
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
