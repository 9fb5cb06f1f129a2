"""Opens a model's weights. Runs on the owner thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weighbridge_engines.mlx_qwen.runtime import checkpoint, refusals, sampling
from weighbridge_engines.mlx_qwen.runtime.checkpoint import Checkpoint
from weighbridge_engines.mlx_qwen.runtime.mlx import Mlx
from weighbridge_engines.mlx_qwen.runtime.owner import Cancellation
from weighbridge_engines.mlx_qwen.runtime.sampling import Sampling

# Weights are read in groups of about this size: each group is a step of the progress and a chance to cancel.
_GROUP_BYTES = 64 * 1024 * 1024

# mlx-lm lists every tensor that does not match; the first words say enough.
_LONGEST_CAUSE = 300


@dataclass(frozen=True)
class Limits:
    """The plan's sizes that the runtime keeps to. Zeros: kv_bits not quantised, memory_bytes no limit."""

    context_tokens: int
    prefill_step_tokens: int
    cache_bytes: int = 0
    memory_bytes: int = 0
    kv_bits: int = 0
    kv_group_size: int = 64


@dataclass(frozen=True)
class LoadSpec:
    """What to load and within which limits."""

    folder: Path
    name: str
    limits: Limits


@dataclass(frozen=True)
class LoadProgress:
    """How far a load is: phase is tokenizer, weights, warm_up or done, in this order; fraction is 0 to 1."""

    phase: str
    fraction: float


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. module and tokenizer are mlx-lm's and stay on the owner thread."""

    name: str
    module: Any
    tokenizer: Any
    vocabulary: int
    limits: Limits
    sampling_defaults: Sampling


class LoadCancelledError(Exception):
    """Nobody waits for the load any more."""


def load(mlx: Mlx, spec: LoadSpec, cancellation: Cancellation, emit: Callable[[LoadProgress], None]) -> LoadedModel:
    """Checks, opens and warms up a model. Raises RequestError for one that cannot be loaded, LoadCancelledError if
    cancelled.

    Nothing is opened unless the weights fit the planned limit. When this raises, the caller reclaims what was read.
    """
    _stop_if(cancellation)
    found = checkpoint.inspect(spec.folder)
    if 0 < spec.limits.memory_bytes < found.weight_bytes:
        raise refusals.weights_above_limit(found.weight_bytes, spec.limits.memory_bytes)
    mlx.apply_limits(memory_bytes=spec.limits.memory_bytes, cache_bytes=spec.limits.cache_bytes)
    # First, because parsing a large tokenizer takes about 20 times its file for a moment (measured: 200 MB for 12 MB,
    # 2026-11-30), and that must not come on top of the weights.
    emit(LoadProgress("tokenizer", 0.0))
    tokenizer = _open_tokenizer(mlx, found)
    mlx.reclaim()
    _stop_if(cancellation)
    emit(LoadProgress("weights", 0.0))
    module, config = _open(mlx, found)
    for done in _read(mlx, module, cancellation):
        emit(LoadProgress("weights", done))
    model = LoadedModel(
        name=spec.name or spec.folder.name,
        module=module,
        tokenizer=tokenizer,
        vocabulary=_vocabulary(config, tokenizer),
        limits=spec.limits,
        sampling_defaults=sampling.defaults_of(found.generation_config),
    )
    _stop_if(cancellation)
    emit(LoadProgress("warm_up", 0.0))
    _warm_up(mlx, model)
    emit(LoadProgress("done", 1.0))
    return model


def _open(mlx: Mlx, found: Checkpoint) -> tuple[Any, dict[str, Any]]:
    """The model with its weights named but not yet read."""
    try:
        with found.as_mlx_lm_reads_it() as folder:
            module, config = mlx.load_model(
                folder, lazy=True, model_config=dict(found.config_overrides), trust_remote_code=False
            )
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as cause:
        raise refusals.malformed_config(
            f"{found.folder.name}/config.json does not describe a {found.model_type} model ({_said(cause)})."
        ) from None
    except ValueError as cause:
        raise refusals.malformed_weights(
            f"The weights of {found.folder.name} do not match its config.json: {_said(cause)}"
        ) from None
    except (OSError, RuntimeError) as cause:
        raise refusals.malformed_weights(
            f"The weights of {found.folder.name} cannot be opened: {_said(cause)}"
        ) from None
    return module, config


def _read(mlx: Mlx, module: Any, cancellation: Cancellation) -> Iterator[float]:
    """Reads the weights in groups and tells the fraction read after each."""
    arrays = [array for _, array in mlx.tree_flatten(module.parameters())]
    total = sum(array.nbytes for array in arrays) or 1
    done = pending = 0
    group: list[Any] = []
    while arrays:
        _stop_if(cancellation)
        group.append(arrays.pop())
        pending += group[-1].nbytes
        if pending >= _GROUP_BYTES or not arrays:
            mlx.core.eval(group)
            done, pending = done + pending, 0
            group.clear()
            yield done / total


def _open_tokenizer(mlx: Mlx, found: Checkpoint) -> Any:
    try:
        tokenizer = mlx.load_tokenizer(
            found.folder,
            # False, not absent: absent makes transformers ask on standard input whether to run a model's own code.
            {"trust_remote_code": False, "local_files_only": True},
            eos_token_ids=found.end_tokens,
        )
    except Exception as cause:
        # Tokenizer libraries raise whatever they meet in the file; all of it means that this one cannot be used.
        raise refusals.tokenizer_missing(
            f"The tokenizer of {found.folder.name} cannot be opened: {_said(cause)}"
        ) from None
    if not tokenizer.has_chat_template:
        raise refusals.tokenizer_missing(
            f"The tokenizer of {found.folder.name} has no chat template, so the model cannot chat. "
            "Use the instruct version, or copy its chat_template into tokenizer_config.json."
        )
    return tokenizer


def _vocabulary(config: dict[str, Any], tokenizer: Any) -> int:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(size) if isinstance(size, int) else len(tokenizer)


def _warm_up(mlx: Mlx, model: LoadedModel) -> None:
    """One token through the model, so that the first request does not pay for compiled kernels."""
    steps = mlx.generate_step(
        mlx.core.array([0]),
        model.module,
        max_tokens=1,
        prompt_cache=mlx.make_prompt_cache(model.module),
        kv_bits=model.limits.kv_bits or None,
        kv_group_size=model.limits.kv_group_size,
        quantized_kv_start=0,
    )
    for _ in steps:
        pass


def _stop_if(cancellation: Cancellation) -> None:
    if cancellation.requested:
        raise LoadCancelledError


def _said(cause: BaseException) -> str:
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text if len(text) <= _LONGEST_CAUSE else text[:_LONGEST_CAUSE] + "…"
