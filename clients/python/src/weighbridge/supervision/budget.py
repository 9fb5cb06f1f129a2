"""How often a service that dies is started again."""

from dataclasses import dataclass, field

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
"""A service that was killed once is back within the patience of a waiting client; one that cannot live does not burn
a core with its attempts."""

MAX_RESTARTS = 8
WINDOW_S = 60.0
"""Restarts within this window before the service counts as broken. With the delays above eight attempts take 20 s."""


@dataclass
class RestartBudget:
    """Decides on each death of one service whether and when it starts again. Times are seconds of any steady clock."""

    max_restarts: int = MAX_RESTARTS
    window_s: float = WINDOW_S
    first_delay_s: float = FIRST_DELAY_S
    longest_delay_s: float = LONGEST_DELAY_S
    _deaths: list[float] = field(default_factory=list)

    def delay_after_death(self, now_s: float) -> float | None:
        """Seconds to wait before the next start; None: too many deaths in the window, give up.

        The delay doubles with each death in the window, so it falls back by itself when the service lives on.
        """
        self._deaths = [death for death in self._deaths if now_s - death < self.window_s]
        self._deaths.append(now_s)
        if len(self._deaths) > self.max_restarts:
            return None
        return float(min(self.first_delay_s * 2 ** (len(self._deaths) - 1), self.longest_delay_s))
