"""Time marks that work the same way on CPU and GPU."""

import time

import torch


class Clock:
    """Takes time marks: on a CPU the current time, on a GPU an event that completes when the GPU reaches it.

    Seconds are those of this machine's monotonic clock, which all its processes share.
    """

    def __init__(self):
        self.on_gpu = torch.cuda.is_initialized()
        if self.on_gpu:
            self._device = torch.cuda.current_device()
            torch.cuda.synchronize()
        self.began_s = time.perf_counter()
        self._began = self.mark()

    def mark(self):
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
        mark.synchronize()
        return self.began_s + self._began.elapsed_time(mark) / 1e3
