"""How often an engine may be started again after it failed, and how soon."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """The figures of a :class:`RestartBudget`.

    Attributes:
        failures: so many failed starts or crashes within the window, and no further start is allowed.
        window_s: length of the sliding window.
        first_delay_s, longest_delay_s: wait after the first failure, doubled with each further one up to the longest.

    3 in 60 s is the reference system's budget (reference system, supervisor, October 2026).
    """

    failures: int = 3
    window_s: float = 60.0
    first_delay_s: float = 0.25
    longest_delay_s: float = 5.0


class RestartBudget:
    """Counts failures, not starts: an engine that is loaded and unloaded in good health may be so at any rate."""

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self._policy = policy or RestartPolicy()
        self._failures: deque[float] = deque()

    def record_failure(self, now_s: float) -> None:
        """A start failed or a running engine crashed at ``now_s`` (monotonic clock)."""
        self._failures.append(now_s)

    def exhausted_for_s(self, now_s: float) -> float | None:
        """Seconds until a start is allowed again; None: it is allowed."""
        self._forget(now_s)
        if len(self._failures) < self._policy.failures:
            return None
        return self._failures[-self._policy.failures] + self._policy.window_s - now_s

    def delay_s(self, now_s: float) -> float:
        """How long the next start should wait so as not to spin: 0 unless something failed just now."""
        self._forget(now_s)
        if not self._failures:
            return 0.0
        delay = self._policy.first_delay_s * float(2 ** (len(self._failures) - 1))
        return max(0.0, self._failures[-1] + min(delay, self._policy.longest_delay_s) - now_s)

    def _forget(self, now_s: float) -> None:
        while self._failures and self._failures[0] <= now_s - self._policy.window_s:
            self._failures.popleft()
