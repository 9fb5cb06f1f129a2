"""The baseline of benchmarks.chat: mlx-lm called directly, one JSON request per line on standard input."""

import json
import sys
import time

from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler


def main(model_path: str) -> None:
    """Answer each line with the seconds to the first token, tokens per second after it, and the tokens."""
    model, tokenizer = load(model_path)[:2]
    sampler = make_sampler(temp=0.0)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": request["prompt"]}], add_generation_prompt=True
        )
        first = last = 0.0
        count = 0
        for response in stream_generate(model, tokenizer, prompt, max_tokens=request["tokens"], sampler=sampler):
            last = time.perf_counter()
            first = first or last
            count = response.generation_tokens
        answer = {"first_s": first - start, "tokens_per_s": (count - 1) / (last - first), "tokens": count}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
