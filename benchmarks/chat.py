"""A chat through the whole suite against mlx-lm called directly in one process."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2, chat_service_pb2_grpc
from weighbridge_proto.fit.v1 import weights_pb2

from benchmarks.measure import Comparison
from tests.harness import make_model, running_suite

MODELS = Path(".cache/models")
PROMPT = "Write a long story about a weighbridge at the harbour, with many details."
OUTPUT_TOKENS = 48
ROUNDS = 7
"""On a CPU the demo model makes some ten tokens a second, so this is minutes, not seconds."""


class DirectMlx:
    """mlx-lm in a process of its own that answers one request for each line it reads."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.direct_mlx", str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def chat(self, prompt: str, tokens: int) -> tuple[float, float, int]:
        """Seconds to the first token, tokens per second after it, tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["first_s"], answer["tokens_per_s"], answer["tokens"]

    def close(self) -> None:
        """End the process: it stops when its input ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


async def _chat(target: str, model: str, prompt: str, tokens: int) -> tuple[float, float, int]:
    async with open_channel(target) as channel:
        request = chat_service_pb2.ChatRequest(
            model=weights_pb2.ModelRef(path=model),
            messages=[
                chat_service_pb2.ChatMessage(
                    role=chat_service_pb2.ROLE_USER, parts=[chat_service_pb2.ContentPart(text=prompt)]
                )
            ],
            sampling=chat_service_pb2.Sampling(temperature=0),
            max_output_tokens=tokens,
        )
        start = time.perf_counter()
        first = last = 0.0
        count = 0
        async for response in chat_service_pb2_grpc.ChatServiceStub(channel).Chat(request):
            if response.HasField("delta"):
                last = time.perf_counter()
                first = first or last
            if response.HasField("finished"):
                count = response.finished.usage.output_tokens
        return first - start, (count - 1) / (last - first), count


def run() -> Iterator[Comparison]:
    """Tokens per second and time to first token, requests in turn."""
    model = make_model("demo", MODELS / "demo").absolute()
    direct = DirectMlx(model)
    samples: dict[str, list[tuple[float, float, int]]] = {"suite": [], "direct": []}
    with running_suite(model.parent) as suite:
        target = f"unix:{suite.run_dir / 'engine-mlx.sock'}"
        suite.cli("load", str(model))
        for number in range(1 + ROUNDS):
            through = asyncio.run(_chat(target, str(model), PROMPT, OUTPUT_TOKENS))
            alone = direct.chat(PROMPT, OUTPUT_TOKENS)
            assert through[2] == alone[2], "both must have made the same number of tokens"
            if number:
                samples["suite"].append(through)
                samples["direct"].append(alone)
        assert suite.stop() == 0
    direct.close()
    yield Comparison(
        f"tokens per second through the suite ({OUTPUT_TOKENS} tokens)", "tokens/s",
        [s[1] for s in samples["suite"]], "mlx-lm called directly in one process", [s[1] for s in samples["direct"]],
        "at least 0.95", lambda ratio: ratio >= 0.95,
    )  # fmt: skip
    yield Comparison(
        "time to first token through the suite", "ms", [s[0] * 1e3 for s in samples["suite"]],
        "mlx-lm called directly in one process", [s[0] * 1e3 for s in samples["direct"]], "",
    )  # fmt: skip
