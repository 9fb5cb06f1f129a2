"""An answer as JSON: chunks of an event stream, or one whole body."""

import json
import time
from typing import Any

from services.engines.standins.ds4.client import Client
from services.engines.standins.ds4.prompt import Request
from services.engines.standins.ds4.script import Answer


class Reply:
    """Where the answer to one request goes. ``number`` counts answers since the server began."""

    def __init__(self, client: Client, request: Request, number: int) -> None:
        self._client = client
        self._request = request
        self._id = f"chatcmpl-{number}"

    async def role(self) -> bool:
        """Who speaks; like all here: whether it went out."""
        return await self.delta({"role": "assistant"})

    async def delta(self, delta: dict[str, Any], finish: str | None = None) -> bool:
        """One more piece."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return await self._event({**self._head("chat.completion.chunk"), "choices": [choice]})

    async def end_stream(self, answer: Answer, finish: str, usage: dict[str, Any]) -> bool:
        """What was held back, why it ended, what it took if that was asked for, and the mark of the end."""
        for delta in answer.flush():
            if not await self.delta(delta):
                return False
        if not await self.delta({}, finish):
            return False
        if self._request.include_usage:
            chunk = {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}
            if not await self._event(chunk):
                return False
        return await self._client.send(b"data: [DONE]\n\n")

    async def whole(self, answer: Answer, finish: str, usage: dict[str, Any]) -> bool:
        """The answer to a request that asked for no stream."""
        answer.flush()
        choice = {"index": 0, "message": answer.message(), "finish_reason": finish}
        return await self._client.respond(200, {**self._head("chat.completion"), "choices": [choice], "usage": usage})

    async def _event(self, chunk: dict[str, Any]) -> bool:
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return await self._client.send(f"data: {text}\n\n".encode())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self._request.model}


def usage_of(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """What a request took, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": max(0, prompt - cached)},
    }


async def send_failure(client: Client, error: str) -> bool:
    """A failure after the headers of a stream are out."""
    told = json.dumps({"error": {"message": error, "type": "server_error"}}, separators=(",", ":"))
    return await client.send(f"event: error\ndata: {told}\n\n".encode())
