"""Shapes of public models, from their config.json or GGUF header, and the formula of what their architecture needs."""

from typing import Any

from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.gguf.architecture import geometry_from_metadata
from weighbridge_fit.laws import kv
from weighbridge_fit.laws.kv_layers import layer_rows
from weighbridge_fit.model_config import geometry_from_config

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def dense(layers: int, heads: int, kv_heads: int, size: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "torch_dtype": "bfloat16",
        **more,
    }


def latent(model_type: str, layers: int, heads: int, hidden: int, nope: int, value: int, **more: Any) -> dict[str, Any]:
    return dense(layers, heads, heads, 64, hidden) | {
        "model_type": model_type,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        **more,
    }


HYBRID_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "torch_dtype": "bfloat16",
    "text_config": {
        **dense(64, 24, 4, 256, 5120, model_type="qwen3_5_text", vocab_size=248_320),
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
        "max_position_embeddings": 262_144,
    },
}
HYBRID_35B_A3B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {**HYBRID_27B["text_config"], **dense(40, 16, 2, 256, 2048), "vocab_size": 248_320}
    | {"linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": dense(32, 32, 8, 128, 4096),
    "Llama-3.1-70B": dense(80, 64, 8, 128, 8192),
    "Qwen2.5-7B": dense(28, 28, 4, 128, 3584, model_type="qwen2", vocab_size=152_064),
    "Qwen3-0.6B": dense(28, 16, 8, 128, 1024, model_type="qwen3", vocab_size=151_936),
    "Qwen3-32B": dense(64, 64, 8, 128, 5120, model_type="qwen3", vocab_size=151_936),
    # Its text section leaves out the vocabulary and the pattern of its windows.
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "intermediate_size": 21_504,
        },
    },
    "gemma3-1b": dense(26, 4, 1, 256, 1152, model_type="gemma3_text", sliding_window=512, sliding_window_pattern=6),
    "gpt-oss-20b": dense(24, 64, 8, 64, 2880, model_type="gpt_oss", sliding_window=128)
    | {"layer_types": ["sliding_attention", "full_attention"] * 12},
    "gpt-oss-120b": dense(36, 64, 8, 64, 2880, model_type="gpt_oss", sliding_window=128),
    "Qwen3.6-27B": HYBRID_27B,
    "Qwen3.6-35B-A3B": HYBRID_35B_A3B,
    "LFM2-1.2B": dense(16, 32, 8, 64, 2048, model_type="lfm2", vocab_size=65_536)
    | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3},
    "DeepSeek-V3.1": latent("deepseek_v3", 61, 128, 7168, 128, 128, num_nextn_predict_layers=1),
    "Kimi-K2.5": {"model_type": "kimi_k25", "text_config": latent("kimi_k2", 61, 64, 7168, 128, 128)},
    "GLM-5": latent("glm_moe_dsa", 78, 64, 6144, 192, 256, index_head_dim=128, num_nextn_predict_layers=1),
}


def geometry(name: str) -> ModelGeometry:
    found = geometry_from_config(CONFIGS[name])
    assert found is not None
    return found


def gib(size: float) -> float:
    return size / GIB


def caches_by_formula(name: str, tokens: int) -> int:
    """What the architecture needs: full layers the context, windows their window, latent rows as they are."""
    found, total = geometry(name), 0
    for index, row in enumerate(layer_rows(found)):
        total += kv.layer_bytes_per_token(found, index) * min(tokens, row.window_tokens or tokens)
    return total


# Qwen3.6-27B as its GGUF header says it.
QWEN35_GGUF: dict[str, Any] = {
    "general.architecture": "qwen35",
    "qwen35.block_count": 64,
    "qwen35.embedding_length": 5120,
    "qwen35.attention.head_count": 24,
    "qwen35.attention.head_count_kv": 4,
    "qwen35.attention.key_length": 256,
    "qwen35.attention.value_length": 256,
    "qwen35.full_attention_interval": 4,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.group_count": 16,
    "qwen35.ssm.time_step_rank": 48,
    "qwen35.ssm.inner_size": 6144,
    "qwen35.context_length": 262_144,
}


def from_gguf(metadata: dict[str, Any]) -> ModelGeometry:
    found = geometry_from_metadata(metadata, {}, tied=False)
    assert found is not None
    return found


GEMMA3N_GGUF: dict[str, Any] = {
    "general.architecture": "gemma3n",
    "gemma3n.block_count": 35,
    "gemma3n.embedding_length": 2048,
    "gemma3n.attention.head_count": 8,
    "gemma3n.attention.head_count_kv": 2,
    "gemma3n.attention.key_length": 256,
    "gemma3n.attention.value_length": 256,
    "gemma3n.attention.sliding_window": 512,
    "gemma3n.attention.shared_kv_layers": 15,
    "gemma3n.attention.sliding_window_pattern": [True, True, True, True, False] * 7,
}


LFM2_GGUF: dict[str, Any] = {
    "general.architecture": "lfm2",
    "lfm2.block_count": 16,
    "lfm2.embedding_length": 2048,
    "lfm2.attention.head_count": 32,
    "lfm2.attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0],
    "lfm2.shortconv.l_cache": 3,
}


# As its header says it: 40 of 48 layers slide, the others have one wide head.
GEMMA4_12B_GGUF: dict[str, Any] = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 48,
    "gemma4.embedding_length": 3840,
    "gemma4.context_length": 262_144,
    "gemma4.attention.head_count": 16,
    "gemma4.attention.head_count_kv": [8, 8, 8, 8, 8, 1] * 8,
    "gemma4.attention.sliding_window": 1024,
    "gemma4.attention.sliding_window_pattern": [1, 1, 1, 1, 1, 0] * 8,
    "gemma4.attention.key_length": 512,
    "gemma4.attention.key_length_swa": 256,
    "gemma4.attention.value_length": 512,
    "gemma4.attention.value_length_swa": 256,
}
