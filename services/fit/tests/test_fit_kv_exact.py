"""The MLX law against mlx-lm's own cache objects, to the byte, for every way of remembering that it knows."""

import json
from typing import Any

import pytest
from fit_tiny_configs import CONFIGS
from weighbridge_fit.laws import kv
from weighbridge_fit.laws.kv import KvLaw
from weighbridge_fit.model_config import geometry_from_config

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

pytestmark = pytest.mark.mlx

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
