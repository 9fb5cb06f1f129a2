"""How long a render has yet to go, told by what it took so far. No I/O, no clock."""

from weighbridge_engines.sd_server.jobs import RenderProgress

DECODE_STEPS = 4
"""A decode is taken to last as long as so many sampling steps, until its own progress tells. By operations it is some 3
steps of SD 1.5 or SDXL without guidance and fewer of larger models; its convolutions run a little worse."""


class RenderPace:
    """One render's pace.

    Args:
        images: how many it makes.
    """

    def __init__(self, images: int) -> None:
        self._images = images
        self._phase = ""
        self._entered_s = self._heard_s = 0.0
        self._done = self._total = 0
        self._step_s: float | None = None

    def heard(self, progress: RenderProgress, now_s: float) -> None:
        """It came so far."""
        if progress.phase != self._phase:
            self._phase, self._entered_s = progress.phase, now_s
        self._heard_s, self._done, self._total = now_s, progress.done, progress.total
        if self._phase == "sampling" and self._done:
            self._step_s = (now_s - self._entered_s) / self._done

    def seconds_left(self, now_s: float) -> float | None:
        """How long it will probably take from now on; None: nothing was measured that would tell."""
        if self._step_s is None:
            return None
        decode_s = DECODE_STEPS * self._images * self._step_s
        since_s = now_s - self._heard_s
        if self._phase == "sampling" and self._done < self._total:
            return max(0.0, (self._total - self._done) * self._step_s - since_s) + decode_s
        if self._phase == "decode" and self._done:
            part_s = (self._heard_s - self._entered_s) / self._done
            return max(0.0, (self._total - self._done) * part_s - since_s)
        return max(0.0, decode_s - since_s)
