"""Determines when a collective completes, and how long this rank waits for it.

**On a CPU, over gloo.** Completion is reported by the future of the Work, or, if it has no future, by the code that
waits for the Work. A future runs its callback on its own thread. That thread needs the GIL, so while Python computes,
the report can be some milliseconds late (the interpreter hands over the GIL every 5 ms). A wait is the time that the
host spends in `wait()`.

**On a GPU, over NCCL.** No call blocks the host: the stream waits instead. So each time is that of a CUDA event, which
the clock records on the current stream (see `clock.py`).

- A *synchronous* collective has no Work. NCCL runs it on the current stream, between the event before the call and the
  event after it: from its launch to its completion, this rank waits. `WithoutWork` stands in for the missing Work.
- An *asynchronous* collective runs on NCCL's own stream. It is launched when the current stream reaches the call, and
  complete when NCCL's stream is: the callback of the Work's future runs on a stream that waits for NCCL's.
- `Work.wait()` makes the current stream wait. The time between the events before and after it is how long the stream
  had nothing to do, and that is what counts as exposed. It is zero if the collective was complete by then. The same
  holds for `event.wait()` and `stream.wait_event()`, with which FSDP2 waits for its collectives.
- The sends and receives of `batch_isend_irecv` have no Works of their own. They complete when the stream has waited for
  the batch.

Only waits of the stream on which the watcher was created count, because that is the one that computes. When watching
ends, the host waits for the current stream, and for nothing else. A collective that this stream did not wait for may
still be in flight then. If the host waited for it, a missing `wait()` would go unnoticed during a recording.

**Over simulated NCCL,** an operation is complete when its results have landed in the caller's tensors: when this rank
uses them. These times exist only so that code that reads them runs. They mean nothing.
"""

import contextlib
import time

import torch
import torch.distributed as dist

from shared.deadlines import scaled
from shared.wire.clock import Clock

_SETTLE_TIMEOUT_S = scaled(1.0)
_original_wait = dist.Work.wait
usual_wait = _original_wait  # what `Work.wait` is while nobody watches
_original_end_coalescing = dist.ProcessGroup.__dict__["_end_coalescing"]  # the attribute would not bind to a group
_original_event_wait = torch.cuda.Event.wait
_watchers: list = []
_batched: list = []  # asynchronous operations without a Work, since the last batch ended
_batches: dict[int, tuple] = {}  # id of a batch's Work → (the Work, kept alive; its operations)


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
        self._landing: dict[int, tuple] = {}  # id of a simulated flight → (the flight, kept alive; its entry)

    def watch(self, work, entry, tensors: list[torch.Tensor]) -> None:
        """Record the completion of a Work, through its future if it has one, or else when something waits for it.

        Args:
            work: A Work, or the WithoutWork that stands in for it.
            entry: An object whose `launched_s`, `completed_s` and `in_flight` will be set.
            tensors: The tensors of the operation.
        """
        if self.clock.on_gpu:  # the collective starts when the GPU reaches it
            began = work.began.get(self) if isinstance(work, WithoutWork) else None
            self._marks.append((entry, "launched_s", began or self.clock.mark()))
        flight = getattr(work, "flight", None)
        if flight is not None:
            self._landing[id(flight)] = (flight, entry)
            return
        try:
            future = work.get_future()
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
        self.stood_still(began)
        waited_for = None if work_id is None else self._waited_for.pop(work_id, None)
        if waited_for is not None:
            _, entry, _ = waited_for
            self._marks.append((entry, "completed_s", self.clock.mark()))

    def stood_still(self, began) -> None:
        """Record that this rank has waited since a mark. On a GPU, this counts only if the stream that computes did."""
        if self.clock.follows_current_stream():
            self._wait_marks.append((began, self.clock.mark()))

    def landed(self, flight) -> None:
        """Record the completion of a simulated operation."""
        _, entry = self._landing.pop(id(flight), (None, None))
        if entry is not None:
            self._marks.append((entry, "completed_s", self.clock.mark()))

    @contextlib.contextmanager
    def waiting(self, tensor: torch.Tensor):
        """Time a wait in C++ for the collective that writes to a tensor."""
        began = self.clock.mark()
        yield
        matching = (work_id for work_id, (_, _, memory) in self._waited_for.items() if _memory_of(tensor) in memory)
        self.waited(next(matching, None), began)

    def settle(self) -> None:
        """Fill in the times that are known, and note what is still in flight.

        Code that waits for a future may continue before our callback has run, so give the callback a moment.
        """
        self.clock.catch_up()
        deadline_s = time.perf_counter() + _SETTLE_TIMEOUT_S
        for future, entry in list(self._futures.values()):
            while future.done() and id(entry) in self._futures and time.perf_counter() < deadline_s:
                time.sleep(1e-4)
        unfinished = [entry for future, entry in list(self._futures.values()) if not future.done()]
        unfinished += [entry for _, entry in self._landing.values()]
        for entry, field, mark in self._marks:
            if self.clock.has_reached(mark):
                setattr(entry, field, self.clock.seconds(mark))
            else:
                unfinished.append(entry)
        for entry in unfinished:
            entry.in_flight = True
        waits = [(began, ended) for began, ended in self._wait_marks if self.clock.has_reached(ended)]
        self.waits[:] = [(self.clock.seconds(began), self.clock.seconds(ended)) for began, ended in waits]


class WithoutWork:
    """Stands in for the Work of an operation that has none.

    A synchronous call over NCCL has none, because the current stream waits for the operation in the call itself. In a
    monitored barrier, the host does. The operations of a batch are waited for through the Work of the batch.
    """

    def __init__(self, began: dict):
        """Take the marks of all Watchers, as `marks()` returned them before the launch."""
        self.began = began

    def launched(self, is_async: bool) -> None:
        """Record the wait of a synchronous operation. An asynchronous one belongs to the batch that is being built."""
        if is_async and _watchers:
            _batched.append(self)
        elif not is_async:
            waited(self, self.began)

    def get_future(self) -> torch.futures.Future:
        raise RuntimeError("an operation without a Work has no future")


@contextlib.contextmanager
def watching(watcher: Watcher | None = None):
    """Watch Works inside the block. Yields the Watcher, a new one if none is given.

    Inside the block, `Work.wait` and whatever else makes this rank wait is replaced by a function that records the wait
    and calls torch's own. Blocks may be nested.
    """
    watcher = watcher or Watcher()
    _watchers.append(watcher)
    dist.Work.wait = _timed_wait  # pyright: ignore[reportAttributeAccessIssue] (a patch)
    dist.ProcessGroup._end_coalescing = _end_batch  # pyright: ignore[reportAttributeAccessIssue] (a patch)
    if watcher.clock.on_gpu:
        torch.cuda.Event.wait = _timed_event_wait  # pyright: ignore[reportAttributeAccessIssue] (a patch)
    try:
        yield watcher
    finally:
        _watchers[:] = [other for other in _watchers if other is not watcher]
        if not _watchers:
            dist.Work.wait = usual_wait
            dist.ProcessGroup._end_coalescing = _original_end_coalescing
            torch.cuda.Event.wait = _original_event_wait
            _batched.clear()
            _batches.clear()
        watcher.settle()


def marks() -> dict:
    """Return a mark of each Watcher: the point that its clock has reached."""
    return {watcher: watcher.clock.mark() for watcher in _watchers}


def waited(work, began: dict) -> None:
    """Record for every Watcher that this rank has waited for a Work since the marks `began`."""
    _, works = _batches.pop(id(work), (None, [work]))
    for watcher, mark in began.items():
        for each in works:
            watcher.waited(id(each), mark)


@contextlib.contextmanager
def timed(work):
    """Record for every Watcher that this rank waits for a Work inside the block, and that the Work then is complete."""
    began = marks()
    yield
    waited(work, began)


@contextlib.contextmanager
def landing(flight):
    """Record for every Watcher that this rank waits inside the block until a simulated operation has landed."""
    began = marks()
    yield
    for watcher, mark in began.items():
        watcher.stood_still(mark)
        watcher.landed(flight)


def untimed_wait(work, *args, **kwargs) -> bool:
    """Call torch's own wait without recording it."""
    return _original_wait(work, *args, **kwargs)


def _timed_wait(work, *args, **kwargs):
    with timed(work):
        return usual_wait(work, *args, **kwargs)


def _end_batch(group, *args, **kwargs):
    """Launch the operations of a batch, and remember that a wait for the Work of the batch waits for them."""
    began = marks()
    work = _original_end_coalescing(group, *args, **kwargs)
    operations, _batched[:] = _batched[:], []
    if work is not None:
        _batches[id(work)] = work, operations
    else:
        for operation in operations:
            waited(operation, began)
    return work


def _timed_event_wait(event, stream=None):
    began = marks()
    _original_event_wait(event, stream)
    if stream is None or stream == torch.cuda.current_stream():
        for watcher, mark in began.items():
            watcher.stood_still(mark)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
