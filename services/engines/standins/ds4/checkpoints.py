"""Checkpoints of conversations on disk: a file for each prefix, named after its text and holding it in plain words."""

import hashlib
import os
import struct
import time
from pathlib import Path

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.command_line import CommandLine
from services.engines.standins.ds4.prompt import count_tokens

_MIB = 1 << 20
_HEADER = struct.Struct("<4sBBBBIIQQQQ")
_REASONS = {"cold": 1, "continued": 2, "evict": 3, "shutdown": 4}
_HALF_LIFE_S = 6 * 3600


class Checkpoints:
    """The folder, where one was named."""

    def __init__(self, line: CommandLine) -> None:
        self._folder: Path | None = None
        self._least = line.number("kv-cache-min-tokens", 512)
        self._most_cold = line.number("kv-cache-cold-max-tokens", 30_000)
        self._trim = line.number("kv-cache-boundary-trim-tokens", 32)
        self._align = line.number("kv-cache-boundary-align-tokens", 2048)
        self._budget = line.number("kv-disk-space-mb", 4096) * _MIB
        self._context = line.context
        if not line.has("kv-disk-dir"):
            return
        folder = Path(line.text("kv-disk-dir"))
        try:
            for each in (*reversed(folder.parents), folder):
                if not each.is_dir():
                    each.mkdir(0o700)
        except OSError as error:
            log.server(f"failed to create KV cache directory {folder}: {error.strerror}")
            return
        self._folder = folder
        crossing = "reject" if line.has("kv-cache-reject-different-quant") else "accept"
        log.server(
            f"KV disk cache {folder} (budget={self._budget // _MIB} MiB, cross-quant={crossing}, min={self._least}, "
            f"cold_max={self._most_cold}, continued={line.number('kv-cache-continued-interval-tokens', 10_000)}, "
            f"trim={self._trim}, align={self._align}, hit_half_life={_HALF_LIFE_S}s)"
        )

    def longest_prefix(self, prompt: str) -> str:
        """The longest saved text that a prompt begins with, "" for none."""
        best = ""
        for path in self._folder.glob("*.kv") if self._folder else ():
            text = _text_of(path)
            if len(text) > len(best) and prompt.startswith(text):
                best = text
        return best

    def save_cold(self, prompt: str, tokens: int) -> None:
        """Save a first prompt's stable beginning, where it is neither too short nor too long."""
        if self._folder and self._least <= tokens <= self._most_cold:
            stable = tokens - self._trim
            stable -= stable % self._align if self._align else 0
            kept = stable if tokens > self._least + self._trim and stable >= self._least else tokens
            # As many bytes as tokens: marks are longer, so it is a little less than ds4 would keep.
            text = prompt.encode()[:kept].decode(errors="ignore") if kept < tokens else prompt
            self.save(text, "cold", tokens - kept)

    def save(self, text: str, reason: str, trimmed: int = 0) -> None:
        """Write a checkpoint, and drop the oldest ones that the budget has no room for."""
        tokens = count_tokens(text)
        if self._folder is None or tokens < self._least:
            return
        started = time.monotonic()
        encoded = text.encode()
        key = hashlib.sha1(encoded, usedforsecurity=False).hexdigest()
        now = int(time.time())
        header = _HEADER.pack(b"KVC\1", 2, _REASONS[reason], 0, 0, tokens, self._context, now, now, 0, len(encoded))
        path = self._folder / f"{key}.kv"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + encoded)
        size = len(header) + len(encoded)
        log.server(
            f"kv cache stored tokens={tokens} trimmed={trimmed} reason={reason} key=token-text "
            f"size={size / _MIB:.2f} MiB save={(time.monotonic() - started) * 1000:.1f} ms"
        )
        self._evict(path)

    def save_last(self, text: str) -> None:
        """Save what is live when the server ends."""
        tokens = count_tokens(text)
        if self._folder and tokens >= self._least:
            log.server(f"persisting current KV cache before shutdown tokens={tokens}")
            self.save(text, "shutdown")

    def _evict(self, newest: Path) -> None:
        assert self._folder is not None
        files = sorted(self._folder.glob("*.kv"), key=lambda path: path.stat().st_mtime)
        while sum(path.stat().st_size for path in files) > self._budget and files[0] != newest:
            oldest = files.pop(0)
            size = oldest.stat().st_size / _MIB
            oldest.unlink()
            log.server(f"kv cache evicted reason=disk-cache-full tokens=0 hits=0 size={size:.2f} MiB file={oldest}")


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    return data[_HEADER.size :].decode("utf-8", "replace") if data.startswith(b"KVC") else ""
