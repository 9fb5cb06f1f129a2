"""What a ds4 model is made of: which bytes stay in memory, which are experts, and the measures of its context.

Read from the names and shapes of the tensors. A model whose facts came without tensors is recognised by the size of its
file where that is a published one; else its parts are a plausible range.
"""

import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from weighbridge_fit.calibration import BOUNDS
from weighbridge_fit.calibration.ds4 import Ds4Calibration, PublishedFile
from weighbridge_fit.facts import TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.laws.ds4_context import ContextLayers
from weighbridge_fit.laws.ds4_experts import ExpertSizes
from weighbridge_fit.lines import Range, Source
from weighbridge_fit.model import Model
from weighbridge_fit.plans.errors import UNSUPPORTED_ARCHITECTURE, PlanError

# Metadata of a published file differs by a chat template or a tokenizer, weights do not.
METADATA_TOLERANCE_BYTES = 16 << 20
# Rows of an Engram table as ds4's own files store them, raw 8-bit floats with their scales.
ENGRAM_ROW_BYTES = 264
LONGEST_CONTEXT = 1_048_576
# V4 Flash has 43 layers; PRO has more, a chunk of its own, and no DSpark drafter.
FLASH_LAYERS = 43
# Routed experts per token where the file's metadata was not kept: V4 and V4.1.
USED_EXPERTS = 6
_BLOCK = re.compile(r"blk\.([0-9]{1,4})\.(.+)", re.DOTALL)
_ROUTED = re.compile(r"_exps(\.|$)")


class Family(Enum):
    """Models that ds4 tells apart by general.architecture, and how their context is priced."""

    V4 = "deepseek4"
    V41 = "deepseek41"
    GLM = "glm-dsa"
    OTHER = ""


# Loaded by builds of July to September 2026, with no law here: priced by a catalogue's figures or a range.
OTHER_ARCHITECTURES = frozenset({"laguna", "qwen4exp"})
ARCHITECTURES = frozenset(family.value for family in Family if family.value) | OTHER_ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Ds4Weights:
    """One model's weights.

    `mapped_bytes` are what a resident launch maps: the file less `disk_only_bytes` (Engram tables). `non_routed` are
    what a streamed launch keeps; `experts` None where their size is not known. `context` None where no law knows it.
    """

    family: Family
    mapped_bytes: int
    disk_only_bytes: int
    non_routed: Range
    embedding_bytes: int
    largest_tensor_bytes: int
    hidden_size: int
    vocab_size: int
    longest_context: int
    experts: ExpertSizes | None
    context: ContextLayers | None
    draft_block: bool
    source: Source
    basis: str

    @property
    def pro(self) -> bool:
        """Whether this is V4 PRO, whose chunk and drafters differ from Flash."""
        return self.family is Family.V4 and self.context is not None and len(self.context.ratios) > FLASH_LAYERS


def architecture_of(model: Model) -> str:
    """As the file says, else as the catalogue does."""
    return model.facts.architecture or (model.entry.architecture if model.entry else "")


def has_routed_experts(facts: WeightFacts) -> bool:
    """Whether the tensors are laid out as ds4 needs them: experts of a layer stacked."""
    return any(_ROUTED.search(tensor.name) for _, tensor in facts.tensors)


def weights_of(model: Model, calibration: Ds4Calibration) -> Ds4Weights:
    """Reads a model. Raises PlanError UNSUPPORTED_ARCHITECTURE."""
    facts, architecture = model.facts, architecture_of(model)
    named_by_catalogue = model.entry is not None
    if facts.format not in (WeightFormat.GGUF, WeightFormat.UNKNOWN):
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", "ds4 loads GGUF files; this model is stored otherwise.")
    if len(facts.files) > 1:
        message = "ds4 loads one whole GGUF file; this model is split. Join its parts with a GGUF tool first."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    if architecture not in ARCHITECTURES and not named_by_catalogue:
        named = f"of type {architecture!r}" if architecture else "without a type"
        message = f"ds4 loads DeepSeek V4, V4.1 and GLM 5.2 ({', '.join(sorted(ARCHITECTURES))}); this is one {named}."
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", message)
    family = next((family for family in Family if family.value == architecture), Family.OTHER)
    longest = (facts.geometry.max_context_tokens if facts.geometry else 0) or (
        model.entry.max_context_tokens if model.entry else 0
    )
    longest = longest or LONGEST_CONTEXT
    if has_routed_experts(facts):
        return _from_tensors(facts, family, longest, calibration)
    # A catalogue entry's facts without tensors hold the sizes of all its files together, companions included.
    listed = 0 if facts.tensor_count else _main_file_bytes(model)
    size = listed or max(facts.file_bytes, facts.tensor_bytes)
    if not size:
        raise PlanError(UNSUPPORTED_ARCHITECTURE, "model", "The size of the model's file is not known.")
    for published in calibration.published:
        if published.family == architecture and abs(size - published.file_bytes) <= METADATA_TOLERANCE_BYTES:
            return _from_published(size, published, family, longest, calibration)
    return _from_size(size, family, longest, calibration)


def _main_file_bytes(model: Model) -> int:
    """The catalogue's own file, without companions."""
    files = model.entry.files if model.entry else ()
    return sum(file.size_bytes for file in files if file.component == "model")


def _from_tensors(facts: WeightFacts, family: Family, longest: int, calibration: Ds4Calibration) -> Ds4Weights:
    tensors = [tensor for _, tensor in facts.tensors]
    layers: dict[int, dict[str, TensorFact]] = {}
    top: dict[str, TensorFact] = {}
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found:
            layers.setdefault(int(found[1]), {})[found[2]] = tensor
        else:
            top[tensor.name] = tensor
    disk_only = sum(tensor.bytes for tensor in tensors if family is Family.V41 and _is_engram_table(tensor))
    routed = sum(tensor.bytes for tensor in tensors if _ROUTED.search(tensor.name))
    whole = sum(tensor.bytes for tensor in tensors)
    embedding = top.get("token_embd.weight")
    hidden = embedding.shape[0] if embedding and embedding.shape else 0
    context = _context_layers(layers, calibration) if family is Family.V4 else None
    return Ds4Weights(
        family=family if family is not Family.V4 or context else Family.OTHER,
        mapped_bytes=max(facts.file_bytes, whole) - disk_only,
        disk_only_bytes=disk_only,
        non_routed=Range.exactly(whole - routed - disk_only),
        embedding_bytes=embedding.bytes if embedding else 0,
        largest_tensor_bytes=max((tensor.bytes for tensor in tensors if not _is_engram_table(tensor)), default=0),
        hidden_size=hidden,
        vocab_size=embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0,
        longest_context=longest,
        experts=_experts(layers, facts),
        context=context,
        draft_block=any(".nextn." in tensor.name for tensor in tensors),
        source=Source.DERIVED,
        basis="tensor bytes of the header, exactly",
    )


def _is_engram_table(tensor: TensorFact) -> bool:
    """Lookup tables stay on disk, the projections behind them do not."""
    if "engram" not in tensor.name:
        return False
    rows = tensor.elements // tensor.shape[0] if tensor.shape and tensor.shape[0] else 0
    return "engram_embd" in tensor.name or "table" in tensor.name or rows * ENGRAM_ROW_BYTES == tensor.bytes > 0


def _experts(layers: dict[int, dict[str, TensorFact]], facts: WeightFacts) -> ExpertSizes | None:
    """The size that most layers' experts have is the cache's; layers of another size go past it."""
    sizes: Counter[tuple[int, int]] = Counter()
    totals: Counter[tuple[int, int]] = Counter()
    for parts in layers.values():
        stacked = [tensor for name, tensor in parts.items() if _ROUTED.search(name) and len(tensor.shape) == 3]
        if not stacked or not stacked[0].shape[2]:
            continue
        whole, experts = sum(tensor.bytes for tensor in stacked), stacked[0].shape[2]
        sizes[experts, whole // experts] += 1
        totals[experts, whole // experts] += whole
    if not sizes:
        return None
    (experts, size), count = max(sizes.items(), key=lambda item: (item[1], item[0]))
    if not size:
        return None
    used = facts.geometry.experts_per_token if facts.geometry else 0
    bypass = sum(totals.values()) - totals[experts, size]
    return ExpertSizes(count, experts, size, used or USED_EXPERTS, bypass)


def _context_layers(layers: dict[int, dict[str, TensorFact]], calibration: Ds4Calibration) -> ContextLayers | None:
    """The measures of V4's context: the compressor's position table has one column for each token of its ratio."""
    ratios, row_size, indexer_size = [], 0, 0
    for number in range(len(layers)):
        parts = layers.get(number)
        if parts is None:
            return None
        table = parts.get("attn_compressor_ape.weight")
        ratios.append(table.shape[1] if table and len(table.shape) == 2 else 0)
        keys, indexer = parts.get("attn_kv.weight"), parts.get("indexer_compressor_norm.weight")
        row_size = keys.shape[1] if keys and len(keys.shape) == 2 else row_size
        indexer_size = indexer.shape[0] if indexer and indexer.shape else indexer_size
    if not row_size or not any(ratios):
        return None
    return ContextLayers(tuple(ratios), row_size, indexer_size, calibration.flash.window_tokens)


def _from_published(
    size: int, published: PublishedFile, family: Family, longest: int, calibration: Ds4Calibration
) -> Ds4Weights:
    layers, experts, expert = max(published.routed)
    bypass = sum(count * each * bytes_ for count, each, bytes_ in published.routed) - layers * experts * expert
    return Ds4Weights(
        family=family,
        mapped_bytes=size - published.disk_only_bytes,
        disk_only_bytes=published.disk_only_bytes,
        non_routed=Range.exactly(published.non_routed_bytes),
        embedding_bytes=published.embedding_bytes,
        largest_tensor_bytes=published.largest_tensor_bytes,
        hidden_size=published.hidden_size,
        vocab_size=calibration.flash_vocab if family is Family.V4 else 0,
        longest_context=longest,
        experts=ExpertSizes(layers, experts, expert, published.used, bypass),
        context=calibration.flash if family is Family.V4 else None,
        draft_block=published.draft_block,
        source=Source.DERIVED,
        basis=f"the file's size is that of {published.name}, whose layout is known",
    )


def _from_size(size: int, family: Family, longest: int, calibration: Ds4Calibration) -> Ds4Weights:
    share = calibration["other_non_routed_share"]
    # Every quantisation of V4.1 stores the same tables.
    tables = next((each.disk_only_bytes for each in calibration.published if each.family == family.value), 0)
    disk_only = tables if size > tables else 0
    mapped = size - disk_only
    return Ds4Weights(
        family=family if family in (Family.V41, Family.GLM) else Family.OTHER,
        mapped_bytes=mapped,
        disk_only_bytes=disk_only,
        non_routed=Range(*(int(mapped * share.at(bound)) for bound in BOUNDS)),
        embedding_bytes=0,
        largest_tensor_bytes=0,
        hidden_size=0,
        vocab_size=0,
        longest_context=longest,
        experts=None,
        context=None,
        draft_block=False,
        source=Source.ASSUMED,
        basis=f"without facts about its tensors; {share.basis}",
    )
