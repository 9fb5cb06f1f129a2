"""The flags of sd-server, read from its own help (help.txt, as stable-diffusion-cpp-python 0.4.7 prints it)."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.engines.standins.sd import log

HELP = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
VERSION = HELP.partition("\n")[0]

_OPTION = re.compile(r"(?m)^  (?:(-\w), )?(--[\w-]+)(?: <(\w+)>)? {2,}")

# These take a value too, though the help does not say so.
_WITH_VALUE = frozenset(
    {"--type", "--rng", "--sampler-rng", "--prediction", "--lora-apply-mode", "--seed", "--sampling-method",
     "--high-noise-sampling-method", "--scheduler", "--sigmas", "--skip-layers", "--high-noise-skip-layers",
     "--ref-image", "--cache-mode", "--cache-option", "--scm-mask", "--scm-policy", "--vae-tile-size",
     "--vae-relative-tile-size"}
)  # fmt: skip
_TYPES = frozenset(
    {"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"}
)

# Order in which parts are loaded, and what they are called then.
PARTS = {
    "--model": "model",
    "--diffusion-model": "diffusion model",
    "--high-noise-diffusion-model": "high noise diffusion model",
    "--clip_l": "clip_l",
    "--clip_g": "clip_g",
    "--clip_vision": "clip_vision",
    "--t5xxl": "t5xxl",
    "--llm": "llm",
    "--llm_vision": "llm vision",
    "--vae": "vae",
    "--taesd": "tae",
}
_ALIASES = {"--tae": "--taesd", "--qwen2vl": "--llm", "--qwen2vl_vision": "--llm_vision"}


@dataclass(frozen=True)
class CommandLine:
    """What it was started with: long flag to value, "" for flags without one."""

    given: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        return self.given.get("--listen-ip", "127.0.0.1"), int(self.given.get("--listen-port", "1234"))

    @property
    def lora_folder(self) -> Path:
        return Path(self.given.get("--lora-model-dir", "."))

    @property
    def parts(self) -> list[tuple[str, Path]]:
        """What is loaded: what it is called, and its file."""
        return [(name, Path(self.given[flag])) for flag, name in PARTS.items() if flag in self.given]

    @property
    def model_path(self) -> Path:
        return Path(self.given.get("--model") or self.given["--diffusion-model"])

    def number(self, flag: str, default: float) -> float:
        return float(self.given.get(flag, default))


def parse(arguments: Sequence[str], program: str) -> CommandLine:
    """Ends the process as sd-server does: with 0 after --version and --help, with 1 for what it does not take."""
    if arguments[:1] == ["--version"]:
        sys.stdout.write(VERSION + "\n")
        sys.exit(0)
    kinds: dict[str, tuple[str, str]] = {}
    for short, long, hint in _OPTION.findall(HELP):
        kind = hint or ("manual" if long in _WITH_VALUE else "")
        kinds[long] = kinds[short or long] = (_ALIASES.get(long, long), kind)

    def leave(code: int, *errors: str) -> None:
        for text in errors:
            log.error("common.cpp:286", text)
        log.raw(HELP.replace("{program}", program))
        sys.exit(code)

    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        if word not in kinds:
            leave(1, f"error: unknown argument: {word}")
        flag, kind = kinds[word]
        invalid = f"error: invalid parameter for argument: {word}"
        if flag == "--help":
            leave(0, invalid)
        value = next(words, None) if kind else ""
        if value is None:
            leave(1, invalid)
        elif flag == "--type" and value not in _TYPES:
            leave(1, f"error: invalid weight format {value}", invalid)
        else:
            given[flag] = value
    found = CommandLine(given)
    if not {"--model", "--diffusion-model"} & given.keys():
        leave(1, "error: the following arguments are required: model_path/diffusion_model")
    if not 0 <= found.address[1] <= 65535:
        leave(1, "error: listen_port should be in the range [0, 65535]")
    return found
