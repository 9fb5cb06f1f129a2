"""Loads a model as sd-server does, by what it prints and how it fails, without reading any weights."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.engines.standins.sd import log
from services.engines.standins.sd.behaviour import Behaviour
from services.engines.standins.sd.command_line import CommandLine
from services.engines.standins.sd.model_files import AbortError, FileFaultError, Tensors, look_into

_MIB = 2**20

# By what a model is recognised: part of a tensor's name, what it is called, and what sizes are rounded up to (pixels).
_KINDS = (
    ("double_stream_modulation_img.lin.weight", "Flux.2 klein", 16),
    ("double_blocks.", "Flux", 8),
    ("joint_blocks.", "SD3.x", 8),
    ("transformer_blocks.0.img_mod.1.weight", "Qwen Image", 8),
    ("cap_embedder.0.weight", "Z-Image", 8),
    ("input_blocks.", "SD 1.x", 64),
)
_NEEDED = {
    "Flux.2 klein": (
        ("llm", "text_encoders.llm.model.embed_tokens.weight", ("token_embd.weight", "embed_tokens.weight")),
        ("vae", "first_stage_model.decoder.conv_in.weight", ("decoder.conv_in.weight",)),
        ("tae", "tae.decoder.layers.0.weight", ("decoder.layers.0.weight",)),
    ),
}
"""Part, the engine's name of one of its tensors, and what that ends with in files. Of vae and tae one is enough."""

_TAE_SHAPES = {"Flux.2 klein": {"decoder.layers.0.weight": (64, 32, 3, 3)}}
_TEXT_ENCODERS = ("clip_l", "clip_g", "t5xxl", "llm")


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        path: its main file.
        multiple: what sizes are rounded up to, in pixels.
        has_text_encoder: without one, the first render of a Flux crashes.
        starts_from_noise: whether what a render starts from is noise alone if it begins at the first noise level, as in
            models that were trained on flows. Of a source nothing is left then.
    """

    path: Path
    multiple: int
    has_text_encoder: bool
    starts_from_noise: bool


def load(command_line: CommandLine, behaviour: Behaviour) -> Model:
    """Ends the process, as sd-server does, where the model cannot be loaded."""
    found: dict[str, Tensors] = {}
    for part, path in command_line.parts:
        log.info("stable-diffusion.cpp:219", f"loading {part} from '{path}'")
        tensors = _read(part, path)
        if tensors is not None:
            found[part] = tensors
    names = [name for tensors in found.values() for name in tensors.shapes]
    recognised = [row for row in _KINDS if any(row[0] in name for name in names)]
    if not recognised:
        _fail(
            ("stable-diffusion.cpp:299", f"get sd version from file failed: '{command_line.given.get('--model', '')}'")
        )
    _, kind, multiple = recognised[0]
    log.info("stable-diffusion.cpp:305", f"Version: {kind} ")
    has_text_encoder = any(part in found for part in (*_TEXT_ENCODERS, "model"))
    if kind == "Flux" and not has_text_encoder:
        log.warn("conditioner.hpp:1093", "IMPORTANT NOTICE: No text encoders provided, cannot process prompts!")
    uses_tae = any(part == "tae" for part, _ in command_line.parts)
    log.info("stable-diffusion.cpp:634", f"using {'TAE' if uses_tae else 'VAE'} for encoding / decoding")
    _fault(behaviour)
    _count_tensors(len(names), behaviour.load_s)
    _check(command_line, found, kind, "tae" if uses_tae else "vae")
    _tell_memory(found)
    log.info("stable-diffusion.cpp:952", "running in Flux2 FLOW mode")
    return Model(command_line.model_path, multiple, has_text_encoder, kind != "SD 1.x")


def abort(last_words: str) -> None:
    """End by SIGABRT."""
    log.unended(last_words + "\n")
    os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(60)


def _read(part: str, path: Path) -> Tensors | None:
    try:
        tensors = look_into(path)
    except FileFaultError as fault:
        if fault.warning:
            log.warn("model.cpp:231", fault.warning)
        else:
            log.info("model.cpp:219", f"load {path} using safetensors format")
        for text in fault.errors:
            log.error("model.cpp:299", text)
        if part == "model":
            log.error("stable-diffusion.cpp:214", f"init model loader from file failed: '{path}'")
        else:
            log.warn("stable-diffusion.cpp:221", f"loading {part} from '{path}' failed")
        return None
    except AbortError as last:
        for text in last.errors:
            log.error("ggml_extend.hpp:69", text)
        abort(str(last))
        return None
    log.info("model.cpp:216", f"load {path} using {tensors.format} format")
    for text in tensors.errors:
        log.error("ggml_extend.hpp:69", text)
    return tensors


def _fault(behaviour: Behaviour) -> None:
    fault = behaviour.load_fault
    if fault == "out_of_memory":
        abort("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc")
    elif fault == "silence":
        os._exit(1)
    elif fault == "hang":
        while True:
            time.sleep(3600)
    elif fault:
        os.kill(os.getpid(), signal.Signals[fault])
        time.sleep(60)


def _count_tensors(count: int, seconds: float) -> None:
    pauses = 4
    for quarter in range(1, pauses + 1):
        time.sleep(seconds / pauses)
        log.bar(max(1, count * quarter // pauses), count, f"{27.57 * quarter:.2f}MB/s")
    log.info("model.cpp:993", f"loading tensors completed, taking {seconds:.2f}s (process: 0.00s, read: 0.00s)")


def _check(command_line: CommandLine, found: dict[str, Tensors], kind: str, autoencoder: str) -> None:
    for part, path in command_line.parts:
        if part in found and found[part].is_cut_off:
            _fail(
                ("model.cpp:876", f"read tensor data failed: '{path}'"),
                ("model.cpp:1051", "load tensors from file failed"),
                ("stable-diffusion.cpp:801", "load tensors from model loader failed"),
            )
    for name, shape in _TAE_SHAPES.get(kind, {}).items():
        got = found["tae"].shapes.get(name, shape) if "tae" in found else shape
        if got != shape:
            _fail(
                ("model.cpp:1035", f"tensor 'tae.{name}' has wrong shape in model file: "
                                   f"got {list(reversed(got))}, expected {list(reversed(shape))}"),
                ("model.cpp:1051", "load tensors from file failed"),
                ("stable-diffusion.cpp:801", "load tensors from model loader failed"),
            )  # fmt: skip
    names = [name for tensors in found.values() for name in tensors.shapes]
    for part, needed, endings in _NEEDED.get(kind, ()):
        if part in ("vae", "tae") and part != autoencoder:
            continue
        if not any(name.endswith(endings) for name in names):
            _fail(
                ("model.cpp:1067", f"tensor '{needed}' not in model file"),
                ("stable-diffusion.cpp:801", "load tensors from model loader failed"),
            )


def _tell_memory(found: dict[str, Tensors]) -> None:
    def mib(belongs: Callable[[str], bool]) -> float:
        return sum(tensors.size_bytes for part, tensors in found.items() if belongs(part)) / _MIB

    text = mib(lambda part: part in _TEXT_ENCODERS)
    autoencoder = mib(lambda part: part in ("vae", "tae"))
    rest = mib(lambda part: part not in (*_TEXT_ENCODERS, "vae", "tae"))
    total = text + rest + autoencoder
    log.info(
        "stable-diffusion.cpp:858",
        f"total params memory size = {total:.2f}MB (VRAM 0.00MB, RAM {total:.2f}MB): text_encoders {text:.2f}MB(RAM), "
        f"diffusion_model {rest:.2f}MB(RAM), vae {autoencoder:.2f}MB(RAM), controlnet 0.00MB(VRAM), pmid 0.00MB(RAM)",
    )


def _fail(*errors: tuple[str, str]) -> None:
    for where, text in errors:
        log.error(where, text)
    log.error("main.cpp:92", "new_sd_ctx_t failed")
    sys.exit(1)
