"""A link emulated by Works that end late: for machines that cannot make hosts (`shared/hosts`), whose links are real.

    with emulated.link("1gbit", latency_ms=0.1):
        work = dist.all_reduce(data, async_op=True)     # comes back at once
        work.wait()                                     # and here the time passes

Inside the block, what a rank launches takes its link for messages · latency + bytes / rate, by the ring algorithm's
formulas, after what it launched before. Sends and receives have a direction each, collectives need both. The messages
themselves are as fast as ever; the Work that stands in for torch's ends when the link would have carried them, for
whoever waits: `wait()`, a future, DDP's reducer, DTensor, the ledger. Two things no link would do. A rank counts from
its own launch, so a receive that was launched long before its send may end too early. And what nobody waits for is
never late.
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

# C++ keeps a Work, but not what Python adds to it; without that a wait would never end. This is longer than any waits.
_kept: deque = deque(maxlen=10_000)


@contextlib.contextmanager
def link(rate: str, latency_ms: float = 0.0):
    """Inside the block, what this rank launches ends no sooner than a link of that rate would let it.

    latency_ms: what each of a collective's messages costs besides its bytes, α.
    Raises: ValueError for what is no rate, and where NCCL is the backend: its waits are the GPU's.
    """
    held = _Link(bits_per_s(rate), latency_ms)
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        raise ValueError("a link can be emulated for gloo only: start the ranks with backend='gloo'")
    instrumentation.install()
    print(f"Emulated, not measured: a {held.bits_per_s / 1e9:g} Gbit/s link, {latency_ms:g} ms per message.")
    instrumentation.stand_ins.append(held.hold)
    try:
        yield
    finally:
        instrumentation.stand_ins[:] = [other for other in instrumentation.stand_ins if other != held.hold]


def link_s(call: instrumentation.Call, rate_bits_per_s: float, latency_ms: float, rank: int) -> float:
    """Seconds for which a call takes a rank's link: α for each message after another, and its bytes."""
    return _messages(call) * latency_ms / 1e3 + _bytes(call, rank) * 8 / rate_bits_per_s


def _messages(call: instrumentation.Call) -> int:
    others = len(call.group_ranks) - 1
    if call.op.startswith("all_reduce"):
        return 2 * others
    return others if call.op.startswith(("all_gather", "reduce_scatter", "all_to_all")) else 1


def _bytes(call: instrumentation.Call, rank: int) -> float:
    """Bytes in the busier direction; a tensor that comes from one rank, or goes to one, is late for all."""
    if call.op in ("broadcast", "reduce", "recv"):
        return call.payload_bytes
    if call.op in ("gather", "scatter"):
        return formulas.ring_fraction(len(call.group_ranks)) * call.payload_bytes
    return wire.sent_bytes_of(call, rank)


class _Link:
    """When each direction of a rank's link is free again."""

    def __init__(self, rate_bits_per_s: float, latency_ms: float):
        if latency_ms < 0:
            raise ValueError(f"latency_ms must be 0 or more, got {latency_ms}")
        self.bits_per_s, self._latency_ms = rate_bits_per_s, latency_ms
        self._free_s = {"out": 0.0, "in": 0.0}

    def carry(self, call: instrumentation.Call, rank: int) -> float:
        """Take the link for a call, after those before it. → when it completion, in seconds of time.perf_counter"""
        directions = {"send": ["out"], "recv": ["in"]}.get(call.op, ["out", "in"])
        begins_s = max([call.launched_s, *(self._free_s[direction] for direction in directions)])
        due_s = begins_s + link_s(call, self.bits_per_s, self._latency_ms, rank)
        self._free_s.update(dict.fromkeys(directions, due_s))
        return due_s

    def hold(self, call: instrumentation.Call, work: dist.Work) -> dist.Work:
        """Give back a Work that ends when the link has carried the call, and not before `work`."""
        late = _LateWork(work, self.carry(call, dist.get_rank()))
        _kept.append(late)
        return late


class _LateWork(dist.Work):
    """Stands in for a Work, and ends with it or at due_s, whichever is later."""

    def __init__(self, work: dist.Work, due_s: float):
        super().__init__()
        self._work: dist.Work | None = work  # None once it has ended: it holds the tensors
        self._due_s = due_s
        self._source: int | None = None
        self._future: torch.futures.Future | None = None
        self._result = None  # once it has ended, what its future gave, held weakly
        with contextlib.suppress(RuntimeError):  # gloo's messages and its reduce-scatter have none
            under_way = work.get_future()
            self._future = torch.futures.Future()
            under_way.add_done_callback(self._end_future)

    def _end_future(self, ended: torch.futures.Future) -> None:
        def end() -> None:
            future = self._future
            try:
                future.set_result(ended.value())
            except RuntimeError as error:
                future.set_exception(error)  # and the Work stays, so that wait() raises it too
                return
            self._result = tree_map_only(torch.Tensor, TensorWeakRef, ended.value())
            self._future = self._work = None

        timer = threading.Timer(self._due_s - time.perf_counter(), end)
        timer.daemon = True
        timer.start()

    def wait(self, timeout=None) -> bool:
        with completion.timed(self):
            work, future = self._work, self._future
            if work is not None:
                completion.untimed_wait(work, *([timeout] if timeout else []))
                with contextlib.suppress(RuntimeError):  # only a receive has a source
                    self._source = work._source_rank()
            time.sleep(max(0.0, self._due_s - time.perf_counter()))
            if future is not None:
                future.wait()  # whoever listens to it is told before the rank goes on
            self._work = None
        return True

    def is_completed(self) -> bool:
        work = self._work
        return time.perf_counter() >= self._due_s and (work is None or work.is_completed())

    def get_future(self) -> torch.futures.Future:
        future, work = self._future, self._work  # a timer may take them away meanwhile
        if future is not None:
            return future
        if work is not None:
            return work.get_future()  # which says why there is none
        done = torch.futures.Future()
        # DDP's reducer asks after its launch, on a busy machine after the end, and takes what it gets for tensors.
        done.set_result(tree_map_only(TensorWeakRef, lambda held: held(), self._result))
        return done

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank
