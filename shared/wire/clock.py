"""Time marks that work the same way on CPU and GPU."""

import time
from typing import Any

import torch

PAUSE_S = 1e-4  # between two queries of the GPU
_JUST_REACHED_S = 1e-3  # if one stream has waited for something, others that wait for it continue within microseconds


class Clock:
    """Takes time marks: on a CPU the current time, on a GPU an event that completes when the GPU reaches it.

    On a GPU, a call like `all_reduce` or `wait()` returns before anything has happened, so the time on the host means
    nothing. A mark is an event on the current stream, and the time between two marks is the time that the stream needed
    to get from one to the other.

    Seconds are those of this machine's monotonic clock, which all its processes share.
    """

    def __init__(self):
        self.on_gpu = torch.cuda.is_initialized()
        if self.on_gpu:
            self._device = torch.cuda.current_device()
            self._stream = torch.cuda.current_stream(self._device)
            wait_for(self.mark())  # an idle stream reaches the next mark at once
        self.began_s = time.perf_counter()
        self._began = self.mark()

    def mark(self) -> Any:
        """Mark the point that the current stream has reached. Returns a mark to pass to seconds()."""
        if not self.on_gpu:
            return time.perf_counter()
        with torch.cuda.device(self._device):  # another thread may have a different current device
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def seconds(self, mark) -> float:
        """Convert a mark to seconds. On a GPU, this waits until the GPU has reached the mark."""
        if not self.on_gpu:
            return mark
        wait_for(mark)
        return self.began_s + self._began.elapsed_time(mark) / 1e3

    def catch_up(self) -> None:
        """Wait until the GPU has reached this point of the current stream. On a CPU, there is nothing to wait for."""
        if self.on_gpu:
            wait_for(self.mark())

    def has_reached(self, mark) -> bool:
        """Return whether the GPU has reached a mark, or reaches it within a millisecond. Always true on a CPU."""
        if not self.on_gpu:
            return True
        deadline_s = time.perf_counter() + _JUST_REACHED_S
        while not (reached := mark.query()) and time.perf_counter() < deadline_s:
            time.sleep(PAUSE_S)
        return reached

    def follows_current_stream(self) -> bool:
        """Return whether the current stream is the one on which the clock was started. Always true on a CPU.

        FSDP2 runs its collectives on streams of their own. While those wait, the stream that computes does not.
        """
        return not self.on_gpu or torch.cuda.current_stream(self._device) == self._stream


def wait_for(event, pause_s: float = PAUSE_S) -> None:
    """Wait until the GPU has reached an event.

    Unlike `event.synchronize()`, this can be interrupted, and the doctor recognizes it. The event may lie behind a
    collective that never completes.
    """
    while not event.query():
        time.sleep(pause_s)
