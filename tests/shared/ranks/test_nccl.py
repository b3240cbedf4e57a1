"""What NCCL needs and does, without a GPU: how its groups start, and how ledger, timeline and doctor measure streams.

Over NCCL, no call blocks the host, and synchronous ones have no Work. A fake GPU has streams and events on a clock of
its own, which makes every time exact. The last tests run over simulated NCCL. Their functions without `test_` run on
the ranks.
"""

import ast
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import ranks, timeline, wire
from shared.checks.engine import late_ranks
from shared.checks.engine.steps import Event, EventLog
from shared.deadlines import scaled
from shared.plots import buckets
from shared.ranks import calls, diagnosis, doctor, rankside
from shared.wire import clock, completion, instrumentation
from tests import fake_gpu

MS = 1e3
ROOT = Path(__file__).parents[3]
# ProcessGroupNCCL.hpp is part of every build.
HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
SOURCES = [path for folder in ("shared", "solutions", "labs", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
WITHOUT_GPUS = ("gloo", "fake")


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu.installed(monkeypatch) as gpu:
        yield gpu


@pytest.fixture
def without_works(monkeypatch):
    """A group of one rank on the CPU whose calls have no Works, as NCCL's synchronous ones."""
    monkeypatch.setattr(dist.Work, "unbox", staticmethod(lambda boxed: None))
    instrumentation.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    instrumentation.reset()


def spans_of(log: wire.Ledger) -> list[tuple[float, float]]:
    """Return the intervals of the entries, in seconds since the ledger was opened."""
    return [(round(e.launched_s - log.opened_s, 3), round(e.completed_s - log.opened_s, 3)) for e in log.entries]


def waits_of(log: wire.Ledger) -> list[tuple[float, float]]:
    """Return the waits that took time, in seconds since the ledger was opened."""
    waits = [(round(began - log.opened_s, 3), round(ended - log.opened_s, 3)) for began, ended in log.waits]
    return [(began, ended) for began, ended in waits if ended > began]


# -- the ledger


def bucket_run(log: wire.Ledger) -> buckets.CapRun:
    """Do what the lesson of chapter 03 does with a ledger."""
    model = torch.nn.Linear(1, 1)
    by_cap = {"25 MiB": [[model.weight], [model.bias]]}
    _, [run] = buckets.runs_of(model, by_cap, {"25 MiB": [log]}, alpha_ms=1.0, ns_per_byte=0.0)
    return run


def test_the_lesson_on_buckets_can_read_calls_without_a_work(without_works):
    with wire.ledger() as log:
        for _ in range(2):
            dist.all_reduce(torch.ones(4))
    assert bucket_run(log).took_ms > 0
    assert log.total_ms > 0
    assert "–" not in str(log.table())


def test_a_timeline_shows_calls_without_a_work(without_works):
    with timeline.record() as line:
        dist.all_reduce(torch.ones(4))
    assert [span.name for span in line.spans] == ["all_reduce 1"]
    assert line.exposed_ms == pytest.approx(line.communication_ms) and line.overlap == 0


def test_a_synchronous_call_takes_the_time_between_the_events_around_it(gpu):
    with wire.ledger() as log:
        gpu.computes(3.0)
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
        assert gpu.now_s == 0, "the host does not wait"
    assert spans_of(log) == [(3, 8), (8, 13)]
    assert waits_of(log) == [(3, 8), (8, 13)]
    assert bucket_run(log).took_ms == pytest.approx(10 * MS)
    assert gpu.now_s == 13, "the end of the ledger waits for the stream"


def test_an_asynchronous_call_ends_on_the_stream_of_nccl_and_only_the_wait_is_exposed(gpu):
    with wire.ledger() as log:
        work = dist.all_reduce(torch.ones(4), async_op=True)  # from 0 to 5 s
        gpu.computes(3.0)
        work.wait()
        gpu.computes(1.0)
    assert spans_of(log) == [(0, 5)]
    assert waits_of(log) == [(3, 5)]


def test_a_wait_for_a_complete_collective_takes_no_time(gpu):
    with wire.ledger() as log:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        gpu.computes(7.0)
        work.wait()
    assert spans_of(log) == [(0, 5)]
    assert waits_of(log) == []


def test_a_ledger_does_not_wait_for_a_call_that_nothing_waited_for(gpu):
    """Otherwise a missing wait() would do no harm as long as somebody records."""
    with timeline.record() as line, wire.ledger() as log:
        waited_for = dist.all_reduce(torch.ones(4), async_op=True)  # from 0 to 5 s
        dist.all_reduce(torch.ones(4), async_op=True)  # from 5 to 10 s
        waited_for.wait()
        gpu.computes(1.0)
    assert 6 <= gpu.now_s < 7, "only the current stream has caught up"
    assert [entry.in_flight for entry in log.entries] == [False, True]
    assert log.entries[0].took_ms == pytest.approx(5 * MS) and log.entries[1].completed_s is None
    assert "not finished" in str(log.table())
    assert [span.name for span in line.spans] == ["all_reduce 1"] and line.in_flight == ["all_reduce 2"]


def test_a_call_on_another_stream_is_a_wait_only_where_this_stream_waits_for_it(gpu):
    """FSDP2 calls synchronous collectives on a stream of its own, and waits for an event of that stream."""
    side = fake_gpu.Stream()
    with wire.ledger() as log:
        with gpu.on(side):
            dist.all_reduce(torch.ones(4))
            gathered = torch.cuda.Event()
            gathered.record()
        gpu.computes(2.0)
        gathered.wait()
    assert spans_of(log) == [(0, 5)]
    assert waits_of(log) == [(2, 5)]
    assert torch.cuda.Event.wait is completion._original_event_wait


def test_the_operations_of_a_batch_complete_when_the_stream_has_waited_for_it(gpu, monkeypatch):
    """The operations of a batch have no Works of their own, and that of the batch is not an operator's result."""
    group, works = dist.group.WORLD, []

    def end_coalescing(group, device):
        works.append(dist.all_reduce(torch.ones(4), async_op=True))  # stands in for the batch: it takes 5 s
        return works[0]

    monkeypatch.setattr(completion, "_original_end_coalescing", end_coalescing)
    dist.all_reduce(torch.ones(2))
    send = replace(instrumentation.last_call, op="send", partner=0, is_async=True)
    with wire.ledger() as log:
        operation = completion.WithoutWork(completion.marks())
        instrumentation._tell_listeners(send, operation, {"tensors": [torch.ones(4)]})
        operation.launched(send.is_async)
        assert group._end_coalescing(torch.device("cpu")) is works[0]
        gpu.computes(1.0)
        works[0].wait()
    assert log.ops == {"send": 1, "all_reduce": 1}
    assert spans_of(log) == [(0, 5), (0, 5)]
    assert completion._batches == {} and completion._batched == []


# -- the timeline


class Unit(nn.Module):
    """A unit whose forward takes 2 s on the fake GPU."""

    def __init__(self, gpu):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.gpu = gpu

    def forward(self, inputs):
        self.gpu.computes(2.0)
        return inputs * self.weight


@pytest.mark.parametrize(("is_async", "exposed_s"), [(False, 5), (True, 3)])
def test_exposed_time_is_how_long_the_stream_has_waited(gpu, is_async, exposed_s):
    model = nn.Sequential(Unit(gpu))
    with timeline.record(model) as line:
        work = dist.all_reduce(torch.ones(4), async_op=is_async)
        model(torch.ones(1))
        if is_async:
            work.wait()
    assert line.communication_ms == pytest.approx(5 * MS)
    assert line.compute_ms == pytest.approx(2 * MS)
    assert line.exposed_ms == pytest.approx(exposed_s * MS)


def test_a_synchronous_call_inside_a_unit_is_not_computation(gpu):
    class Reducing(Unit):
        def forward(self, inputs):
            dist.all_reduce(torch.ones(4))
            return super().forward(inputs)

    model = nn.Sequential(Reducing(gpu))
    with timeline.record(model) as line:
        model(torch.ones(1))
    assert line.compute_ms == pytest.approx(2 * MS)
    assert (line.exposed_ms, line.overlap) == (pytest.approx(5 * MS), pytest.approx(0))


# -- the checks' instruments


def test_the_checks_see_a_synchronous_call_without_a_work_as_a_launch_and_a_wait(gpu):
    log = EventLog(("all_reduce",))
    with completion.watching(log), instrumentation.listening(log.launched, log.waiting):
        dist.all_reduce(torch.ones(4))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
    events = [event for event in log.events if event != Event("wait")]  # gloo's own wait, which NCCL does not have
    launch = Event("all_reduce")
    assert events == [launch, Event("wait", launched=0), launch, Event("wait", launched=1)]


def test_a_rank_meets_the_others_when_its_stream_has_arrived(gpu, monkeypatch):
    """Otherwise code that waits for a late rank would seem not to, because over NCCL only its stream waits."""
    monkeypatch.setattr(rankside.here, "store", dist.HashStore())
    meeting = late_ranks.Rendezvous("a meeting")
    dist.all_reduce(torch.ones(4))
    meeting.arrive(with_the_stream=False)
    assert gpu.now_s == 0
    meeting.arrive()
    assert gpu.now_s == 5


meetings: list[list[int]] = []


@late_ranks.rehearsed
def meet_rank_1(piece: str) -> str:
    """Wait for rank 1, which never comes."""
    meeting = late_ranks.Rendezvous("a meeting")
    meeting.arrive()
    meetings.append(meeting.missing())
    return piece


def test_a_probe_is_rehearsed_on_a_gpu_with_no_rank_late(gpu, monkeypatch):
    """The first launch of a kernel may wait for the late rank, which would look as if the student's code did."""
    monkeypatch.setattr(rankside.here, "store", dist.HashStore())
    monkeypatch.setattr(late_ranks, "PATIENCE_S", 0.05)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    meetings.clear()
    on_a_rank, _ = calls.unpack(calls.pack(meet_rank_1, ()))
    assert on_a_rank("what the student wrote") == "what the student wrote"
    assert meetings == [[], [1]]


# -- the doctor


def test_the_end_of_a_cell_waits_for_its_stream(gpu):
    dist.all_reduce(torch.ones(4))
    assert gpu.now_s == 0
    instrumentation.synchronize()
    assert gpu.now_s == 5


def test_the_doctor_names_the_collective_that_the_gpu_waits_in(gpu):
    """The host has launched two more calls since. Rank 1 skipped the first one, and has left the cell."""
    dist.all_reduce(torch.ones(2))  # in an earlier cell
    doctor.work_begins(None)
    for elements in (3, 4, 5):
        dist.all_reduce(torch.ones(elements))
    doctor.cell_synchronizes()
    stuck = doctor.position(0, threading.get_ident())
    doctor.work_ends()
    assert [call["number"] for call in stuck["ahead"]] == [2, 3, 4] and stuck["waits"] == "yes"
    for call in [stuck["call"], *stuck["ahead"]]:
        call["group"] = [0, 1]
    left = stuck | {"rank": 1, "busy": False, "waits": "no", "ahead": []}
    left |= {"call": stuck["ahead"][0] | {"number": 1}, "counts": [[stuck["call"]["lane"], 1]]}
    cell = diagnosis.CellState([0, 1], {}, {0: stuck, 1: left})
    assert not diagnosis.is_deadlocked(cell), "rank 1 may not have begun"
    cell.outcomes[1] = SimpleNamespace(error=None)
    assert diagnosis.is_deadlocked(cell)
    assert "Rank 0 waits in all_reduce #2 (float32, 3 elements) for rank 1" in diagnosis.explain(cell)


def test_a_rank_that_polls_its_gpu_inside_a_cell_waits(gpu, monkeypatch):
    """As at the end of a `with wire.ledger()` block, which waits until the stream has caught up."""
    monkeypatch.setattr(clock.time, "sleep", time.sleep)  # the fake one would look like a function of the student's
    main_thread, reached, seen = threading.get_ident(), threading.Event(), []

    def look() -> None:
        seen.append(doctor.position(0, main_thread))
        reached.set()

    doctor.work_begins(None)
    dist.all_reduce(torch.ones(2))
    thread = threading.Timer(0.1, look)
    thread.start()
    clock.wait_for(SimpleNamespace(query=reached.is_set))
    thread.join()
    doctor.work_ends()
    assert seen[0]["waits"] == "yes" and "clock.wait_for" in seen[0]["line"]


def test_a_cell_that_only_computes_on_its_gpu_does_not_wait_for_a_rank(gpu):
    dist.all_reduce(torch.ones(2))
    doctor.work_begins(None)
    doctor.cell_synchronizes()
    position = doctor.position(0, threading.get_ident())
    doctor.work_ends()
    assert (position["waits"], position["line"]) == ("no", "its GPU has not finished what the cell launched")


# -- how groups start: the sources of torch say what device_id and the environment do


@pytest.mark.parametrize(
    ("backend", "device", "device_id"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:3", torch.device("cuda", 3)),
        ("gloo", "cuda:3", None),  # ranks that share GPUs
        ("gloo", "cpu", None),
    ],
)
def test_ranks_name_their_device_exactly_if_the_backend_is_nccl(monkeypatch, backend, device, device_id):
    monkeypatch.setattr(rankside.here, "rank", 0)
    monkeypatch.setattr(rankside.here, "device", device)
    monkeypatch.setattr(rankside.here, "store", dist.HashStore())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with mock.patch.object(dist, "init_process_group") as init, mock.patch.object(rankside, "list_ranks") as listed:
        rankside.join(1, [0], backend, detect_mismatch=False, simulate=None)
    assert init.call_args.args == (backend,) and init.call_args.kwargs["device_id"] == device_id
    assert listed.called == (device_id is not None), "a mesh splits groups only from one that names its device"


SPLIT_IN_THE_SECOND_GENERATION = """
from datetime import timedelta

import torch.distributed as dist

from shared.ranks import rankside

for generation in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rankside.list_ranks(dist.group.WORLD)
    part = dist.group.WORLD.split_group([0], timeout=timedelta(seconds=20), group_name="part")
    print(part.size())
    dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_groups_can_be_split_in_every_generation():
    """As with gloo here, torch 2.13 would end the process in the second generation with NCCL, too."""
    command = [sys.executable, "-c", SPLIT_IN_THE_SECOND_GENERATION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60.0))
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr


def starts_of_groups(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith("init_process_group")]


def test_every_group_that_may_use_nccl_names_its_device():
    """Without device_id, NCCL creates communicators when a rank first needs them, where nothing can interrupt it."""
    unnamed = []
    for path in SOURCES:
        for call in starts_of_groups(path):
            backend = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if backend not in WITHOUT_GPUS and "device_id" not in {keyword.arg for keyword in call.keywords}:
                unnamed.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not unnamed
    assert any(starts_of_groups(path) for path in SOURCES)


def test_the_environment_that_ranks_set_is_one_that_torch_reads():
    header = HEADER.read_text()
    for name in (*rankside.NCCL_ENVIRONMENT, *rankside.BLOCKING_WAIT):
        assert f'"{name}"' in header, f"torch {torch.__version__} does not know {name}"


def test_waits_never_block_the_host(monkeypatch):
    """A student's shell may have set TORCH_NCCL_BLOCKING_WAIT, under its present name or its old one."""
    for name in rankside.BLOCKING_WAIT:
        monkeypatch.setenv(name, "1")
    for name in rankside.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(dist, "TCPStore", mock.Mock())
    for module, name in (
        (rankside.instrumentation, "install"),
        (rankside.instrumentation, "recorder"),
        (rankside.sizes, "Recorder"),
        (rankside.handles, "install"),
        (rankside.hosts, "enter"),
        (rankside.doctor, "listen"),
        (torch, "set_num_threads"),
    ):
        monkeypatch.setattr(module, name, mock.Mock())
    seen = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(os.environ))
    for attribute in ("rank", "device", "store"):
        monkeypatch.setattr(rankside.here, attribute, getattr(rankside.here, attribute))
    rankside.initialize_rank(0, "cuda:0", ("127.0.0.1", 1), "/sizes")
    assert not {name for name in rankside.BLOCKING_WAIT if name in seen}
    assert {name: seen[name] for name in rankside.NCCL_ENVIRONMENT} == rankside.NCCL_ENVIRONMENT


def test_nothing_else_mentions_blocking_waits():
    mentions = [path for path in SOURCES if "BLOCKING_WAIT" in path.read_text()]
    assert mentions == [ROOT / "shared" / "ranks" / "rankside.py"]


# -- simulated NCCL


@pytest.fixture(scope="module")
def simulated():
    ranks.start(2, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)
    yield
    ranks.stop()


def reduce_synchronously_and_not() -> tuple[wire.Ledger, timeline.Timeline, list[Event]]:
    checked = EventLog(("all_reduce",))
    synchronous, asynchronous, unused = torch.ones(3), torch.ones(4), torch.ones(5)
    with timeline.record() as line, wire.ledger() as log:
        with completion.watching(checked), instrumentation.listening(checked.launched, checked.waiting):
            dist.all_reduce(synchronous)
            work = dist.all_reduce(asynchronous, async_op=True)
            work.wait()
        assert (synchronous.sum() + asynchronous.sum()).item() == 14
        dist.all_reduce(unused)
    return log, line, checked.events


@pytest.mark.slow
def test_over_simulated_nccl_operations_end_when_their_results_land(simulated):
    for log, line, events in ranks.run(reduce_synchronously_and_not):
        assert log.is_simulated and "NCCL is simulated" in str(log.table())
        assert all(e.launched_s < e.completed_s <= log.closed_s for e in log.entries) and len(log.entries) == 3
        assert bucket_run(log).took_ms > 0
        assert line.is_simulated and line.communication_ms > 0 and line.overlap == pytest.approx(0, abs=1)
        launch = Event("all_reduce")
        assert events == [launch, Event("wait", launched=0), launch, Event("wait", launched=1)]


def use_too_early_inside_a_ledger() -> None:
    with wire.ledger():
        data = torch.ones(4)
        dist.all_reduce(data, async_op=True)
        time.sleep(scaled(0.3))  # gloo's all-reduce completes in the meantime
        data.add_(1)


@pytest.mark.slow
def test_a_ledger_hides_no_violation(simulated):
    with pytest.raises(ranks.CellFailed, match="was written to before wait"):
        ranks.run(use_too_early_inside_a_ledger)


def skip_one_all_reduce() -> None:
    if dist.get_rank() == 0:
        return
    for elements in (3, 4):
        dist.all_reduce(torch.ones(elements))


@pytest.mark.slow
def test_a_hang_is_blamed_on_the_first_call_that_another_rank_skipped(simulated):
    with pytest.raises(ranks.CellFailed, match=r"Rank 1 waits in all_reduce #\d+ \(float32, 3 elements\) for rank 0"):
        ranks.run(skip_one_all_reduce, timeout_s=scaled(20))
