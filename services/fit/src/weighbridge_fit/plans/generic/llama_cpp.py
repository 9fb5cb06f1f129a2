"""A model as llama.cpp holds it with all layers offloaded: weights on the device, input embeddings in host memory,
caches, one compute buffer, and the process."""

import re

from weighbridge_fit.calibration.generic import generic
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.geometry import ModelGeometry
from weighbridge_fit.laws import kv_llama_cpp, prefill
from weighbridge_fit.lines import NOTHING, Line, Phase, Range, Source
from weighbridge_fit.plans.generic.caches import cache_lines
from weighbridge_fit.plans.generic.options import GenericShape

# Tensors of the input layer, which stays in host memory whatever is offloaded.
INPUT_TENSORS = frozenset(
    {
        "token_embd.weight",
        "per_layer_token_embd.weight",
        "position_embd.weight",
        "token_types.weight",
        "token_embd_norm.weight",
        "token_embd_norm.bias",
    }
)
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_BLOCK = re.compile(r"blk\.(\d{1,4})\.")


def lines(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape) -> list[Line]:
    """All lines."""
    return [*_weight_lines(facts, geometry, shape), *cache_lines(geometry, shape), *_compute_lines(geometry, shape)]


def _weight_lines(facts: WeightFacts, geometry: ModelGeometry, shape: GenericShape) -> list[Line]:
    sizes = {tensor.name: tensor.bytes for _, tensor in facts.tensors}
    skipped = _draft_bytes(sizes, geometry)
    loaded = facts.tensor_bytes - skipped
    drafted = "; its draft head's blocks are not loaded" if skipped else ""
    largest = Range.exactly(min(facts.largest_tensor_bytes, loaded))
    if not shape.on_card:
        basis = f"all tensors, exactly{drafted}"
        return [Line("model", Phase.RESIDENT, Range.exactly(loaded), Source.DERIVED, basis, largest)]
    embeddings = sum(size for name, size in sizes.items() if name in INPUT_TENSORS)
    # A model without an output matrix uses its embeddings for it, and has them on both sides.
    shared = sizes.get(_EMBEDDING, 0) if _OUTPUT not in sizes else 0
    on_card = loaded - embeddings + shared
    basis = f"all tensors but the input embeddings, exactly{drafted}"
    if not sizes:
        basis = "all tensors: which are input embeddings is not known from these facts"
    made = [Line("model", Phase.RESIDENT, Range.exactly(on_card), Source.DERIVED, basis, largest, on_device=True)]
    if embeddings:
        basis = "input embeddings, which llama.cpp keeps in host memory in their own type"
        made.append(Line("embeddings", Phase.RESIDENT, Range.exactly(embeddings), Source.DERIVED, basis))
    return made


def _draft_bytes(sizes: dict[str, int], geometry: ModelGeometry) -> int:
    """Blocks behind the model's own: its draft head, which a launch without drafting leaves in the file."""
    if not geometry.draft_layers:
        return 0
    first = len(geometry.layers)
    found = ((_BLOCK.match(name), size) for name, size in sizes.items())
    return sum(size for match, size in found if match and int(match.group(1)) >= first)


def _compute_lines(geometry: ModelGeometry, shape: GenericShape) -> list[Line]:
    figures = generic().figures["llama_cpp"]
    batch = min(shape.micro_batch_tokens, shape.context_tokens * shape.slots)
    cells = kv_llama_cpp.full_cells(shape.context_tokens, shape.slots)
    law = prefill.llama_cpp_compute_bytes(geometry, batch)
    share = figures["compute_share"]
    scores = prefill.llama_cpp_score_bytes(geometry, batch, cells)
    sized = Range(int(law * share.low), int(law * share.expected), int(law * share.high))
    basis = f"logits and activations of {batch:,} tokens, flash attention on; {share.basis}"
    without = f"; {scores / 2**30:,.1f} GiB more where flash attention is off" if scores else ""
    made = [Line("compute", Phase.RESIDENT, sized, share.source, basis + without, sized, shape.on_card)]
    host = prefill.llama_cpp_host_compute_bytes(geometry, batch, cells)
    output = shape.slots * geometry.vocab_size * prefill.FLOAT32_BYTES
    basis = f"attention mask of {batch:,} x {cells:,} cells, inputs and one row of logits for each conversation"
    on_host = Range(host // 2, host + output, host + output)
    made.append(Line("compute_host", Phase.RESIDENT, on_host, Source.DERIVED, basis))
    if shape.on_card:
        context = figures["device_context_bytes"]
        made.append(Line("device_context", Phase.RESIDENT, context.range, context.source, context.basis, NOTHING, True))
    process = figures["process_bytes"]
    made.append(Line("process", Phase.RESIDENT, process.range, process.source, process.basis))
    return made
