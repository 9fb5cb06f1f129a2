"""An engine for images and one for chats on one machine: who waits for whom and why, and that nobody is cut off.

With the stand-in of sd-server alone: what is shown here is between the engines and the ledger.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import chat_service_pb2, chat_service_pb2_grpc
from weighbridge_proto.fit.v1 import weights_pb2

from services.engines.standins.sd.program import write_standin
from tests.harness import Suite, running_suite
from tests.images import SIDE_PX, ImageEngine, ImageModel, admitted, made_of_parts, told

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def image_model(models_root: Path) -> ImageModel:
    return made_of_parts(models_root)


@pytest.fixture(scope="module")
def chat_model(tiny_models: Path) -> Path:
    return tiny_models / "tiny-qwen3-bf16"


@pytest.fixture(scope="module", params=["EXCLUSIVE_USE", "BYTES_HELD"])
def collision(request: Any) -> str:
    """Why the two engines cannot have a model loaded at one time."""
    return str(request.param)


@pytest.fixture(scope="module")
def suite(
    models_root: Path, image_model: ImageModel, chat_model: Path, collision: str, tmp_path_factory: Any
) -> Iterator[Suite]:
    """A suite on a machine with one GPU, where no model is left alone for being young.

    An sd-server that was built for Metal wants the GPU for itself. One that computes on the processor leaves it alone,
    and then the machine has room for either model and not for both.
    """
    program = write_standin(tmp_path_factory.mktemp("standin"))
    if collision == "EXCLUSIVE_USE":
        program.with_name("libggml-metal.so").write_bytes(b"ggml_backend_metal_init")
    settings = {
        "WEIGHBRIDGE_LEDGER_MACHINE": "unified:8",
        "WEIGHBRIDGE_LEDGER_MIN_RESIDENCY_S": "0",
        "WEIGHBRIDGE_LEDGER_MAX_RESIDENCY_S": "0",
        "WEIGHBRIDGE_ENGINES_SD_SERVER": str(program),
    }
    with running_suite(models_root, "mlx,sd", **settings) as started:
        if collision == "BYTES_HELD":
            chat_bytes, image_bytes = (
                int(started.json("fit", str(model), *words)["claim"]["host_bytes"])
                for model, words in (
                    (chat_model, ()),
                    (image_model.path, ("--engine", "sd", "--size", f"{SIDE_PX}x{SIDE_PX}")),
                )
            )
            limit_bytes = max(chat_bytes, image_bytes) * 9 // 8
            assert chat_bytes + image_bytes > limit_bytes
            started.cli("limit", f"{limit_bytes}B")
        yield started


@pytest.fixture
async def images(suite: Suite) -> AsyncIterator[ImageEngine]:
    async with open_channel(f"unix:{suite.run_dir}/engine-sd.sock") as channel:
        yield ImageEngine(channel)
    suite.cli("unload", "sd")
    suite.cli("unload", "mlx")
    assert suite.committed_bytes() == 0


@pytest.fixture
async def chats(suite: Suite) -> AsyncIterator[chat_service_pb2_grpc.ChatServiceStub]:
    async with open_channel(f"unix:{suite.run_dir}/engine-mlx.sock") as channel:
        yield chat_service_pb2_grpc.ChatServiceStub(channel)


def chat(chats: Any, model: Path, tokens: int) -> Any:
    """Begin an answer of so many tokens; the stream of its events."""
    part = chat_service_pb2.ContentPart(text="Count.")
    return chats.Chat(
        chat_service_pb2.ChatRequest(
            model=weights_pb2.ModelRef(path=str(model)),
            messages=[chat_service_pb2.ChatMessage(role=chat_service_pb2.ROLE_USER, parts=[part])],
            max_output_tokens=tokens,
            sampling=chat_service_pb2.Sampling(temperature=0),
        )
    )


async def test_an_image_waits_until_an_answer_is_complete(
    images: ImageEngine, chats: Any, image_model: ImageModel, chat_model: Path, collision: str
) -> None:
    answering = chat(chats, chat_model, tokens=300)
    lease_of_chat = admitted(await told(answering, until="delta"))
    rendering = images.generate(image_model)
    waits = (await told(rendering, until="load.queued")).events[-1].load.queued
    assert [reason.code for reason in waits.reasons] == [collision]

    answer = await told(answering)
    assert answer.events[-1].finished.usage.output_tokens == 300
    rest = await told(rendering)
    [asked] = [event.load.reclaiming for event in rest.events if event.load.HasField("reclaiming")]
    assert list(asked.victim_lease_ids) == [lease_of_chat]
    assert len(rest.images) == 1


async def test_a_chat_waits_until_a_render_is_complete(
    images: ImageEngine, chats: Any, image_model: ImageModel, chat_model: Path, collision: str
) -> None:
    rendering = images.generate(image_model, steps=100)
    lease_of_images = admitted(await told(rendering, until="progress"))
    answering = chat(chats, chat_model, tokens=3)
    waits = (await told(answering, until="load.queued")).events[-1].load.queued
    assert [reason.code for reason in waits.reasons] == [collision]

    assert len((await told(rendering)).images) == 1
    answer = await told(answering)
    assert answer.kinds[-1] == "finished"
    [asked] = [event.load.reclaiming for event in answer.events if event.load.HasField("reclaiming")]
    assert list(asked.victim_lease_ids) == [lease_of_images]
