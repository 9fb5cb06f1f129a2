"""Which lines of ds4's output are about which request.

A line names no request, only the span of its prompt in tokens (``ctx=<cached>..<prompt>:<new>``), which nobody knows
before the line comes. ds4 takes requests in the order in which they come. So a prompt that starts belongs to the oldest
request that has not started; a later line with the same span belongs to that request; and where ds4 holds one
conversation, a prompt that starts shows that every request before it is over.
"""

from collections.abc import Callable

from weighbridge_engines.ds4.events import PromptStarted, RequestEnded, RequestEvent, Span

MOST_KEPT = 64
"""Requests that are followed at most. More are there only where the output tells nothing of them."""


def _nothing() -> None:
    pass


class Turn:
    """One request to ds4.

    Attributes:
        span: of its prompt, when it has started; None before that.
        ended: how it ended, by ds4's output; None: nothing was printed of that.
        is_over: whether ds4 computes nothing for it any more, by whatever sign.
        heard_at_s: when ds4 last printed a line that is certainly about it; before that, when it was sent.
        on_change: called when anything becomes known of it.
    """

    def __init__(self, sent_at_s: float, starts_before: int) -> None:
        self.span: Span | None = None
        self.ended: RequestEnded | None = None
        self.is_over = False
        self.heard_at_s = sent_at_s
        self.on_change: Callable[[], None] = _nothing
        self.starts_before = starts_before

    def end(self, ended: RequestEnded | None = None) -> None:
        """Nothing is computed for it any more."""
        self.ended = ended or self.ended
        self.is_over = True
        self.on_change()


class TurnLog:
    """See the module.

    Args:
        sessions: conversations that ds4 holds at once.
        now: the clock.
    """

    def __init__(self, sessions: int, now: Callable[[], float]) -> None:
        self._sessions = sessions
        self._now = now
        self._turns: list[Turn] = []
        self._starts = 0
        self._heard_at_s = now()

    def begin(self) -> Turn:
        """A request that is sent now."""
        turn = Turn(self._now(), self._starts)
        self._turns.append(turn)
        del self._turns[:-MOST_KEPT]
        return turn

    def close(self, turn: Turn) -> None:
        """It is over, by what its stream said. Its lines may still come: they take another way than its answer."""
        turn.end()
        if turn.span is None and self._sessions == 1 and self._starts > turn.starts_before:
            # Its line came and was taken for that of an older request, one that never started.
            self.forget(turn)

    def forget(self, turn: Turn) -> None:
        """No line will come of it: ds4 refused it, or never got it."""
        turn.is_over = True
        if turn in self._turns:
            self._turns.remove(turn)

    def heard_of(self, turn: Turn) -> float:
        """When ds4 last showed that it works for a request: where it holds one conversation, every line does."""
        return max(turn.heard_at_s, self._heard_at_s) if self._sessions == 1 else turn.heard_at_s

    def take(self, event: RequestEvent) -> None:
        """What a line says about a request."""
        self._heard_at_s = self._now()
        if isinstance(event, PromptStarted):
            self._start(event.span)
        elif isinstance(event, RequestEnded):
            self._end(event)
        else:
            for turn in self._turns:
                if turn.span == event.span:
                    turn.heard_at_s = self._heard_at_s

    def _start(self, span: Span) -> None:
        self._starts += 1
        waiting = [turn for turn in self._turns if turn.span is None]
        if not waiting:
            return
        turn = waiting[0]
        if self._sessions == 1:
            before = self._turns[: self._turns.index(turn)]
            del self._turns[: len(before)]
            for earlier in before:
                earlier.end()
        turn.span = span
        turn.heard_at_s = self._heard_at_s
        turn.on_change()

    def _end(self, ended: RequestEnded) -> None:
        running = [turn for turn in self._turns if turn.span is not None]
        fitting = [turn for turn in running if turn.span == ended.span]
        # Where the line does not say, and one only can be meant, it is that one.
        turn = fitting[0] if fitting else running[0] if ended.span is None and len(running) == 1 else None
        if turn is not None:
            self._turns.remove(turn)
            turn.end(ended)
