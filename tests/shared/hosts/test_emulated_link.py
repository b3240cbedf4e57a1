"""The emulated link: no Work completes too early, whatever waits for it, and a launch returns immediately.

The functions without `test_` run on the ranks. Here 100 kB take 0.1 s, and load on the machine never makes it faster.
"""

import contextlib
import gc
import time
import weakref
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import formulas, ranks, wire
from shared.deadlines import scaled
from shared.hosts import emulated
from shared.wire import instrumentation
from tests.shared.wire.test_wire import call

pytestmark = pytest.mark.slow

RATE = "8mbit"  # 1 MB/s
ELEMENTS = 25_000  # of 4 bytes: 0.1 s


def timed(launch) -> float:
    """Run launch() behind the emulated link. Returns the seconds until it returns."""
    dist.barrier()
    with emulated.link(RATE):
        began_s = time.perf_counter()
        launch()
        return time.perf_counter() - began_s


# -- hosts that several ranks share


@pytest.mark.parametrize(
    ("op", "group_ranks", "partner", "share"),
    [
        ("all_reduce", (0, 1), None, 0.0),
        ("all_reduce", (0, 2), None, 0.5),
        ("all_reduce", (0, 1, 2, 3), None, 1.0),
        ("send", (0, 1, 2, 3), 1, 0.0),
        ("send", (0, 1, 2, 3), 3, 0.5),
        ("all_reduce", (0,), None, 0.5),
    ],
)
def test_a_ring_gets_the_share_of_the_link_that_its_ranks_have_on_the_host(op, group_ranks, partner, share):
    a_call = call(op, 800, group_ranks=group_ranks, partner=partner)
    assert emulated.share_of_link(a_call, rank=0, ranks_per_host=2) == share


# -- how long


@pytest.mark.parametrize(
    ("op", "more", "messages", "nbytes"),
    [
        ("all_reduce", {}, 6, 1200),
        ("reduce_scatter_tensor", {}, 3, 600),
        ("all_gather_into_tensor", {}, 3, 600),
        ("all_to_all_single", {"kept_bytes": 200}, 3, 600),
        ("broadcast", {"root": 0}, 1, 800),
        ("gather", {"root": 0}, 1, 600),
        ("send", {"partner": 1}, 1, 800),
        ("recv", {"partner": 1}, 1, 800),
    ],
)
def test_call_takes_the_time_of_its_messages_and_bytes(op, more, messages, nbytes):
    one_call = call(op, 800, **more)
    for rank in range(4):
        assert emulated.link_s(one_call, 8e3, 2.0, rank) == pytest.approx(messages * 2e-3 + nbytes / 1e3)


def test_all_reduce_takes_the_time_of_the_formula():
    took_s = emulated.link_s(call("all_reduce", 1 << 20), 1e9, 0.1, 0)
    assert took_s == pytest.approx(formulas.ring_all_reduce_s(1 << 20, 4, alpha_s=1e-4, beta_s=8e-9))


@pytest.mark.parametrize(
    ("rate", "latency_ms", "expected"), [("fast", 0.0, "link must be a rate"), ("1gbit", -1, "0 or more")]
)
def test_invalid_link_is_rejected(rate, latency_ms, expected):
    with pytest.raises(ValueError, match=expected), emulated.link(rate, latency_ms):
        pass


# -- everything that waits


def synchronous() -> float:
    return timed(lambda: dist.all_reduce(torch.ones(ELEMENTS)))


def exchange() -> float:
    data, into, other = torch.ones(ELEMENTS), torch.empty(ELEMENTS), 1 - dist.get_rank()

    def launch():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, other), dist.P2POp(dist.isend, data, other)]):
            work.wait()

    return timed(launch)


def future() -> float:
    found = []
    took_s = timed(lambda: found.append(dist.all_reduce(torch.ones(ELEMENTS), async_op=True).get_future().wait()))
    assert found[0][0][0].item() == 2
    return took_s


def backward_of_ddp() -> float:
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(ELEMENTS, 1, bias=False))
    loss = model(torch.full((1, ELEMENTS), dist.get_rank() + 1.0)).sum()
    took_s = timed(loss.backward)
    assert model.module.weight.grad[0, 0].item() == 1.5
    return took_s


def functional() -> float:
    import torch.distributed._functional_collectives as calls

    found = []
    took_s = timed(lambda: found.append(calls.all_reduce(torch.ones(ELEMENTS), "sum", dist.group.WORLD) + 0))
    assert found[0][0].item() == 2
    return took_s


def step_of_fsdp() -> float:
    """The all-gather before forward and the reduce-scatter each send half of the bytes. The root is not resharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(ELEMENTS, 1, bias=False), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return timed(lambda: model(torch.ones(1, ELEMENTS)).sum().backward())


WAITS = [synchronous, exchange, future, backward_of_ddp, functional, step_of_fsdp]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
def test_whatever_waits_returns_late_and_with_its_value(world, wait):
    assert all(took_s >= 0.1 for took_s in ranks.run(wait))


def asynchronous() -> dict:
    data = torch.ones(10 * ELEMENTS)
    dist.barrier()
    with emulated.link(RATE):
        began_s = time.perf_counter()
        first, second = dist.all_reduce(data, async_op=True), dist.all_reduce(torch.ones(1), async_op=True)
        found = {"launched_s": time.perf_counter() - began_s, "complete at launch": first.is_completed()}
        second.wait()
        found |= {"second_s": time.perf_counter() - began_s, "first complete": first.is_completed()}
        first.wait()
        return found | {"sum": data[0].item(), "second complete": second.is_completed()}


def test_launch_returns_immediately_and_works_complete_in_order(world):
    for found in ranks.run(asynchronous):
        assert found["launched_s"] < 0.7
        assert not found["complete at launch"]
        assert found["second_s"] >= 1.0, "the second follows the first on the same link"
        assert found["first complete"] and found["second complete"] and found["sum"] == 2


def test_sends_and_receives_occupy_one_direction_and_collectives_both():
    link = emulated._Link(8e6, 0.0)
    calls = [call("send", 100_000, partner=1, launched_s=5.0), call("recv", 300_000, partner=1, launched_s=5.0)]
    calls += [call("send", 100_000, partner=1, launched_s=5.05), call("all_gather", 400_000, launched_s=5.1)]
    assert [link.occupy(one, 0) for one in calls] == pytest.approx([5.1, 5.3, 5.2, 5.6])
    assert link.occupy(call("send", 100_000, partner=1, launched_s=9.0), 0) == pytest.approx(9.1), "the link was free"


def receive_from_any_source() -> int:
    with emulated.link(RATE):
        if dist.get_rank() == 0:
            return dist.recv(torch.empty(1))
        dist.send(torch.ones(1), 0)
    return -1


def test_receive_from_any_source_returns_the_source(world):
    assert ranks.run(receive_from_any_source)[0] == 1


def backward_with_slow_launches() -> float:
    """Pause after each launch, as happens on a busy machine, so that DDP asks for futures of completed Works."""
    delay = emulated._Link.delay

    def delay_and_pause(link, one_call, work):
        delayed = delay(link, one_call, work)
        time.sleep(0.1)
        return delayed

    emulated._Link.delay = delay_and_pause
    try:
        with emulated.link("1gbit"):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))
            model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    finally:
        emulated._Link.delay = delay
    return model.module.weight.grad[0, 0].item()


def test_future_requested_after_completion_has_its_value(world):
    assert ranks.run(backward_with_slow_launches) == [1.5, 1.5]


# -- with the other instruments


def record_in_ledger(ledger_outside: bool) -> tuple[float, float]:
    dist.barrier()
    link, ledger = emulated.link(RATE), wire.ledger()
    with contextlib.ExitStack() as stack:
        entered = [stack.enter_context(each) for each in ((ledger, link) if ledger_outside else (link, ledger))]
        dist.all_reduce(torch.ones(ELEMENTS), async_op=True).wait()
    log = entered[0 if ledger_outside else 1]
    entry = log.entries[-1]
    return entry.took_ms, 1e3 * sum(ended - began for began, ended in log.waits)


@pytest.mark.parametrize("ledger_outside", [True, False])
def test_ledger_records_the_emulated_completion(world, ledger_outside):
    for took_ms, waited_ms in ranks.run(record_in_ledger, ledger_outside):
        assert took_ms >= 100
        assert 50 < waited_ms < 1.5 * took_ms, "each wait is recorded once"


def error_inside() -> bool:
    with contextlib.suppress(KeyError), emulated.link(RATE):
        raise KeyError("the student's own")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    return instrumentation.work_wrappers == [] and not isinstance(work, emulated._DelayedWork)


def call_in_a_row() -> list[tuple[float, float]]:
    with emulated.link("1gbit", latency_ms=1), wire.ledger() as log:
        for _ in range(200):
            dist.all_reduce(torch.zeros(4))
    return [(entry.launched_s, entry.completed_s) for entry in log.entries]


def test_calls_in_a_row_do_not_overlap(four_ranks):
    for spans in ranks.run(call_in_a_row):
        assert len(spans) == 200
        assert all(ended_s <= began_s for (_, ended_s), (began_s, _) in pairwise(spans))


def test_emulation_ends_with_the_block_even_after_an_error(world):
    assert ranks.run(error_inside) == [True] * world


def tensor_is_freed() -> bool:
    """Return whether a tensor is freed after its Works have completed."""
    with emulated.link("1gbit"):
        data = torch.ones(1000)
        gone = weakref.ref(data)
        dist.all_reduce(data)
        dist.send(data, 1) if dist.get_rank() == 0 else dist.recv(data, 0)
    del data
    deadline = time.monotonic() + scaled(5.0)
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return gone() is None


def test_completed_works_do_not_keep_their_tensors(world):
    assert ranks.run(tensor_is_freed) == [True] * world


def hang_behind_a_link():
    with emulated.link(RATE):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))


def test_ranks_recover_from_a_hang_behind_an_emulated_link(world):
    with pytest.raises(ranks.CellFailed, match=r"Rank 0 waits in all_reduce #\d+ .* for rank 1"):
        ranks.run(hang_behind_a_link)
    assert all(took_s >= 0.1 for took_s in ranks.run(synchronous))


def test_output_says_that_the_link_is_emulated(world, capsys):
    ranks.run(synchronous)
    assert "Emulated, not measured: a 0.008 Gbit/s link, 0 ms per message." in capsys.readouterr().out
