"""What a catalogue's chat model plausibly needs where nothing is known of its tensors: a range from its files' sizes.

Each bound is one that published models stay within; the sources stand beside the figures. Every line is ASSUMED.
"""

from weighbridge_fit.catalog.entry import CatalogEntry, Use
from weighbridge_fit.lines import Line, Phase, Range, Requirement, Source, requirement
from weighbridge_fit.plans.plan import Engine

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_CONTEXT = 4096
# More than any model was made for, so that products of the two stay sizes.
MOST_TOKENS, MOST_SLOTS = 1 << 24, 1024

# What lies in a chat model's files and is not loaded by a runtime of text: towers for pictures and sound, draft heads.
# The largest of the catalogue's are those of Nemotron 3 Nano Omni, about 1.5 B parameters in 16 bits, and no tower is
# more than four tenths of a small model's files (Qwen3.5 2B in 4 bits: 0.66 of 1.72 GB).
UNLOADED_BYTES = 3 * GIB
UNLOADED_SHARE = 0.4

# Keys and values of one token in 16 bits. Low: hybrids with a few attention layers (Nemotron 3.5 Lightning, 6,144).
# High: 88 layers of 8 heads of 128 (Mistral Medium 128 B). Expected: 32 layers of 4 heads of 128.
KV_BYTES_PER_TOKEN = Range(6_144, 65_536, 360_448)

# Beside weights and cache: the process, freed buffers and one prefill step. Measured runs of mlx-lm lie between 0.2 GiB
# (2 B parameters) and 10 GiB (120 B, prompts of 32 k tokens); they grow with the model.
CHAT_BESIDE_BYTES = Range(128 * MIB, 768 * MIB, 2 * GIB)
CHAT_BESIDE_SHARE = (0.0, 0.02, 0.06)


def can_be_ranged(entry: CatalogEntry) -> bool:
    """Whether a range is known for models of this kind; engines of pictures and ds4 give their own."""
    return entry.use is Use.CHAT and entry.engine in (Engine.MLX, Engine.GENERIC)


def plausible(entry: CatalogEntry, context_tokens: int = 0, slots: int = 0) -> Requirement:
    """The requirement of an entry that `can_be_ranged`. Zero: the defaults of a chat."""
    return requirement(_chat(entry, context_tokens or DEFAULT_CONTEXT, slots or 1))


def _chat(entry: CatalogEntry, context_tokens: int, slots: int) -> tuple[Line, ...]:
    files = entry.weight_bytes
    unloaded = min(UNLOADED_BYTES, round(files * UNLOADED_SHARE))
    weights = Range(files - unloaded, files, files)
    tokens = context_tokens * slots
    given, fixed = entry.figures.get("kv_bytes_per_token"), entry.figures.get("kv_fixed_bytes", 0) * slots
    if given is None:
        cache = Range(*(tokens * size for size in _bounds(KV_BYTES_PER_TOKEN)))
        cache_basis = f"{tokens:,} tokens x 6 to 352 KiB: what models of its kind keep for each"
    else:
        cache = Range.exactly(tokens * given + fixed)
        cache_basis = f"{tokens:,} tokens x {given:,} bytes and {fixed:,} bytes, as the catalogue's author gives them"
    beside = Range(
        *(
            size + round(files * share)
            for size, share in zip(_bounds(CHAT_BESIDE_BYTES), CHAT_BESIDE_SHARE, strict=True)
        )
    )
    return (
        _line("weights", Phase.RESIDENT, weights, "the size of its files, less what a runtime of text may leave out"),
        _line("kv_cache", Phase.RESIDENT, cache, cache_basis),
        _line("workspace", Phase.PREFILL, beside, "process, freed buffers and one prefill step of models of its size"),
    )


def _line(component: str, phase: Phase, size: Range, basis: str) -> Line:
    return Line(component, phase, size, Source.ASSUMED, basis)


def _bounds(size: Range) -> tuple[int, int, int]:
    return size.low, size.expected, size.high
