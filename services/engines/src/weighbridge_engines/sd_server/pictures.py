"""Pictures on their way in and out.

In: sd-server answers a source that it cannot read with a plain picture and 200, and decodes whatever it is sent into
memory that nobody planned for. So every picture is decoded, bounded and checked here, and it gets a PNG of the render's
own size. Out: its PNG passes through as it is, or is told in another format with the same generation data.
"""

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from weighbridge_proto.errors import RequestError, invalid_argument

MOST_BYTES = 24 * 2**20
"""Of one picture as it is sent; a whole request may have 32 MiB."""

MOST_PIXELS = 2**25
"""Of one picture as it is sent: 33.5 megapixels are 96 MiB when decoded, and are decoded one at a time."""

JPEG_QUALITY, WEBP_QUALITY = 95, 92
"""Above what the formats' libraries take by default (75, 80): a render is often edited further."""

MOST_COMMENT_BYTES = 60_000
"""Of generation data in Exif. A JPEG has 65,533 bytes for all of its Exif."""

_FORMATS = ("PNG", "JPEG", "WEBP")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PARAMETERS = b"parameters\x00"
"""Keyword of the text chunk into which image generators, sd-server among them, write what a picture was made with."""
_TELLING_CHUNKS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME"})
_PROGRAM_DATA = ", SDCPP: "
"""sd-server ends its generation data with the same once more as JSON, for programs."""

Mode = Literal["RGB", "L"]


class OutputFormat(Enum):
    """File format of a rendered picture, with its media type."""

    PNG = "image/png"
    JPEG = "image/jpeg"
    WEBP = "image/webp"


@dataclass(frozen=True)
class EngineImage:
    """A PNG file of the engine's.

    Attributes:
        png: the file.
        width: in pixels.
        height: in pixels.
    """

    png: bytes
    width: int
    height: int


def read(data: bytes, field: str, mode: Mode = "RGB") -> Image.Image:
    """A picture that somebody sent: upright, opaque, eight bits deep, and nothing beside its pixels.

    Transparent places are white in a picture, and black ("L") in a mask.

    Args:
        data: a PNG, JPEG or WebP file.
        field: which field it was sent in, for the refusal.
        mode: RGB, or L for a mask.

    Raises:
        RequestError: INVALID_ARGUMENT INVALID_IMAGE with the field.
    """
    if not data:
        raise _invalid(field, "has no data")
    if len(data) > MOST_BYTES:
        raise _invalid(field, f"is larger than {MOST_BYTES >> 20} MiB, the most that is taken")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _refuse_unfit(opened, field)
            opened.load()
            return _plain(opened, mode)
    except RequestError:
        raise
    except UnidentifiedImageError as error:
        raise _invalid(field, "is no PNG, JPEG or WebP picture") from error
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(field, "far too many") from error
    except Exception as error:
        # Decoders of broken files raise whatever they stumble over: OSError, SyntaxError, ValueError, struct.error, ...
        raise _invalid(field, "is broken or cut off: it cannot be decoded") from error


def for_engine(picture: Image.Image, width: int, height: int) -> bytes:
    """A PNG of the render's size: cut around the middle to its aspect, then resized. Of that size already: as it is."""
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    made = io.BytesIO()
    # Little compression: it goes over loopback, once.
    picture.save(made, "PNG", compress_level=1)
    return made.getvalue()


def of_engine(png: bytes) -> EngineImage:
    """What the engine made.

    Raises:
        ValueError: it is no PNG.
    """
    header = next(_chunks(png), None)
    if header is None or header[0] != b"IHDR" or len(header[1]) != 13:
        raise ValueError("no PNG")
    width, height = (int.from_bytes(header[1][start : start + 4]) for start in (0, 4))
    return EngineImage(png, width, height)


def encoded(image: EngineImage, output: OutputFormat, strip: bool) -> bytes:
    """The picture as it was asked for. A PNG keeps the engine's own bytes; stripped, all but the text in it.

    Generation data goes where image generators and viewers look for it: the text chunk `parameters` of a PNG, the Exif
    field UserComment of the others.

    Raises:
        ValueError, OSError: the engine's file is broken.
    """
    if output is OutputFormat.PNG:
        return _without_text(image.png) if strip else image.png
    with Image.open(io.BytesIO(image.png), formats=("PNG",)) as opened:
        picture = opened.convert("RGB")
    picture.info.clear()
    exif = Image.Exif()
    text = "" if strip else generation_data(image.png)
    if text:
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = _user_comment(text)
    made = io.BytesIO()
    if output is OutputFormat.JPEG:
        picture.save(made, "JPEG", quality=JPEG_QUALITY, subsampling=0, exif=exif)
    else:
        picture.save(made, "WEBP", quality=WEBP_QUALITY, exif=exif)
    return made.getvalue()


def generation_data(png: bytes) -> str:
    """What the engine wrote into its PNG: prompt, steps, seed and the like; empty: nothing."""
    for kind, data in _chunks(png):
        if kind == b"tEXt" and data.startswith(_PARAMETERS):
            # The format has Latin-1 here, sd-server and its like write UTF-8.
            return data.removeprefix(_PARAMETERS).decode(errors="replace")
    return ""


def _refuse_unfit(opened: Image.Image, field: str) -> None:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise _too_many_pixels(field, f"{width} x {height}")
    # Phones put a second view or a depth map behind a JPEG ("MPO"): that is no animation, and the first one counts.
    if opened.format != "MPO" and getattr(opened, "is_animated", False):
        raise _invalid(field, "is an animation; send one picture of it")


def _plain(opened: Image.Image, mode: Mode) -> Image.Image:
    picture = _upright(opened)
    if picture.mode.startswith("I"):
        # 16 bits of grey: converting alone would cut off at 255.
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if picture.has_transparency_data:
        ground = Image.new("RGBA", picture.size, "white" if mode == "RGB" else "black")
        picture = Image.alpha_composite(ground, picture.convert("RGBA"))
    picture = picture.convert(mode)
    picture.info.clear()
    return picture


def _upright(picture: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:
        return picture  # Exif that cannot be read does not spoil the pixels


def _user_comment(text: str) -> bytes:
    def bytes_of(text: str) -> bytes:
        return b"UNICODE\x00" + text.encode("utf-16-be")

    comment = bytes_of(text)
    if len(comment) > MOST_COMMENT_BYTES:
        comment = bytes_of(text.partition(_PROGRAM_DATA)[0])
    return comment[: MOST_COMMENT_BYTES // 2 * 2]


def _without_text(png: bytes) -> bytes:
    kept = [_PNG_SIGNATURE]
    for kind, data in _chunks(png):
        if kind not in _TELLING_CHUNKS:
            kept += [len(data).to_bytes(4), kind, data, zlib.crc32(kind + data).to_bytes(4)]
    return b"".join(kept)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and data of each chunk.

    Raises:
        ValueError: it is no PNG, or cut off.
    """
    if not png.startswith(_PNG_SIGNATURE):
        raise ValueError("no PNG")
    at = len(_PNG_SIGNATURE)
    while at < len(png):
        length, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        data = png[at + 8 : at + 8 + length]
        if len(data) != length:
            raise ValueError("cut off")
        yield kind, data
        at += 12 + length


def _too_many_pixels(field: str, which: str) -> RequestError:
    return _invalid(field, f"has {which} pixels; at most {MOST_PIXELS / 1e6:.1f} megapixels are taken")


def _invalid(field: str, why: str) -> RequestError:
    return invalid_argument(field, why, "INVALID_IMAGE")
