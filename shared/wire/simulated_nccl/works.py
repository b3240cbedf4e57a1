"""The Work that simulated NCCL returns."""

import contextlib
from collections import deque

import torch
import torch.distributed as dist

from shared.wire import completion

_kept: deque = deque(maxlen=10_000)  # C++ keeps a Work alive, but not the attributes that Python adds to it


class SimulatedWork(dist.Work):
    """What NCCL returns for an operation in flight. Waiting for it does not block the host."""

    def __init__(self, simulation, flight):
        super().__init__()
        self._simulation, self.flight = simulation, flight
        _kept.append(self)

    def wait(self, timeout=None) -> bool:
        with completion.timed(self) if self.flight.call.is_async else contextlib.nullcontext():
            self._simulation.wait(self.flight)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Return whether the operation is complete. If so, the host may rely on that, and need not call wait()."""
        gloo_work = self.flight.work
        is_complete = gloo_work is None or gloo_work.is_completed()
        if is_complete:
            self._simulation.wait(self.flight)
        return is_complete

    def get_future(self) -> torch.futures.Future:
        """Return a future whose value, the outputs, can be used without a wait.

        Raises:
            RuntimeError: For gloo's send, receive and reduce-scatter, which have no future.
        """

        def land(done: torch.futures.Future) -> list[torch.Tensor]:
            # Waits for the future, because gloo's Work is complete only after this callback.
            self._simulation.complete(self.flight, done.wait)
            self.flight.waited = True
            return self.flight.outputs

        if self.flight.work is None:
            raise RuntimeError("the operation is already complete, so simulated NCCL no longer has its future")
        return self.flight.work.get_future().then(land)
