"""Sessions, and the requests that wait for one: first come, first served, and nobody is asked whether they still wait.

A session holds one conversation. A prompt that goes on where a session stands is read from there; any other one is
read anew, and the session forgets what it held.
"""

import asyncio
import functools
from collections import deque
from dataclasses import dataclass

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.checkpoints import Checkpoints
from services.engines.standins.ds4.client import Client
from services.engines.standins.ds4.command_line import CommandLine
from services.engines.standins.ds4.prompt import Request
from services.engines.standins.ds4.startup import Loaded
from services.engines.standins.ds4.stopping import Stopping
from services.engines.standins.ds4.turn import Model, Session, Turn


@dataclass
class _Job:
    request: Request
    client: Client
    done: asyncio.Event


class Engine:
    """As many sessions as were asked for, one request on each at a time."""

    def __init__(self, line: CommandLine, loaded: Loaded, behaviour: Behaviour, stopping: Stopping) -> None:
        chunk = loaded.context.chunk or line.context
        checkpoints = Checkpoints(line)
        self._checkpoints = checkpoints
        self._model = Model(behaviour, stopping, checkpoints, line.context, chunk, line.backend == "cpu")
        self._waiting: deque[_Job] = deque()
        self._sessions = [Session() for _ in range(line.sessions)]
        self._idle = list(self._sessions)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, request: Request, client: Client) -> None:
        """Until the request has been dealt with, whatever became of whoever sent it."""
        job = _Job(request, client, asyncio.Event())
        self._waiting.append(job)
        self._dispatch()
        await job.done.wait()

    def close(self) -> None:
        """Nothing runs any more: save what is live."""
        for session in self._sessions:
            self._checkpoints.save_last(session.text)

    def _dispatch(self) -> None:
        while self._waiting and self._idle:
            job = self._waiting.popleft()
            session = max(self._idle, key=functools.partial(Session.continued, prompt=job.request.prompt))
            self._idle.remove(session)
            task = asyncio.create_task(self._serve(job, session))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _serve(self, job: _Job, session: Session) -> None:
        try:
            if not job.client.left.is_set():
                await Turn(self._model, job.request, job.client, session).run()
        finally:
            job.done.set()
            self._idle.append(session)
            self._dispatch()
