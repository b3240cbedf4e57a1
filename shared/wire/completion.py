"""Determines when a collective completes, and how long this rank waits for it.

Completion is reported by the future of the Work, or, if it has no future, by the code that waits for the Work. A future
calls back on its own thread. That thread needs the GIL, so while Python computes, the report can be some milliseconds
late (the interpreter hands over the GIL every 5 ms).
"""

import contextlib
import time

import torch
import torch.distributed as dist

from shared.deadlines import scaled
from shared.wire.clock import Clock

_SETTLE_TIMEOUT_S = scaled(1.0)
_original_wait = dist.Work.wait
_watchers: list = []


class Watcher:
    """Fills in `launched_s` and `completed_s` of entries, and collects the times during which this rank waited.

    Completion times are reliable only after settle().
    """

    def __init__(self):
        self.clock = Clock()
        self.waits: list[tuple[float, float]] = []
        self._marks: list[tuple] = []  # (entry, field name, mark)
        self._wait_marks: list[tuple] = []
        self._futures: dict[int, tuple] = {}  # id of an entry → (its future, the entry), while in flight
        # id of a Work → (the Work, kept alive so that its id is not reused; its entry; addresses of its tensors)
        self._waited_for: dict[int, tuple] = {}

    def watch(self, work, entry, tensors: list[torch.Tensor]) -> None:
        """Record the completion of a Work, through its future if it has one, or else when something waits for it."""
        if self.clock.on_gpu:  # the collective starts when the GPU reaches it
            self._marks.append((entry, "launched_s", self.clock.mark()))
        try:
            future = getattr(work, "observed_future", work.get_future)()
        except RuntimeError:  # gloo's send, receive and reduce-scatter have no future
            self._waited_for[id(work)] = (work, entry, {_memory_of(tensor) for tensor in tensors})
            return
        self._futures[id(entry)] = (future, entry)
        future.add_done_callback(lambda _: self._ended(entry))

    def _ended(self, entry) -> None:
        self._marks.append((entry, "completed_s", self.clock.mark()))
        self._futures.pop(id(entry), None)

    def waited(self, work_id: int | None, began) -> None:
        """Record that a wait has ended, and the completion of the Work it was for, if that is known."""
        ended = self.clock.mark()
        self._wait_marks.append((began, ended))
        _, entry, _ = self._waited_for.pop(work_id, (None, None, None))
        if entry is not None:
            self._marks.append((entry, "completed_s", ended))

    @contextlib.contextmanager
    def waiting(self, tensor: torch.Tensor):
        """Time a wait in C++ for the collective that writes to a tensor."""
        began = self.clock.mark()
        yield
        matching = (work_id for work_id, (_, _, memory) in self._waited_for.items() if _memory_of(tensor) in memory)
        self.waited(next(matching, None), began)

    def settle(self) -> None:
        """Fill in the times that are known.

        Code that waits for a future may continue before our callback has run, so allow the callback a moment.
        """
        deadline_s = time.perf_counter() + _SETTLE_TIMEOUT_S
        for future, entry in list(self._futures.values()):
            while future.done() and id(entry) in self._futures and time.perf_counter() < deadline_s:
                time.sleep(1e-4)
        for entry, field, mark in self._marks:
            setattr(entry, field, self.clock.seconds(mark))
        self.waits[:] = [(self.clock.seconds(began), self.clock.seconds(ended)) for began, ended in self._wait_marks]


@contextlib.contextmanager
def watching(watcher: Watcher | None = None):
    """Watch Works inside the block. Yields the Watcher, a new one if none is given.

    Inside the block, `Work.wait` is replaced by a function that records the wait and calls torch's own. Blocks may be
    nested.
    """
    watcher = watcher or Watcher()
    _watchers.append(watcher)
    dist.Work.wait = _timed_wait
    try:
        yield watcher
    finally:
        _watchers[:] = [other for other in _watchers if other is not watcher]
        if not _watchers:
            dist.Work.wait = _original_wait
        watcher.settle()


@contextlib.contextmanager
def timed(work):
    """Record for every Watcher that this rank waits for a Work inside the block, and that it is complete afterwards."""
    began = [(watcher, watcher.clock.mark()) for watcher in _watchers]
    yield
    for watcher, mark in began:
        watcher.waited(id(work), mark)


def untimed_wait(work, *args, **kwargs) -> bool:
    """Call torch's own wait without recording it."""
    return _original_wait(work, *args, **kwargs)


def _timed_wait(work, *args, **kwargs):
    with timed(work):
        return _original_wait(work, *args, **kwargs)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
