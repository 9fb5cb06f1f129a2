"""The laws against the real thing: caches, weights and growth of mlx-lm, to the byte."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from weighbridge_fit.calibration import ComputeDevice
from weighbridge_fit.describe import describe
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.laws import cache_growth, mlx_caches
from weighbridge_fit.plans.mlx.options import MlxRequest
from weighbridge_fit.plans.mlx.plan import plan

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.mlx

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {**COMMON, "model_type": "qwen2", "num_hidden_layers": 4, "head_dim": 32},
    "qwen3": {**COMMON, "model_type": "qwen3", "num_hidden_layers": 4},
    "qwen3_moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **COMMON,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models, saved as mlx-lm saves them."""
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import _get_classes, save_model

    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, config in CONFIGS.items():
        path = folder / name
        path.mkdir()
        model_class, args_class = _get_classes(json.loads(json.dumps(config)))
        mx.random.seed(7)
        model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
        cast = getattr(model, "cast_predicate", lambda _: True)
        # MLX on the CPU multiplies gathered experts in float32 only.
        dtype = mx.float32 if name == "qwen3_moe" else mx.bfloat16

        def stored(key: str, value: Any, keep: Any = cast, dtype: Any = dtype) -> Any:
            return value.astype(dtype) if keep(key) and mx.issubdtype(value.dtype, mx.floating) else value

        model.update(tree_map_with_path(stored, model.parameters()))
        save_model(path, model)
        (path / "config.json").write_text(json.dumps(config))
        made[name] = path
    return made


@pytest.fixture(scope="module")
def loaded(models: dict[str, Path]) -> dict[str, Any]:
    """The same, loaded once: generating changes nothing in them."""
    from mlx_lm.utils import load_model

    return {name: load_model(path)[0] for name, path in models.items()}


def facts_of(path: Path) -> WeightFacts:
    return describe(path, lambda file: file if file.exists() else None)


def generated(model: Any, prompt: int, answer: int, step: int, **options: Any) -> list[Any]:
    """The caches after a prompt and an answer."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    tokens = mx.array([index % VOCABULARY for index in range(prompt)])
    for _ in generate_step(
        tokens, model, max_tokens=answer, prompt_cache=caches, prefill_step_size=step, quantized_kv_start=0, **options
    ):
        pass
    return caches


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_equal_what_mlx_holds_after_an_eager_load(models: dict[str, Path], name: str) -> None:
    from mlx_lm.utils import load_model

    planned = plan(facts_of(models[name]), MlxRequest(), ComputeDevice.CPU).weight_bytes
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = load_model(models[name])
    held = mx.get_active_memory() - before
    del model
    # The allocator rounds small arrays up; a handful of bytes, never a tensor.
    assert planned <= held <= planned + 64


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("prompt", "answer", "step"), [(5, 3, 64), (300, 8, 64), (300, 8, 512), (513, 2, 256)])
def test_caches_equal_the_law(
    models: dict[str, Path], loaded: dict[str, Any], name: str, prompt: int, answer: int, step: int
) -> None:
    geometry = facts_of(models[name]).geometry
    assert geometry is not None
    law = mlx_caches.caches(geometry)
    expected = cache_growth.slots_up_to(prompt + answer, step) * law.slot_bytes + law.state_bytes
    assert sum(cache.nbytes for cache in generated(loaded[name], prompt, answer, step)) == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_caches_equal_the_law(models: dict[str, Path], loaded: dict[str, Any], bits: int) -> None:
    geometry = facts_of(models["qwen3"]).geometry
    assert geometry is not None
    caches = generated(loaded["qwen3"], 40, 4, 64, kv_bits=bits, kv_group_size=64)
    expected = cache_growth.slots_up_to(44, 64) * mlx_caches.caches(geometry, bits, 64).slot_bytes
    assert sum(cache.nbytes for cache in caches) == expected


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("keys", [["self_attn.q_proj", "self_attn.v_proj"], None])
def test_a_mounted_adapter_holds_what_the_plan_says(
    models: dict[str, Path], tmp_path: Path, dora: bool, keys: list[str] | None
) -> None:
    """Written by mlx-lm, weighed from its folder, mounted by mlx-lm: the model holds its factors more, and the DoRA
    target its row norms."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
    from mlx_lm.utils import load_model

    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, **({"keys": keys} if keys else {})}
    model, _ = load_model(models["qwen3"])
    linear_to_lora_layers(model, 4, parameters, use_dora=dora)
    ends = (".lora_a", ".lora_b", ".m")
    mine = {name: value for name, value in tree_flatten(model.parameters()) if name.endswith(ends)}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), mine)
    kind = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 4, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(kind))

    model, _ = load_model(models["qwen3"])
    plain = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    load_adapters(model, str(tmp_path))
    held = sum(value.nbytes for _, value in tree_flatten(model.parameters())) - plain
    companions = {"adapter:a": facts_of(tmp_path)}
    made = plan(facts_of(models["qwen3"]), MlxRequest(adapters=("a",)), ComputeDevice.CPU, companions)
    lines = {line.component: line.bytes for line in made.requirement.lines}
    assert lines["adapter a"].expected == held
    assert ("adapter_matrix" in lines) is dora


def test_growth_equals_the_real_cache_on_random_chunks() -> None:
    from mlx_lm.models.cache import KVCache

    chance = random.Random(20261130)
    for _ in range(100):
        chunks = [chance.choice([1, 1, 2, chance.randint(1, 700)]) for _ in range(chance.randint(1, 12))]
        cache = KVCache()
        for chunk in chunks:
            cache.update_and_fetch(mx.zeros((1, 1, chunk, 1)), mx.zeros((1, 1, chunk, 1)))
        assert cache_growth.capacity_after(chunks) == cache.keys.shape[2], chunks


def test_window_growth_equals_the_real_cache_on_random_chunks() -> None:
    from mlx_lm.models.cache import RotatingKVCache

    chance = random.Random(20261130)
    for _ in range(100):
        window = chance.choice([8, 100, 256, 300, 700])
        chunks = [chance.choice([1, 1, 2, chance.randint(1, 700)]) for _ in range(chance.randint(1, 12))]
        cache, held = RotatingKVCache(max_size=window), []
        for chunk in chunks:
            cache.update_and_fetch(mx.zeros((1, 1, chunk, 1)), mx.zeros((1, 1, chunk, 1)))
            held.append(cache.keys.shape[2])
        assert cache_growth.window_slots_after(chunks, window) == held, (window, chunks)


@pytest.mark.parametrize("paddings", [[0], [3, 0, 7], [0, 0, 0, 0]])
def test_a_batch_holds_rows_as_wide_as_its_longest(paddings: list[int]) -> None:
    """Left padding takes slots like tokens: every row is as wide as the longest, and grows with it."""
    from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

    chance, rows = random.Random(20261130), len(paddings)
    for _ in range(20):
        chunks = [chance.randint(8, 600), *[1] * chance.randint(0, 300)]
        growing, rotating = BatchKVCache(paddings), BatchRotatingKVCache(300, paddings)
        for chunk in chunks:
            for cache in (growing, rotating):
                cache.update_and_fetch(mx.zeros((rows, 2, chunk, 4)), mx.zeros((rows, 2, chunk, 4)))
        row = 2 * 2 * 4 * 4
        assert growing.nbytes == rows * cache_growth.capacity_after(chunks) * row
        assert rotating.nbytes == rows * cache_growth.window_slots_after(chunks, 300)[-1] * row


def test_keys_and_values_take_the_width_that_the_weights_promote_to(models: dict[str, Path], tmp_path: Path) -> None:
    """One float32 norm makes the caches float32: the plan must say so."""
    from mlx_lm.utils import load_model

    arrays = mx.load(str(models["qwen3"] / "model.safetensors"))
    widened = {
        name: array.astype(mx.float32) if name.endswith("input_layernorm.weight") else array
        for name, array in arrays.items()
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), widened, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    model, _ = load_model(tmp_path)
    geometry = facts_of(tmp_path).geometry
    assert geometry is not None
    assert geometry.activation_bytes == 4
    expected = cache_growth.slots_up_to(12, 64) * mlx_caches.caches(geometry).slot_bytes
    assert sum(cache.nbytes for cache in generated(model, 10, 2, 64)) == expected
