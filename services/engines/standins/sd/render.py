"""Renders: the phases and lines of a real one, in the time that the behaviour says, to a picture that depends on all
that it was asked with."""

import hashlib
import io
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

from PIL import Image, PngImagePlugin

from services.engines.standins.sd import log
from services.engines.standins.sd.behaviour import Behaviour
from services.engines.standins.sd.command_line import CommandLine
from services.engines.standins.sd.model import Model
from services.engines.standins.sd.parameters import SAMPLERS, Parameters, ServerError

_BLOCK = 8
"""Pixels of one colour, on each side: the real decoders upscale by as much."""

_NEVER_ALLOCATED = 2**28
"""Pixels that no machine of tests has room for."""


class Renderer:
    """One render at a time; whoever waits has no place in a queue."""

    def __init__(self, command_line: CommandLine, model: Model, behaviour: Behaviour) -> None:
        self._command_line = command_line
        self._model = model
        self._behaviour = behaviour
        self._lock = threading.Lock()

    def render(self, asked: Parameters) -> list[bytes]:
        """Encoded pictures; none where the render failed. Goes on to the end, whoever has gone meanwhile.

        Raises:
            ServerError: memory could not even be asked for.
        """
        with self._lock:
            started = time.monotonic()
            pictures = list(self._pictures(asked))
            if pictures:
                log.info("stable-diffusion.cpp:3591", f"generate_image completed in {time.monotonic() - started:.2f}s")
            return pictures

    def _pictures(self, asked: Parameters) -> Iterator[bytes]:
        width, height = self._aligned(*asked.size)
        log.info("stable-diffusion.cpp:3367", f"generate_image {width}x{height}")
        log.info("denoiser.hpp:499", "get_sigmas with discrete scheduler")
        log.info("stable-diffusion.cpp:2814", "sampling using Euler method")
        if width * height > _NEVER_ALLOCATED:
            raise ServerError("std::bad_alloc")
        steps = self._encode(asked, width, height)
        if self._behaviour.encode_s:
            time.sleep(self._behaviour.encode_s)
        log.info(
            "stable-diffusion.cpp:3168", f"get_learned_condition completed, taking {self._behaviour.encode_s:.2f}s"
        )
        for image in range(1, asked.batch + 1):
            log.info(
                "stable-diffusion.cpp:3401", f"generating image: {image}/{asked.batch} - seed {asked.seed + image - 1}"
            )
            if not self._model.has_text_encoder:
                os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(60)
            if self._fails(width, height, image, asked.batch):
                return
            self._count(steps, self._behaviour.step_s)
            log.info("stable-diffusion.cpp:3432", f"sampling completed, taking {steps * self._behaviour.step_s:.2f}s")
        log.info("stable-diffusion.cpp:3450", f"generating {asked.batch} latent images completed, taking 0.00s")
        log.info("stable-diffusion.cpp:3192", f"decoding {asked.batch} latents")
        for image in range(1, asked.batch + 1):
            self._decode(asked, width, height)
            log.info("stable-diffusion.cpp:3208", f"latent {image} decoded, taking {self._behaviour.decode_s:.2f}s")
            yield self._picture(asked, width, height, asked.seed + image - 1)
        log.info("stable-diffusion.cpp:3212", "decode_first_stage completed, taking 0.00s")

    def _aligned(self, width: int, height: int) -> tuple[int, int]:
        multiple = self._model.multiple
        up = math.ceil(width / multiple) * multiple, math.ceil(height / multiple) * multiple
        if up != (width, height):
            log.warn(
                "stable-diffusion.cpp:2623",
                f"align generation request up {width}x{height} to {up[0]}x{up[1]} (multiple={multiple})",
            )
        return up

    def _encode(self, asked: Parameters, width: int, height: int) -> int:
        """Encodes what it starts from or refers to; how many steps are left to sample."""
        steps = asked.steps
        if asked.source is not None:
            log.info("stable-diffusion.cpp:2932", "IMG2IMG")
            steps -= _first_level(asked)
            if asked.strength < 1:
                log.info("stable-diffusion.cpp:2939", f"target t_enc is {steps - 1} steps")
            self._decode(asked, width, height)
        if asked.references:
            log.info("stable-diffusion.cpp:3007", "EDIT mode")
        if asked.source is not None or asked.references:
            log.info("stable-diffusion.cpp:3106", "encode_first_stage completed, taking 0.00s")
        return steps

    def _decode(self, asked: Parameters, width: int, height: int) -> None:
        across, down = (
            max(1, 2 * math.ceil(side / self._model.multiple / cells) - 1)  # tiles overlap by half
            for side, cells in zip((width, height), asked.tile_size, strict=True)
        )
        if asked.tiling:
            self._count(across * down, self._behaviour.decode_s / (across * down))
        else:
            time.sleep(self._behaviour.decode_s)

    def _count(self, parts: int, seconds: float) -> None:
        for part in range(1, parts + 1):
            time.sleep(seconds)
            log.bar(part, parts, log.pace(seconds))
            fault = self._behaviour.render_fault
            if fault.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[fault])
                time.sleep(60)

    def _fails(self, width: int, height: int, image: int, batch: int) -> bool:
        fault = self._behaviour.render_fault
        too_large = 0 < self._behaviour.largest_pixels < width * height
        if fault == "out_of_memory" or too_large:
            size = 4 * (width * height // 256 + 512) ** 2  # attention over all tokens, klein without flash attention
            log.error(
                "ggml_extend.hpp:69", f"ggml_gallocr_reserve_n_impl: failed to allocate CPU buffer of size {size}"
            )
            log.error("ggml_extend.hpp:1914", "flux: failed to allocate the compute buffer")
        elif fault != "no_results":
            return False
        log.error("stable-diffusion.cpp:1786", "Diffusion model sampling failed")
        log.error("stable-diffusion.cpp:3437", f"sampling for image {image}/{batch} failed after 0.00s")
        return True

    def _picture(self, asked: Parameters, width: int, height: int, seed: int) -> bytes:
        source = asked.source.tobytes() if asked.source is not None else b""
        if self._model.starts_from_noise and _first_level(asked) == 0:
            source = b""
        references = b"".join(image.tobytes() for image in asked.references)
        told = json.dumps(
            [asked.prompt, asked.negative_prompt, width, height, asked.steps, asked.guidance, seed, asked.sampler,
             asked.scheduler, _first_level(asked) if source else 0]
        )  # fmt: skip
        # Not for secrets: the same request gives the same picture.
        pixels = random.Random(hashlib.sha256(told.encode() + source + references).digest())  # noqa: S311
        across, down = math.ceil(width / _BLOCK), math.ceil(height / _BLOCK)
        blocks = Image.frombytes("RGB", (across, down), pixels.randbytes(across * down * 3))
        picture = blocks.resize((across * _BLOCK, down * _BLOCK), Image.Resampling.NEAREST).crop((0, 0, width, height))
        out = io.BytesIO()
        if asked.output_format == "jpeg":
            picture.save(out, "JPEG", quality=95)
            return out.getvalue()
        text = PngImagePlugin.PngInfo()
        if asked.embed:
            # As UTF-8, whatever the format says of tEXt, and as far as the first NUL.
            text.add(b"tEXt", b"parameters\0" + self._said(asked, seed).encode().partition(b"\0")[0])
        picture.save(out, "PNG", pnginfo=text)
        return out.getvalue()

    def _said(self, asked: Parameters, seed: int) -> str:
        """The generation data that it embeds, the prompt among them."""
        width, height = asked.size
        sampler = asked.sampler if asked.sampler in SAMPLERS else "NONE"
        more = {
            "schema": "sdcpp.image.params/v1",
            "seed": seed,
            "width": width,
            "height": height,
            "prompt": {"positive": asked.prompt, "negative": asked.negative_prompt},
            "sampling": {"steps": asked.steps, "guidance": {"txt_cfg": asked.guidance}},
        }
        negative = f"Negative prompt: {asked.negative_prompt}\n" if asked.negative_prompt else ""
        return (
            f"{asked.prompt}\n{negative}Steps: {asked.steps}, CFG scale: {asked.guidance:.6f}, Guidance: 3.500000, "
            f"Seed: {seed}, Size: {width}x{height}, Model: {self._command_line.model_path.name}, RNG: cuda, "
            f"Sampler: {sampler}, Version: stable-diffusion.cpp, SDCPP: {json.dumps(more, sort_keys=True)}"
        )


def _first_level(asked: Parameters) -> int:
    """At which of its noise levels a render from a source begins; 0 is noise alone, or as good as that."""
    if asked.strength >= 1:
        return 0
    return asked.steps - 1 - min(int(asked.steps * asked.strength), asked.steps - 1)
