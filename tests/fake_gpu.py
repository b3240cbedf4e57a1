"""A GPU that exists only in numbers: streams, events and NCCL's collectives on a clock of their own.

    with fake_gpu.installed(monkeypatch) as gpu:
        gpu.computes(3.0)                         # 3 s of work on the current stream, for which the host does not wait
        dist.all_reduce(torch.ones(4))            # `gpu.collective_s` more; returns no Work, as over NCCL

It replaces the few names of `torch.cuda` that the instruments use. The group is gloo's, with one rank.
"""

import contextlib
import types

import torch
import torch.distributed as dist

from shared.wire import clock, completion, instrumentation


class Stream:
    """A queue of work. `free_s` is when the GPU will have done all of it."""

    def __init__(self):
        self.free_s = 0.0


class FakeGpu:
    """Streams and their clock.

    Attributes:
        now_s: The time on the host, which passes only while the host sleeps between two looks at an event.
        collective_s: How long a collective takes.
    """

    def __init__(self, collective_s: float = 5.0):
        self.now_s, self.collective_s = 0.0, collective_s
        self.current, self.nccl = Stream(), Stream()
        self._works: list[FakeWork] = []  # C++ keeps a Work alive, but not what Python adds to it
        self.last_call: instrumentation.Call | None = None
        self.events_s: list[float] = []  # when the GPU reaches each recorded event

    def computes(self, seconds: float, stream: Stream | None = None) -> None:
        """Put work into a stream, by default into the current one."""
        stream = stream or self.current
        stream.free_s = max(stream.free_s, self.now_s) + seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass on the host, but stop where the GPU reaches an event, so that all times are exact."""
        until_s = self.now_s + max(seconds, 1e-4)
        self.now_s = min([until_s, *(at_s for at_s in self.events_s if self.now_s < at_s)])

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # -- NCCL

    def runs_on_the_current_stream(self, boxed) -> None:
        """Run a synchronous collective. It has no Work."""
        self.computes(self.collective_s)

    def runs_on_its_own_stream(self, work: dist.Work) -> "FakeWork":
        """Run an asynchronous collective after everything that the current stream does until now."""
        self.nccl.free_s = max(self.nccl.free_s, self.current.free_s, self.now_s)
        self.computes(self.collective_s, self.nccl)
        self._works.append(FakeWork(self, work, self.nccl.free_s))
        return self._works[-1]


class FakeWork(dist.Work):
    """What NCCL returns for an asynchronous collective: its wait() makes the current stream wait."""

    def __init__(self, gpu: FakeGpu, work: dist.Work, ends_s: float):
        super().__init__()
        self._gpu, self._work, self.ends_s = gpu, work, ends_s

    def wait(self, timeout=None) -> bool:
        with completion.timed(self):
            completion.untimed_wait(self._work)
            self._gpu.current.free_s = max(self._gpu.current.free_s, self.ends_s)
        return True

    def is_completed(self) -> bool:
        return self.ends_s <= self._gpu.now_s

    def get_future(self):
        """Return a future that is complete at once, and calls back on a stream that waits for NCCL's."""
        side = Stream()
        side.free_s = self.ends_s

        def add_done_callback(callback) -> None:
            with self._gpu.on(side):
                callback(future)

        future = types.SimpleNamespace(add_done_callback=add_done_callback, done=lambda: True)
        return future


@contextlib.contextmanager
def installed(monkeypatch):
    """Let this process have a fake GPU and a process group of one rank over fake NCCL. Yields the FakeGpu."""
    gpu = FakeGpu()

    class Event:
        def __init__(self, enable_timing: bool = False):
            self.at_s = None

        def record(self, stream: Stream | None = None) -> None:
            self.at_s = max((stream or gpu.current).free_s, gpu.now_s)
            gpu.events_s.append(self.at_s)

        def query(self) -> bool:
            return self.at_s <= gpu.now_s

        def wait(self, stream: Stream | None = None) -> None:
            stream = stream or gpu.current
            stream.free_s = max(stream.free_s, self.at_s)

        def elapsed_time(self, other: "Event") -> float:
            return 1e3 * (other.at_s - self.at_s)

    unbox = dist.Work.unbox

    def remember(call: instrumentation.Call) -> None:
        gpu.last_call = call

    def unbox_as_nccl(boxed):
        return unbox(boxed) if gpu.last_call.is_async else gpu.runs_on_the_current_stream(boxed)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(completion, "_original_event_wait", Event.wait)
    monkeypatch.setattr(clock, "time", types.SimpleNamespace(perf_counter=lambda: gpu.now_s, sleep=gpu.sleep))
    monkeypatch.setattr(dist.Work, "unbox", staticmethod(unbox_as_nccl))
    monkeypatch.setattr(instrumentation, "before_launch", [remember])
    monkeypatch.setattr(instrumentation, "work_wrappers", [lambda call, work: gpu.runs_on_its_own_stream(work)])
    instrumentation.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield gpu
    finally:
        dist.destroy_process_group()
        instrumentation.reset()
