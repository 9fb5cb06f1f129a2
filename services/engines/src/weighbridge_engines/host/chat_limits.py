"""How many pieces one chat may be of, for every engine, and where a large one is looked through.

The size of a message alone bounds little: 32 MiB hold millions of empty messages or tools, and each piece costs many
times its bytes in every process that handles it. The bounds are far above what a model can read: of the largest context
that an engine offers, 1,048,576 tokens, they leave 64 tokens a message and 16 a part.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.errors import invalid_argument

MOST_MESSAGES = 16_384
MOST_PARTS = 65_536
"""Parts and tool calls of all messages together."""
MOST_TOOLS = 1_024
"""A tool takes some 100 tokens or more of the prompt: its name, what it does, and the schema of its arguments."""

LARGE_REQUEST_BYTES = 64 * 2**10
"""A request from this size on is looked through beside the event loop. A message may have 32 MiB, and the check of
one tool whose schema has 30 MB takes 7 s (measured, December 2026): on the loop, nobody is answered and no lease is
renewed meanwhile. Smaller ones are looked through in the order in which they come, within 0.1 s, and need no thread to
be woken up."""

T = TypeVar("T")


def refuse_too_many(request: chat_pb.ChatRequest) -> None:
    """Refuse a chat of too many pieces.

    Raises:
        RequestError: INVALID_ARGUMENT TOO_MANY_MESSAGES, TOO_MANY_PARTS, TOO_MANY_TOOLS, with what was given and the
            limit.
    """
    # Messages first: those are looked at one by one for their parts.
    _refuse_more(len(request.messages), MOST_MESSAGES, "messages", "messages", "TOO_MANY_MESSAGES")
    parts = sum(len(message.parts) + len(message.tool_calls) for message in request.messages)
    _refuse_more(parts, MOST_PARTS, "messages", "parts and tool calls in all messages", "TOO_MANY_PARTS")
    _refuse_more(len(request.tools), MOST_TOOLS, "tools", "tools", "TOO_MANY_TOOLS")


def _refuse_more(given: int, limit: int, field: str, what: str, reason: str) -> None:
    if given > limit:
        description = f"a chat may have at most {limit:,} {what}, and this one has {given:,}"
        raise invalid_argument(field, description, reason, metadata={"given": given, "limit": limit})


async def look_through(request: chat_pb.ChatRequest, work: Callable[[], T]) -> T:
    """What ``work`` makes of all of a request: here, or in a thread where that is large."""
    return work() if request.ByteSize() < LARGE_REQUEST_BYTES else await asyncio.to_thread(work)
