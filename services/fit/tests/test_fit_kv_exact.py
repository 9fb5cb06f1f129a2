"""The MLX law against mlx-lm's own cache objects, to the byte, for every way of remembering that it knows."""

import json
from typing import Any

import pytest
from weighbridge_fit.laws import kv
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.model_config import geometry_from_config

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.mlx

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "attention_bias": False,
}
MAMBA: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
GEMMA3 = {"query_pre_attn_scalar": 32, "rope_local_base_freq": 1e4, "rope_global_base_freq": 1e6, "rope_scaling": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "num_hidden_layers": 3},
    "gemma2": {
        **BASE,
        **{"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 64, "query_pre_attn_scalar": 32},
    },
    "gemma3_text": {
        **BASE,
        **GEMMA3,
        **{"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 64, "sliding_window_pattern": 6},
    },
    "cohere2": {
        **BASE,
        **{
            "model_type": "cohere2",
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 64,
            "sliding_window_pattern": 4,
        },
        **{"layer_norm_eps": 1e-5, "logit_scale": 1.0, "attention_bias": False, "layer_norm_bias": False},
    },
    "olmo3": {
        **BASE,
        **{"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 64, "head_dim": 16},
        "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
    },
    "gemma4_text": {
        **BASE,
        **{"model_type": "gemma4_text", "num_hidden_layers": 8, "sliding_window": 64, "global_head_dim": 64},
        **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "use_double_wide_mlp": False},
        "layer_types": [*["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 2]
        + ["full_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3"},
    "deepseek_v2": {
        **LATENT,
        "model_type": "deepseek_v2",
        "rope_scaling": {
            **{"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
            "original_max_position_embeddings": 4096,
        },
    },
    "minicpm3": {
        **LATENT,
        **{"model_type": "minicpm3", "v_head_dim": None, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
        "rope_scaling": {
            **{"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt_oss": {
        **BASE,
        **{"model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 64, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "torch_dtype": "float32"},
    },
    "gemma3n": {
        "model_type": "gemma3n",
        "torch_dtype": "bfloat16",
        "text_config": {
            **BASE,
            **{"model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 64},
            **{"vocab_size_per_layer_input": 128, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0},
            **{"activation_sparsity_pattern": [0.0] * 6, "hidden_size_per_layer_input": 16, "altup_num_inputs": 4},
            **{"altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8},
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    },
    "jamba": {
        **BASE,
        **MAMBA,
        **{
            "model_type": "jamba",
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 4,
            "head_dim": 16,
        },
        **{"expert_layer_offset": 1, "expert_layer_period": 2, "num_experts": 1, "num_experts_per_tok": 1},
    },
    "granitemoehybrid": {
        **BASE,
        **MAMBA,
        **{"model_type": "granitemoehybrid", "num_hidden_layers": 3, "attention_bias": False, "head_dim": 16},
        **{"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0},
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "recurrent_gemma": {
        **BASE,
        **{"model_type": "recurrent_gemma", "num_hidden_layers": 3, "attention_bias": False, "conv1d_width": 4},
        **{"logits_soft_cap": 30.0, "attention_window_size": 64, "head_dim": 16, "num_key_value_heads": 1},
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "deepseek_v32": {
        **LATENT,
        **{"model_type": "deepseek_v32", "index_head_dim": 32, "index_n_heads": 2, "index_topk": 16},
    },
    "lfm2": {
        **BASE,
        **{"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": 3},
        **{"norm_eps": 1e-5, "conv_bias": False, "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 32},
        **{"block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "head_dim": 16},
    },
    "nemotron_h": {
        **BASE,
        **{"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M"},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "conv_kernel": 4, "n_groups": 2},
        **{"mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False, "use_bias": False},
        **{"use_conv_bias": True, "layer_norm_epsilon": 1e-5},
    },
    "falcon_h1": {
        **BASE,
        **MAMBA,
        **{"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_chunk_size": 128},
        **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "embedding_multiplier": 1.0},
        **{"key_multiplier": 1.0, "lm_head_multiplier": 1.0, "mamba_norm_before_gate": False, "mamba_rms_norm": False},
        **{"mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 2, "mlp_multipliers": [1.0, 1.0]},
        **{"projectors_bias": False, "ssm_in_multiplier": 1.0, "ssm_multipliers": [1.0] * 5, "ssm_out_multiplier": 1.0},
        **{"attention_bias": False, "num_logits_to_keep": 1, "rope_scaling": None, "rope_traditional": False},
    },
    "mamba2": {
        **{"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "vocab_size": 128, "hidden_size": 64},
        **{"intermediate_size": 128, "state_size": 16, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5},
        **{"conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True},
        **{"time_step_limit": [0.0, 100.0], "time_step_rank": 4, "torch_dtype": "bfloat16"},
    },
    "mamba": {
        **{"model_type": "mamba", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "state_size": 16},
        **{"num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
        **{"tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    },
    "rwkv7": {
        **{"model_type": "rwkv7", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "norm_eps": 1e-5},
        **{"head_dim": 32, "num_hidden_layers": 2, "a_low_rank_dim": 16, "v_low_rank_dim": 16},
        **{"gate_low_rank_dim": 16, "decay_low_rank_dim": 16, "torch_dtype": "bfloat16"},
    },
    "qwen3_next": {
        **BASE,
        **{"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, "decoder_sparse_step": 1},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "mlp_only_layers": []},
        **{"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 0, "num_experts_per_tok": 0},
        **{"shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "partial_rotary_factor": 0.25},
    },
    "kimi_linear": {
        **LATENT,
        **{"model_type": "kimi_linear", "num_experts": 0, "num_shared_experts": 0, "model_max_length": 4096},
        "linear_attn_config": {
            **{"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 4, "head_dim": 32},
            "short_conv_kernel_size": 4,
        },
    },
}
VOCABULARY = 128


def filled(config: dict[str, Any], prompt: int, answer: int, step: int) -> list[Any]:
    """The caches of a random model after a prompt and an answer."""
    from mlx.utils import tree_map_with_path
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(json.loads(json.dumps(config)))
    mx.random.seed(7)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    # MLX on the CPU multiplies gathered experts in float32 only.
    dtype = mx.float32 if config.get("torch_dtype") == "float32" else mx.bfloat16
    cast = getattr(model, "cast_predicate", lambda _: True)

    def stored(key: str, value: Any) -> Any:
        return value.astype(dtype) if cast(key) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(stored, model.parameters()))
    caches = make_prompt_cache(model)
    tokens = mx.array([index % VOCABULARY for index in range(prompt)])
    for _ in generate_step(tokens, model, max_tokens=answer, prompt_cache=caches, prefill_step_size=step):
        pass
    return caches


@pytest.mark.parametrize("name", CONFIGS)
def test_caches_equal_the_law(name: str) -> None:
    geometry = geometry_from_config(CONFIGS[name])
    assert geometry is not None
    caches = filled(CONFIGS[name], 300, 4, 256)
    law = kv.cache_bytes(geometry, KvLaw.MLX, 304, micro_batch=256)
    assert sum(cache.nbytes for cache in caches) == law.total
