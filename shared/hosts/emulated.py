"""Emulates a link by delaying Works, for machines that cannot make hosts with real links (see `shared/hosts`).

    with emulated.link("1gbit", latency_ms=0.1):
        work = dist.all_reduce(data, async_op=True)     # returns immediately
        work.wait()                                     # returns when the link would have transferred the data

Inside the block, each operation that a rank launches occupies the rank's link for messages · latency + bytes / rate, by
the ring algorithm's formulas, after the operations before it. Sends and receives each occupy one direction, collectives
both. The data itself is transferred as fast as without the emulation. The Work that replaces torch's completes when the
link would have transferred the data, whatever waits for it: `wait()`, a future, DDP's reducer, DTensor or the ledger.

The emulation differs from a real link in two ways. Each rank measures from its own launch, so a receive that was
launched long before its send may complete too early. And an operation that nothing waits for is never delayed.
"""

import contextlib
import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from shared import formulas, wire
from shared.hosts import bits_per_s
from shared.wire import completion, instrumentation

# C++ keeps a Work alive, but not the attributes that Python adds to it, and without those a wait would never end. This
# queue keeps more Works than can be in flight.
_kept: deque = deque(maxlen=10_000)


@contextlib.contextmanager
def link(rate: str, latency_ms: float = 0.0, ranks_per_host: int = 1):
    """Complete each operation that this rank launches inside the block no earlier than a link of this rate would.

    Args:
        latency_ms: The fixed cost α of each message of a collective, in addition to the time for its bytes.
        ranks_per_host: How many consecutive ranks share a host and its link. Operations inside a host are not delayed.
            All others get a constant share of the link, as if all ranks of the host communicated at the same time.

    Raises:
        ValueError: If rate is not a rate, or the backend is NCCL, whose waits happen on the GPU.
    """
    emulated_link = _Link(bits_per_s(rate), latency_ms, ranks_per_host)
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        raise ValueError("a link can be emulated for gloo only: start the ranks with backend='gloo'")
    instrumentation.install()
    print(f"Emulated, not measured: a {emulated_link.bits_per_s / 1e9:g} Gbit/s link, {latency_ms:g} ms per message.")
    wrappers = instrumentation.work_wrappers
    wrappers.append(emulated_link.delay)
    try:
        yield
    finally:
        wrappers[:] = [other for other in wrappers if other != emulated_link.delay]


def link_s(call: instrumentation.Call, rate_bits_per_s: float, latency_ms: float, rank: int) -> float:
    """Return the seconds for which a call occupies a rank's link: α for each consecutive message, plus the bytes."""
    return _messages(call) * latency_ms / 1e3 + _bytes(call, rank) * 8 / rate_bits_per_s


def _messages(call: instrumentation.Call) -> int:
    others = len(call.group_ranks) - 1
    if call.op.startswith("all_reduce"):
        return 2 * others
    return others if call.op.startswith(("all_gather", "reduce_scatter", "all_to_all")) else 1


def _bytes(call: instrumentation.Call, rank: int) -> float:
    """Return the bytes in the busier direction. If one rank sends or receives all bytes, it delays all ranks."""
    if call.op in ("broadcast", "reduce", "recv"):
        return call.payload_bytes
    if call.op in ("gather", "scatter"):
        return formulas.ring_fraction(len(call.group_ranks)) * call.payload_bytes
    return wire.sent_bytes_of(call, rank)


def share_of_link(call: instrumentation.Call, rank: int, ranks_per_host: int) -> float:
    """Return the share of its host's link that a call of this rank gets; 0 if it stays inside the host.

    A ring leaves each host once, however many of its ranks are there. So if k of the n ranks of a host are in a group,
    there may be n/k such groups, and each of their rings gets k/n of the link.
    """
    if call.partner is not None:
        return 0.0 if call.partner // ranks_per_host == rank // ranks_per_host else 1 / ranks_per_host
    on_host = sum(other // ranks_per_host == rank // ranks_per_host for other in call.group_ranks)
    return 0.0 if on_host == len(call.group_ranks) > 1 else on_host / ranks_per_host


class _Link:
    """Keeps track of when each direction of a rank's link is free again."""

    def __init__(self, rate_bits_per_s: float, latency_ms: float, ranks_per_host: int = 1):
        if latency_ms < 0:
            raise ValueError(f"latency_ms must be 0 or more, got {latency_ms}")
        self.bits_per_s, self._latency_ms, self._ranks_per_host = rate_bits_per_s, latency_ms, ranks_per_host
        self._free_s = {"out": 0.0, "in": 0.0}

    def occupy(self, call: instrumentation.Call, rank: int) -> float:
        """Occupy the link for a call, after earlier calls. Returns the time.perf_counter() of its completion."""
        share = share_of_link(call, rank, self._ranks_per_host)
        if not share:
            return call.launched_s
        directions = {"send": ["out"], "recv": ["in"]}.get(call.op, ["out", "in"])
        begins_s = max([call.launched_s, *(self._free_s[direction] for direction in directions)])
        due_s = begins_s + link_s(call, share * self.bits_per_s, self._latency_ms, rank)
        self._free_s.update(dict.fromkeys(directions, due_s))
        return due_s

    def delay(self, call: instrumentation.Call, work: dist.Work) -> dist.Work:
        """Return a Work that completes when the link has transferred the call's bytes, and not before `work`."""
        delayed = _DelayedWork(work, self.occupy(call, dist.get_rank()))
        _kept.append(delayed)
        return delayed


class _DelayedWork(dist.Work):
    """Stands in for a Work, and completes with it or at due_s, whichever is later."""

    def __init__(self, work: dist.Work, due_s: float):
        super().__init__()
        self._work: dist.Work | None = work  # None after completion, because it keeps the tensors alive
        self._due_s = due_s
        self._source = -1
        self._future: torch.futures.Future | None = None
        self._timer: threading.Timer | None = None
        self._result = None  # after completion, the value of its future, held by weak references
        with contextlib.suppress(RuntimeError):  # gloo's send, receive and reduce-scatter have no future
            original_future = work.get_future()
            self._future = torch.futures.Future()
            original_future.add_done_callback(self._complete_later)

    def _complete_later(self, original_future: torch.futures.Future) -> None:
        def complete() -> None:
            future = self._future
            assert future is not None  # It becomes None below.
            try:
                future.set_result(original_future.value())
            except RuntimeError as error:
                future.set_exception(error)  # _work is kept, so that wait() raises the error too
                return
            self._result = tree_map_only(torch.Tensor, TensorWeakRef, original_future.value())
            self._future = self._work = self._timer = None

        self._timer = threading.Timer(self._due_s - time.perf_counter(), complete)
        self._timer.daemon = True
        self._timer.start()

    def wait(self, timeout=None) -> bool:
        with completion.timed(self):
            work, future = self._work, self._future
            if work is not None:
                completion.untimed_wait(work, *([timeout] if timeout else []))
                with contextlib.suppress(RuntimeError):  # only a receive has a source
                    self._source = work._source_rank()
            time.sleep(max(0.0, self._due_s - time.perf_counter()))
            if future is not None:
                future.wait()
                timer = self._timer
                if timer is not None and timer is not threading.current_thread():
                    timer.join()  # the future's callbacks run before the rank continues
            self._work = None
        return True

    def is_completed(self) -> bool:
        work = self._work
        return time.perf_counter() >= self._due_s and (work is None or work.is_completed())

    def get_future(self) -> torch.futures.Future:
        future, work = self._future, self._work  # a timer may set them to None in the meantime
        if future is not None:
            return future
        if work is not None:
            return work.get_future()  # raises the error that says why there is none
        done = torch.futures.Future()
        # DDP's reducer asks for the future after the launch (on a busy machine, even after completion), and uses its
        # value as tensors.
        done.set_result(tree_map_only(TensorWeakRef, lambda reference: reference(), self._result))
        return done

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
