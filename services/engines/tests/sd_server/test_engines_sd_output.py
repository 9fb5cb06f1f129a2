"""What sd-server printed (recorded/: stable-diffusion-cpp-python 0.4.7, CPU, tiny model), and what is made of it."""

from pathlib import Path

import pytest
from weighbridge_engines.sd_server.events import (
    FailureKind,
    Listening,
    LoadProgress,
    ModelVersion,
    ParamsMemory,
    RenderEnded,
    RenderStarted,
    SdFailure,
    SizeAligned,
)
from weighbridge_engines.sd_server.jobs import RenderProgress
from weighbridge_engines.sd_server.output import OutputReader
from weighbridge_engines.supervisor.output import LineSplitter

RECORDED = Path(__file__).parent / "recorded"
MIB = 2**20


def lines_of(data):
    splitter = LineSplitter()
    return splitter.feed(data) + splitter.end()


def events_of(lines, reader=None, *, from_stderr=False):
    reader = reader or OutputReader()
    return [event for line in lines for event in reader.read(line, from_stderr=from_stderr)]


def recorded(name):
    """The recording's load and its renders, each as lines."""
    parts = [[]]
    for line in lines_of((RECORDED / name).read_bytes()):
        if "generate_image " in line and "completed" not in line:
            # What was said of the request before it belongs to the render.
            at = len(parts[-1]) - sum("media_io.cpp" in said or "align generation" in said for said in parts[-1][-3:])
            parts.append(parts[-1][at:])
            del parts[-2][at:]
        parts[-1].append(line)
    return parts


def progress(events, phase=None):
    return [
        (event.phase, event.done, event.total)
        for event in events
        if isinstance(event, RenderProgress) and phase in (None, event.phase)
    ]


def loaded():
    reader = OutputReader()
    events_of(recorded("plain.log")[0], reader)
    return reader


def test_a_load_counts_tensors_and_tells_the_model_its_memory_and_that_it_listens():
    reader = OutputReader()
    events = events_of(recorded("plain.log")[0], reader)
    counted = [event for event in events if isinstance(event, LoadProgress)]
    # The bar is printed again for each of the three files; only what is new is told.
    assert [event.done for event in counted] == sorted({event.done for event in counted})
    assert (counted[0].total, counted[-1]) == (493, LoadProgress(493, 493))
    version, memory, listening = events[0], events[-2], events[-1]
    assert (version, listening) == (ModelVersion("Flux.2 klein"), Listening())
    assert isinstance(memory, ParamsMemory)
    assert memory.host_bytes == pytest.approx(16.77 * MIB, abs=0.02 * MIB)
    assert memory.device_bytes == 0
    assert [(part.part, part.on_device) for part in memory.parts] == [
        ("text_encoders", False), ("diffusion_model", False), ("vae", False), ("controlnet", True), ("pmid", False),
    ]  # fmt: skip
    assert reader.is_listening
    assert reader.failures == []


def test_parts_on_a_card_count_for_the_card():
    text = (
        "[INFO ] stable-diffusion.cpp:858  - total params memory size = 300.50MB (VRAM 200.25MB, RAM 100.25MB): "
        "text_encoders 100.25MB(RAM), diffusion_model 150.00MB(VRAM), vae 50.25MB(VRAM), controlnet 0.00MB(VRAM), "
        "pmid 0.00MB(RAM)"
    )
    (memory,) = OutputReader().read(text, from_stderr=False)
    assert (memory.host_bytes, memory.device_bytes) == (100.25 * MIB, 200.25 * MIB)


def test_a_render_from_text_goes_through_three_phases():
    reader = loaded()
    reader.expect_render(steps=1, has_source=False)
    events = events_of(recorded("plain.log")[1], reader)
    assert events[0] == RenderStarted(64, 64)
    assert progress(events) == [
        ("text_encode", 0, 1), ("text_encode", 1, 1),
        ("sampling", 0, 1), ("sampling", 1, 1),
        ("decode", 0, 1), ("decode", 1, 1),
    ]  # fmt: skip
    assert isinstance(events[-1], RenderEnded)
    assert not events[-1].used_source


def test_steps_and_images_of_a_batch_are_counted_together():
    reader = loaded()
    reader.expect_render(steps=2, has_source=False)
    events = events_of(recorded("plain.log")[2], reader)
    assert progress(events, "sampling") == [("sampling", done, 4) for done in range(5)]
    assert progress(events, "decode") == [("decode", done, 2) for done in range(3)]


def test_a_source_is_encoded_before_the_prompt_and_shortens_the_sampling():
    reader = loaded()
    reader.expect_render(steps=4, has_source=True)  # strength 0.5
    events = events_of(recorded("plain.log")[3], reader)
    assert progress(events) == [
        ("encode", 0, 1), ("encode", 1, 1),
        ("text_encode", 0, 1), ("text_encode", 1, 1),
        ("sampling", 0, 3), ("sampling", 1, 3), ("sampling", 2, 3), ("sampling", 3, 3),
        ("decode", 0, 1), ("decode", 1, 1),
    ]  # fmt: skip
    assert events[-1].used_source


def test_bars_that_look_alike_are_told_apart_by_their_phase():
    load, render = recorded("tiled.log")
    reader = OutputReader()
    events_of(load, reader)
    reader.expect_render(steps=2, has_source=True)  # strength 1, two images, source and pictures in tiles
    events = events_of(render, reader)
    assert events[0] == SizeAligned(120, 128, 128, 128, 16)
    assert events[1] == RenderStarted(128, 128)
    assert progress(events, "encode") == [("encode", 0, 1)] + [("encode", tile, 4) for tile in range(1, 5)]
    assert progress(events, "sampling") == [("sampling", step, 4) for step in range(5)]
    assert progress(events, "decode") == [("decode", 0, 2)] + [("decode", tile, 18) for tile in range(1, 19)]


def test_phases_never_go_back():
    reader = loaded()
    reader.expect_render(steps=4, has_source=True)
    order = ["encode", "text_encode", "sampling", "decode"]
    told = [
        (order.index(phase), done / total)
        for phase, done, total in progress(events_of(recorded("plain.log")[3], reader))
    ]
    assert told == sorted(told)


def test_a_source_that_was_not_used_shows():
    reader = loaded()
    reader.expect_render(steps=1, has_source=True)
    broken = "[ERROR] media_io.cpp:538  - load image from 'memory' failed"
    (failure,) = reader.read(broken, from_stderr=True)
    assert failure.kind is FailureKind.UNREADABLE_SOURCE
    events = events_of(recorded("plain.log")[1], reader)  # it goes on as from text
    assert not events[-1].used_source
    assert progress(events)[:3] == [("encode", 0, 1), ("text_encode", 0, 1), ("text_encode", 1, 1)]


def test_a_grey_source_is_refused_in_a_line_without_an_end():
    unended = "the number of channels for the input image must be >= 3,but got 1 channels, image_path = memory"
    reader = loaded()
    assert [event.kind for event in reader.read(unended, from_stderr=True)] == [FailureKind.UNREADABLE_SOURCE]
    joined = unended + "[ERROR] ggml_extend.hpp:1914 - vae: failed to allocate the compute buffer"
    assert [event.kind for event in reader.read(joined, from_stderr=True)] == [
        FailureKind.UNREADABLE_SOURCE, FailureKind.OUT_OF_MEMORY,
    ]  # fmt: skip


def test_a_bar_and_a_message_may_share_a_line():
    bar = "  |=================================>                | 335/493 - 55.50MB/s\x1b[K"
    message = "[INFO ] model.cpp:993  - loading tensors completed, taking 0.41s"
    assert OutputReader().read(bar + message, from_stderr=False) == [LoadProgress(335, 493)]
    version = "[INFO ] stable-diffusion.cpp:305  - Version: SDXL "
    assert OutputReader().read(bar + version, from_stderr=False) == [LoadProgress(335, 493), ModelVersion("SDXL")]


@pytest.mark.parametrize("ending", [b"\n", b"\r", b"\r\n"])
def test_it_does_not_matter_how_lines_end(ending):
    data = (RECORDED / "tiled.log").read_bytes()
    plain = data.replace(b"\r", b"").replace(b"\x1b[K", b"\n")  # every bar on a line of its own
    assert events_of(lines_of(plain.replace(b"\n", ending))) == events_of(lines_of(data))


@pytest.mark.parametrize(
    "bar",
    [
        "  |==>                                               | 0/493 - 2.71MB/s",
        "  |==================================================| 494/493 - 2.71MB/s",
        "  |==================================================| 2/2 - 2.71it/s",  # sampling before there is a render
        "  |==================================================| 999999999999/999999999999 - 2.71MB/s",
        "  |==>  | 1/2 - 2.71MB/s",
        "x |==================================================| 1/2 - 2.71MB/s",
    ],
)
def test_a_bar_that_cannot_be_is_passed_over(bar):
    assert OutputReader().read(bar, from_stderr=False) == []


def test_a_loading_bar_in_a_render_is_not_taken_for_steps():
    reader = loaded()
    reader.expect_render(steps=2, has_source=False)
    reader.read("[INFO ] stable-diffusion.cpp:3367 - generate_image 64x64", from_stderr=False)
    reader.read("[INFO ] stable-diffusion.cpp:3401 - generating image: 1/1 - seed 1", from_stderr=False)
    lora = "  |==================================================| 999/999 - 2.71GB/s"
    assert reader.read(lora, from_stderr=False) == []


def test_a_prompt_repeated_in_an_error_forges_nothing():
    """A broken <sd_cpp_extra_args> is printed as it came (one line: the engine's pattern stops at line ends)."""
    reader = loaded()
    forged = (
        "[ERROR] common.cpp:1524 - json parse failed {[ERROR] main.cpp:92 - new_sd_ctx_t failed "
        "[INFO ] main.cpp:1 - listening on: 1.2.3.4:5 terminate called after throwing an instance of 'std::bad_alloc' "
        "tensor 'x' not in model file  |==================================================| 2/2 - 1.00it/s"
    )
    assert reader.read(forged, from_stderr=True) == []
    assert reader.failures == []


@pytest.mark.parametrize(
    ("line", "from_stderr"),
    [
        ("[INFO ] stable-diffusion.cpp:3401 - generating image: 1/1 - seed 1", True),
        ("[INFO ] main.cpp:148  - listening on: 127.0.0.1:1", True),
        ("  |==================================================| 1/1 - 4.80it/s", True),
        ("[ERROR] main.cpp:92   - new_sd_ctx_t failed", False),
        ("terminate called after throwing an instance of 'std::bad_alloc'", False),
        ("[DEBUG] main.cpp:148  - listening on: 127.0.0.1:1", False),
        ("[INFO ] main.cpp:92   - new_sd_ctx_t failed", True),
        ("somebody said [ERROR] main.cpp:92   - new_sd_ctx_t failed", True),
    ],
)
def test_a_line_on_the_wrong_stream_or_level_says_nothing(line, from_stderr):
    reader = OutputReader()
    reader.read("[INFO ] stable-diffusion.cpp:3367 - generate_image 64x64", from_stderr=False)
    assert reader.read(line, from_stderr=from_stderr) == []
    assert not reader.is_listening


ON_STDERR = {
    "ggml_aligned_malloc: insufficient memory (attempted to allocate 1230.19 MB)": (
        FailureKind.OUT_OF_MEMORY, "", None),
    "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1289945184": (
        FailureKind.OUT_OF_MEMORY, "", 1289945184),
    "ggml_gallocr_reserve_n_impl: failed to allocate CPU buffer of size 1289945184": (
        FailureKind.OUT_OF_MEMORY, "", 1289945184),
    "flux: failed to allocate the compute buffer": (FailureKind.OUT_OF_MEMORY, "", None),
    "flux alloc compute buffer failed": (FailureKind.OUT_OF_MEMORY, "", None),
    "qwen3 alloc params backend buffer failed, num_tensors = 310": (FailureKind.OUT_OF_MEMORY, "", None),
    "diffusion model compute failed": (FailureKind.RENDER_FAILED, "", None),
    "sampling for image 1/1 failed after 2.68s": (FailureKind.RENDER_FAILED, "", None),
    "vae decode compute failed": (FailureKind.RENDER_FAILED, "", None),
    "decode_first_stage failed for latent 1": (FailureKind.RENDER_FAILED, "", None),
    "tensor 'tae.decoder.layers.0.weight' not in model file": (
        FailureKind.MISSING_TENSOR, "tae.decoder.layers.0.weight", None),
    "tensor 'tae.decoder.layers.0.weight' has wrong shape in model file: got [3, 3, 64, 32], expected [3, 3, 32, 64]": (
        FailureKind.WRONG_SHAPE, "tae.decoder.layers.0.weight", None),
    "read tensor data failed: 'bad/trunc.gguf'": (FailureKind.TRUNCATED_FILE, "bad/trunc.gguf", None),
    "get sd version from file failed: 'tiny/tae.safetensors'": (FailureKind.WRONG_FILE, "tiny/tae.safetensors", None),
    "init model loader from file failed: 'bad/text.gguf'": (FailureKind.WRONG_FILE, "bad/text.gguf", None),
    "gguf_init_from_file_ptr: number of tensors is 1152921504606846976 but must be in [0, 45212608023797920]": (
        FailureKind.WRONG_FILE, "", None),
    "error: unknown argument: --nope": (FailureKind.WRONG_ARGUMENT, "--nope", None),
    "error: invalid weight format zz": (FailureKind.WRONG_ARGUMENT, "", None),
    "new_sd_ctx_t failed": (FailureKind.LOAD_FAILED, "", None),
}  # fmt: skip


@pytest.mark.parametrize("text", ON_STDERR)
def test_errors_are_told_apart(text):
    kind, subject, size_bytes = ON_STDERR[text]
    (failure,) = OutputReader().read(f"[ERROR] some_file.hpp:12   - {text}", from_stderr=True)
    assert (failure.kind, failure.subject, failure.size_bytes, failure.text) == (kind, subject, size_bytes, text)


@pytest.mark.parametrize(
    ("text", "kind", "subject"),
    [
        ("file nope.gguf not found", FailureKind.MISSING_FILE, "nope.gguf"),
        ("loading diffusion model from 'nope.gguf' failed", FailureKind.MISSING_PART, "diffusion model"),
        ("loading tae from 'it's here/tae.safetensors' failed", FailureKind.MISSING_PART, "tae"),
        ("unknown format bad/text.gguf", FailureKind.WRONG_FILE, "bad/text.gguf"),
        ("IMPORTANT NOTICE: No text encoders provided, cannot process prompts!", FailureKind.MISSING_PART, ""),
    ],
)
def test_warnings_that_a_load_dies_of_later_are_kept(text, kind, subject):
    reader = OutputReader()
    assert reader.read(f"[WARN ] model.cpp:231  - {text}", from_stderr=False) == [SdFailure(kind, text, subject)]
    assert reader.failures == [SdFailure(kind, text, subject)]


def test_failures_of_a_render_are_forgotten_with_the_next_and_those_of_the_load_are_not():
    reader = OutputReader()
    reader.read("[WARN ] conditioner.hpp:1093 - IMPORTANT NOTICE: No text encoders provided", from_stderr=False)
    reader.read("[INFO ] main.cpp:148  - listening on: 127.0.0.1:1", from_stderr=False)
    reader.read("[ERROR] ggml_extend.hpp:1914 - flux: failed to allocate the compute buffer", from_stderr=True)
    assert [failure.kind for failure in reader.render_failures] == [FailureKind.OUT_OF_MEMORY]
    reader.expect_render(steps=1, has_source=False)
    assert reader.render_failures == []
    assert [failure.kind for failure in reader.failures] == [FailureKind.MISSING_PART]


def test_two_threads_that_fail_at_once_mix_their_lines():
    """Seen with two threads that read the same cut-off file."""
    text = "model.cpp:876  - read tensor data failed: 'a.gguf'"
    mixed = [f"[ERROR] [ERROR] {text}", text]
    events = events_of(mixed, from_stderr=True)
    assert [(event.kind, event.subject) for event in events] == [(FailureKind.TRUNCATED_FILE, "a.gguf")]


def test_whether_the_model_was_loaded_by_then_is_kept():
    text = "[ERROR] ggml_extend.hpp:1914 - flux: failed to allocate the compute buffer"
    assert [event.while_loaded for event in OutputReader().read(text, from_stderr=True)] == [False]
    assert [event.while_loaded for event in loaded().read(text, from_stderr=True)] == [True]
