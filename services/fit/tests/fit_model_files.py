"""Small files of every format, written by the formats' own libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, tuple[int, ...]]

# One layer of each component, with the names and shapes that tell it.
LANGUAGE: Shapes = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (64, 8),
}
FLUX: Shapes = {
    "double_blocks.0.img_attn.qkv.weight": (24, 8),
    "img_in.weight": (8, 4),
    "single_blocks.0.linear1.weight": (8, 8),
}
VAE: Shapes = {"encoder.conv_in.weight": (8, 3, 3, 3), "decoder.conv_in.weight": (8, 4, 3, 3), "decoder.mid.bias": (8,)}
CLIP_L: Shapes = {
    "text_model.embeddings.token_embedding.weight": (16, 768),
    "text_model.encoder.layers.0.mlp.fc1.weight": (8, 8),
}
CLIP_G: Shapes = {
    "text_model.embeddings.token_embedding.weight": (16, 1280),
    "text_model.encoder.layers.0.mlp.fc1.weight": (8, 8),
}
T5: Shapes = {
    "shared.weight": (16, 8),
    "encoder.block.0.layer.0.SelfAttention.q.weight": (8, 8),
    "encoder.final_layer_norm.weight": (8,),
}
SD15: Shapes = {
    "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
    "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (320, 768),
    "model.diffusion_model.middle_block.1.norm.weight": (1280,),
    "first_stage_model.decoder.conv_in.weight": (8, 4, 3, 3),
    "cond_stage_model.transformer.text_model.final_layer_norm.weight": (768,),
    "model_ema.decay": (1,),
}
LORA: Shapes = {
    "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight": (24, 4),
    "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (4, 8),
}
LLAMA_GGUF: Shapes = {
    "token_embd.weight": (64, 8),
    "blk.0.attn_q.weight": (8, 8),
    "output_norm.weight": (8,),
    "output.weight": (64, 8),
}


def write_safetensors(
    path: Path, shapes: Shapes, dtype: str = "float16", metadata: dict[str, str] | None = None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros(shape, dtype) for name, shape in shapes.items()}, path, metadata)
    return path


def write_gguf(
    path: Path,
    shapes: Shapes,
    architecture: str = "llama",
    *,
    kind: str = "",
    values: Mapping[str, Any] | None = None,
    quantised: str = "",
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    for key, value in (values or {}).items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    for name, shape in shapes.items():
        if quantised and len(shape) == 2 and shape[-1] % 32 == 0:
            kind_of = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(name, gguf.quantize(np.zeros(shape, np.float32), kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_pipeline(folder: Path, class_name: str, components: Mapping[str, Shapes], **extra: Any) -> Path:
    """A diffusers tree: one file for each component."""
    index: dict[str, Any] = {"_class_name": class_name, "_diffusers_version": "0.35.0", "scheduler": ["diffusers", "S"]}
    index |= {name: ["diffusers", "Class"] for name in components} | extra
    write_json(folder / "model_index.json", index)
    for name, shapes in components.items():
        stem = "model" if name.startswith("text_encoder") else "diffusion_pytorch_model"
        write_safetensors(folder / name / f"{stem}.safetensors", shapes)
        write_json(folder / name / "config.json", {"_class_name": "Class"})
    return folder
