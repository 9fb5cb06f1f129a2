"""Which reader knows which architecture, and what its own class fills in for fields that published configs leave out.

Defaults are those of transformers 5.24 (November 2026).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weighbridge_fit.config import attention, recurrent
from weighbridge_fit.config.fields import Fields
from weighbridge_fit.geometry import ModelGeometry

Reader = Callable[[Fields, ModelGeometry], ModelGeometry]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one model type is read. `read` raises Unsaid where the config does not say what it needs."""

    read: Reader
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _one_kv_head(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Falcon and StarCoder 1: all query heads share one key and value, unless the config says otherwise."""
    heads = base.kv_heads
    if fields.flag("new_decoder_architecture"):
        heads = fields.optional("num_kv_heads", "n_head_kv") or heads
    elif fields.flag("multi_query", True):
        heads = 1
    return attention.uniform(fields, replace(base, kv_heads=heads))


def _nested_heads(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """DBRX and MPT keep the number of key and value heads in a section."""
    heads = fields.section("attn_config").optional("kv_n_heads") if fields.has("attn_config") else 0
    return attention.uniform(fields, replace(base, kv_heads=heads or base.kv_heads))


def _grouped_query(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """ChatGLM."""
    heads = fields.optional("multi_query_group_num") if fields.flag("multi_query_attention") else 0
    return attention.uniform(fields, replace(base, kv_heads=heads or base.kv_heads))


def _most_heads(fields: Fields, base: ModelGeometry) -> ModelGeometry:
    """Laguna: query heads differ by layer, and the most of them decide the workspace. They share as many keys."""
    heads = fields.sizes("num_attention_heads_per_layer") or ()
    return attention.uniform(fields, replace(base, attention_heads=max(heads, default=0) or base.attention_heads))


_PLAIN = (
    *("apertus", "arcee", "baichuan", "bitnet", "bloom", "cohere", "deepseek", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone", "gemma", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "gpt2", "gpt_neox"),
    *("gptj", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("internlm2", "internlm3", "llama", "mimo", "minicpm", "minimax_m2", "ministral", "ministral3", "mistral"),
    *("mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "phimoe"),
    *("qwen", "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text"),
    *("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open"),
    *("stablelm", "starcoder2", "telechat3", "xverse"),
)
_ENCODERS = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert"),
    *("gte", "jina_bert_v3", "modernbert", "mpnet", "new", "nomic_bert", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
_LATENT = (*("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3", "mistral4", "youtu", "youtu_llm"),)

_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "vocab_size": 262_208,
}
_GEMMA3N = {
    "num_hidden_layers": 35,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262_400,
}
_GEMMA4 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512}
_LLAMA4 = {"head_dim": 128, "attention_chunk_size": 8192}
_gemma2 = Architecture(partial(attention.gemma, group=2), {"head_dim": 256, "sliding_window": 4096})
_gemma3 = Architecture(partial(attention.gemma, group=6), _GEMMA3)
_gemma3n = Architecture(partial(attention.sharing, group=5, shared=15), _GEMMA3N)
_gemma4 = Architecture(attention.gemma4, _GEMMA4)
_llama4 = Architecture(attention.llama4, _LLAMA4)
_every_fourth = Architecture(partial(attention.alternating, group=4), {"sliding_window": 4096})
_indexed = Architecture(attention.indexed, {"index_head_dim": 128})

ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(attention.uniform) for name in _PLAIN},
    **{name: Architecture(attention.encoder) for name in _ENCODERS},
    **{name: Architecture(attention.latent) for name in _LATENT},
    "gemma": Architecture(attention.uniform, {"head_dim": 256}),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gemma3n": _gemma3n,
    "gemma3n_text": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "gpt_oss": Architecture(partial(attention.alternating, group=2), {"head_dim": 64, "sliding_window": 128}),
    "laguna": Architecture(_most_heads, {"sliding_window": 512}),
    "cohere2": _every_fourth,
    "olmo3": _every_fourth,
    "exaone4": Architecture(partial(attention.alternating, group=4)),
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mimo_v2_flash": Architecture(attention.mimo),
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
    "longcat_flash": Architecture(attention.twice_latent),
    "deepseek_v4": Architecture(attention.compressed, {"head_dim": 512, "sliding_window": 128}),
    "whisper": Architecture(attention.transcriber, {"max_source_positions": 1500, "max_target_positions": 448}),
    "falcon": Architecture(_one_kv_head),
    "gpt_bigcode": Architecture(_one_kv_head),
    "dbrx": Architecture(_nested_heads),
    "mpt": Architecture(_nested_heads),
    "chatglm": Architecture(_grouped_query),
    "olmo_hybrid": Architecture(recurrent.named_delta),
    "kimi_linear": Architecture(recurrent.kimi_linear),
    "nemotron_h": Architecture(recurrent.nemotron_h),
    "granitemoehybrid": Architecture(recurrent.granite_hybrid),
    "bamba": Architecture(recurrent.granite_hybrid),
    "falcon_h1": Architecture(recurrent.falcon_h1),
    "jamba": Architecture(recurrent.jamba),
    "mamba": Architecture(recurrent.mamba, {"expand": 2, "state_size": 16, "conv_kernel": 4}),
    "falcon_mamba": Architecture(recurrent.mamba, {"expand": 2, "state_size": 16, "conv_kernel": 4}),
    "mamba2": Architecture(recurrent.mamba2, {"conv_kernel": 4}),
    "lfm2": Architecture(recurrent.short_convolution),
    "lfm2_moe": Architecture(recurrent.short_convolution),
    "recurrent_gemma": Architecture(recurrent.recurrent_gemma, {"head_dim": 256, "attention_window_size": 2048}),
    "rwkv6": Architecture(recurrent.rwkv),
    "rwkv7": Architecture(recurrent.rwkv),
}

TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
"""Where models of several media keep their language model's config."""


def base_geometry(fields: Fields, model_type: str) -> ModelGeometry:
    """What all architectures name alike, or nearly. Raises Unsaid or CONFIG_INVALID."""
    hidden = fields.first("hidden_size", "n_embd", "d_model", "dim")
    heads = fields.optional("num_attention_heads", "n_head", "n_heads")
    kv_heads = fields.optional("num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    head_size = fields.optional("head_dim", "attention_head_dim", "kv_channels", "d_kv")
    return ModelGeometry(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.lenient("intermediate_size", "ffn_hidden_size", "n_inner"),
        vocab_size=fields.lenient("vocab_size", "padded_vocab_size"),
        attention_heads=heads,
        kv_heads=kv_heads,
        head_size=head_size or (hidden // heads if heads else 0),
        experts=fields.lenient("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        experts_per_token=fields.lenient("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk"),
        expert_intermediate_size=fields.lenient("moe_intermediate_size", "expert_ffn_hidden_size"),
        max_context_tokens=fields.lenient(
            "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "model_max_length"
        ),
        draft_layers=fields.lenient("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
    )
