"""What is said stays between the person and the model: no log, span, metric or file of the suite has a word of it."""

from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
)
from weighbridge_proto.fit.v1 import weights_pb2

from tests.harness import running_suite

pytestmark = pytest.mark.mlx

SECRET = "xyzzy-plugh-9471"  # a phrase that nothing else says
DEBUG = {f"WEIGHBRIDGE_{service}_LOG_LEVEL": "debug" for service in ("ENGINES", "FIT", "LEDGER")}


class Collector(grpc.GenericRpcHandler):
    """Takes every OTLP export (traces, metrics, logs) as bytes."""

    def __init__(self) -> None:
        self.exports: list[tuple[str, bytes]] = []

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """One handler for every method."""

        def take(request: bytes, _context: Any) -> bytes:
            self.exports.append((call.method, request))
            return b""

        identity: Callable[[bytes], bytes] = bytes
        return grpc.unary_unary_rpc_method_handler(take, identity, identity)


def request(model: Path, **fields: Any) -> chat_service_pb2.ChatRequest:
    def said(role: "chat_service_pb2.Role.ValueType") -> chat_service_pb2.ChatMessage:
        part = chat_service_pb2.ContentPart(text=f"Remember {SECRET}.")
        return chat_service_pb2.ChatMessage(role=role, parts=[part])

    return chat_service_pb2.ChatRequest(
        model=weights_pb2.ModelRef(path=str(model)),
        messages=[said(chat_service_pb2.ROLE_SYSTEM), said(chat_service_pb2.ROLE_USER)],
        **{"max_output_tokens": 24, "stop_sequences": [SECRET], **fields},
    )


async def test_nothing_of_a_conversation_is_kept_or_exported(models_root: Path, tiny_models: Path) -> None:
    collector, model = Collector(), tiny_models / "tiny-qwen3-bf16"
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[collector])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    answer = ""
    with running_suite(models_root, WEIGHBRIDGE_OTLP_ENDPOINT=endpoint, **DEBUG) as suite:
        async with open_channel(f"unix:{suite.run_dir / 'engine-mlx.sock'}") as channel:
            chats = chat_service_pb2_grpc.ChatServiceStub(channel)
            async for response in chats.Chat(request(model, sampling=chat_service_pb2.Sampling(temperature=1, seed=3))):
                answer += response.delta.text
            for bad in ({"max_output_tokens": 10**6}, {"stop_sequences": 17 * [SECRET]}, {"adapter": SECRET}):
                with pytest.raises(grpc.RpcError):
                    async for _ in chats.Chat(request(model, **bad)):
                        pass
            tail = engine_service_pb2_grpc.EngineServiceStub(channel).TailLog(
                engine_service_pb2.TailLogRequest(max_lines=10_000)
            )
            printed = "\n".join([line.line async for line in tail])
        suite.cli("chat", str(model), f"Say {SECRET}", "--max-tokens", "8")
        suite.cli("unload", "mlx")
        assert suite.stop() == 0
        kept = {str(path): path.read_bytes() for path in suite.home.rglob("*") if path.is_file()}
    server.stop(None)

    assert len(answer) > 20
    assert {method.rpartition("/")[0].rpartition(".")[2] for method, _ in collector.exports} >= {
        "TraceService", "MetricsService",
    }  # fmt: skip
    assert any(name.endswith("engine-mlx.log") for name in kept)
    seen = {**kept, "TailLog": printed.encode(), **{f"{m} {i}": b for i, (m, b) in enumerate(collector.exports)}}
    assert any(model.name.encode() in content for _, content in collector.exports), "exports can be searched"
    for phrase in (SECRET, answer, answer[:12]):
        assert [where for where, content in seen.items() if phrase.encode() in content] == []
