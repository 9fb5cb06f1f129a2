"""Finds stop sequences in text that arrives in pieces."""

from collections.abc import Iterable


class StopScanner:
    """Passes text through until one of the stop strings is complete, wherever the pieces are cut.

    The first stop string to be *completed* wins; of two completed by the same character, the longer one. What is
    passed on never contains a stop string nor the start of one that later completes, and does not depend on how the
    text was cut.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: the stop strings. Raises ValueError for an empty one, which would stop before the first character."""
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("a stop sequence must not be empty")
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, once one was."""

    def feed(self, text: str) -> str:
        """Takes the next piece and returns the text that is safe to show. After a match it returns nothing more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            shown, self._held = self._held[:start], ""
            return shown
        safe = len(self._held) - self._longest_open_start()
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown

    def finish(self) -> str:
        """The text that was held back because a stop string might have followed. Call it when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _longest_open_start(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
