"""The HTTP of ds4-server: a list of models, chats, and nothing else; no health check and no way to stop a request."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from typing import Any

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.client import Client
from services.engines.standins.ds4.command_line import CommandLine
from services.engines.standins.ds4.engine import Engine
from services.engines.standins.ds4.flags import MAY
from services.engines.standins.ds4.prompt import RefusedError, read_request
from services.engines.standins.ds4.startup import Loaded
from services.engines.standins.ds4.stopping import Stopping

DEFAULT_TOKENS = 393_216
BACKLOG = 128
_CREATED = 1_767_225_600
_PARAMETERS = ("tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream",
               "reasoning_effort")  # fmt: skip
_FLASH, _PRO = ("deepseek-v4-flash", "DeepSeek V4 Flash"), ("deepseek-v4-pro", "DeepSeek V4 Pro")
_V41, _GLM = ("deepseek-v4.1-flash", "DeepSeek V4.1 Flash"), ("glm-5.2", "GLM 5.2")


async def serve(line: CommandLine, loaded: Loaded, behaviour: Behaviour, stopping: Stopping) -> None:
    """Until it is asked to end and has dealt with everything that came before."""
    server = _Server(line, loaded, behaviour, stopping)
    listener = _listen(line)
    log.server(f"listening on http://{line.host}:{line.port}")
    loop = asyncio.get_running_loop()
    accepting = asyncio.create_task(server.accept(listener))
    stopping.tell(lambda: loop.call_soon_threadsafe(accepting.cancel))
    with contextlib.suppress(asyncio.CancelledError):
        await accepting
    listener.close()
    log.server("shutdown requested, draining requests")
    await server.drain()


def _listen(line: CommandLine) -> socket.socket:
    """Ends the process where the port cannot be had, which is only found out now."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    host = "127.0.0.1" if line.host == "localhost" else line.host
    try:
        try:
            socket.inet_pton(socket.AF_INET, host)
        except OSError:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
        listener.bind((host, line.port & 0xFFFF))
        listener.listen(BACKLOG)
    except OSError as error:
        log.server(f"failed to listen on {line.host}:{line.port}: {error.strerror}")
        sys.exit(1)
    return listener


class _Server:
    def __init__(self, line: CommandLine, loaded: Loaded, behaviour: Behaviour, stopping: Stopping) -> None:
        self._line = line
        self._behaviour = behaviour
        self._stopping = stopping
        self._default_tokens = line.number("tokens", DEFAULT_TOKENS)
        architecture = loaded.file.architecture
        aliases = {"deepseek41": [_V41], "glm-dsa": [_GLM]}.get(architecture, [_FLASH, _PRO])
        self._aliases = dict([_FLASH] if behaviour.build == MAY else aliases)
        self._engine = Engine(line, loaded, behaviour, stopping)
        self._clients: set[asyncio.Task[None]] = set()
        self._unanswered: list[socket.socket] = []

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            if not self._behaviour.answers:
                self._unanswered.append(connection)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def drain(self) -> None:
        while self._clients:
            await asyncio.wait(self._clients)
        self._engine.close()

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        client = Client(connection, self._behaviour, self._stopping, cors=self._line.has("cors"))
        try:
            received = await client.receive()
            if received is None:
                await client.refuse(400, "bad HTTP request")
            else:
                await self._answer(client, *received)
        finally:
            client.close()

    async def _answer(self, client: Client, method: str, path: str, body: bytes) -> None:
        alias = path.removeprefix("/v1/models/")
        if method == "OPTIONS":
            await client.respond(204)
        elif (method, path) == ("GET", "/v1/models"):
            await client.respond(200, {"object": "list", "data": [self._model(each) for each in self._aliases]})
        elif method == "GET" and path != alias and alias in self._aliases:
            await client.respond(200, self._model(alias))
        elif (method, path) == ("POST", "/v1/chat/completions"):
            await self._chat(client, body)
        else:
            await client.refuse(404, "unknown endpoint")

    async def _chat(self, client: Client, body: bytes) -> None:
        context = self._line.context
        try:
            request = read_request(body, self._default_tokens, context)
        except RefusedError as refused:
            await client.refuse(400, str(refused))
            return
        if request.prompt_tokens >= context:
            counted = f"Prompt has {request.prompt_tokens} tokens, but the configured context size is {context} tokens"
            await client.refuse(
                400, counted, param="messages", code="context_length_exceeded",
                n_prompt_tokens=request.prompt_tokens, n_ctx=context,
            )  # fmt: skip
            return
        if self._behaviour.stopping or self._stopping.asked:
            await client.refuse(503, "server shutting down")
            return
        if self._behaviour.cancels:
            client.watch()
        await self._engine.run(request, client)

    def _model(self, alias: str) -> dict[str, Any]:
        context = self._line.context
        return {
            "id": alias, "object": "model", "created": _CREATED, "owned_by": "ds4.c", "name": self._aliases[alias],
            "context_length": context,
            "top_provider": {
                "context_length": context, "max_completion_tokens": min(context, self._default_tokens),
                "is_moderated": False,
            },
            "supported_parameters": list(_PARAMETERS),
        }  # fmt: skip
