"""An engine for chats that computes nothing and cannot be stopped: a real process that sleeps, and a runtime that does
what its test wants of it."""

import asyncio
import shutil

import grpc
from host_fakes import Suite
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError, KindDescription, KindLaunch
from weighbridge_engines.supervisor.child import ChildSpec
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import plan_pb2


class FakeChatRuntime:
    """Answers as the prompt says: ``endless`` streams one piece and then nothing, ``broken`` finds the engine broken,
    ``silent`` fails while the engine computes on. What is given up is computed until the kind's `free` is set."""

    def __init__(self, kind):
        self.kind = kind
        self._closed = asyncio.get_running_loop().create_future()

    async def is_ready(self):
        return True

    async def is_alive(self):
        return True

    async def load(self, plan):
        yield engine_pb.LoadStarting(phase="weights", fraction=0.5)
        for announced in self.kind.announces:
            yield announced
        yield engine_pb.LoadStarting(phase="weights", fraction=1.0)

    async def chat(self, request):
        prompt, finished = request.messages[0].parts[0].text, False
        self.kind.begun.append(prompt)
        assert not self.kind.computing, "given a second request while it computes"
        self.kind.computing = True
        try:
            yield chat_pb.ChatResponse(delta=chat_pb.ChatDelta(text="a"))
            if prompt == "endless":
                await asyncio.shield(self._closed)
                raise EngineLostError("the connection broke")
            if prompt == "broken":
                raise EngineBrokenError("Three answers in a row failed.")
            if prompt == "silent":
                raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, "ENGINE_SILENT", "Nothing came of it.")
            yield chat_pb.ChatResponse(finished=chat_pb.ChatFinished(reason=chat_pb.FINISH_REASON_STOP))
            finished = True
        finally:
            if finished or prompt == "broken":
                self.kind.computing = False

    async def settle(self):
        await self.kind.free.wait()  # a closed connection tells it nothing
        self.kind.computing = False
        if self.kind.settles_broken:
            raise EngineBrokenError("It never came to an end.")

    async def aclose(self):
        self.kind.computing = False
        if not self._closed.done():
            self._closed.set_result(None)


class FakeChatKind:
    """See the module."""

    name = "mlx"
    title = "The chat engine"
    engine_kind = plan_pb2.ENGINE_KIND_MLX
    does_chat = True
    does_images = False
    exclusive = False
    least_start_timeout_s = 900.0
    least_stop_grace_s = 30.0

    def __init__(self):
        self.announces = []
        self.begun = []
        self.computing = False
        self.free = asyncio.Event()
        self.settles_broken = False

    def describe(self):
        return KindDescription("fake talker", "build-1")

    def check_options(self, options):
        pass

    def complete_options(self, options):
        pass

    def check_plan(self, plan):
        pass

    def check_chat(self, request):
        pass

    def launch(self, plan, workspace):
        child = ChildSpec("talker", (shutil.which("sleep"), "1000"), {}, workspace)
        return KindLaunch(child, lambda: FakeChatRuntime(self))

    def slots(self, plan):
        return 1


class ChatSuite(Suite):
    """A suite whose engine goes on computing what is given up."""

    def __init__(self, run_dir, **settings):
        super().__init__(run_dir, kind=FakeChatKind(), **settings)

    def warm_up(self, prompt="warm", model="a"):
        request = self.chat_request(prompt, model)
        request.warm_up = True
        return self.chats.Chat(request)
