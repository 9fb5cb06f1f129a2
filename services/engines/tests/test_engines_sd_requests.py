"""Requests for images: what is refused and where it says so, what a render is made of, and what a prompt cannot do."""

import io
import re

import grpc
import pytest
from PIL import Image
from weighbridge_engines.sd_server import requests
from weighbridge_proto.engines.v1 import image_service_pb2 as image_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb
from weighbridge_proto.fit.v1 import plan_pb2

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


def picture(width=32, height=16, color="red", mode="RGB"):
    made = io.BytesIO()
    Image.new(mode, (width, height), color).save(made, "PNG")
    return image_pb.SourceImage(data=made.getvalue())


def message(prompt="a cat", **fields):
    return image_pb.GenerateImageRequest(prompt=prompt, **fields)


def size(**fields):
    return plan_pb2.ImageWorkload(**fields)


def plan(width=128, height=64, batch=1, notes=(), **rendering):
    """A plan for pictures of 64 to 2048 pixels."""
    made = fit_pb.PlanModelResponse(model_name="some-model", notes=[plan_pb2.PlanNote(code=code) for code in notes])
    made.workload.image.CopyFrom(size(width_px=width, height_px=height, batch=batch))
    said = {"steps": 25, "min_side": 64, "max_width": 2048, "max_height": 1024, "size_multiple": 64} | rendering
    made.launch.sd.rendering.CopyFrom(plan_pb2.SdRendering(**said))
    return made


def refusal(call):
    with pytest.raises(RequestError) as raised:
        call()
    failure = raised.value.failure
    return failure.code, failure.reason, [field for field, _ in failure.field_violations]


# -- what is refused without a model --


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": " \n\t"}),
        ("prompt", {"prompt": "\0 \0"}),
        ("prompt", {"prompt": "x" * 20_001}),
        ("negative_prompt", {"negative_prompt": "x" * 20_001}),
        ("steps", {"steps": 0}),
        ("steps", {"steps": -1}),
        ("steps", {"steps": 101}),
        ("guidance", {"guidance": -0.5}),
        ("guidance", {"guidance": float("nan")}),
        ("guidance", {"guidance": float("inf")}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**31}),
        ("size.batch", {"size": size(batch=9)}),
        ("size.batch", {"size": size(batch=-1)}),
        ("size.frames", {"size": size(frames=17)}),
        ("size.prompt_tokens", {"size": size(prompt_tokens=-1)}),
        ("size.quality", {"size": size(quality=99)}),
        ("size", {"size": size(quality=plan_pb2.QUALITY_TIER_HIGH, width_px=16)}),
        ("size", {"size": size(width_px=64)}),
        ("size", {"size": size(height_px=64)}),
        ("format", {"format": 99}),
        ("source_images", {"source_images": [picture(), picture()]}),
        ("reference_images", {"reference_images": 17 * [picture()]}),
        ("strength", {"source_images": [picture()], "strength": 1.5}),
        ("strength", {"source_images": [picture()], "strength": float("nan")}),
        ("strength", {"strength": 0.5}),
        ("mask", {"mask": picture(mode="L", color=0)}),
        ("require_source", {"require_source": True}),
    ],
)
def test_what_no_model_could_render_is_refused_with_the_field(field, fields):
    assert refusal(lambda: requests.check(message(**fields))) == (INVALID, "INVALID_IMAGE_REQUEST", [field])


@pytest.mark.parametrize("count", [9, -1])
def test_a_count_that_is_refused_is_told_from_one_on(count):
    """Zero leaves it to the engine, and is no count that anyone would ask for."""
    with pytest.raises(RequestError) as refused:
        requests.check(message(size=size(batch=count)))
    assert str(refused.value.failure.message) == f"size.batch: is {count}; it must be 1 to 8"
    assert requests.check(message(size=size(batch=0))).workload().image.batch == 1


@pytest.mark.parametrize("side", [65_536, 2**31 - 1, 4097, 63, 1, -64])
def test_sides_that_no_model_renders_are_refused_before_anyone_is_asked(side):
    assert refusal(lambda: requests.check(message(size=size(width_px=side, height_px=64)))) == (
        INVALID, "SIZE_OUT_OF_RANGE", ["size.width_px"],
    )  # fmt: skip
    assert refusal(lambda: requests.check(message(size=size(width_px=64, height_px=side)))) == (
        INVALID, "SIZE_OUT_OF_RANGE", ["size.height_px"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"steps": 1, "guidance": 0.0, "seed": 0},
        {"steps": 100, "guidance": 30.0, "seed": 2**31 - 1},
        {"size": size(width_px=64, height_px=4096, batch=8)},
        {"size": size(quality=plan_pb2.QUALITY_TIER_HIGH, width_px=16, height_px=9)},
        {"source_images": [picture()], "strength": 0.0, "require_source": True},
        {"format": image_pb.IMAGE_FORMAT_WEBP, "strip_metadata": True},
    ],
)
def test_what_some_model_could_render_is_taken(fields):
    requests.check(message(**fields))


# -- prompts --

ENGINE_TAGS = (re.compile(r"<sd_cpp_extra_args>(.*?)</sd_cpp_extra_args>"), re.compile(r"<lora:([^:>]+):([^>]+)>"))
"""The expressions by which stable-diffusion.cpp finds parameters and adapters in a prompt: routes_sdapi.cpp and
common.cpp of its examples, as packaged for Python in 0.4.7."""


@pytest.mark.parametrize(
    "prompt",
    [
        'a cat<sd_cpp_extra_args>{"width":65536}</sd_cpp_extra_args>',
        "<sd_cpp_extra_args><sd_cpp_extra_args>{}</sd_cpp_extra_args></sd_cpp_extra_args>",
        "<sd_cpp_<sd_cpp_extra_args>extra_args>{}</sd_cpp_extra_args>",
        "a cat <lora:/etc/passwd:1>",
        "<lora:|high_noise|x:0.5> a cat",
    ],
)
def test_no_tag_of_the_engines_is_left_in_a_prompt(prompt):
    assert any(tag.search(prompt) for tag in ENGINE_TAGS)
    checked = requests.check(message(prompt, negative_prompt=prompt))
    for text in (checked.prompt, checked.negative_prompt):
        assert not any(tag.search(text) for tag in ENGINE_TAGS)
        assert text.replace("< ", "<") == prompt  # every word is still there


@pytest.mark.parametrize("text", ["<|im_start|>system", "<extra_id_0>", "</s>", "<|image_pad|>", "<Ünicode:1>", "<!--"])
def test_tags_of_tokenizers_and_engines_to_come_are_text_as_well(text):
    assert requests.plain_text(text) == "< " + text[1:]


@pytest.mark.parametrize(
    "text", ["I <3 you", "a < b", "(red:1.2) [blue] BREAK", "猫 🐈 é", "5<6", "a <", "line\nbreak"]
)
def test_what_is_no_tag_stays_as_it_is(text):
    assert requests.plain_text(text) == text


def test_the_engine_does_not_stop_reading_at_a_nul():
    assert requests.plain_text("a\0cat") == "a cat"


# -- what is planned --


def test_the_workload_says_what_the_render_takes():
    request = requests.check(
        message(
            size=size(width_px=100, height_px=200, batch=2, reference_images=9, source_images=9),
            source_images=[picture()],
            reference_images=[picture(), picture()],
        )
    )
    assert request.workload().image == size(width_px=100, height_px=200, batch=2, reference_images=2, source_images=1)
    assert request.workload(with_source=False).image.source_images == 0


def test_a_tier_is_planned_as_a_tier():
    asked = size(quality=plan_pb2.QUALITY_TIER_DRAFT, width_px=16, height_px=9)
    image = requests.check(message(size=asked)).workload().image
    assert (image.quality, image.width_px, image.height_px) == (plan_pb2.QUALITY_TIER_DRAFT, 16, 9)


def test_a_longer_prompt_is_planned_for_in_steps_whichever_of_the_two_it_is():
    def tokens(prompt="a cat", negative_prompt="", asked=0):
        request = requests.check(message(prompt, negative_prompt=negative_prompt, size=size(prompt_tokens=asked)))
        return request.workload().image.prompt_tokens

    assert tokens() == 0
    assert tokens("x" * 225) == 0  # 75 tokens of three bytes: what one pass of CLIP reads
    assert tokens("x" * 226) == 128
    assert tokens(negative_prompt="x" * 600) == 256
    assert tokens("猫" * 200) == 256
    assert tokens("x" * 600, asked=1000) == 1000


# -- what the model says --


@pytest.mark.parametrize(
    ("asked", "planned", "field"),
    [
        ({"width_px": 2049, "height_px": 512}, {"width": 2112}, "size.width_px"),
        ({"width_px": 512, "height_px": 1025}, {"height": 1088}, "size.height_px"),
        ({"width_px": 2040, "height_px": 512}, {"width": 2112}, "size.width_px"),  # in range, and rounded up out of it
        ({"width_px": 100, "height_px": 512}, {"width": 128, "min_side": 128}, "size.width_px"),
        ({}, {"width": 65_536, "max_width": 2**30}, "size.width_px"),  # whatever a plan says
        ({}, {"height": 0}, "size.height_px"),
    ],
)
def test_sizes_outside_of_the_models_ranges_are_refused(asked, planned, field):
    request = requests.check(message(size=size(**asked)))
    assert refusal(lambda: request.check_plan(plan(**planned))) == (INVALID, "SIZE_OUT_OF_RANGE", [field])


def test_sizes_are_rounded_up_as_planned():
    request = requests.check(message(size=size(width_px=65, height_px=70)))
    made = plan(128, 128)
    request.check_plan(made)
    job = request.job(made, with_source=True)
    assert (job.width, job.height) == (128, 128)


def test_reference_images_for_a_model_that_takes_none_are_refused():
    # One architecture crashes on them; the others would draw without a word.
    request = requests.check(message(reference_images=[picture()]))
    request.check_plan(plan())
    code, reason, _ = refusal(lambda: request.check_plan(plan(notes=["REFERENCES_IGNORED"])))
    assert (code, reason) == (PRECONDITION, "REFERENCES_NOT_SUPPORTED")


def test_a_source_that_the_model_cannot_use_is_told_or_refused_if_it_was_demanded():
    unusable, usable = plan(weights_kind="diffusion-model"), plan(weights_kind="checkpoint")
    request = requests.check(message(source_images=[picture()]))
    assert "some-model" in request.why_source_unused(unusable)
    assert request.why_source_unused(usable) == ""
    assert requests.check(message()).why_source_unused(unusable) == ""
    demanding = requests.check(message(source_images=[picture()], require_source=True))
    assert demanding.why_source_unused(usable) == ""
    code, reason, _ = refusal(lambda: demanding.why_source_unused(unusable))
    assert (code, reason) == (PRECONDITION, "SOURCE_NOT_SUPPORTED")


# -- the render --


def test_what_is_not_asked_for_is_the_models_default():
    job = requests.check(message()).job(plan(steps=4, guidance=1.0), with_source=True)
    assert (job.steps, job.guidance, job.batch, job.sampler, job.scheduler) == (4, 1.0, 1, "", "")
    assert (job.source_png, job.mask_png, job.strength, job.reference_pngs) == (None, None, None, ())
    assert requests.check(message()).job(plan(), with_source=True).guidance is None
    assert requests.check(message()).job(plan(steps=0), with_source=True).steps == 20  # sd-server's own


def test_what_is_asked_for_is_rendered():
    asked = message("a cat", negative_prompt="a dog", steps=7, guidance=0.0, seed=0, sampler="heun", scheduler="karras")
    job = requests.check(asked).job(plan(batch=3, guidance=4.5), with_source=True)
    assert (job.prompt, job.negative_prompt, job.steps, job.guidance) == ("a cat", "a dog", 7, 0.0)
    assert (job.seed, job.sampler, job.scheduler, job.batch) == (0, "heun", "karras", 3)


def test_a_seed_is_chosen_where_none_is_asked_for_and_stays_the_same():
    seeds = {requests.check(message()).seed for _ in range(20)}
    assert len(seeds) > 10
    assert all(0 <= seed < 2**31 for seed in seeds)
    request = requests.check(message())
    assert request.job(plan(), True).seed == request.job(plan(), True).seed == request.seed


def opened(png):
    return Image.open(io.BytesIO(png))


def test_pictures_come_to_the_engine_in_the_renders_size():
    asked = message(
        source_images=[picture(32, 16)],
        mask=picture(32, 16, 255, "L"),
        strength=0.25,
        reference_images=[picture(10, 10, "blue")],
    )
    job = requests.check(asked).job(plan(128, 64), with_source=True)
    assert job.strength == 0.25
    assert (opened(job.source_png).size, opened(job.source_png).mode) == ((128, 64), "RGB")
    assert (opened(job.mask_png).size, opened(job.mask_png).mode) == ((128, 64), "L")
    assert [opened(png).size for png in job.reference_pngs] == [(128, 64)]


@pytest.mark.parametrize(
    ("strength", "steps", "is_used"),
    [
        (None, 4, False),  # sd-server's own, 0.75
        (None, 5, True),
        (0.74, None, True),  # the model's four
        (0.75, None, False),
        (1.0, 20, False),
        (0.94, 20, True),
        (0.0, 1, False),
        (0.5, 2, False),
        (0.49, 2, True),
        (0.9, 10, False),  # in the engine's precision exactly nine
    ],
)
def test_a_source_of_which_steps_and_strength_leave_nothing_is_not_taken_for_used(strength, steps, is_used):
    asked = message(source_images=[picture()], strength=strength, steps=steps)
    flow = plan(steps=4, flow=True)
    assert (requests.check(asked).why_source_unused(flow) == "") == is_used
    assert requests.check(asked).why_source_unused(plan(steps=4)) == ""
    asked.require_source = True
    if not is_used:
        expected = (PRECONDITION, "SOURCE_NOT_SUPPORTED", [])
        assert refusal(lambda: requests.check(asked).why_source_unused(flow)) == expected
    asked.mask.CopyFrom(picture(32, 16, 255, "L"))
    assert requests.check(asked).why_source_unused(flow) == ""


def test_the_reason_says_which_strength_leaves_something():
    asked = requests.check(message(source_images=[picture()]))
    assert "a strength below 0.75" in asked.why_source_unused(plan(steps=4, flow=True))
    assert "more steps" in asked.why_source_unused(plan(steps=1, flow=True))


def test_a_source_that_is_not_used_takes_mask_and_strength_with_it():
    asked = message(source_images=[picture()], mask=picture(32, 16, 255, "L"), strength=0.25)
    job = requests.check(asked).job(plan(), with_source=False)
    assert (job.source_png, job.mask_png, job.strength) == (None, None, None)


@pytest.mark.parametrize("with_source", [True, False])
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("source_images[0].data", {"source_images": [image_pb.SourceImage(data=b"no picture")]}),
        ("mask.data", {"source_images": [picture()], "mask": image_pb.SourceImage(data=b"no picture")}),
        ("mask.data", {"source_images": [picture()], "mask": picture(33, 16, 255, "L")}),
        ("reference_images[1].data", {"reference_images": [picture(), image_pb.SourceImage()]}),
    ],
)
def test_a_picture_that_is_none_is_refused_also_where_it_would_not_be_used(field, fields, with_source):
    request = requests.check(message(**fields))
    assert refusal(lambda: request.job(plan(), with_source)) == (INVALID, "INVALID_IMAGE", [field])
