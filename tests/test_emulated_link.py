"""The emulated link: no Work ends before its time, whoever waits for it, and a launch waits for nothing.

The functions without `test_` run on the ranks. Here 100 kB take 0.1 s, and no load makes a rank faster than that.
"""

import contextlib
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import formulas, ranks, wire
from shared.deadlines import scaled
from shared.hosts import emulated
from shared.wire import instrumentation
from tests.test_wire import call

RATE = "8mbit"  # 1 MB/s
ELEMENTS = 25_000  # of 4 bytes: 0.1 s


@pytest.fixture
def world(four_ranks):
    with ranks.world(2):
        yield 2


def timed(launch) -> float:
    """Run launch() behind the emulated link. → seconds until it comes back"""
    dist.barrier()
    with emulated.link(RATE):
        began_s = time.perf_counter()
        launch()
        return time.perf_counter() - began_s


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
def test_call_takes_its_messages_and_its_bytes(op, more, messages, nbytes):
    one_call = call(op, 800, **more)
    for rank in range(4):
        assert emulated.link_s(one_call, 8e3, 2.0, rank) == pytest.approx(messages * 2e-3 + nbytes / 1e3)


def test_all_reduce_takes_what_the_formula_says():
    took_s = emulated.link_s(call("all_reduce", 1 << 20), 1e9, 0.1, 0)
    assert took_s == pytest.approx(formulas.ring_all_reduce_s(1 << 20, 4, alpha_s=1e-4, beta_s=8e-9))


@pytest.mark.parametrize(
    ("rate", "latency_ms", "said"), [("fast", 0.0, "link must be a rate"), ("1gbit", -1, "0 or more")]
)
def test_what_is_no_link_is_refused(rate, latency_ms, said):
    with pytest.raises(ValueError, match=said), emulated.link(rate, latency_ms):
        pass


# -- who waits


def synchronous() -> float:
    return timed(lambda: dist.all_reduce(torch.ones(ELEMENTS)))


def test_synchronous_call_comes_back_late(world):
    assert all(took_s >= 0.1 for took_s in ranks.run(synchronous)[:world])


def asynchronous() -> dict:
    data = torch.ones(10 * ELEMENTS)
    dist.barrier()
    with emulated.link(RATE):
        began_s = time.perf_counter()
        first, second = dist.all_reduce(data, async_op=True), dist.all_reduce(torch.ones(1), async_op=True)
        found = {"launched_s": time.perf_counter() - began_s, "at once": first.is_completed()}
        second.wait()
        found |= {"second_s": time.perf_counter() - began_s, "first then": first.is_completed()}
        first.wait()
        return found | {"sum": data[0].item(), "after": second.is_completed()}


def test_launch_returns_at_once_and_works_end_one_after_another(world):
    for found in ranks.run(asynchronous)[:world]:
        assert found["launched_s"] < 0.7
        assert not found["at once"]
        assert found["second_s"] >= 1.0, "it went after the first on the same link"
        assert found["first then"] and found["after"] and found["sum"] == 2


def test_messages_have_a_direction_each_and_collectives_need_both():
    link = emulated._Link(8e6, 0.0)
    calls = [call("send", 100_000, partner=1, launched_s=5.0), call("recv", 300_000, partner=1, launched_s=5.0)]
    calls += [call("send", 100_000, partner=1, launched_s=5.05), call("all_gather", 400_000, launched_s=5.1)]
    assert [link.carry(one, 0) for one in calls] == pytest.approx([5.1, 5.3, 5.2, 5.6])
    assert link.carry(call("send", 100_000, partner=1, launched_s=9.0), 0) == pytest.approx(9.1), "it was free"


def message_each_way() -> float:
    data, into, other = torch.ones(ELEMENTS), torch.empty(ELEMENTS), 1 - dist.get_rank()

    def launch():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, other), dist.P2POp(dist.isend, data, other)]):
            work.wait()

    return timed(launch)


def test_messages_between_two_ranks_end_late(world):
    assert all(took_s >= 0.1 for took_s in ranks.run(message_each_way)[:world])


def from_anyone() -> int:
    with emulated.link(RATE):
        if dist.get_rank() == 0:
            return dist.recv(torch.empty(1))
        dist.send(torch.ones(1), 0)
    return -1


def test_receive_from_anyone_knows_from_whom(world):
    assert ranks.run(from_anyone)[0] == 1


def future() -> tuple[float, float]:
    found = []
    took_s = timed(lambda: found.append(dist.all_reduce(torch.ones(ELEMENTS), async_op=True).get_future().wait()))
    return took_s, found[0][0][0].item()


def test_future_comes_late_and_with_its_value(world):
    for took_s, value in ranks.run(future)[:world]:
        assert took_s >= 0.1 and value == 2


def backward_of_ddp() -> tuple[float, float]:
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(ELEMENTS, 1, bias=False))
    loss = model(torch.full((1, ELEMENTS), dist.get_rank() + 1.0)).sum()
    return timed(loss.backward), model.module.weight.grad[0, 0].item()


def test_ddp_waits_in_cpp(world):
    for took_s, gradient in ranks.run(backward_of_ddp)[:world]:
        assert took_s >= 0.1 and gradient == 1.5


def asked_after_the_end() -> float:
    """A busy machine lets a rank stand still between a launch and what it does next."""
    hold = emulated._Link.hold

    def hold_and_stand_still(link, one_call, work):
        late = hold(link, one_call, work)
        time.sleep(0.1)
        return late

    emulated._Link.hold = hold_and_stand_still
    try:
        with emulated.link("1gbit"):
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False))
            model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    finally:
        emulated._Link.hold = hold
    return model.module.weight.grad[0, 0].item()


def test_future_that_is_asked_for_after_the_end_has_its_value(world):
    assert ranks.run(asked_after_the_end)[:world] == [1.5, 1.5]


def functional() -> tuple[float, float]:
    import torch.distributed._functional_collectives as calls

    found = []
    took_s = timed(lambda: found.append(calls.all_reduce(torch.ones(ELEMENTS), "sum", dist.group.WORLD) + 0))
    return took_s, found[0][0].item()


def test_functional_collectives_wait_in_cpp(world):
    for took_s, value in ranks.run(functional)[:world]:
        assert took_s >= 0.1 and value == 2


def step_of_fsdp() -> float:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(ELEMENTS, 1, bias=False))
    return timed(lambda: model(torch.ones(1, ELEMENTS)).sum().backward())


def test_fsdp2_gathers_and_scatters_late(world):
    """Half of the bytes each: an all-gather before forward (again before backward: not for the root), a scatter."""
    assert all(took_s >= 0.1 for took_s in ranks.run(step_of_fsdp)[:world])


# -- with the other instruments


def in_the_ledger(ledger_outside: bool) -> tuple[float, float]:
    def launch():
        data = torch.ones(ELEMENTS)
        work = dist.all_reduce(data, async_op=True)
        work.wait()

    dist.barrier()
    if ledger_outside:
        with wire.ledger() as log:
            timed_in_block(launch)
    else:
        with emulated.link(RATE), wire.ledger() as log:
            launch()
    entry = log.entries[-1]
    return entry.took_ms, 1e3 * sum(ended - began for began, ended in log.waits)


def timed_in_block(launch) -> None:
    with emulated.link(RATE):
        launch()


@pytest.mark.parametrize("ledger_outside", [True, False])
def test_ledger_sees_the_emulated_end(world, ledger_outside):
    for took_ms, waited_ms in ranks.run(in_the_ledger, ledger_outside)[:world]:
        assert took_ms >= 100
        assert 50 < waited_ms < 1.5 * took_ms, "told once"


def error_inside() -> bool:
    with contextlib.suppress(KeyError), emulated.link(RATE):
        raise KeyError("the student's own")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    return instrumentation.stand_ins == [] and not isinstance(work, emulated._LateWork)


def test_after_the_block_everything_is_as_before(world):
    assert ranks.run(error_inside)[:world] == [True] * world


def tensor_is_freed() -> bool:
    """Works that have ended must not keep their tensors."""
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


def test_works_that_have_ended_let_go_of_their_tensors(world):
    assert ranks.run(tensor_is_freed)[:world] == [True] * world


def fails_behind_a_link():
    with emulated.link(RATE):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))


def test_hang_behind_an_emulated_link_is_explained_and_healed(world):
    with pytest.raises(ranks.CellFailed, match=r"Rank 0 waits in all_reduce #\d+ .* for rank 1"):
        ranks.run(fails_behind_a_link)
    assert all(took_s >= 0.1 for took_s in ranks.run(synchronous)[:world])


def test_it_says_that_it_is_emulated(world, capsys):
    ranks.run(synchronous)
    assert "Emulated, not measured: a 0.008 Gbit/s link, 0 ms per message." in capsys.readouterr().out
