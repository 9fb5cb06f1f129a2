"""Pictures that people send are decoded, bounded, and told from what only looks like one; renders keep their data."""

import io
import random
import struct
import zlib

import grpc
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from weighbridge_engines.sd_server import pictures
from weighbridge_engines.sd_server.pictures import EngineImage, OutputFormat
from weighbridge_proto.errors import RequestError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
USER_COMMENT, EXIF_IFD, ORIENTATION = 0x9286, 0x8769, 0x0112


def file_of(picture, format="PNG", **options):
    made = io.BytesIO()
    picture.save(made, format, **options)
    return made.getvalue()


def halves(left=RED, right=BLUE, size=(32, 16)):
    """Left half of one colour, right half of another."""
    picture = Image.new("RGB", size, left)
    picture.paste(right, (size[0] // 2, 0, *size))
    return picture


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, body=b"", *extra):
    """A PNG whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(body)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def refusal(data, mode="RGB"):
    with pytest.raises(RequestError) as raised:
        pictures.read(data, "source_images[0].data", mode)
    failure = raised.value.failure
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_IMAGE")
    [(field, why)] = failure.field_violations
    assert field == "source_images[0].data"
    return why


def near(pixel, expected, tolerance=12):
    return all(abs(got - wanted) <= tolerance for got, wanted in zip(pixel, expected, strict=True))


# -- what comes in --


@pytest.mark.parametrize(
    "data",
    [
        file_of(halves()),
        file_of(halves(), "JPEG", quality=95, subsampling=0),
        file_of(halves(), "JPEG", quality=95, subsampling=0, progressive=True),
        file_of(halves(), "WEBP", lossless=True),
        file_of(halves().convert("P")),
        file_of(halves().convert("CMYK"), "JPEG", quality=95, subsampling=0),
    ],
    ids=["png", "jpeg", "progressive", "webp", "palette", "cmyk"],
)
def test_png_jpeg_and_webp_are_read_as_the_pixels_that_they_show(data):
    picture = pictures.read(data, "source_images[0].data")
    assert (picture.mode, picture.size) == ("RGB", (32, 16))
    assert near(picture.getpixel((4, 8)), RED)
    assert near(picture.getpixel((28, 8)), BLUE)


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "RGBA"])
def test_grey_and_other_modes_become_colour(mode):
    picture = pictures.read(file_of(Image.new("L", (8, 8), 255).convert(mode)), "source_images[0].data")
    assert (picture.mode, picture.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_sixteen_bits_of_grey_keep_their_shade():
    # Converted by the library alone, everything above 255 of 65,535 was white.
    picture = pictures.read(file_of(Image.new("I;16", (8, 8), 0x8000)), "source_images[0].data")
    assert picture.getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    ("orientation", "top_left"), [(1, RED), (2, BLUE), (3, BLUE), (4, RED), (5, RED), (6, RED), (7, BLUE), (8, BLUE)]
)
def test_a_photograph_is_turned_as_its_camera_was(orientation, top_left):
    """The stored picture is red on the left and blue on the right; the eight cases are those of the Exif standard."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = file_of(halves(), "JPEG", quality=95, subsampling=0, exif=exif)
    picture = pictures.read(data, "source_images[0].data")
    assert picture.size == ((32, 16) if orientation < 5 else (16, 32))
    assert near(picture.getpixel((1, 1)), top_left)
    assert not picture.getexif()


def test_exif_that_cannot_be_read_does_not_spoil_a_picture():
    data = file_of(halves(), "JPEG", exif=b"Exif\0\0" + bytes(20))
    assert pictures.read(data, "source_images[0].data").size == (32, 16)


def test_transparent_places_are_white_in_a_picture_and_black_in_a_mask():
    picture = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    picture.paste((255, 255, 255, 255), (4, 0, 8, 8))
    data = file_of(picture)
    assert pictures.read(data, "source_images[0].data").getpixel((0, 0)) == (255, 255, 255)
    mask = pictures.read(data, "mask.data", "L")
    assert (mask.mode, mask.getpixel((0, 0)), mask.getpixel((6, 0))) == ("L", 0, 255)


def test_a_second_view_behind_a_jpeg_is_no_animation():
    # Phones store a depth map or a second view so; the first picture is the photograph.
    data = file_of(halves(), "MPO", save_all=True, append_images=[halves(GREEN, GREEN)])
    assert near(pictures.read(data, "source_images[0].data").getpixel((4, 8)), RED)


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_animations_are_refused(format, options):
    data = file_of(halves(), format, save_all=True, append_images=[halves(GREEN, GREEN)], duration=50, **options)
    assert "animation" in refusal(data)


@pytest.mark.parametrize(
    "data",
    [
        b"hello, I am no picture",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        file_of(halves(), "GIF"),
        file_of(halves(), "BMP"),
        file_of(halves(), "TIFF"),
        file_of(halves(), "AVIF") if "AVIF" in Image.registered_extensions().values() else b"....ftypavif",
    ],
    ids=["text", "svg", "gif", "bmp", "tiff", "avif"],
)
def test_other_files_are_refused(data):
    assert refusal(data) == "is no PNG, JPEG or WebP picture"


def test_nothing_is_no_picture():
    assert refusal(b"") == "has no data"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_picture_that_is_cut_off_is_refused(format):
    noise = Image.frombytes("RGB", (64, 64), random.Random(1).randbytes(64 * 64 * 3))
    data = file_of(noise, format)
    for kept in (len(data) // 4, len(data) // 2, len(data) - 100):
        assert "decoded" in refusal(data[:kept]) or "no PNG" in refusal(data[:kept])


def test_a_header_that_promises_more_pixels_than_are_taken_is_refused_before_anything_is_decoded():
    # 65,535 x 65,535 pixels would be 12 GiB; the file has some hundred bytes.
    assert refusal(png(65_535, 65_535, bytes(100))) == "has far too many pixels; at most 33.6 megapixels are taken"
    assert refusal(png(8_000, 8_000, bytes(100))) == "has 8000 x 8000 pixels; at most 33.6 megapixels are taken"


def test_a_long_thin_picture_is_bounded_as_well():
    assert "megapixels" in refusal(png(2**25 + 1, 1))


def test_text_that_unpacks_to_much_is_refused():
    # 64 MiB of zeros in 64 KiB, of which a decoder would make a string.
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 << 20)))
    assert "decoded" in refusal(png(8, 8, bytes(8 * 25), bomb))


def test_more_bytes_than_one_picture_may_have_are_refused():
    assert "larger than 24 MiB" in refusal(file_of(halves()) + bytes(pictures.MOST_BYTES))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_broken_picture_is_read_or_refused_and_nothing_else(format):
    data = bytearray(file_of(halves(), format))
    chance = random.Random(format)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            picture = pictures.read(bytes(broken), "source_images[0].data")
        except RequestError as error:
            assert error.failure.reason == "INVALID_IMAGE"
        else:
            assert picture.mode == "RGB"


# -- for the engine --


def test_the_engine_gets_a_plain_png_of_the_renders_size():
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    source = pictures.read(file_of(halves(size=(400, 200)), "JPEG", exif=exif, comment=b"secret"), "f")
    made = pictures.for_engine(source, 64, 64)
    assert made.startswith(b"\x89PNG")
    assert b"secret" not in made
    sent = Image.open(io.BytesIO(made))
    assert (sent.mode, sent.size, sent.info) == ("RGB", (64, 64), {})


def test_a_source_of_another_aspect_is_cut_around_its_middle():
    stripes = Image.new("RGB", (300, 100), RED)
    stripes.paste(GREEN, (100, 0, 200, 100))
    stripes.paste(BLUE, (200, 0, 300, 100))
    sent = Image.open(io.BytesIO(pictures.for_engine(stripes, 64, 64)))
    assert sent.getpixel((4, 32)) == sent.getpixel((60, 32)) == GREEN


def test_a_source_of_the_renders_size_keeps_its_pixels():
    noise = Image.frombytes("RGB", (64, 64), random.Random(2).randbytes(64 * 64 * 3))
    sent = Image.open(io.BytesIO(pictures.for_engine(noise, 64, 64)))
    assert sent.tobytes() == noise.tobytes()


# -- what goes out --


PARAMETERS = "a “cat”, 猫\nNegative prompt: dog\nSteps: 4, CFG scale: 1.0, Seed: 7, Size: 32x16, Version: x"


def engine_png(parameters=PARAMETERS):
    """As sd-server writes it: a text chunk that holds UTF-8, though the format says Latin-1."""
    plain = file_of(halves())
    text = chunk(b"tEXt", b"parameters\0" + parameters.encode())
    return plain[:33] + text + plain[33:]


def made_by_engine(parameters=PARAMETERS):
    return pictures.of_engine(engine_png(parameters))


def test_the_engines_own_file_passes_through():
    image = made_by_engine()
    assert (image.width, image.height) == (32, 16)
    assert pictures.encoded(image, OutputFormat.PNG, strip=False) == engine_png()


def test_a_stripped_png_has_the_same_pixels_and_not_a_word():
    info = PngInfo()
    info.add_text("parameters", "a cat")
    info.add_itxt("Comment", "a cat", zip=True)
    exif = Image.Exif()
    exif[0x010E] = "a cat"
    image = pictures.of_engine(file_of(halves(), pnginfo=info, exif=exif))
    stripped = pictures.encoded(image, OutputFormat.PNG, strip=True)
    opened = Image.open(io.BytesIO(stripped))
    opened.load()
    assert opened.tobytes() == halves().tobytes()
    assert not opened.text
    assert not opened.getexif()
    assert stripped == file_of(halves())


@pytest.mark.parametrize("output", [OutputFormat.JPEG, OutputFormat.WEBP])
def test_other_formats_carry_the_generation_data_in_exif(output):
    """UserComment of the Exif standard: eight bytes that name the encoding, then UTF-16."""
    data = pictures.encoded(made_by_engine(), output, strip=False)
    opened = Image.open(io.BytesIO(data))
    assert opened.get_format_mimetype() == output.value
    comment = opened.getexif().get_ifd(EXIF_IFD)[USER_COMMENT]
    assert comment[:8] == b"UNICODE\0"
    assert comment[8:].decode("utf-16-be") == PARAMETERS
    assert near(opened.convert("RGB").getpixel((4, 8)), RED, 20)


@pytest.mark.parametrize("output", [OutputFormat.JPEG, OutputFormat.WEBP])
def test_other_formats_carry_nothing_when_stripped(output):
    data = pictures.encoded(made_by_engine(), output, strip=True)
    assert not Image.open(io.BytesIO(data)).getexif()
    assert b"cat" not in data
    assert "cat".encode("utf-16-be") not in data


def test_generation_data_too_long_for_a_jpeg_loses_its_program_part_first():
    people = "a cat\nSteps: 4, Seed: 7"
    long = made_by_engine(people + ', SDCPP: {"prompt":"' + "x" * 50_000 + '"}')
    opened = Image.open(io.BytesIO(pictures.encoded(long, OutputFormat.JPEG, strip=False)))
    assert opened.getexif().get_ifd(EXIF_IFD)[USER_COMMENT][8:].decode("utf-16-be") == people


def test_generation_data_too_long_even_so_is_cut():
    opened = Image.open(io.BytesIO(pictures.encoded(made_by_engine("y" * 60_000), OutputFormat.JPEG, strip=False)))
    comment = opened.getexif().get_ifd(EXIF_IFD)[USER_COMMENT]
    assert len(comment) <= 60_000
    assert set(comment[8:].decode("utf-16-be")) == {"y"}


def test_an_engine_without_generation_data_is_told_without():
    data = pictures.encoded(pictures.of_engine(file_of(halves())), OutputFormat.JPEG, strip=False)
    assert not Image.open(io.BytesIO(data)).getexif()


@pytest.mark.parametrize("answer", [b"", b"not a picture", file_of(halves())[:20]])
def test_an_answer_that_is_no_png_is_an_error(answer):
    with pytest.raises(ValueError, match=r"PNG|cut off"):
        pictures.of_engine(answer)


def test_a_broken_png_of_the_engines_is_an_error_not_a_picture():
    broken = EngineImage(engine_png()[:-30], 32, 16)
    with pytest.raises((ValueError, OSError)):
        pictures.encoded(broken, OutputFormat.JPEG, strip=False)
