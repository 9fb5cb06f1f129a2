"""Chats through the whole suite against the same ds4-server asked directly over HTTP, in turn.

The server is the project's stand-in, which paces its tokens as told: what is measured is what the suite adds to a
model that makes 30 tokens a second, or 200. How fast it really made them when it was asked directly is printed first:
a baseline that is itself late would flatter the suite. Nothing here says anything of ds4's own speed.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
from weighbridge_proto.engines.v1 import chat_service_pb2

from benchmarks.measure import Comparison
from tests.ds4 import Ds4Engine, Ds4Models, Program, connected, server_of, settings_of, write_models
from tests.harness import Suite, running_suite
from tests.images import told

ROUNDS = 50
PACES = ((30, 24), (200, 100))
"""Tokens a second, and tokens of each answer: 0.8 and 0.5 s."""
BURST_TOKENS = 1000
BURST_ROUNDS = 15
PROMPT = "Tell me of a weighbridge."
MOST_LATER_MS = 5.0
PACE_SHARE = 0.02
"""How far from what it was told the stand-in may pace."""
DIRECTLY = "the same stand-in asked directly over HTTP"


@dataclass(frozen=True)
class _Answer:
    """Milliseconds to the first token, and tokens per second after it."""

    first_ms: float
    rate: float


async def _timed(tokens: AsyncIterator[None], expected: int) -> _Answer:
    start = time.perf_counter()
    times = [time.perf_counter() async for _ in tokens]
    assert len(times) == expected, f"{len(times)} of {expected} tokens came"
    return _Answer((times[0] - start) * 1e3, (len(times) - 1) / (times[-1] - times[0]))


async def _through_suite(engine: Ds4Engine, tokens: int) -> AsyncIterator[None]:
    async for event in engine.chat(PROMPT, max_output_tokens=tokens, thinking=chat_service_pb2.THINKING_OFF):
        if event.HasField("delta"):
            yield


async def _directly(client: httpx2.AsyncClient, tokens: int) -> AsyncIterator[None]:
    body = {
        "messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "think": False, "stream": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[len("data: ") :])["choices"]:
                if choice["delta"].get("content"):
                    yield


async def _in_turn(suite: Suite, models: Ds4Models, tokens: int, rounds: int) -> tuple[list[_Answer], list[_Answer]]:
    """Answers through the suite, and direct ones."""
    async with connected(suite) as engine:
        await told(engine.load(models.flash, stream_experts=False))
        words = server_of(suite).cmdline()
        address = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        ours, theirs = [], []
        async with httpx2.AsyncClient(base_url=address, trust_env=False) as client:
            for number in range(rounds + 1):
                through = await _timed(_through_suite(engine, tokens), tokens)
                alone = await _timed(_directly(client, tokens), tokens)
                if number:
                    ours.append(through)
                    theirs.append(alone)
        await engine.unload()
    return ours, theirs


def _no_later(baseline: list[float]) -> Callable[[float], bool]:
    usual_ms = statistics.median(baseline)
    return lambda ratio: (ratio - 1) * usual_ms <= MOST_LATER_MS


def paced(pace: int, rates: list[float]) -> Comparison:
    """How fast the stand-in made its tokens when it was asked directly, beside what it was told."""
    return Comparison(
        f"tokens per second of the stand-in itself, told to make {pace} a second", "tokens/s",
        rates, "what it was told", [float(pace)],
        f"{1 - PACE_SHARE:g} to {1 + PACE_SHARE:g}, or the baseline is unsound",
        lambda ratio: abs(ratio - 1) <= PACE_SHARE,
    )  # fmt: skip


def run() -> Iterator[Comparison]:
    """Tokens per second and time to the first, at two paces; and as fast as it goes."""
    with tempfile.TemporaryDirectory() as folder:
        root, program_folder, scratch = (Path(folder) / name for name in ("models", "program", "scratch"))
        for made in (root, program_folder, scratch):
            made.mkdir()
        models, program = write_models(root), Program(program_folder)
        with running_suite(root, "ds4", **settings_of(program, scratch, "unified:128")) as suite:
            for pace, tokens in PACES:
                program.becomes(rate=pace, tokens=tokens, reasoning="")
                ours, theirs = asyncio.run(_in_turn(suite, models, tokens, ROUNDS))
                yield paced(pace, [answer.rate for answer in theirs])
                yield Comparison(
                    f"tokens per second through the suite, paced at {pace} a second", "tokens/s",
                    [answer.rate for answer in ours], DIRECTLY, [answer.rate for answer in theirs],
                    "at least 0.97", lambda ratio: ratio >= 0.97,
                )  # fmt: skip
                usual = [answer.first_ms for answer in theirs]
                yield Comparison(
                    f"time to the first token through the suite, paced at {pace} a second", "ms",
                    [answer.first_ms for answer in ours], DIRECTLY, usual,
                    f"at most {MOST_LATER_MS:g} ms more", _no_later(usual),
                )  # fmt: skip
            program.becomes(rate=0.0, tokens=BURST_TOKENS, reasoning="")
            ours, theirs = asyncio.run(_in_turn(suite, models, BURST_TOKENS, BURST_ROUNDS))
            yield Comparison(
                "tokens per second through the suite, as fast as the stand-in makes them", "tokens/s",
                [answer.rate for answer in ours], DIRECTLY, [answer.rate for answer in theirs], "",
            )  # fmt: skip
            assert suite.stop() == 0
