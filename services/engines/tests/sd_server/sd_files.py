"""Weights that sd-server trips over, made from those it renders."""

import json
import math
import struct
from pathlib import Path

_WIDTH = 128


def rewritten(source: Path, target: Path, change) -> Path:
    """A safetensors file with a header that ``change`` was let at."""
    data = source.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return target


def patched(source: Path, target: Path, offset: int, value: bytes) -> Path:
    """A copy with other bytes at ``offset``."""
    data = bytearray(source.read_bytes())
    data[offset : offset + len(value)] = value
    target.write_bytes(data)
    return target


def cut_off(source: Path, target: Path) -> Path:
    """The first half of a file."""
    data = source.read_bytes()
    target.write_bytes(data[: len(data) // 2])
    return target


def flux1_without_text_encoder(folder: Path) -> list[str]:
    """Arguments for a tiny FLUX.1, all zeros, with nothing that reads a prompt."""
    diffusion, autoencoder = folder / "flux1.safetensors", folder / "flux1-tae.safetensors"
    _write_zeros(diffusion, _flux1())
    _write_zeros(autoencoder, _tiny_autoencoder())
    return ["--diffusion-model", str(diffusion), "--taesd", str(autoencoder)]


def _write_zeros(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def _flux1() -> dict[str, tuple[int, ...]]:
    linear = {
        "img_in": (_WIDTH, 64), "txt_in": (_WIDTH, 4096), "time_in.in_layer": (_WIDTH, 256),
        "time_in.out_layer": (_WIDTH, _WIDTH), "vector_in.in_layer": (_WIDTH, 768),
        "vector_in.out_layer": (_WIDTH, _WIDTH), "final_layer.linear": (64, _WIDTH),
        "final_layer.adaLN_modulation.1": (2 * _WIDTH, _WIDTH), "single_blocks.0.linear1": (7 * _WIDTH, _WIDTH),
        "single_blocks.0.linear2": (_WIDTH, 5 * _WIDTH), "single_blocks.0.modulation.lin": (3 * _WIDTH, _WIDTH),
    }  # fmt: skip
    shapes = {
        f"{part}.{norm}.scale": (_WIDTH,) for part in ("single_blocks.0.norm",) for norm in ("key_norm", "query_norm")
    }
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}"
        linear |= {
            f"{block}_mod.lin": (6 * _WIDTH, _WIDTH), f"{block}_attn.qkv": (3 * _WIDTH, _WIDTH),
            f"{block}_attn.proj": (_WIDTH, _WIDTH), f"{block}_mlp.0": (4 * _WIDTH, _WIDTH),
            f"{block}_mlp.2": (_WIDTH, 4 * _WIDTH),
        }  # fmt: skip
        shapes |= {f"{block}_attn.norm.{norm}.scale": (_WIDTH,) for norm in ("key_norm", "query_norm")}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _tiny_autoencoder(latent: int = 16, width: int = 64) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, 3, 3)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    conv("decoder.layers.0", latent, width)
    conv("decoder.layers.18", width, 3)
    conv("encoder.layers.0", 3, width)
    conv("encoder.layers.14", width, latent)
    blocks = {"decoder": (2, 3, 4, 7, 8, 9, 12, 13, 14, 17), "encoder": (1, 3, 4, 5, 7, 8, 9, 11, 12, 13)}
    for half, numbers in blocks.items():
        for number in numbers:
            for layer in (0, 2, 4):
                conv(f"{half}.layers.{number}.conv.{layer}", width, width)
    for half, numbers in {"decoder": (6, 11, 16), "encoder": (2, 6, 10)}.items():
        for number in numbers:
            conv(f"{half}.layers.{number}", width, width, bias=False)
    return shapes
