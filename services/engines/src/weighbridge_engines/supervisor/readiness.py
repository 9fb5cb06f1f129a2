"""Whether an engine is ready, and later whether it still lives: two questions, each with its own timeout."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weighbridge_engines.supervisor.child import Child
from weighbridge_engines.supervisor.exits import ExitFacts, FatalLine

Probe = Callable[[], Awaitable[bool]]
"""Asks the engine once. False and any exception mean no."""


class EngineEndedError(Exception):
    """The engine ended while something was expected of it."""

    def __init__(self, facts: ExitFacts) -> None:
        super().__init__("the engine ended")
        self.facts = facts


class FatalOutputError(Exception):
    """The engine printed that it cannot go on, whether or not it ended."""

    def __init__(self, line: FatalLine) -> None:
        super().__init__(line.text)
        self.line = line


@dataclass(frozen=True)
class ReadinessPolicy:
    """How an engine is asked whether it is ready.

    Attributes:
        timeout_s: how long the whole start may take.
        poll_s: pause between probes.
        probe_timeout_s: how long one probe may take: a server that accepts and never answers must not hang the start.
    """

    timeout_s: float = 60.0
    poll_s: float = 0.05
    probe_timeout_s: float = 2.0


@dataclass(frozen=True)
class LivenessPolicy:
    """How a ready engine is watched: 15 s and 3 in a row are the reference system's (October 2026)."""

    interval_s: float = 15.0
    probe_timeout_s: float = 5.0
    failures: int = 3


async def until_ready(child: Child, probe: Probe, policy: ReadinessPolicy) -> None:
    """Return when ``probe`` says yes.

    Raises:
        EngineEndedError: the engine ended first.
        FatalOutputError: it printed that it cannot go on.
        TimeoutError: it did not become ready in time.
    """
    await while_alive(child, _ask_until_yes(probe, policy), policy.timeout_s)


async def while_alive(child: Child, work: Awaitable[None], timeout_s: float) -> None:
    """Run ``work``, which needs the engine, and give up at once when the engine ends or prints that it must.

    Raises as :func:`until_ready`, and what ``work`` raises.
    """
    working = asyncio.ensure_future(work)
    ended = asyncio.ensure_future(child.wait())
    fatal = asyncio.ensure_future(child.wait_fatal())
    try:
        done, _ = await asyncio.wait({working, ended, fatal}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ended in done:
            raise EngineEndedError(ended.result())
        if fatal in done:
            raise FatalOutputError(fatal.result())
        if not done:
            raise TimeoutError
        working.result()
    finally:
        for task in (working, ended, fatal):
            task.cancel()
        await asyncio.gather(working, ended, fatal, return_exceptions=True)


async def until_dead(probe: Probe, policy: LivenessPolicy, excused: Callable[[], bool] = lambda: False) -> None:
    """Return when ``probe`` has failed ``policy.failures`` times in a row.

    Args:
        excused: whether a failure does not count now, because the engine shows by other signs that it lives (a
            saturated engine answers probes late and is not to be killed in mid-answer).
    """
    failures = 0
    while failures < policy.failures:
        await asyncio.sleep(policy.interval_s)
        failures = 0 if await _ask(probe, policy.probe_timeout_s) or excused() else failures + 1


async def until_gone(is_gone: Callable[[], bool], timeout_s: float, poll_s: float = 0.02) -> bool:
    """Whether ``is_gone`` became true within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not is_gone():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(poll_s)
    return True


async def _ask_until_yes(probe: Probe, policy: ReadinessPolicy) -> None:
    while not await _ask(probe, policy.probe_timeout_s):  # noqa: ASYNC110 # another process tells no event
        await asyncio.sleep(policy.poll_s)


async def _ask(probe: Probe, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await probe()
    except Exception:  # however a probe fails, the answer is: not yet
        return False
