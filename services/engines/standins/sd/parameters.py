"""From the body of a request to what is rendered, with every liberty that sd-server takes.

Its three ways in differ: sdapi and OpenAI refuse a field of the wrong type with 500, the job API lets it fall to its
default; all of them clamp steps and images, and take an unknown sampler for the default one.
"""

import base64
import binascii
import io
import json
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image, UnidentifiedImageError

from services.engines.standins.sd import log
from services.engines.standins.sd.command_line import CommandLine

SAMPLERS = ("euler", "euler_a", "heun", "dpm2", "dpm++2s_a", "dpm++2m", "dpm++2mv2", "ipndm", "ipndm_v", "lcm",
            "ddim_trailing", "tcd", "res_multistep", "res_2s", "er_sde")  # fmt: skip
SCHEDULERS = ("discrete", "karras", "exponential", "ays", "gits", "sgm_uniform", "simple", "smoothstep", "kl_optimal",
              "lcm", "bong_tangent")  # fmt: skip
OUTPUT_FORMATS = ("png", "jpeg")
"""WebP, for source images too, only in builds with SD_WEBP=ON."""

_EXTRA_ARGUMENTS = re.compile(r"<sd_cpp_extra_args>(.*?)</sd_cpp_extra_args>")  # not over a line's end
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")
_KIND_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


class RefusedError(Exception):
    """Answered with 400 and this message."""


class ServerError(Exception):
    """Answered with 500, server_error and this message."""


@dataclass(frozen=True)
class Parameters:
    """What is rendered."""

    prompt: str = ""
    negative_prompt: str = ""
    width: int = -1
    height: int = -1
    batch: int = 1
    steps: int = 20
    guidance: float = 7.0
    seed: int = 42
    sampler: str = ""
    scheduler: str = ""
    strength: float = 0.75
    source: Image.Image | None = None
    references: tuple[Image.Image, ...] = ()
    tiling: bool = False
    output_format: str = "png"
    embed: bool = True
    tile_size: tuple[int, int] = field(default=(32, 32))

    @property
    def size(self) -> tuple[int, int]:
        """As asked for; 512 where it is not."""
        return self.width if self.width > 0 else 512, self.height if self.height > 0 else 512


def defaults(command_line: CommandLine) -> Parameters:
    """What a request is rendered with where it says nothing."""
    given = command_line.given
    across, _, down = given.get("--vae-tile-size", "32x32").partition("x")
    return Parameters(
        width=int(given.get("--width", -1)),
        height=int(given.get("--height", -1)),
        steps=int(given.get("--steps", 20)),
        guidance=command_line.number("--cfg-scale", 7.0),
        seed=int(given.get("--seed", 42)),
        strength=command_line.number("--strength", 0.75),
        tiling="--vae-tiling" in given,
        tile_size=(int(across), int(down or across)),
        embed="--disable-image-metadata" not in given,
    )


def from_sdapi(body: bytes, base: Parameters, *, from_image: bool, loras: frozenset[str]) -> tuple[Parameters, Any]:
    """For /sdapi/v1/txt2img and img2img; with the request itself, which the answer repeats."""
    if not body:
        raise RefusedError("empty body")
    sent = _object(_json(body))
    width, height = _number(sent, "width", 512), _number(sent, "height", 512)
    asked = replace(
        base,
        prompt=_text(sent, "prompt", ""),
        negative_prompt=_text(sent, "negative_prompt", ""),
        steps=int(_number(sent, "steps", base.steps)),
        guidance=_number(sent, "cfg_scale", base.guidance),
        seed=int(_number(sent, "seed", -1)),
        batch=int(_number(sent, "batch_size", 1)),
        width=int(width) if "width" in sent else -1,
        height=int(height) if "height" in sent else -1,
        sampler=_known(_text(sent, "sampler_name", "").lower(), SAMPLERS),
        scheduler=_known(_text(sent, "scheduler", ""), SCHEDULERS),
    )
    if int(width) <= 0 or int(height) <= 0:
        raise RefusedError("width and height must be positive")
    if not asked.prompt:
        raise RefusedError("prompt required")
    asked = _obey_prompt(asked)
    for lora in sent.get("lora", []) if isinstance(sent.get("lora"), list) else []:
        if lora.get("path") not in loras:
            raise RefusedError(f"invalid lora path: {lora.get('path')}")
    if from_image:
        images = sent.get("init_images")
        asked = _with_source(asked, images[0] if isinstance(images, list) and images else "")
        strength = _number(sent, "denoising_strength", -1)
        if strength >= 0:
            asked = replace(asked, strength=min(strength, 1.0))
    extra = sent.get("extra_images")
    for image in extra if isinstance(extra, list) else []:
        decoded = _decoded(image, asked) if isinstance(image, str) else None
        if decoded is not None:
            asked = replace(asked, references=(*asked.references, decoded))
    return _resolved(asked), sent


def from_openai(body: bytes, base: Parameters) -> Parameters:
    """For /v1/images/generations. The seed is the server's default, so every picture of a prompt is the same."""
    if not body:
        raise RefusedError("empty body")
    sent = _object(_json(body))
    width, height = base.size
    size = re.match(r"\s*(-?\d+)[^x]*x\s*(-?\d+)", _text(sent, "size", ""))
    if size:
        width, height = int(size[1]), int(size[2])
    if not _text(sent, "prompt", ""):
        raise RefusedError("prompt required")
    asked = replace(
        base,
        prompt=_text(sent, "prompt", ""),
        width=width,
        height=height,
        batch=max(1, int(_number(sent, "n", 1))),
        output_format=_output_format(_text(sent, "output_format", "png")),
    )
    return _resolved(_obey_prompt(asked))


def from_job(body: bytes, base: Parameters) -> Parameters:
    """For /sdcpp/v1/img_gen, which needs no prompt."""
    try:
        sent = json.loads(body)
    except ValueError as error:
        raise RefusedError("invalid json") from error
    asked = _take(base, _object(sent))
    asked = replace(asked, output_format=_output_format(_text(sent, "output_format", "png")))
    if "init_image" in sent:
        asked = _with_source(asked, sent["init_image"])
        if asked.source is None:
            raise RefusedError("invalid generation parameters")
    return _resolved(asked)


def _take(base: Parameters, sent: dict[str, Any]) -> Parameters:
    """Fields of the right type; others are as if they were not there."""
    whole = {"width": "width", "height": "height", "batch": "batch_count", "seed": "seed"}
    taken: dict[str, Any] = {ours: sent[key] for ours, key in whole.items() if type(sent.get(key)) is int}
    taken |= {key: sent[key] for key in ("prompt", "negative_prompt") if isinstance(sent.get(key), str)}
    if type(sent.get("strength")) in (int, float):
        taken["strength"] = float(sent["strength"])
    sampling = sent.get("sample_params")
    if isinstance(sampling, dict):
        if type(sampling.get("sample_steps")) is int:
            taken["steps"] = sampling["sample_steps"]
        guidance = sampling.get("guidance")
        if isinstance(guidance, dict) and type(guidance.get("txt_cfg")) in (int, float):
            taken["guidance"] = float(guidance["txt_cfg"])
    return replace(base, **taken)


def _obey_prompt(asked: Parameters) -> Parameters:
    """A prompt may hold parameters, and they outrank the request's."""
    found = _EXTRA_ARGUMENTS.search(asked.prompt)
    if not found or not found[1]:
        return asked
    asked = replace(asked, prompt=_EXTRA_ARGUMENTS.sub("", asked.prompt))
    try:
        extra = json.loads(found[1])
    except ValueError as error:
        log.error("common.cpp:1524", f"json parse failed {found[1]}")
        raise RefusedError("invalid sd_cpp_extra_args") from error
    return _take(asked, extra) if isinstance(extra, dict) else asked


def _resolved(asked: Parameters) -> Parameters:
    if not 0 <= asked.strength <= 1:
        log.error("common.cpp:1980", "error: can only work with strength in [0.0, 1.0]\n")
        raise RefusedError("invalid params")
    if asked.guidance < 0:
        log.error("common.cpp:1985", "error: cfg_scale must be positive")
        raise RefusedError("invalid params")
    seed = asked.seed if asked.seed >= 0 else secrets.randbelow(2**31)
    return replace(asked, steps=min(max(asked.steps, 1), 100), batch=min(max(asked.batch, 1), 8), seed=seed)


def _with_source(asked: Parameters, encoded: object) -> Parameters:
    source = _decoded(encoded, asked) if isinstance(encoded, str) else None
    if source is None:
        return asked
    if asked.width <= 0 or asked.height <= 0:
        log.info("common.cpp:1830", f"set width x height to {source.width} x {source.height}")
        asked = replace(asked, width=source.width, height=source.height)
    return replace(asked, source=source)


def _decoded(encoded: str, asked: Parameters) -> Image.Image | None:
    """An image in the size that is asked for; None, and a line on standard error, where it cannot be decoded."""
    encoded = encoded.partition(",")[2] or encoded  # a data URL
    sound = _BASE64.match(encoded)
    assert sound is not None
    try:
        data = base64.b64decode(sound[0][: len(sound[0]) // 4 * 4] + _padded(sound[0]))
    except binascii.Error:
        return None
    if not data:
        return None
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.format == "WEBP":
                raise UnidentifiedImageError
            opened.load()
            channels = len(opened.getbands()) if opened.mode != "P" else 3
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError):
        log.error("media_io.cpp:538", "load image from 'memory' failed")
        return None
    if channels < 3:
        log.unended(
            f"the number of channels for the input image must be >= 3,but got {channels} channels, image_path = memory"
        )
        return None
    if asked.width > 0 and asked.height > 0 and image.size != (asked.width, asked.height):
        log.info(
            "media_io.cpp:592", f"resize input image from {image.width}x{image.height} to {asked.width}x{asked.height}"
        )
        image = image.resize((asked.width, asked.height), Image.Resampling.BOX)
    return image


def _padded(text: str) -> str:
    rest = text[len(text) // 4 * 4 :]
    return rest + "=" * (4 - len(rest)) if len(rest) > 1 else ""


def _output_format(name: str) -> str:
    if name.lower() not in OUTPUT_FORMATS:
        raise RefusedError(f"invalid output_format, must be one of [{', '.join(OUTPUT_FORMATS)}]")
    return name.lower()


def _known(name: str, names: tuple[str, ...]) -> str:
    return name if name in names else ""


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ServerError(f"[json.exception.parse_error.101] parse error: {error}") from error


def _object(sent: Any) -> dict[str, Any]:
    if not isinstance(sent, dict):
        raise ServerError(f"[json.exception.type_error.306] cannot use value() with {_kind_name(sent)}")
    return sent


def _text(sent: dict[str, Any], key: str, default: str) -> str:
    value = sent.get(key, default)
    if not isinstance(value, str):
        raise ServerError(f"[json.exception.type_error.302] type must be string, but is {_kind_name(value)}")
    return value


def _number(sent: dict[str, Any], key: str, default: float) -> float:
    value = sent.get(key, default)
    if not isinstance(value, int | float):
        raise ServerError(f"[json.exception.type_error.302] type must be number, but is {_kind_name(value)}")
    return float(value)  # 1 and 1.0 are the same request


def _kind_name(value: Any) -> str:
    return "null" if value is None else _KIND_NAMES[type(value)]
