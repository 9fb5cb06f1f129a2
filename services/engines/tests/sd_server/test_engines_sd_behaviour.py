"""What sd-server answers, where that matters to whoever calls it: the real one, and its stand-in the same way.

Each test is a row of what was measured with stable-diffusion-cpp-python 0.4.7 (CPU, 2026-11-30). Where a newer build
behaves otherwise the test fails for the real one, and says what to look at.
"""

import io
import json
import time

import pytest
from PIL import Image
from sd_subjects import PATIENCE_S, encoded, pixels
from weighbridge_engines.sd_server.events import RenderEnded, RenderStarted
from weighbridge_engines.sd_server.jobs import RenderProgress
from weighbridge_engines.sd_server.output import OutputReader

ALIGNMENT = 16
"""Pixels that sizes of a FLUX.2 are rounded up to."""

TINY = {"prompt": "a cat", "width": 64, "height": 64, "steps": 1, "seed": 7, "cfg_scale": 1}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "known-by-this.safetensors").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def server(subject, tiny_model, adapters):
    """One for the module. Its defaults keep requests small that cannot say what they want."""
    small = ["--width", "64", "--height", "64", "--steps", "1", "--cfg-scale", "1"]
    started = subject.start(
        [*tiny_model.arguments, *small, "--lora-model-dir", str(adapters)],
        short_of_memory="in_render", encode_s=0.2,
    )  # fmt: skip
    try:
        yield started.wait_ready()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def plain(server):
    """The pixels of TINY."""
    return pixels(server.post("/sdapi/v1/txt2img", TINY).pictures[0])


def render(server, path="/sdapi/v1/txt2img", **changes):
    answer = server.post(path, TINY | changes)
    assert answer.status == 200, answer.body
    return [pixels(picture) for picture in answer.pictures]


def wait_job(server, job_id, *states):
    deadline = time.monotonic() + PATIENCE_S
    while (job := server.get(f"/sdcpp/v1/jobs/{job_id}").json)["status"] not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


# What can be asked


def test_it_has_no_health_check_and_no_progress(server):
    assert {server.get(path).status for path in ("/health", "/healthz", "/sdapi/v1/progress")} == {404}


def test_any_answer_means_that_the_model_is_loaded_and_none_names_it_but_the_stem(server):
    assert server.get("/").body == b"Stable Diffusion Server is running"
    (model,) = server.get("/v1/models").json["data"]
    assert model["id"] == "sd-cpp-local"  # whatever is loaded
    assert server.get("/sdapi/v1/options").json["sd_model_checkpoint"] == "diffusion"
    (named,) = server.get("/sdapi/v1/sd-models").json
    assert (named["model_name"], named["sha256"]) == ("diffusion", "8" * 64)


def test_samplers_and_schedulers_are_lists_that_begin_with_default(server):
    samplers = [entry["name"] for entry in server.get("/sdapi/v1/samplers").json]
    schedulers = [entry["name"] for entry in server.get("/sdapi/v1/schedulers").json]
    assert samplers[0] == schedulers[0] == "default"
    assert {"euler", "euler_a", "heun", "dpm++2m", "lcm"} <= set(samplers)
    assert {"discrete", "karras", "simple"} <= set(schedulers)
    assert isinstance(server.get("/sdapi/v1/upscalers").json, list)
    assert isinstance(server.get("/sdapi/v1/latent-upscale-modes").json, list)


def test_files_in_its_folder_of_adapters_are_listed_whatever_they_hold(server):
    """So a server can be told from another one on the same port."""
    expected = {"name": "known-by-this", "path": "known-by-this.safetensors"}
    assert server.get("/sdapi/v1/loras").json == [expected]
    assert server.get("/sdcpp/v1/capabilities").json["loras"] == [expected]


def test_capabilities_tell_limits_that_nothing_holds_to_and_that_renders_cannot_be_cancelled(server, tiny_model):
    told = server.get("/sdcpp/v1/capabilities").json
    assert told["model"]["path"] == str(tiny_model.files["--diffusion-model"])
    assert told["current_mode"] == "img_gen"
    assert told["defaults_by_mode"]["img_gen"]["sample_params"]["sample_steps"] == 1
    assert told["limits"] == {
        "min_width": 64, "max_width": 4096, "min_height": 64, "max_height": 4096, "max_batch_count": 8,
        "max_queue_size": 64,
    }  # fmt: skip
    assert (told["features"]["cancel_queued"], told["features"]["cancel_generating"]) == (True, False)
    assert "euler" in told["samplers"]
    assert {"png", "jpeg"} <= set(told["output_formats"])


def test_any_origin_is_let_in(server):
    """No authentication, and any page in a browser may call it: it must listen on loopback only."""
    answer = server.ask("GET", "/v1/models", Origin="http://evil.example")
    assert answer.headers["Access-Control-Allow-Origin"] == "http://evil.example"
    assert answer.headers["Access-Control-Allow-Credentials"] == "true"
    assert server.ask("OPTIONS", "/sdapi/v1/txt2img", Origin="http://evil.example").status == 204


# Renders


def test_a_render_answers_with_a_png_the_request_and_its_generation_data_and_prints_no_prompt(server):
    printed = server.mark()
    answer = server.post("/sdapi/v1/txt2img", TINY | {"prompt": "größe 🐈\n[INFO ] main.cpp:1 - listening on: x"})
    assert answer.status == 200
    assert answer.json["parameters"]["seed"] == 7
    assert answer.json["info"] == ""
    with Image.open(io.BytesIO(answer.pictures[0])) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))
        data = picture.text["parameters"].encode("latin-1").decode()  # UTF-8, where the format wants Latin-1
    assert data.startswith("größe 🐈\n")
    assert "Steps: 1, " in data
    assert "Seed: 7, " in data
    server.mark()
    assert not [line for line, _ in server.lines[printed:] if "größe" in line or "listening" in line]


def test_a_seed_and_a_prompt_make_a_picture(server, plain):
    assert render(server)[0] == plain
    other_prompt, *others = render(server, prompt="a dog", batch_size=9)  # clamped to 8
    assert other_prompt != plain
    assert len({other_prompt, *others}) == 8  # each with the seed after the last one's


def test_phases_are_printed_in_order(server):
    printed = server.mark()
    reader = OutputReader()
    reader.expect_render(steps=3, has_source=True)
    source = encoded(Image.new("RGB", (32, 48), "red"))
    render(server, "/sdapi/v1/img2img", steps=3, batch_size=2, init_images=[source], denoising_strength=1)
    server.wait_line("generate_image completed", after=printed)
    events = [
        event for line, from_stderr in server.lines[printed:] for event in reader.read(line, from_stderr=from_stderr)
    ]
    assert events[0] == RenderStarted(64, 64)
    assert [(event.phase, event.done, event.total) for event in events if isinstance(event, RenderProgress)] == [
        ("encode", 0, 1), ("encode", 1, 1),
        ("text_encode", 0, 1), ("text_encode", 1, 1),
        *(("sampling", step, 6) for step in range(7)),
        ("decode", 0, 2), ("decode", 1, 2), ("decode", 2, 2),
    ]  # fmt: skip
    assert isinstance(events[-1], RenderEnded)
    assert events[-1].used_source


def test_sizes_are_rounded_up_without_a_word_in_the_answer(server):
    ((size, _),) = render(server, width=1, height=70.7, steps=0)  # steps are clamped to 1
    assert size == (ALIGNMENT, 80)
    server.wait_line(r"align generation request up 1x70 to 16x80 \(multiple=16\)")


def test_nothing_is_too_large_to_be_tried(server, subject):
    subject.needs_memory_limit()
    answer = server.post("/sdapi/v1/txt2img", TINY | {"width": 65536, "height": 65536})
    assert (answer.status, answer.json) == (500, {"error": "server_error", "message": "std::bad_alloc"})
    assert server.get("/v1/models").status == 200


def test_an_unknown_sampler_or_scheduler_is_the_default_without_a_word(server, plain):
    assert render(server, sampler_name="no such sampler", scheduler="no such scheduler")[0] == plain


def test_openai_requests_use_the_default_seed_and_a_malformed_size_is_the_default_one(server):
    printed = server.mark()
    answer = server.post("/v1/images/generations", {"prompt": "a cat", "size": "huge", "output_format": "jpeg"})
    assert (answer.status, answer.json["output_format"]) == (200, "jpeg")
    (made,) = answer.json["data"]
    assert made["b64_json"].startswith("/9j/")  # a JPEG
    server.wait_line("generate_image 64x64", after=printed)
    server.wait_line("generating image: 1/1 - seed 42", after=printed)


def test_parameters_hidden_in_a_prompt_outrank_the_request(server):
    """A gateway that admits by size must take them out."""
    ((size, _),) = render(server, prompt='a cat<sd_cpp_extra_args>{"width": 96}</sd_cpp_extra_args>')
    assert size == (96, 64)


def test_broken_parameters_hidden_in_a_prompt_are_printed(server):
    """The one way by which text of a prompt comes into the log without -v."""
    prompt = "a cat<sd_cpp_extra_args>{secret words</sd_cpp_extra_args>"
    answer = server.post("/sdapi/v1/txt2img", TINY | {"prompt": prompt})
    assert (answer.status, answer.json) == (400, {"error": "invalid sd_cpp_extra_args"})
    assert "json parse failed {secret words" in server.wait_line("secret words")


# Requests that it refuses


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "empty body"),
        ({"width": 64}, 400, "prompt required"),
        ({"prompt": ""}, 400, "prompt required"),
        ({"prompt": "a", "width": 0}, 400, "width and height must be positive"),
        ({"prompt": "a", "height": -1}, 400, "width and height must be positive"),
        ({"prompt": "a", "cfg_scale": -1}, 400, "invalid params"),
        ({"prompt": "a", "lora": [{"path": "nope"}]}, 400, "invalid lora path: nope"),
        ({"prompt": "a", "width": "64"}, 500, "type must be number, but is string"),
        ({"prompt": "a", "width": None}, 500, "type must be number, but is null"),
        ({"prompt": 5}, 500, "type must be string, but is number"),
        (b"{", 500, "parse error"),
        (b"[1]", 500, "cannot use value() with array"),
    ],
)
def test_bad_requests_are_refused_or_answered_as_a_fault_of_the_server(server, body, status, message):
    answer = server.post("/sdapi/v1/txt2img", body)
    assert answer.status == status
    assert message in json.dumps(answer.json)
    assert (answer.json["error"] == "server_error") is (status == 500)


@pytest.mark.parametrize("path", ["/v1/images/generations", "/sdcpp/v1/img_gen"])
def test_an_unknown_file_format_is_refused(server, path):
    answer = server.post(path, {"prompt": "a", "output_format": "gif"})
    assert answer.status == 400
    assert "invalid output_format" in answer.json["error"]


def test_a_model_for_images_makes_no_video(server):
    answer = server.post("/sdcpp/v1/vid_gen", {"prompt": "a"})
    assert (answer.status, answer.json["error"]) == (400, "loaded model does not support vid_gen")


# Source images


@pytest.mark.parametrize(
    "source",
    [
        "data:image/jpeg;base64," + encoded(Image.new("RGB", (100, 30), "green"), "JPEG"),
        encoded(Image.new("RGBA", (64, 64), "green")),
    ],
    ids=["jpeg as a data URL, of another size", "png with transparency"],
)
def test_a_source_is_used_if_it_can_be_decoded(server, plain, source):
    printed = server.mark()
    # The second of two noise levels is where it begins.
    changed = render(server, "/sdapi/v1/img2img", init_images=[source], steps=2, denoising_strength=0.3)[0]
    assert changed != plain
    server.wait_line("IMG2IMG", after=printed)


def test_nothing_is_left_of_a_source_where_steps_times_strength_reaches_the_last_step(server, plain):
    """int(steps * strength) >= steps - 1: a model trained on flows begins with noise alone.

    With the four steps of a distilled model, the default strength of 0.75 is enough.
    """
    printed = server.mark()
    source = encoded(Image.new("RGB", (64, 64), "red"))
    assert render(server, "/sdapi/v1/img2img", init_images=[source], steps=1, denoising_strength=0.5)[0] == plain
    server.wait_line("IMG2IMG", after=printed)  # for all it says, it was used


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ([encoded(Image.new("L", (64, 64)))], ""),  # it complains, but only begins a line with it
        (["aGVsbG8="], "load image from 'memory' failed"),
        ([], ""),
    ],
    ids=["grey", "no image", "none"],
)
def test_a_source_that_cannot_be_used_is_answered_with_a_plain_picture_and_200(server, plain, sources, complaint):
    """So sources have to be decoded and checked before, and sent as RGB."""
    printed = server.mark()
    assert render(server, "/sdapi/v1/img2img", init_images=sources)[0] == plain
    if complaint:
        server.wait_line(complaint, after=printed)
    assert "IMG2IMG" not in server.text(from_stderr=False, after=printed)


# One at a time


def test_it_answers_while_it_renders(server):
    printed = server.mark()
    running = server.send("POST", "/sdapi/v1/txt2img", json.dumps(TINY | {"prompt": "a bird"}).encode())
    server.wait_line("generate_image 64x64", after=printed)
    assert server.get("/v1/models").status == 200
    assert "generate_image completed" not in server.text(from_stderr=False, after=printed)
    assert running.getresponse().status == 200
    running.close()


def test_a_client_that_has_gone_stops_nothing_and_the_next_render_waits_whichever_way_it_came(server):
    printed = server.mark()
    gone = server.send("POST", "/sdapi/v1/txt2img", json.dumps(TINY | {"seed": 1001}).encode())
    server.wait_line("generate_image 64x64", after=printed)
    gone.close()
    job = server.post("/sdcpp/v1/img_gen", {"prompt": "a", "seed": 1002}).json["id"]
    assert wait_job(server, job, "completed", "failed")["status"] == "completed"
    server.mark()
    said = server.text(from_stderr=False, after=printed)
    first, second = said.index("seed 1001"), said.index("seed 1002")
    assert first < said.index("generate_image completed") < second


def test_jobs_wait_in_order_and_only_those_that_wait_can_be_cancelled(server):
    job = TINY | {"sample_params": {"sample_steps": 1, "guidance": {"txt_cfg": 1}}}
    answers = [server.post("/sdcpp/v1/img_gen", job) for _ in range(3)]
    assert {answer.status for answer in answers} == {202}
    first, second, third = (answer.json["id"] for answer in answers)
    assert answers[0].json["poll_url"] == f"/sdcpp/v1/jobs/{first}"
    wait_job(server, first, "generating")
    waiting = server.get(f"/sdcpp/v1/jobs/{third}").json
    assert (waiting["status"], waiting["queue_position"]) == ("queued", 2)
    assert "progress" not in waiting
    refused = server.post(f"/sdcpp/v1/jobs/{first}/cancel", b"")
    assert refused.status == 409
    assert "cannot be interrupted" in refused.json["error"]
    for waits in (third, second):
        cancelled = server.post(f"/sdcpp/v1/jobs/{waits}/cancel", b"")
        assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
        assert cancelled.json["error"]["code"] == "cancelled"
    done = wait_job(server, first, "completed", "failed")
    assert done["status"] == "completed"
    assert [image["index"] for image in done["result"]["images"]] == [0]
    too_late = server.post(f"/sdcpp/v1/jobs/{first}/cancel", b"")
    assert (too_late.status, too_late.json["status"]) == (200, "completed")


def test_a_job_needs_no_prompt_and_a_field_of_the_wrong_type_is_its_default(server):
    printed = server.mark()
    answer = server.post("/sdcpp/v1/img_gen", {"width": "x", "height": 32.5, "seed": 5})
    assert answer.status == 202
    assert wait_job(server, answer.json["id"], "completed", "failed")["status"] == "completed"
    server.wait_line("generate_image 64x64", after=printed)


def test_an_unknown_job_is_not_found(server):
    assert server.get("/sdcpp/v1/jobs/job_0_00000000").status == 404
    assert server.post("/sdcpp/v1/jobs/job_0_00000000/cancel", b"").status == 404


# Out of memory


def test_a_render_without_memory_makes_no_picture_and_the_next_one_works(server, subject, plain):
    subject.needs_memory_limit()
    printed = server.mark()
    large = TINY | {"width": 2048, "height": 2048}
    answer = server.post("/sdapi/v1/txt2img", large)
    assert (answer.status, answer.json) == (500, {"error": "generate_image returned no results"})
    reader = OutputReader()
    server.wait_line("sampling for image 1/1 failed", after=printed)
    for line, from_stderr in server.lines[printed:]:
        reader.read(line, from_stderr=from_stderr)
    assert reader.failures[0].kind == "OUT_OF_MEMORY"
    assert max(failure.size_bytes or 0 for failure in reader.failures) > 2**30
    assert render(server)[0] == plain
