"""What ds4 says that it will take: the line about context buffers of every build, and the plan of later ones.

The arithmetic is the allocator's (antirez/ds4 8d57664, 7e3dbef), equal to public logs to 0.01 MiB; of V4.1 the sums of
one session are public (September 2026) and how they are told is ours.
"""

from dataclasses import dataclass

from weighbridge_common.ds4_layout import EXPERTS, HEAD_SIZE, INDEXER_SIZE, LAYERS, RATIOS, V41_LAYERS

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.command_line import CommandLine
from services.engines.standins.ds4.flags import MAY
from services.engines.standins.ds4.model_file import ModelFile, die

GIB, MIB = 1 << 30, 1 << 20
_WINDOW = 128
_V41_SESSION = ((4096, 1_921_216_616), (32_768, 8_465_702_760), (1_048_576, 20_298_913_640))
"""Context, and bytes of one session's graph and cache at it."""
_V41_CACHE_BYTES = 6_600
"""Of the cache, for each token."""
_GLM_CACHE_BYTES = 89 * 1024


@dataclass(frozen=True)
class Context:
    """One session's context. Sizes in bytes."""

    chunk: int
    raw_rows: int
    compressed_rows: int
    raw: int
    compressed: int
    scratch: int

    @property
    def total(self) -> int:
        return self.raw + self.compressed + self.scratch


def context_of(file: ModelFile, line: CommandLine, build: str) -> Context:
    """What one session takes."""
    tokens, backend = line.context, line.backend
    if file.architecture == "deepseek41":
        return _v41(tokens, min(tokens, line.number("prefill-chunk", 2048 if tokens < 16_384 else 8192)))
    if file.architecture == "glm-dsa":
        return Context(min(tokens, 2048), tokens, 0, tokens * _GLM_CACHE_BYTES, 0, 0)
    rows = tokens // 4 + 2
    if backend == "cpu":
        raw_rows = min(_WINDOW, tokens)
        scratch = (raw_rows + rows) * 4 + rows * 4 + rows
        return Context(0, raw_rows, rows, _raw(raw_rows), _compressed(tokens, 4), scratch)
    chunk = min(tokens, line.number("prefill-chunk", 2048 if build == MAY else 4096))
    ring = -(-min(min(_WINDOW, tokens) + chunk, tokens) // 256) * 256
    raw_rows = max(min(ring, 8192), min(_WINDOW, tokens))
    staging = 0 if build == MAY else (chunk // 4 + 2) * HEAD_SIZE * 4
    row_bytes = 2 if build != MAY and backend == "metal" else 4
    return Context(
        chunk, raw_rows, rows, _raw(raw_rows), _compressed(tokens, row_bytes), 2 * rows * chunk * 4 + staging
    )


def _raw(rows: int) -> int:
    return LAYERS * rows * HEAD_SIZE * 4


def _compressed(tokens: int, row_bytes: int) -> int:
    total = 0
    for ratio in filter(None, RATIOS):
        rows = tokens // ratio + 2
        total += rows * HEAD_SIZE * row_bytes + (rows * INDEXER_SIZE * 4 if ratio == 4 else 0)
    return total


def _v41(tokens: int, chunk: int) -> Context:
    below, above = (_V41_SESSION[0], _V41_SESSION[1]) if tokens < 16_384 else (_V41_SESSION[1], _V41_SESSION[2])
    whole = below[1] + (tokens - below[0]) * (above[1] - below[1]) // (above[0] - below[0])
    raw = V41_LAYERS * _WINDOW * HEAD_SIZE * 4
    compressed = min(tokens * _V41_CACHE_BYTES, whole - raw)
    return Context(chunk, _WINDOW, tokens + 1, raw, compressed, whole - raw - compressed)


@dataclass(frozen=True)
class ExpertCache:
    """Experts kept in memory while others are read from disk: slots, and bytes of one and of the reserve."""

    slots: int
    expert: int
    reserve: int


def expert_cache(file: ModelFile, line: CommandLine, context: Context, working_set: int) -> ExpertCache:
    """Ends the process for a cache that prompts do not go through."""
    layers, experts = (V41_LAYERS, 384) if file.architecture == "deepseek41" else (LAYERS, EXPERTS)
    size = max(1, _size_of_most_experts(file, experts))
    if line.cache_slots:
        return ExpertCache(min(line.cache_slots, layers * experts), size, 0)
    budget = line.cache_gib * GIB
    if not budget:
        if not working_set:
            advice = "set --ssd-streaming-cache-experts N or NGB explicitly"
            die(f"SSD streaming auto cache: recommended working set unavailable; {advice}")
        others = file.tensor_bytes - file.routed_bytes - file.table_bytes
        return ExpertCache(max(1, (working_set * 8 // 10 - others) // size), size, 0)
    if working_set:
        budget = min(budget, (working_set * 7 // 8 - context.total) // GIB * GIB)
    reserve = 2 * experts * size
    if budget <= reserve:
        needed = f"prompts need {reserve / GIB:.2f} GiB of it"
        die(f"SSD streaming expert cache of {budget / GIB:.2f} GiB is too small: {needed}")
    return ExpertCache(min((budget - reserve) // size, layers * experts), size, reserve)


def _size_of_most_experts(file: ModelFile, experts: int) -> int:
    sizes: list[int] = []
    for layer in range(LAYERS):
        parts = [file.tensors.get(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
        sizes.append(sum(part.bytes for part in parts if part) // experts)
    return max(set(sizes), key=sizes.count)


def tell_plan(file: ModelFile, line: CommandLine, context: Context, cache: ExpertCache | None, extra: int) -> None:
    """The two lines of the plan, which builds print since July. Of several sessions it counts one."""
    raw, compressed, scratch = context.raw, context.compressed, context.scratch
    if cache is None:
        resident = file.file_bytes - file.data_start - file.table_bytes
    elif file.architecture == "deepseek41":
        resident = file.tensor_bytes - file.routed_bytes - file.table_bytes
    else:
        resident = file.tensors["token_embd.weight"].bytes
    text = (
        f"memory: KV {_gib(raw + compressed)} GiB (raw {_gib(raw)} + compressed {_gib(compressed)}) "
        f"+ buffers {_gib(scratch)} GiB + resident model {_gib(resident)} GiB"
    )
    total = raw + compressed + scratch + resident + extra
    if cache is not None:
        text += f" + expert cache {_gib(cache.slots * cache.expert)} GiB"
        text += f" + prefill expert reserve {_gib(cache.reserve)} GiB" if cache.reserve else ""
        total += cache.slots * cache.expert + cache.reserve
    log.engine(f"{text} = {_gib(total)} GiB planned")
    log.engine(
        f"memory detail: ctx={line.context} prefill_cap={context.chunk} raw_kv_rows={context.raw_rows} "
        f"compressed_kv_rows={context.compressed_rows} backend={line.backend}"
    )


def tell_context(line: CommandLine, context: Context) -> None:
    """The line about context buffers, which every build prints."""
    log.server(
        f"context buffers {context.total / MIB:.2f} MiB (ctx={line.context}, backend={line.backend}, "
        f"prefill_chunk={context.chunk}, raw_kv_rows={context.raw_rows}, "
        f"compressed_kv_rows={context.compressed_rows})"
    )
    if line.sessions > 1:
        whole = line.sessions * context.total / GIB
        log.server(f"{line.sessions} resident sessions request at least {whole:.2f} GiB of context buffers")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
