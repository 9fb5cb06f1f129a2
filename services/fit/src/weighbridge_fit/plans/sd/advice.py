"""What would make a picture possible here, and by how much: each choice is planned again, nothing is estimated."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from weighbridge_common.sizes import format_gib

from weighbridge_fit.capacity import Capacity
from weighbridge_fit.lines import Phase, Requirement
from weighbridge_fit.lines import requirement as added_up
from weighbridge_fit.plans.plan import Plan
from weighbridge_fit.plans.sd.options import SdRequest, SdShape
from weighbridge_fit.verdict import SMALLEST_REQUANTISATION, Verdict, judge, limit_help, uses_card

MOST_SENTENCES = 5
WORTH_SAYING_BYTES = 64 << 20
"""Less than a plan's own uncertainty is no advice."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """One change of a request, in words, with what it makes of the plan."""

    words: str
    saved: int
    verdict: Verdict

    @property
    def runs(self) -> bool:
        """Whether it is enough."""
        return self.verdict is Verdict.RUNS

    @property
    def sentence(self) -> str:
        """For people."""
        many = " and " in self.words.partition(" (")[0]
        saves = f"{'save' if many else 'saves'} {format_gib(max(0, self.saved))}"
        return f"{self.words} {saves}{', and then it runs' if self.runs else ''}."


def advice(
    request: SdRequest,
    plan: Plan,
    requirement: Requirement,
    capacity: Capacity,
    again: Callable[[SdRequest], Plan],
    largest: Callable[[SdRequest, tuple[int, int]], tuple[int, int]],
) -> tuple[str, ...]:
    """Sentences, the most useful first. `again` plans another request, `largest` solves its largest picture."""
    shape = cast(SdShape, plan.shape)

    def tried(changes: Iterable[tuple[str, SdRequest]]) -> list[_Choice]:
        found = [_tried(words, changed, requirement, capacity, again) for words, changed in changes]
        useful = [choice for choice in found if choice.saved >= WORTH_SAYING_BYTES or choice.verdict is Verdict.RUNS]
        return sorted(useful, key=lambda choice: (choice.verdict is not Verdict.RUNS, -choice.saved))

    choices = tried(_single_changes(request, shape))
    if not any(choice.verdict is Verdict.RUNS for choice in choices):
        choices = [*(choice for choice in tried(_joint_changes(request, shape)) if choice.runs), *choices]
    smaller = _smaller(request, shape, requirement, capacity, again, largest)
    said = [*smaller, *(choice.sentence for choice in choices)]
    if not smaller and not any(choice.runs for choice in choices):
        # No choice and no size helps: nothing but other weights does.
        said = [*_other_weights(requirement, capacity), *said]
    limit = limit_help(requirement, capacity)
    return (*said[: MOST_SENTENCES - 1], *([limit] if limit else []))


def _single_changes(request: SdRequest, shape: SdShape) -> Iterator[tuple[str, SdRequest]]:
    if not shape.vae_tiling:
        yield "Decoding in tiles (vae_tiling)", replace(request, vae_tiling=True)
    if not shape.vae_conv_direct:
        yield "Direct convolution in the autoencoder (vae_conv_direct)", replace(request, vae_conv_direct=True)
    if not shape.flash_attention:
        yield "Flash attention (flash_attention)", replace(request, flash_attention=True)
    if shape.pool == "discrete":
        if not shape.offload:
            yield "Keeping weights in host memory (offload_to_cpu)", replace(request, offload_to_cpu=True)
        if not shape.text_encoder_on_cpu:
            yield "Text encoders on the CPU (text_encoder_on_cpu)", replace(request, text_encoder_on_cpu=True)
    if not shape.weight_type:
        for word in ("q8_0", "q4_0"):
            yield f"Converting weights to {word} while loading (weight_type)", replace(request, weight_type=word)


def _joint_changes(request: SdRequest, shape: SdShape) -> Iterator[tuple[str, SdRequest]]:
    """Changes that may suffice together where none does alone, the mildest first."""
    lean = replace(request, flash_attention=True, vae_tiling=True)
    yield "Flash attention and decoding in tiles together (flash_attention, vae_tiling)", lean
    yield (
        "Flash attention, tiles and direct convolution together (flash_attention, vae_tiling, vae_conv_direct)",
        replace(lean, vae_conv_direct=True),
    )
    if not shape.weight_type:
        yield (
            "Flash attention, tiles and weights in q4_0 together (flash_attention, vae_tiling, weight_type)",
            replace(lean, weight_type="q4_0"),
        )


def _tried(
    words: str, changed: SdRequest, requirement: Requirement, capacity: Capacity, again: Callable[[SdRequest], Plan]
) -> _Choice:
    needed = again(changed).requirement
    if changed.weight_type and _weight_bytes(needed) >= _weight_bytes(requirement):
        # A plan may leave the card because its weights grew, and that is no saving.
        return _Choice(words, 0, Verdict.UNKNOWN)
    return _Choice(words, _saved(requirement, needed, capacity), judge(needed, capacity).verdict)


def _weight_bytes(requirement: Requirement) -> int:
    """Resident lines with a buffer are the weights' own."""
    return sum(line.bytes.expected for line in requirement.lines if line.phase is Phase.RESIDENT and line.buffer.high)


def _smaller(
    request: SdRequest,
    shape: SdShape,
    needed: Requirement,
    capacity: Capacity,
    again: Callable[[SdRequest], Plan],
    largest: Callable[[SdRequest, tuple[int, int]], tuple[int, int]],
) -> list[str]:
    width, height = largest(request, (shape.width_px, shape.height_px))
    if not width or width * height >= shape.width_px * shape.height_px:
        return []
    smaller = again(replace(request, width_px=width, height_px=height, tier=None)).requirement
    saved = _saved(needed, smaller, capacity)
    saves = f" and saves {format_gib(saved)}" if saved > 0 else ""
    return [f"A picture of {width} x {height} runs here{saves}."]


def _saved(before: Requirement, after: Requirement, capacity: Capacity) -> int:
    """Bytes that another plan expects less, where it counts: on the card if one is used, else in all.

    A measurement may have taken the planned figure's place, so that both are added up from their lines.
    """
    if uses_card(before, capacity):
        on_card = before.device_peak.expected - after.device_peak.expected
        return max(on_card, before.host.expected - after.host.expected)
    return added_up(before.lines).total.expected - added_up(after.lines).total.expected


def _other_weights(needed: Requirement, capacity: Capacity) -> list[str]:
    weights = _weight_bytes(needed)
    ceiling = capacity.total if uses_card(needed, capacity) else capacity.host_ceiling
    if not weights:
        return []
    choose = "choose a smaller model."
    share = max(0.0, ceiling.effective - (needed.total.expected - weights)) / weights
    if SMALLEST_REQUANTISATION <= share < 1:
        choose = f"choose a quantisation of at most {share:.0%} of their size, or a smaller model."
    return [f"The weights alone are {format_gib(weights)} in memory: {choose}"]
