"""What stable-diffusion.cpp makes of a request, worked by hand, and what must hold for every request."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weighbridge_fit.laws.sd_buffers import (
    attention_way,
    diffusion_bytes,
    is_priced,
    text_bytes,
    vae_decode_bytes,
    vae_encode_bytes,
)
from weighbridge_fit.laws.sd_process import cpu_work_bytes
from weighbridge_fit.laws.sd_shapes import (
    ARCHITECTURES,
    BufferOptions,
    RenderShape,
    attention_tokens,
    context_tokens,
    encoder_tokens,
    image_tokens,
    references,
    rounded,
    tile_px,
    vision_patches,
)
from weighbridge_fit.lines import NOTHING

MIB, GIB = 1 << 20, 1 << 30
FLASH = BufferOptions(flash_attention=True)


@pytest.mark.parametrize(
    ("architecture", "asked", "made"),
    [
        ("sd15", (1920, 1080), (1920, 1088)),
        ("sdxl", (1000, 1000), (1024, 1024)),
        ("flux1", (1001, 744), (1008, 744)),
        ("klein4b", (65, 70), (80, 80)),  # seen on the unmodified server
        ("wan21_14b", (830, 480), (832, 480)),
        ("wan22_5b", (1080, 1920), (1088, 1920)),
    ],
)
def test_sides_are_rounded_up(architecture: str, asked: tuple[int, int], made: tuple[int, int]) -> None:
    assert rounded(architecture, *asked) == made


@pytest.mark.parametrize(
    ("architecture", "shape", "images", "context"),
    [
        ("sd15", RenderShape(512, 512), 64 * 64, 77),
        ("sd15", RenderShape(512, 512, prompt_tokens=76), 64 * 64, 2 * 77),
        ("sdxl", RenderShape(1024, 1024), 64 * 64, 77),
        ("sd35m", RenderShape(1024, 1024), 64 * 64, 154),
        ("flux1", RenderShape(1024, 1024, prompt_tokens=256), 64 * 64, 512),
        ("flux2", RenderShape(1024, 1024), 64 * 64, 512),
        ("klein4b", RenderShape(1024, 1024, prompt_tokens=600), 64 * 64, 612),
        ("klein4b", RenderShape(1024, 1024, reference_images=((1024, 1024),) * 2), 3 * 64 * 64, 512),
        # A reference of four megapixels becomes one, of the picture's area.
        ("klein4b", RenderShape(512, 512, reference_images=((2048, 2048),)), 2 * 32 * 32, 512),
        ("qwen_image", RenderShape(1024, 1024, prompt_tokens=60), 64 * 64, 65),
        ("zimage", RenderShape(1024, 1024, prompt_tokens=60), 64 * 64, 68),
        # 81 frames are 21 of the latent.
        ("wan21_1.3b", RenderShape(832, 480, frames=81), 52 * 30 * 21, 512),
        ("wan22_5b", RenderShape(1280, 704, frames=5), 40 * 22 * 2, 512),
    ],
)
def test_tokens(architecture: str, shape: RenderShape, images: int, context: int) -> None:
    assert image_tokens(architecture, shape) == images
    assert context_tokens(architecture, shape) == context


def test_z_image_pads_both_sequences() -> None:
    # 44 x 44 tokens are padded to 1,952, and the 18 of a short prompt to 32.
    assert attention_tokens("zimage", 44 * 44, 18) == 1952 + 32


def test_vision_tower_resizes_between_384_and_560_pixels_square() -> None:
    assert vision_patches(1024, 1024) == (560 // 14) ** 2
    assert vision_patches(512, 512) == (504 // 14) ** 2  # 512 / 28 = 18.3, so 18 steps of 28
    assert vision_patches(128, 128) == (392 // 14) ** 2  # 384 / 28 = 13.7, so 14
    # 400 image tokens and 7 words around them, the template's 69 and the prompt's 10.
    edit = RenderShape(1024, 1024, reference_images=((1024, 1024),))
    assert encoder_tokens("qwen_image", edit, vision=True) == 69 + 10 + 407


def test_references_are_resized_in_the_engine_s_steps() -> None:
    wide = RenderShape(1024, 1024, reference_images=((3000, 1000),))
    # One megapixel at 3 : 1 is 1,773.6 x 591.2.
    assert references("klein4b", wide) == ((1776, 592),)
    assert references("qwen_image", wide) == ((1760, 576),)
    assert references("sd15", wide) == ()


def test_tiles_are_latent_cells() -> None:
    tiled = BufferOptions(vae_tiling=True)
    assert tile_px("sd15", tiled, 1024, 1024, encode=False) == (256, 256)
    assert tile_px("klein4b", tiled, 1024, 1024, encode=False) == (512, 512)
    assert tile_px("sd15", tiled, 1024, 1024, encode=True) == (41 * 8, 41 * 8)
    assert tile_px("wan22_5b", tiled, 832, 480, encode=False) == (512, 480)  # 480 px are 30 cells
    assert tile_px("sd15", replace(tiled, vae_tile_px=8), 1024, 1024, encode=False) == (256, 256)  # under 4 cells


def test_flash_attention_falls_back_to_a_mask() -> None:
    # Logged by the unmodified server: 8,446 MiB and 2,057 MiB, where aligned tokens would need 982 and 475.
    assert diffusion_bytes("sd15", RenderShape(1920, 1080), FLASH).expected == pytest.approx(8446 * MIB, rel=0.001)
    assert diffusion_bytes("sd15", RenderShape(832, 1216), FLASH).expected == pytest.approx(2057 * MIB, rel=0.005)
    assert diffusion_bytes("sd15", RenderShape(1024, 1024), FLASH).expected == pytest.approx(492 * MIB, rel=0.002)


def test_autoencoder_of_a_large_picture_is_its_attention() -> None:
    # 4096 x 4096 pixels are 512 x 512 cells: one float32 score for each pair of them is 256 GiB.
    scores = 4 * (512 * 512) ** 2
    decode = vae_decode_bytes("sd15", RenderShape(4096, 4096))
    assert scores == 256 * GIB
    assert scores < decode.expected < 1.02 * scores
    # Direct convolutions save nothing there; flash attention in the autoencoder does, and tiles do everything.
    direct = vae_decode_bytes("sd15", RenderShape(4096, 4096), BufferOptions(vae_conv_direct=True))
    assert direct.expected == pytest.approx(decode.expected, rel=0.001)
    flash = vae_decode_bytes("sd15", RenderShape(4096, 4096), BufferOptions(flash_attention_everywhere=True))
    assert flash.expected == pytest.approx(6656.25 * 4096 * 4096, rel=0.001)
    tiled = vae_decode_bytes("sd15", RenderShape(4096, 4096), BufferOptions(vae_tiling=True))
    assert tiled.expected == pytest.approx(416 * MIB, rel=0.001)


def test_buffers_that_users_reported() -> None:
    # stable-diffusion.cpp #673: "14,978 MB" for a decode of 1536 x 1536; #1154: 176 MB with tiles, where the untiled
    # buffer was above a card's largest allocation.
    untiled = vae_decode_bytes("flux1", RenderShape(1536, 1536))
    assert round(untiled.expected / MIB) == 14_978
    both = BufferOptions(vae_tiling=True, vae_conv_direct=True)
    assert round(vae_decode_bytes("sd15", RenderShape(1024, 1024), both).expected / MIB) == 176


@pytest.mark.parametrize("law", [text_bytes, diffusion_bytes, vae_decode_bytes, vae_encode_bytes])
def test_an_unknown_architecture_has_no_law(law: object) -> None:
    assert not is_priced("hunyuan_video")
    with pytest.raises(KeyError):
        law("hunyuan_video", RenderShape(512, 512))  # type: ignore[operator]


def test_an_unknown_weight_type_is_priced_as_the_widest() -> None:
    shape = RenderShape(1024, 1024)
    assert cpu_work_bytes("flux1", "NVFP4", shape) == cpu_work_bytes("flux1", "F16", shape)


architectures = st.sampled_from(sorted(ARCHITECTURES))
sides = st.integers(256, 2048)
plain_shapes = st.builds(RenderShape, sides, sides, prompt_tokens=st.integers(0, 150))


@settings(max_examples=300, deadline=None)
@given(architectures, sides, sides)
def test_rounding_goes_up_by_less_than_a_multiple_and_once(architecture: str, width: int, height: int) -> None:
    made = rounded(architecture, width, height)
    multiple = ARCHITECTURES[architecture].multiple_px
    for asked, side in zip((width, height), made, strict=True):
        assert asked <= side < asked + multiple
        assert side % multiple == 0
    assert rounded(architecture, *made) == made


@settings(max_examples=400, deadline=None)
@given(architectures, plain_shapes, st.sampled_from([(8, 0), (0, 8), (64, 0), (0, 64), (256, 256)]))
def test_more_pixels_never_need_less(architecture: str, shape: RenderShape, more: tuple[int, int]) -> None:
    larger = replace(shape, width_px=shape.width_px + more[0], height_px=shape.height_px + more[1])
    for law in (diffusion_bytes, vae_decode_bytes):
        assert law(architecture, larger).expected >= law(architecture, shape).expected
    assert cpu_work_bytes(architecture, "Q4_0", larger).expected >= cpu_work_bytes(architecture, "Q4_0", shape).expected


@settings(max_examples=400, deadline=None)
@given(architectures, plain_shapes, st.sampled_from([(8, 0), (0, 64), (256, 256)]))
def test_more_pixels_never_need_less_with_flash_attention_of_one_kind(
    architecture: str, shape: RenderShape, more: tuple[int, int]
) -> None:
    larger = replace(shape, width_px=shape.width_px + more[0], height_px=shape.height_px + more[1])
    ways = {
        attention_way(
            architecture,
            attention_tokens(architecture, image_tokens(architecture, size), context_tokens(architecture, size)),
            True,
        )
        for size in (shape, larger)
    }
    # A picture whose tokens are a multiple of 256 needs no mask, so it may need less than a smaller one.
    if len(ways) == 1:
        smaller = diffusion_bytes(architecture, shape, FLASH)
        assert diffusion_bytes(architecture, larger, FLASH).expected >= smaller.expected


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["wan21_1.3b", "wan21_14b", "wan22_5b"]),
    st.integers(256, 1280),
    st.integers(256, 1280),
    st.integers(1, 160),
    st.integers(1, 40),
)
def test_more_frames_never_need_less(architecture: str, width: int, height: int, frames: int, more: int) -> None:
    # One frame is a picture: Wan 2.2 5B builds another graph for it.
    short, long = RenderShape(width, height, max(2, frames)), RenderShape(width, height, max(2, frames) + more)
    for law in (diffusion_bytes, vae_decode_bytes):
        assert law(architecture, long).expected >= law(architecture, short).expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["flux1", "flux2", "klein4b", "klein9b", "qwen_image"]), plain_shapes, st.tuples(sides, sides))
def test_a_reference_image_never_saves(architecture: str, shape: RenderShape, image: tuple[int, int]) -> None:
    more = replace(shape, reference_images=(image,))
    assert diffusion_bytes(architecture, more).expected >= diffusion_bytes(architecture, shape).expected
    assert vae_encode_bytes(architecture, shape) == NOTHING
    assert vae_encode_bytes(architecture, more).expected > 0


@settings(max_examples=200, deadline=None)
@given(architectures, plain_shapes, st.integers(1, 8), st.booleans())
def test_batch_changes_no_buffer(architecture: str, shape: RenderShape, batch: int, flash: bool) -> None:
    more, options = replace(shape, batch=batch), BufferOptions(flash_attention=flash)
    for law in (text_bytes, diffusion_bytes, vae_decode_bytes, vae_encode_bytes):
        assert law(architecture, more, options) == law(architecture, shape, options)


@settings(max_examples=300, deadline=None)
@given(architectures, plain_shapes, st.one_of(st.none(), st.integers(32, 1024)), st.booleans())
def test_tiling_never_costs(architecture: str, shape: RenderShape, tile: int | None, direct: bool) -> None:
    whole = BufferOptions(vae_conv_direct=direct)
    tiled = replace(whole, vae_tiling=True, vae_tile_px=tile)
    source = replace(shape, source_image=True)
    for law in (vae_decode_bytes, vae_encode_bytes):
        assert law(architecture, source, tiled).expected <= law(architecture, source, whole).expected


@settings(max_examples=300, deadline=None)
@given(architectures, st.integers(6, 32), st.integers(6, 32))
def test_flash_attention_saves_where_nothing_is_masked(architecture: str, columns: int, rows: int) -> None:
    shape = RenderShape(columns * 128, rows * 128)
    tokens = attention_tokens(architecture, image_tokens(architecture, shape), context_tokens(architecture, shape))
    if tokens >= 2304 and attention_way(architecture, tokens, True) == "flash":
        plain, flash = diffusion_bytes(architecture, shape), diffusion_bytes(architecture, shape, FLASH)
        assert flash.expected < plain.expected


@settings(max_examples=300, deadline=None)
@given(
    architectures,
    st.builds(
        RenderShape,
        st.integers(1, 4096),
        st.integers(1, 4096),
        frames=st.integers(1, 200),
        prompt_tokens=st.integers(0, 3000),
        reference_images=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), max_size=4).map(tuple),
        source_image=st.booleans(),
    ),
    st.builds(
        BufferOptions,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.one_of(st.none(), st.integers(0, 8192)),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
)
def test_every_request_has_an_ordered_price(architecture: str, shape: RenderShape, options: BufferOptions) -> None:
    for law in (text_bytes, diffusion_bytes, vae_decode_bytes):
        found = law(architecture, shape, options)
        assert 0 <= found.low <= found.expected <= found.high
        assert found.expected > 0
    assert vae_encode_bytes(architecture, shape, options).high >= 0
    assert cpu_work_bytes(architecture, "Q4_K", shape, options).expected > 0
