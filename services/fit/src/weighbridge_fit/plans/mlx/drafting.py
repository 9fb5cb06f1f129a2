"""What drafts tokens for an MLX model: a second model, or the model's own draft head.

mlx-lm 0.32.2 drafts with a second model (`speculative_generate_step`). A draft head is priced by the formulas of
mlx-bun, whose engine has one (September 2026): one more layer with the whole context, and a copy of every recurrent
state to go back to.
"""

from collections.abc import Mapping

from weighbridge_fit.components import Component
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import LayerKind, ModelGeometry
from weighbridge_fit.laws import mlx_caches
from weighbridge_fit.laws.cache_growth import most_slots_for
from weighbridge_fit.lines import Line, Phase, Range, Source
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.mlx.options import MlxShape

ROLE = "drafter"
"""A drafter's role among a model's companions."""


def drafter_of(companions: Mapping[str, WeightFacts], target: ModelGeometry) -> WeightFacts:
    """The drafter's facts. Raises PlanError DRAFTER_MISMATCH."""
    drafter = companions.get(ROLE)
    if drafter is None:
        raise refused("The drafter was not found beside the model.")
    geometry = drafter.geometry
    if geometry is not None and geometry.vocab_size != target.vocab_size:
        raise refused(
            f"A drafter needs the model's own vocabulary: this one has {geometry.vocab_size:,} entries, the model "
            f"{target.vocab_size:,}."
        )
    return drafter


def longest_drafted(target: ModelGeometry, companions: Mapping[str, WeightFacts]) -> int:
    """The longest context that drafter and model go along with, in tokens: what the drafter was made for, and what both
    models' caches can be cut back from. 0: nothing bounds it, or no context is short enough."""
    drafter = companions.get(ROLE)
    if drafter is None or drafter.geometry is None:
        return 0
    longest = (drafter.geometry.max_context_tokens, *map(mlx_caches.longest_trimmable, (target, drafter.geometry)))
    return min((tokens for tokens in longest if tokens), default=0)


def refused(message: str) -> PlanError:
    """A drafter that this model cannot be drafted with."""
    return PlanError("DRAFTER_MISMATCH", "options.mlx.draft_model", message)


def check_drafter(geometry: ModelGeometry, shape: MlxShape) -> None:
    """Raises PlanError DRAFTER_MISMATCH for a drafter that cannot go back to what was accepted, or whose caches cannot
    be quantised as the model's are."""
    if not mlx_caches.trimmable(geometry, shape.context_tokens):
        raise refused("This drafter keeps states or full windows, which cannot be cut back to what was accepted.")
    groups = shape.kv_group_size or 1
    fits = all(size % groups == 0 for size in mlx_caches.head_sizes(geometry))
    if shape.kv_bits and not (fits and mlx_caches.quantisable(geometry)):
        raise refused("This drafter's keys and values cannot be quantised like the model's, and mlx-lm does both.")
    longest = geometry.max_context_tokens
    if longest and shape.context_tokens > longest:
        raise refused(f"This drafter was made for at most {longest:,} tokens, less than the context asked for.")


def check_draft_head(facts: WeightFacts) -> None:
    """Raises PlanError DRAFT_HEAD_MISSING."""
    if not facts.component_bytes(Component.DRAFT):
        message = "These files hold no draft head (multi-token prediction)."
        raise PlanError("DRAFT_HEAD_MISSING", "options.mlx.draft_head", message)


def draft_head_lines(geometry: ModelGeometry, shape: MlxShape) -> list[Line]:
    """Keys and values of the draft head's layers, which attend to the whole context like the model's own full
    layers."""
    layers, row_bytes = geometry.draft_layers or 1, _row_bytes(geometry)
    basis = (
        f"{layers} draft layer(s) with the context of {shape.slots} sequence(s): {layers * row_bytes:,} bytes per token"
    )
    slots, tokens = shape.slots * layers * row_bytes, shape.context_tokens
    size = Range(
        tokens * slots, (tokens + shape.draft_tokens) * slots, most_slots_for(tokens + shape.draft_tokens) * slots
    )
    return [Line("draft_head_kv_cache", Phase.RESIDENT, size, Source.DERIVED, basis)]


def rollback_lines(state_bytes: int, shape: MlxShape) -> list[Line]:
    """A recurrent state cannot be cut back to what was accepted: one copy from before the drafted tokens is kept."""
    if not state_bytes:
        return []
    basis = f"states from before the drafted tokens, for {shape.slots} sequence(s): they cannot be cut back"
    size = Range.exactly(state_bytes * shape.slots)
    return [Line("draft_rollback", Phase.RESIDENT, size, Source.DERIVED, basis)]


def _row_bytes(geometry: ModelGeometry) -> int:
    """Key and value of one token in one layer of the draft head."""
    if LayerKind.LATENT_ATTENTION in geometry.layers:
        return (geometry.latent_rank + geometry.latent_rope_size) * geometry.activation_bytes
    return 2 * geometry.kv_heads * geometry.head_size * geometry.activation_bytes
