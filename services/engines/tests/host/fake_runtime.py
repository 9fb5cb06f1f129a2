"""A runtime that holds no model: speaks RuntimeService, and misbehaves as FAKE_RUNTIME (JSON) or a prompt says."""

# ruff: noqa: N802 # rpcs are named as in the contract

import asyncio
import json
import os
import signal
import sys
import threading

BEHAVIOUR = json.loads(os.environ.get("FAKE_RUNTIME", "{}"))


def _lifeline():
    while os.read(0, 1):
        pass
    os._exit(74)


if BEHAVIOUR.get("exit_at_start") is not None:
    print("cannot go on", file=sys.stderr, flush=True)
    os._exit(BEHAVIOUR["exit_at_start"])
threading.Thread(target=_lifeline, daemon=True).start()
if BEHAVIOUR.get("never_ready"):
    if BEHAVIOUR.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("not getting ready", flush=True)
    threading.Event().wait()

import grpc  # noqa: E402
from grpc_health.v1 import health, health_pb2_grpc  # noqa: E402
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb  # noqa: E402
from weighbridge_proto.engines.v1 import runtime_service_pb2 as pb  # noqa: E402
from weighbridge_proto.engines.v1 import runtime_service_pb2_grpc  # noqa: E402
from weighbridge_proto.errors import RequestError  # noqa: E402


class Runtime(runtime_service_pb2_grpc.RuntimeServiceServicer):
    def __init__(self):
        self.busy = 0

    async def Load(self, request, context):
        yield pb.LoadResponse(phase="weights", fraction=0.0)
        if os.path.basename(request.model_path) == "refused":
            error = RequestError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_WEIGHTS", "The weights are broken.")
            await context.abort_with_status(error.failure.to_grpc_status())
        if BEHAVIOUR.get("die_in_load"):
            os.kill(os.getpid(), BEHAVIOUR["die_in_load"])
        if BEHAVIOUR.get("hang_in_load"):
            await asyncio.Event().wait()
        yield pb.LoadResponse(phase="weights", fraction=1.0)
        yield pb.LoadResponse(phase="done", fraction=1.0)

    async def Generate(self, request, context):
        prompt = request.chat.messages[-1].parts[0].text
        self.busy += 1
        try:
            yield pb.GenerateResponse(started=chat_pb.ChatStarted(model_name="fake", prompt_tokens=3))
            if prompt == "overflow":
                error = RequestError(
                    grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_OVERFLOW", "Too long.", metadata={"prompt_tokens": 9}
                )
                await context.abort_with_status(error.failure.to_grpc_status())
            for number in range(3):
                yield pb.GenerateResponse(delta=chat_pb.ChatDelta(text=f"t{number} busy={self.busy} "))
                if prompt == "crash":
                    await asyncio.sleep(0.1)  # so that what was written is on its way
                    os.kill(os.getpid(), signal.SIGKILL)
                if prompt == "endless":
                    print("answering", flush=True)
                    await asyncio.Event().wait()
            yield pb.GenerateResponse(
                finished=chat_pb.ChatFinished(
                    reason=chat_pb.FINISH_REASON_STOP, usage=chat_pb.Usage(prompt_tokens=3, output_tokens=3)
                )
            )
        finally:
            self.busy -= 1
            print(f"generate ended, busy={self.busy}", flush=True)


async def main():
    server = grpc.aio.server()
    runtime_service_pb2_grpc.add_RuntimeServiceServicer_to_server(Runtime(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    server.add_insecure_port("unix:" + sys.argv[sys.argv.index("--socket") + 1])
    await server.start()
    stop = asyncio.Event()
    if not BEHAVIOUR.get("ignore_term"):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("loading\r 50%\r100%\nserving", flush=True)
    await stop.wait()
    await server.stop(0)


asyncio.run(main())
