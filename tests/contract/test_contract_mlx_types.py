"""A plan is a launch only where the engine can load the model: fit and the MLX engine name the same types."""

from weighbridge_engines.mlx_qwen.runtime.checkpoint import MODEL_TYPES
from weighbridge_fit.plans.mlx.architectures import ARCHITECTURES


def test_what_fit_launches_is_what_the_engine_loads() -> None:
    assert {name for name, found in ARCHITECTURES.items() if found.launched} == set(MODEL_TYPES)
