"""The wire ledger compared with torch's own counts and hand-made formulas. test_hosts.py asks network interfaces.

The functions without `test_` run on the ranks.
"""

import _thread
import pickle
import re
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import ranks, wire
from shared.deadlines import scaled
from shared.wire import completion, instrumentation, sockets


@pytest.fixture(params=[2, 3, 4])
def world(request, four_ranks):
    with ranks.world(request.param):
        yield request.param


@pytest.fixture
def pair(four_ranks):
    """Two ranks, for what does not depend on their number."""
    with ranks.world(2):
        yield


# -- bytes by formula


def call(op: str, payload_bytes: int, **more) -> instrumentation.Call:
    """Return a call of four ranks. Fields that the ledger does not use are left empty."""
    rest = dict(number=1, group_name="default", group_ranks=(0, 1, 2, 3), shape=(), dtype="uint8", partner=None)
    rest |= dict(root=None, kept_bytes=0, is_async=False, in_backward=False, launched_s=0.0, called_from=None)
    return instrumentation.Call(op=op, payload_bytes=payload_bytes, **(rest | more))


@pytest.mark.parametrize(
    ("op", "more", "sent_by_each_rank"),
    [
        ("all_reduce", {}, [1200] * 4),  # 2 · 3/4 · 800
        ("all_reduce_coalesced", {}, [1200] * 4),
        ("reduce_scatter", {}, [600] * 4),
        ("reduce_scatter_tensor", {}, [600] * 4),
        ("all_gather_into_tensor", {}, [600] * 4),
        ("all_gather", {}, [600] * 4),
        ("all_to_all_single", {"kept_bytes": 50}, [750] * 4),
        ("broadcast", {"root": 0}, [800, 800, 800, 0]),
        ("broadcast", {"root": 2}, [800, 0, 800, 800]),  # 2 → 3 → 0 → 1
        ("reduce", {"root": 1}, [800, 0, 800, 800]),
        ("gather", {"root": 1}, [200, 0, 200, 200]),  # a quarter of the root's 800
        ("scatter", {"root": 1}, [0, 600, 0, 0]),
        ("send", {"partner": 2}, [800] * 4),
        ("recv", {"partner": 2}, [0] * 4),
        ("barrier", {}, [0] * 4),
    ],
)
def test_sent_bytes_by_the_ring_algorithm(op, more, sent_by_each_rank):
    payload_bytes = 0 if op == "barrier" else 800
    assert [wire.sent_bytes_of(call(op, payload_bytes, **more), rank) for rank in range(4)] == sent_by_each_rank


def test_ranks_of_a_subgroup_are_global_ranks():
    in_group = {"group_ranks": (1, 3), "root": 3}
    assert wire.sent_bytes_of(call("broadcast", 800, **in_group), 3) == 800
    assert wire.sent_bytes_of(call("broadcast", 800, **in_group), 1) == 0
    assert wire.sent_bytes_of(call("all_reduce", 800, **in_group), 1) == 800


# -- what is recorded


def every_operation() -> wire.Ledger:
    size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    with wire.ledger() as log:
        dist.all_reduce(torch.ones(6 * size))
        dist.all_reduce(torch.ones(size, dtype=torch.bfloat16), async_op=True).wait()
        _all_gather(torch.empty(2 * size), torch.ones(2))
        dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2))
        _reduce_scatter(torch.empty(3, dtype=torch.float64), torch.ones(3 * size, dtype=torch.float64))
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
        dist.broadcast(torch.ones(5), src=0)
        outgoing = dist.isend(torch.ones(4), right)
        dist.recv(torch.empty(4), left)
        outgoing.wait()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1))
        dist.barrier()
    return log


def _all_gather(output, shard):
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, shard)


def _reduce_scatter(shard, tensor):
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(shard, tensor)


def test_every_operation_is_recorded_in_order_with_its_bytes_and_without_a_warning(world, capsys):
    n = world
    for rank, log in enumerate(ranks.run(every_operation)):
        recorded = [(e.op, e.dtype, e.elements, e.payload_bytes, e.sent_bytes, e.is_async) for e in log.entries]
        assert recorded == [
            ("all_reduce", "float32", 6 * n, 24 * n, 48 * (n - 1), False),
            ("all_reduce", "bfloat16", n, 2 * n, 4 * (n - 1), True),
            ("all_gather", "float32", 2 * n, 8 * n, 8 * (n - 1), False),
            ("all_gather", "float32", 2 * n, 8 * n, 8 * (n - 1), False),
            ("reduce_scatter", "float64", 3 * n, 24 * n, 24 * (n - 1), False),
            ("all_to_all", "float32", n, 4 * n, 4 * (n - 1), False),
            ("broadcast", "float32", 5, 20, 20 if rank < n - 1 else 0, False),
            ("send", "float32", 4, 16, 16, True),
            ("recv", "float32", 4, 16, 0, False),
            ("all_reduce", "float32", 1, 4, 8 * (n - 1) / n, False),
            ("barrier", "uint8", 0, 0, 0, False),
        ]
        assert log.rank == rank
        assert [e.partner for e in log.entries if e.op in ("send", "recv")] == [(rank + 1) % n, (rank - 1) % n]
        assert log.sent_mb_to(n) == [16e-6 * (other == (rank + 1) % n) for other in range(n)]
        assert all(re.match(r"test_wire\.py, line \d+: \S+", e.line) for e in log.entries)
        assert not any(e.in_backward for e in log.entries)
    assert "Warning" not in capsys.readouterr().out


def calls_of_a_send() -> list[instrumentation.Call]:
    with instrumentation.listening() as calls:
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(7, dtype=torch.int64), 1) if dist.get_rank() == 0 else None
        dist.recv(torch.ones(7, dtype=torch.int64), 0) if dist.get_rank() == 1 else None
        dist.barrier()
    return calls


def test_a_call_describes_what_was_launched_and_counts_in_its_group(world):
    first, second, *_ = ranks.run(calls_of_a_send)
    (reduced, sent, barrier), received = first, second[1]
    assert (reduced.shape, reduced.dtype, reduced.partner) == ((3,), "float32", None)
    assert reduced.group_ranks == tuple(range(world))
    assert (sent.partner, received.partner) == (1, 0)
    assert str(sent) == f"send #{sent.number} to rank 1 (int64, 7 elements)"
    assert barrier.number == reduced.number + 1, "a send does not count in the group's sequence"
    assert str(barrier) == f"barrier #{barrier.number}", "its tensor is torch's own"


def test_every_completion_is_recorded_between_its_launch_and_the_end_of_the_ledger(world):
    for log in ranks.run(every_operation):
        for entry in log.entries:
            assert log.opened_s <= entry.launched_s <= entry.completed_s <= log.closed_s
        assert 0 < log.total_ms <= 1e3 * (log.closed_s - log.opened_s)


def wait_for_a_late_rank(late_s: float) -> wire.Ledger:
    group = dist.new_group()  # in the default group, mismatch detection would make all ranks late
    with wire.ledger() as log:
        if dist.get_rank() == 1:
            time.sleep(late_s)
        work = dist.all_reduce(torch.ones(8), group=group, async_op=True)
        if dist.get_rank() != 1:
            time.sleep(2 * late_s)  # the all-reduce completes in the meantime, and the ledger records when
        work.wait()
    return log


def test_completion_of_asynchronous_work_does_not_depend_on_the_wait(pair):
    late_s = scaled(0.4)
    for rank, log in enumerate(ranks.run(wait_for_a_late_rank, late_s)):
        ratio = log.entries[0].took_ms / (1e3 * late_s)
        assert ratio < 0.85 if rank == 1 else 0.85 < ratio < 1.85


def launch_and_do_not_wait() -> wire.Ledger:
    with wire.ledger() as log:
        work = dist.all_reduce(torch.ones(8), async_op=True)  # with mismatch detection
    work.wait()
    return log


def test_waits_of_mismatch_detection_are_not_recorded(pair):
    for log in ranks.run(launch_and_do_not_wait):
        assert log.messages == 1 and log.waits == []


def never_waited_for() -> wire.Ledger:
    with wire.ledger() as log:
        if dist.get_rank() == 0:
            in_flight = dist.isend(torch.ones(1), 1)
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0)
    if dist.get_rank() == 0:
        in_flight.wait()
    return log


def test_send_that_nothing_waited_for_has_no_completion_time(pair):
    logs = ranks.run(never_waited_for)
    assert logs[0].entries[0].completed_s is None
    assert logs[0].entries[0].took_ms is None
    assert "–" in str(logs[0].table())
    assert logs[1].entries[0].completed_s is not None


def ddp_step() -> wire.Ledger:
    model = nn.parallel.DistributedDataParallel(_layers())
    loss = model(torch.ones(2, 8)).sum()
    with wire.ledger() as log:
        loss.backward()
    return log


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def test_all_reduces_of_ddp_have_the_bytes_of_the_gradients(world):
    gradient_bytes = 4 * 4 * (8 * 8 + 8)
    for log in ranks.run(ddp_step):
        log.assert_volume(payload_bytes=gradient_bytes, sent_bytes=2 * (world - 1) / world * gradient_bytes)
        assert set(log.ops) == {"all_reduce"}
        assert all(entry.in_backward and entry.is_async and entry.completed_s for entry in log.entries)


def counted_by_torch(step) -> tuple[wire.Ledger, dict[str, int]]:
    """Run step() under our ledger and torch's CommDebugMode."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as debug_mode, wire.ledger() as log:
        step()
    counted: dict[str, int] = {}
    for operator, count in debug_mode.get_comm_counts().items():
        family = next(op for op in ("all_gather", "allgather", "reduce_scatter", "all_reduce") if op in str(operator))
        family = family.replace("allgather", "all_gather")
        counted[family] = counted.get(family, 0) + count
    return log, counted


def fsdp_step():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _layers(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return counted_by_torch(lambda: model(torch.ones(2, 8)).sum().backward())


def test_collectives_of_fsdp2_match_the_counts_of_torch(world):
    shard_rows = -(-8 // world)  # FSDP2 pads each parameter's first dimension to a multiple of world_size
    padded_bytes = 4 * world * shard_rows * (8 + 1)
    for log, counted in ranks.run(fsdp_step):
        assert counted == {"all_gather": 8, "reduce_scatter": 4}
        assert log.ops == counted
        gathers = [entry.in_backward for entry in log.entries if entry.op == "all_gather"]
        assert gathers == [False] * 4 + [True] * 4
        assert all(entry.in_backward for entry in log.entries if entry.op == "reduce_scatter")
        log.assert_volume(payload_bytes=12 * padded_bytes, sent_bytes=12 * padded_bytes * (world - 1) / world)


def coalesced() -> wire.Ledger:
    with wire.ledger() as log:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(10))
            dist.all_reduce(torch.ones(20))
        size, rank = dist.get_world_size(), dist.get_rank()
        ends = [(dist.isend, torch.ones(3), (rank + 1) % size), (dist.irecv, torch.ones(3), (rank - 1) % size)]
        for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
            work.wait()
    return log


def test_coalesced_collectives_are_one_entry_with_all_their_bytes(pair):
    for log in ranks.run(coalesced):
        assert log.ops == {"all_reduce": 1, "send": 1, "recv": 1}
        reduced, sent, received = log.entries
        assert (reduced.payload_bytes, reduced.elements) == (120, 30)
        assert sent.is_async and received.is_async
        assert sent.completed_s and received.completed_s


def uneven_all_to_all() -> wire.Ledger:
    """Send r rows from rank r to each rank, so that rank 0 sends none."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with wire.ledger() as log:
        rows = torch.ones(rank * size, 3)
        dist.all_to_all_single(torch.empty(sum(range(size)), 3), rows, list(range(size)), [rank] * size)
    return log


def test_uneven_all_to_all_does_not_count_the_kept_slice(world):
    for rank, log in enumerate(ranks.run(uneven_all_to_all)):
        log.assert_volume(payload_bytes=12 * rank * world, sent_bytes=12 * rank * (world - 1))


def gather_and_scatter() -> wire.Ledger:
    size, rank = dist.get_world_size(), dist.get_rank()
    slices = [torch.ones(5) for _ in range(size)] if rank == 1 else None
    with wire.ledger() as log:
        dist.gather(torch.ones(5), slices, dst=1)
        dist.scatter(torch.ones(5), slices, src=1)
    return log


def test_gather_and_scatter_have_one_payload_on_all_ranks(world):
    for rank, log in enumerate(ranks.run(gather_and_scatter)):
        assert [entry.payload_bytes for entry in log.entries] == [20 * world] * 2
        sent = [0, 20 * (world - 1)] if rank == 1 else [20, 0]
        assert [entry.sent_bytes for entry in log.entries] == sent


def functional() -> wire.Ledger:
    """Launch the collectives that DTensor uses. The waits are in C++, and gloo's reduce-scatter has no future."""
    import torch.distributed._functional_collectives as collectives

    reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
    all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    group = dist.group.WORLD
    with wire.ledger() as log:
        reduce_scatter(torch.ones(12), "sum", 0, group) + 0
        collectives.all_reduce(torch.ones(3), "sum", group) + 0
        all_gather(torch.ones(3), 0, group) + 0
    return log


def test_functional_collectives_complete_at_their_waits(pair):
    for log in ranks.run(functional):
        assert log.ops == {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}
        assert all(entry.completed_s for entry in log.entries)
        assert len(log.waits) >= 3


def launch_without_work() -> wire.Ledger:
    """Report a launch without a Work, as for NCCL's sends and receives in a batch that nothing waits for."""
    with wire.ledger() as log:
        for _, launched, _ in instrumentation._listeners:
            launched(call("send", 8, partner=0), completion.WithoutWork(completion.marks()), [])
    return log


def test_send_without_work_is_recorded(four_ranks):
    for log in ranks.run(launch_without_work):
        assert log.ops == {"send": 1}
        assert log.entries[0].completed_s is None


# -- unusual uses


def nested() -> tuple[wire.Ledger, wire.Ledger, bool]:
    with wire.ledger() as outer:
        dist.all_reduce(torch.ones(1))
        with wire.ledger() as inner:
            dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else None
            dist.recv(torch.ones(2), 0) if dist.get_rank() == 1 else None
        dist.all_reduce(torch.ones(1))
    return outer, inner, dist.Work.wait is completion.usual_wait


def test_nested_ledgers_each_record_their_own_block(pair):
    for rank, (outer, inner, restored) in enumerate(ranks.run(nested)):
        point_to_point = {0: {"send": 1}, 1: {"recv": 1}}.get(rank, {})
        assert inner.ops == point_to_point
        assert outer.ops == {"all_reduce": 2} | point_to_point
        assert all(entry.completed_s for entry in [*outer.entries, *inner.entries])
        assert restored


def error_in_ledger() -> tuple[int, bool]:
    try:
        with wire.ledger() as log:
            dist.all_reduce(torch.ones(1))
            raise ValueError("the student's own")
    except ValueError:
        return log.messages, not instrumentation._listeners


def test_error_inside_closes_the_ledger_and_is_raised(four_ranks):
    assert ranks.run(error_in_ledger) == [(1, True)] * 4


def test_without_a_process_group_there_is_nothing_to_record():
    with wire.ledger() as log:
        torch.ones(3).sum()
    assert (log.rank, log.messages, log.sent_bytes, log.total_ms) == (None, 0, 0, 0.0)
    assert log.summary() == "no communication"
    assert "0 in total" in str(log.table())
    log.assert_volume(messages=0, sent_bytes=0, ops={})


# -- the table and assert_volume


def hand_made() -> wire.Ledger:
    entries = [
        wire.Entry("all_reduce", i, "g", (0, 1), None, "float32", 1000, 4000, 4000.0, True, True, "cell, line 3", s, e)
        for i, (s, e) in enumerate([(1.0, 1.5), (1.2, 2.0), (3.0, 3.25), (4.0, None)], 1)
    ]  # fmt: skip
    return wire.Ledger(0, entries, opened_s=1.0, closed_s=5.0)


def test_a_launch_below_which_there_is_no_python_is_recorded():
    """On a GPU, DDP's reducer launches from a thread of autograd's own, which has no frame of Python below the hook."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with wire.ledger() as log:
            _thread.start_new_thread(dist.group.WORLD.allreduce, ([torch.ones(3)], dist.AllreduceOptions()))
            deadline_s = time.monotonic() + scaled(5.0)
            while not log.entries and time.monotonic() < deadline_s:
                time.sleep(0.01)
        assert [(entry.op, entry.payload_bytes, entry.line) for entry in log.entries] == [("all_reduce", 12, "")]
    finally:
        dist.destroy_process_group()
        instrumentation.reset()


def test_total_time_counts_overlapping_work_once():
    assert hand_made().total_ms == pytest.approx(1250.0)


def test_table_lists_entries_and_totals():
    text = str(hand_made().table())
    assert [line.split("  ")[0] for line in text.splitlines()[:5]] == ["#", "1", "2", "3", "4"]
    assert "4 in total" in text and "16 KB" in text and "1250.00" in text
    assert "1250" not in str(hand_made().table(times=False)), "nothing in it differs from run to run"
    assert "<td" in hand_made().table()._repr_html_()
    assert "0, 1" not in text, "a single group needs no column"


def test_long_table_shows_how_many_entries_are_hidden():
    log = wire.Ledger(0, hand_made().entries * 20, opened_s=1.0)
    lines = str(log.table()).splitlines()
    assert len(lines) == 1 + 10 + 1 + 1 + 1
    assert "70 more" in lines[11]
    assert "80 in total" in lines[12]
    assert "70 more" not in str(log.table(most_rows=80))


def test_assert_volume_names_expected_and_actual_values():
    log = hand_made()
    log.assert_volume(messages=4, ops={"all_reduce": 4}, payload_bytes=16_000, sent_bytes=16_000)
    with pytest.raises(AssertionError, match=r"messages: expected 1, got 4"):
        log.assert_volume(messages=1)
    with pytest.raises(AssertionError, match=r"rank 0 is not as expected\. bytes to send: expected 8000, got 16000"):
        log.assert_volume(messages=4, sent_bytes=8000)
    with pytest.raises(AssertionError, match=r"operations: expected \{'broadcast': 4\}"):
        log.assert_volume(ops={"broadcast": 4})


def test_ledger_can_be_pickled():
    assert pickle.loads(pickle.dumps(hand_made())) == hand_made()


# -- the bytes of this process's own sockets

counts_sockets = pytest.mark.skipif(sockets.sent_bytes() is None, reason="this system does not report them")


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


@counts_sockets
def test_sent_bytes_are_counted_once():
    sender, receiver = _pair()
    with sender, receiver:
        before_bytes = sockets.sent_bytes()
        sender.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(receiver.recv(65536))
        assert sockets.sent_bytes() - before_bytes == 100_000


@counts_sockets
def test_sockets_other_than_tcp_are_skipped_and_stay_open():
    one, other = socket.socketpair()
    with one, other:
        before_bytes = sockets.sent_bytes()
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"
        assert sockets.sent_bytes() == before_bytes


def test_other_systems_have_no_count(monkeypatch):
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    assert sockets.sent_bytes() is None
