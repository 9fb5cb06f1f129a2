"""What ds4-server writes of one request: its beginning, its prompt, its answer, and how it ended."""

import time

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.script import Answer

LOGGED_TOKENS = 50
"""Between two lines of one answer."""


class TurnLog:
    """The lines of one request, from the moment this is made."""

    def __init__(self, *, has_tools: bool) -> None:
        self._tools = " TOOLS" if has_tools else ""
        self._started = time.monotonic()
        self._cached = self._prompt = 0
        self._chunk_end = 0.0
        self._decoding = self._decoded_at = 0.0
        self._decoded = 0

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def line(self, text: str) -> None:
        """A line about the request."""
        log.server(f"chat ctx={self._span()}{self._tools} {text}")

    def prompt_start(self, cached: int, prompt: int) -> None:
        """Tokens that need not be read, and tokens of the whole prompt."""
        self._cached, self._prompt = cached, prompt
        self.line("prompt start")

    def chunk(self, done: int, size: int) -> None:
        """A chunk of the prompt has been read."""
        now = self.elapsed()
        took = now - self._chunk_end
        # The first chunk has nothing to be measured from.
        rate = size / took if self._chunk_end and took > 0 else 0.0
        read, new = done - self._cached, self._prompt - self._cached
        average = read / now if now > 0 else 0.0
        speed = f"chunk={rate:.2f} t/s avg={average:.2f} t/s {now:.3f}s"
        self.line(f"prefill chunk {read}/{new} ({100 * read / new:.1f}%) {speed}")
        self._chunk_end = now

    def prompt_done(self) -> None:
        """All of the prompt has been read."""
        self.line(f"prompt done {self.elapsed():.3f}s")
        self._decoding = self._decoded_at = time.monotonic()

    def decoded(self, answer: Answer) -> None:
        """So much has been generated; nothing is written where nothing is new."""
        new = answer.tokens - self._decoded
        if not new:
            return
        now = time.monotonic()
        span = f"{self._prompt + self._decoded}..{self._prompt + answer.tokens}:{new}"
        rate, average = new / max(now - self._decoded_at, 1e-9), answer.tokens / max(now - self._decoding, 1e-9)
        log.server(
            f"chat ctx={span} gen={answer.tokens}{_flags(answer)} decoding chunk={rate:.2f} t/s avg={average:.2f} t/s "
            f"{now - self._decoding:.3f}s"
        )
        self._decoded, self._decoded_at = answer.tokens, now

    def calls(self, answer: Answer) -> None:
        """Which tools it called."""
        if answer.calls:
            ids = ",".join(call_id for call_id, _, _ in answer.calls)
            names = ",".join(name for _, name, _ in answer.calls)
            log.server(f"tool calls ctx={self._span()} n={len(answer.calls)} raw_dsml=1 ids=[{ids}] names=[{names}]")

    def finish(self, answer: Answer, finish: str, error: str) -> None:
        """The last line."""
        why = f' error="{error}"' if finish == "error" and error else ""
        ended = f"gen={answer.tokens}{_flags(answer)} finish={finish}{why} {self.elapsed():.3f}s"
        log.server(f"chat ctx={self._span()} {ended}")

    def _span(self) -> str:
        return f"{self._cached}..{self._prompt}:{max(0, self._prompt - self._cached)}"


def _flags(answer: Answer) -> str:
    named = {
        "TOOLS": answer.has_tools,
        "THINKING": answer.thinking,
        "DSML_START": bool(answer.calls),
        "DSML_END": answer.closed_calls,
    }
    return "".join(f" {name}" for name, given in named.items() if given)
