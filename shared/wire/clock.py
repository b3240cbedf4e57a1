"""Marks of time that mean the same on CPU and GPU."""

import time

import torch


class Clock:
    """Takes marks: on a CPU the time itself, on a GPU an event that the device passes when it gets there.

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
        """Note the point that the current stream has reached. → pass it to seconds(), when all is done"""
        if not self.on_gpu:
            return time.perf_counter()
        with torch.cuda.device(self._device):  # another thread may stand on another device
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event

    def seconds(self, mark) -> float:
        """Turn a mark into seconds; on a GPU wait until the device has passed it."""
        if not self.on_gpu:
            return mark
        mark.synchronize()
        return self.began_s + self._began.elapsed_time(mark) / 1e3
