"""Requests that were given up and that ds4 may still compute.

Builds before August 2026 notice only at a write that nobody listens: a prompt is read to its end for nobody, which
takes minutes, and the answer stops at one of its first tokens. Their output tells when that is over. Where it tells
nothing (a prompt that failed prints no line), the same request is sent once more, for one token: ds4 takes requests in
turn, so its answer shows that the one before is over, and the prompt is mostly computed by then.
"""

import asyncio
from dataclasses import dataclass

from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

from weighbridge_engines.ds4 import requests
from weighbridge_engines.ds4.client import ConnectionLostError, Ds4Client
from weighbridge_engines.ds4.served import Served
from weighbridge_engines.ds4.turns import Turn, TurnLog
from weighbridge_engines.host.clock import Clock
from weighbridge_engines.host.kind import EngineBrokenError, EngineLostError
from weighbridge_engines.host.waiting import first_of_two

PROBE_AFTER_S = 10.0
"""Without a line of it for so long, a request that was given up is sent again. The first comes some milliseconds after
ds4 has it, or, for the longest prompts, a second."""

PROBE_RUNNING_AFTER_S = 120.0
"""Likewise, once its prompt is being read. A line comes with each chunk, which takes minutes at worst, and a probe has
a price: with its token behind the prompt, ds4 reads the same prompt from its beginning next time (seen, May 2026)."""


@dataclass(frozen=True)
class _Leftover:
    turn: Turn
    request: chat_pb.ChatRequest
    since_s: float


class Leftovers:
    """See the module.

    Args:
        client: the connection.
        log: what ds4 prints about requests.
        served: what the process is.
        idle_limit_s: without a sign of life for so long, ds4 is taken to hang.
        clock: reads and waits.
    """

    def __init__(self, client: Ds4Client, log: TurnLog, served: Served, idle_limit_s: float, clock: Clock) -> None:
        self._client = client
        self._log = log
        self._served = served
        self._idle_limit_s = idle_limit_s
        self._clock = clock
        self._left: list[_Leftover] = []
        self._settling = asyncio.Lock()

    def add(self, turn: Turn, request: chat_pb.ChatRequest) -> None:
        """A request whose socket was closed before its end."""
        if self._served.stops_on_disconnect:
            self._log.forget(turn)
        else:
            self._left.append(_Leftover(turn, request, self._clock.monotonic()))

    async def settle(self) -> None:
        """Return when none is computed any more.

        Raises:
            EngineLostError: ds4 is gone.
            EngineBrokenError: nothing came of it within the idle limit.
        """
        async with self._settling:
            while self._left:
                await self._until_over(self._left[0])
                self._left.pop(0)

    async def _until_over(self, left: _Leftover) -> None:
        turn, changed = left.turn, asyncio.Event()
        turn.on_change = changed.set
        probing: asyncio.Task[None] | None = None
        try:
            # A probe is a request, too: it is waited for once it was sent.
            while not (turn.is_over if probing is None else probing.done()):
                silent_s = self._clock.monotonic() - max(left.since_s, self._log.heard_of(turn))
                if silent_s >= self._idle_limit_s:
                    raise EngineBrokenError(
                        f"it computes for a request that was given up, and told nothing of it for {silent_s:.0f} s"
                    )
                # Where several conversations are held, another one's place would answer, and show nothing.
                may_probe = probing is None and self._served.sessions == 1
                probe_after_s = PROBE_AFTER_S if turn.span is None else PROBE_RUNNING_AFTER_S
                if may_probe and silent_s >= probe_after_s:
                    probing = asyncio.create_task(self._probe(left.request), name="ds4-probe")
                    probing.add_done_callback(lambda _: changed.set())
                    may_probe = False
                limit_s = min(probe_after_s, self._idle_limit_s) if may_probe else self._idle_limit_s
                await first_of_two(changed.wait(), self._clock.sleep(limit_s - silent_s))
                changed.clear()
            if probing is not None:
                probing.result()
                self._log.forget(turn)
        finally:
            if probing is not None:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self, request: chat_pb.ChatRequest) -> None:
        """Returns when ds4 has answered it once more, whatever it said."""
        body = await asyncio.to_thread(requests.render, request, self._served, 1)
        turn, stream = self._log.begin(), self._client.chat(body)
        try:
            async with stream:
                while not stream.ended:
                    while stream.take() is not None:
                        pass
                    await stream.changed()
            if isinstance(stream.failure, ConnectionLostError):
                raise EngineLostError(f"it does not answer ({stream.failure})")
        finally:
            self._log.close(turn)
