"""Makes the smallest model that sd-server renders from end to end: random weights, 17 MB, written in half a second.

A FLUX.2 [klein] of one double and one single block (128 wide), its text encoder a Qwen3 32 wide with the 28 layers and
the whole vocabulary that the engine expects, and the tiny autoencoder or the full one (90 MB as F8). Nothing of it has
been trained: pictures are noise, but the same seed and request give the same picture on one machine.

Run it with ``python -m weighbridge_engines.models.tiny_sd OUT_DIR``; it needs NumPy and gguf
(``weighbridge-engines[demo]``).
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Format = Literal["q8_0", "q4_0", "f16", "bf16", "f8", "f32"]
Autoencoder = Literal["tiny", "f16", "f8"]
FORMATS: tuple[Format, ...] = ("q8_0", "q4_0", "f16", "bf16", "f8", "f32")
AUTOENCODERS: tuple[Autoencoder, ...] = ("tiny", "f16", "f8")

_SEED = 7
_QUANT_BLOCK = 32  # elements of a Q8_0 or Q4_0 block (GGUF specification)

_HIDDEN, _HEAD = 128, 128
_TEXT_HIDDEN, _TEXT_FEED_FORWARD = 32, 32
_TEXT_LAYERS = 28
"""With 28 layers the engine takes a Qwen3 for one of 16 heads; klein reads layers 9, 18 and 27."""
_VOCABULARY = 151936

Table = dict[str, tuple[int, ...]]
"""Tensors: name to shape, the outermost dimension first."""


@dataclass(frozen=True)
class TinySd:
    """A model that was written.

    Attributes:
        files: sd-server's flag to the file that it names.
    """

    files: Mapping[str, Path]

    @property
    def arguments(self) -> list[str]:
        """How sd-server is told to load it."""
        return [word for flag, path in self.files.items() for word in (flag, str(path))]


def write(
    folder: Path, *, format: Format = "q8_0", autoencoder: Autoencoder = "tiny", single: bool = False, seed: int = _SEED
) -> TinySd:
    """Write the model into ``folder``, which is made if need be. The same arguments give the same bytes.

    Args:
        format: of the matrices. Quantised weights are written as GGUF, others as safetensors.
        autoencoder: "tiny", or the full one in F16 or F8.
        single: one checkpoint for everything but the autoencoder, instead of one file for each part.
        seed: of the weights.
    """
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    quantised = format in ("q8_0", "q4_0")
    suffix = "gguf" if quantised else "safetensors"
    files: dict[str, Path] = {}

    def add(flag: str, stem: str, table: Table, architecture: str) -> None:
        files[flag] = folder / f"{stem}.{suffix}"
        tensors = _random(table, rng)
        if quantised:
            _write_gguf(files[flag], tensors, format, architecture)
        else:
            _write_safetensors(files[flag], tensors, format)

    if single:
        table = {f"model.diffusion_model.{name}": shape for name, shape in _diffusion_model().items()}
        table |= {f"text_encoders.llm.{name}": shape for name, shape in _text_encoder(llama_names=False).items()}
        add("-m", "model", table, "flux")
    else:
        add("--diffusion-model", "diffusion", _diffusion_model(), "flux")
        add("--llm", "llm", _text_encoder(llama_names=quantised), "qwen3")
    if autoencoder == "tiny":
        files["--taesd"] = folder / "tae.safetensors"
        _write_safetensors(files["--taesd"], _random(_tiny_autoencoder(), rng), "f16")
    else:
        files["--vae"] = folder / "vae.safetensors"
        _write_safetensors(files["--vae"], _random(_full_autoencoder(), rng), autoencoder)
    return TinySd(files)


def _diffusion_model() -> Table:
    table: Table = {
        "img_in.weight": (_HIDDEN, 128),
        "txt_in.weight": (_HIDDEN, 3 * _TEXT_HIDDEN),
        "time_in.in_layer.weight": (_HIDDEN, 256),
        "time_in.out_layer.weight": (_HIDDEN, _HIDDEN),
        "double_stream_modulation_img.lin.weight": (6 * _HIDDEN, _HIDDEN),
        "double_stream_modulation_txt.lin.weight": (6 * _HIDDEN, _HIDDEN),
        "single_stream_modulation.lin.weight": (3 * _HIDDEN, _HIDDEN),
    }
    for stream in ("img", "txt"):
        table |= {
            f"double_blocks.0.{stream}_attn.norm.key_norm.scale": (_HEAD,),
            f"double_blocks.0.{stream}_attn.norm.query_norm.scale": (_HEAD,),
            f"double_blocks.0.{stream}_attn.qkv.weight": (3 * _HIDDEN, _HIDDEN),
            f"double_blocks.0.{stream}_attn.proj.weight": (_HIDDEN, _HIDDEN),
            f"double_blocks.0.{stream}_mlp.0.weight": (6 * _HIDDEN, _HIDDEN),
            f"double_blocks.0.{stream}_mlp.2.weight": (_HIDDEN, 3 * _HIDDEN),
        }
    return table | {
        "single_blocks.0.linear1.weight": (9 * _HIDDEN, _HIDDEN),
        "single_blocks.0.linear2.weight": (_HIDDEN, 4 * _HIDDEN),
        "single_blocks.0.norm.key_norm.scale": (_HEAD,),
        "single_blocks.0.norm.query_norm.scale": (_HEAD,),
        "final_layer.linear.weight": (128, _HIDDEN),
        "final_layer.adaLN_modulation.1.weight": (2 * _HIDDEN, _HIDDEN),
    }


def _text_encoder(*, llama_names: bool) -> Table:
    queries, keys = 16 * _HEAD, 8 * _HEAD
    layer = {
        # Hugging Face's name: llama.cpp's name, shape
        "self_attn.q_proj": ("attn_q", (queries, _TEXT_HIDDEN)),
        "self_attn.k_proj": ("attn_k", (keys, _TEXT_HIDDEN)),
        "self_attn.v_proj": ("attn_v", (keys, _TEXT_HIDDEN)),
        "self_attn.o_proj": ("attn_output", (_TEXT_HIDDEN, queries)),
        "self_attn.q_norm": ("attn_q_norm", (_HEAD,)),
        "self_attn.k_norm": ("attn_k_norm", (_HEAD,)),
        "mlp.gate_proj": ("ffn_gate", (_TEXT_FEED_FORWARD, _TEXT_HIDDEN)),
        "mlp.up_proj": ("ffn_up", (_TEXT_FEED_FORWARD, _TEXT_HIDDEN)),
        "mlp.down_proj": ("ffn_down", (_TEXT_HIDDEN, _TEXT_FEED_FORWARD)),
        "input_layernorm": ("attn_norm", (_TEXT_HIDDEN,)),
        "post_attention_layernorm": ("ffn_norm", (_TEXT_HIDDEN,)),
    }
    table: Table = {
        "token_embd.weight" if llama_names else "model.embed_tokens.weight": (_VOCABULARY, _TEXT_HIDDEN),
        "output_norm.weight" if llama_names else "model.norm.weight": (_TEXT_HIDDEN,),
    }
    for number in range(_TEXT_LAYERS):
        for theirs, (llama, shape) in layer.items():
            table[f"blk.{number}.{llama}.weight" if llama_names else f"model.layers.{number}.{theirs}.weight"] = shape
    return table


def _conv(name: str, inputs: int, outputs: int, side: int = 3, *, bias: bool = True) -> Table:
    table: Table = {f"{name}.weight": (outputs, inputs, side, side)}
    return table | {f"{name}.bias": (outputs,)} if bias else table


def _norm(name: str, channels: int) -> Table:
    return {f"{name}.weight": (channels,), f"{name}.bias": (channels,)}


def _tiny_autoencoder(latent: int = 32, width: int = 64) -> Table:
    def block(name: str, *, pooled: bool) -> Table:
        table: Table = {}
        for number in (0, 2, 4):
            table |= _conv(f"{name}.conv.{number}", width, width)
        if pooled:
            table |= _conv(f"{name}.pool.0", width, 4 * width, 1, bias=False)
            table |= _norm(f"{name}.pool.1", 4 * width)
            table |= _conv(f"{name}.pool.3", 4 * width, width, 1, bias=False)
        return table

    table = _conv("decoder.layers.0", latent, width) | _conv("decoder.layers.18", width, 3)
    for number in (2, 3, 4, 7, 8, 9, 12, 13, 14, 17):
        table |= block(f"decoder.layers.{number}", pooled=number < 5)
    for number in (6, 11, 16):
        table |= _conv(f"decoder.layers.{number}", width, width, bias=False)
    table |= _conv("encoder.layers.0", 3, width) | _conv("encoder.layers.14", width, latent)
    for number in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13):
        table |= block(f"encoder.layers.{number}", pooled=number > 10)
    for number in (2, 6, 10):
        table |= _conv(f"encoder.layers.{number}", width, width, bias=False)
    return table


def _full_autoencoder(latent: int = 32, widths: tuple[int, ...] = (128, 256, 512, 512)) -> Table:
    def residual(name: str, inputs: int, outputs: int) -> Table:
        table = _norm(f"{name}.norm1", inputs) | _conv(f"{name}.conv1", inputs, outputs)
        table |= _norm(f"{name}.norm2", outputs) | _conv(f"{name}.conv2", outputs, outputs)
        return table | _conv(f"{name}.nin_shortcut", inputs, outputs, 1) if inputs != outputs else table

    def middle(name: str, channels: int) -> Table:
        table = residual(f"{name}.block_1", channels, channels) | residual(f"{name}.block_2", channels, channels)
        table |= _norm(f"{name}.attn_1.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            table |= _conv(f"{name}.attn_1.{part}", channels, channels, 1)
        return table

    last = len(widths) - 1
    channels = widths[0]
    table = _conv("encoder.conv_in", 3, channels)
    for level, width in enumerate(widths):
        for number in range(2):
            table |= residual(f"encoder.down.{level}.block.{number}", channels, width)
            channels = width
        if level < last:
            table |= _conv(f"encoder.down.{level}.downsample.conv", channels, channels)
    table |= middle("encoder.mid", channels) | _norm("encoder.norm_out", channels)
    table |= _conv("encoder.conv_out", channels, 2 * latent)
    table |= _conv("decoder.conv_in", latent, channels) | middle("decoder.mid", channels)
    for level in reversed(range(len(widths))):
        for number in range(3):
            table |= residual(f"decoder.up.{level}.block.{number}", channels, widths[level])
            channels = widths[level]
        if level:
            table |= _conv(f"decoder.up.{level}.upsample.conv", channels, channels)
    table |= _norm("decoder.norm_out", channels) | _conv("decoder.conv_out", channels, 3)
    return table | _conv("quant_conv", 2 * latent, 2 * latent, 1) | _conv("post_quant_conv", latent, latent, 1)


def _random(table: Table, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    """Norms pass values on, biases are zero, matrices and kernels keep the variance of what they multiply."""
    import numpy as np

    for name, shape in table.items():
        if len(shape) == 1:
            yield name, np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
        else:
            scale = 0.05 if "emb" in name else 1 / math.sqrt(math.prod(shape[1:]))
            yield name, rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def _write_gguf(path: Path, tensors: Iterator[tuple[str, Array]], format: Format, architecture: str) -> None:
    import gguf
    import numpy as np

    quantised_type = gguf.GGMLQuantizationType[format.upper()]
    writer = gguf.GGUFWriter(path, architecture)
    for name, values in tensors:
        if values.ndim == 2 and values.shape[-1] % _QUANT_BLOCK == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, quantised_type), raw_dtype=quantised_type)
        else:
            writer.add_tensor(name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_safetensors(path: Path, tensors: Iterator[tuple[str, Array]], format: Format | Autoencoder) -> None:
    """By hand: the safetensors package writes neither BF16 nor F8 from NumPy."""
    header: dict[str, object] = {}
    blobs: list[bytes] = []
    offset = 0
    for name, values in tensors:
        dtype, blob = _encode(values, format)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def _encode(values: Array, format: Format | Autoencoder) -> tuple[str, bytes]:
    if format == "f32":
        return "F32", values.astype("<f4").tobytes()
    if format == "bf16":
        return "BF16", (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    if format == "f8":
        return "F8_E4M3", _to_f8(values).tobytes()
    return "F16", values.astype("<f2").tobytes()


def _to_f8(values: Array) -> Array:
    """The nearest of the finite values of F8_E4M3 (OCP 8-bit floating point: bias 7, no infinities)."""
    import numpy as np

    codes = np.arange(0x7F)  # 0x7F would be NaN
    exponent, mantissa = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    nearest = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values))
    return (nearest | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a model and print how sd-server is told to load it."""
    parser = argparse.ArgumentParser(
        prog="python -m weighbridge_engines.models.tiny_sd", description="Make a tiny random FLUX.2 [klein] for tests."
    )
    parser.add_argument("out_dir", type=Path, help="the folder of its files")
    parser.add_argument("--format", choices=FORMATS, default="q8_0", help="of the matrices (default: q8_0)")
    parser.add_argument("--autoencoder", choices=AUTOENCODERS, default="tiny", help="(default: tiny)")
    parser.add_argument("--single", action="store_true", help="one checkpoint instead of one file for each part")
    wanted = parser.parse_args(arguments)
    made = write(wanted.out_dir, format=wanted.format, autoencoder=wanted.autoencoder, single=wanted.single)
    print(" ".join(made.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
