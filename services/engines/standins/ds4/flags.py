"""The flags of ds4-server by build, and the help that each build prints from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.engines.standins.ds4.behaviour import BUILDS

Kind = Literal["switch", "text", "positive", "natural", "number", "backend", "cache"]

MAY, JULY, SEPTEMBER = BUILDS


@dataclass(frozen=True)
class Flag:
    """One flag. ``hint`` is what the help calls its value, "" for none; it is known from ``since`` to ``until``."""

    names: tuple[str, ...]
    kind: Kind
    hint: str
    help: str
    since: str = MAY
    until: str = SEPTEMBER
    least: float = 0.0
    most: float = 0.0

    @property
    def name(self) -> str:
        """Its long name, without dashes."""
        return self.names[-1].lstrip("-")


_SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Model and runtime": (
        Flag(("-m", "--model"), "text", "FILE", "The model, a GGUF file. Default: ds4flash.gguf"),
        Flag(("--mtp",), "text", "FILE", "Support file to draft tokens with.", until=JULY),
        Flag(("--mtp",), "switch", "", "Draft with the block that is embedded in the model's file.", since=SEPTEMBER),
        Flag(("--mtp-model",), "text", "FILE", "Support file to draft tokens with.", since=SEPTEMBER),
        Flag(("--mtp-draft",), "positive", "N", "Most tokens of one draft. Default: 1"),
        Flag(("--mtp-margin",), "number", "F", "Confidence that the verifier asks for. Default: 3", most=1000.0),
        Flag(("--mtp-exact-sampling",), "switch", "", "Sample drafts exactly as without them.", since=SEPTEMBER),
        Flag(("--dspark",), "switch", "", "Draft with DSpark; needs a support file.", since=JULY),
        Flag(("--dspark-confidence",), "number", "F", "Confidence of a draft; turns --dspark on.", JULY, most=1.0),
        Flag(("--dspark-strict",), "switch", "", "Verify drafts one by one; turns --dspark on.", since=JULY),
        Flag(("--glm-mtp",), "switch", "", "Draft with GLM's own block.", since=JULY, until=JULY),
        Flag(("--vision",), "text", "FILE", "Vision encoder for images in messages.", since=SEPTEMBER),
        Flag(("-c", "--ctx"), "positive", "N", "Context in tokens, allocated at startup. Default: 32768"),
        Flag(("-n", "--tokens"), "positive", "N", "Most tokens of an answer that asks for none. Default: 393216"),
        Flag(("-t", "--threads"), "positive", "N", "Helper threads on the host."),
        Flag(("--chdir",), "text", "DIR", "Working directory for everything that follows."),
        Flag(("--quality",), "switch", "", "Exact kernels instead of faster ones."),
        Flag(("--dir-steering-file",), "text", "FILE", "A direction for each layer to steer along."),
        Flag(("--dir-steering-ffn",), "number", "F", "How far behind feed-forward blocks.", least=-100.0, most=100.0),
        Flag(("--dir-steering-attn",), "number", "F", "How far behind attention.", least=-100.0, most=100.0),
        Flag(("--warm-weights",), "switch", "", "Touch every page of the model first. A slower startup."),
        Flag(("--power",), "positive", "N", "Share of the card's power, 1 to 100. Default: 100", since=JULY, most=100),
        Flag(("--prefill-chunk",), "positive", "N", "Tokens of a prompt read at once. Default: 4096", since=JULY),
        Flag(("--batched-session",), "positive", "N", "Conversations that stay resident.", since=JULY),
        Flag(("--mixed-prefill-quantum",), "positive", "N", "Tokens read between two steps of others.", SEPTEMBER),
        Flag(("--gpu-vram",), "text", "LIST", "Memory to use of each card.", since=JULY),
        Flag(("--gpu-devices",), "text", "LIST", "Cards to use.", since=JULY),
        Flag(("--cuda-tensor-parallel",), "switch", "", "Split layers over cards.", since=JULY),
        Flag(("--simulate-used-memory",), "text", "NGB", "Plan as if so much memory were taken.", since=JULY),
    ),
    "SSD streaming": (
        Flag(("--ssd-streaming",), "switch", "", "Read experts from disk as they are needed.", since=JULY),
        Flag(("--ssd-streaming-cold",), "switch", "", "Start with an empty cache of experts.", since=JULY),
        Flag(("--ssd-streaming-cache-experts",), "cache", "N|NGB", "Experts or GiB to keep in memory.", since=JULY),
        Flag(("--ssd-streaming-full-layers",), "positive", "N", "Layers kept whole; GLM only.", since=JULY),
        Flag(("--ssd-streaming-preload-experts",), "positive", "N", "Experts read at startup.", since=JULY),
    ),
    "HTTP API": (
        Flag(("--host",), "text", "HOST", "Address to listen on. Default: 127.0.0.1"),
        Flag(("--port",), "positive", "N", "Port to listen on. Default: 8000"),
        Flag(("--cors",), "switch", "", "Let any web page call it."),
        Flag(("--trace",), "text", "FILE", "Write every prompt and answer to a file."),
        Flag(("--prefix-file",), "text", "FILE", "Text in front of every conversation.", since=SEPTEMBER),
    ),
    "Disk KV cache": (
        Flag(("--kv-disk-dir",), "text", "DIR", "Keep checkpoints of conversations in a folder."),
        Flag(("--kv-disk-space-mb",), "positive", "N", "Space for them in MiB. Default: 4096"),
        Flag(("--kv-cache-min-tokens",), "positive", "N", "Shortest checkpoint. Default: 512"),
        Flag(("--kv-cache-cold-max-tokens",), "natural", "N", "Longest prompt saved at once. Default: 30000"),
        Flag(("--kv-cache-continued-interval-tokens",), "natural", "N", "Tokens between two saves. Default: 10000"),
        Flag(("--kv-cache-boundary-trim-tokens",), "natural", "N", "Tokens cut off a save. Default: 32"),
        Flag(("--kv-cache-boundary-align-tokens",), "natural", "N", "Multiple to save at. Default: 2048"),
        Flag(("--kv-cache-reject-different-quant",), "switch", "", "Take only checkpoints of the same quantisation."),
        Flag(("--disable-exact-dsml-tool-replay",), "switch", "", "Write tool calls anew when they are sent back."),
        Flag(("--tool-memory-max-ids",), "positive", "N", "Tool calls remembered word for word. Default: 100000"),
    ),
}  # fmt: skip

_BACKENDS = (
    Flag(("--metal",), "switch", "", ""),
    Flag(("--cuda",), "switch", "", ""),
    Flag(("--cpu",), "switch", "", ""),
    Flag(("--backend",), "backend", "NAME", ""),
)


def known(build: str) -> dict[str, Flag]:
    """Every spelling of every flag that a build knows."""
    flags = [*_BACKENDS, *(flag for section in _SECTIONS.values() for flag in section)]
    return {name: flag for flag in flags if flag.since <= build <= flag.until for name in flag.names}


def help_text(build: str) -> str:
    """What ``--help`` prints."""
    return "\n".join(_lines(build)) + "\n"


def _lines(build: str) -> Iterator[str]:
    yield "Usage: ds4-server [options]"
    for title, flags in _SECTIONS.items():
        shown = [flag for flag in flags if flag.since <= build <= flag.until]
        if not shown:
            continue
        yield ""
        yield f"{title}:"
        for flag in shown:
            yield f"  {', '.join(flag.names)} {flag.hint}".rstrip()
            yield f"      {flag.help}"
        if title == "Model and runtime":
            yield "  --metal | --cuda | --cpu | --backend NAME"
            yield "      What to compute on. Default: Metal on macOS, CUDA where that was built."
    yield ""
    yield "  -h, --help"
    yield "      Print this."
