"""Simulated NCCL finds what gloo hides, and accepts what is right on NCCL.

The functions without `test_` run on the ranks.
"""

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from IPython import get_ipython
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from instructor.build import chapters, module_names
from shared import ranks, wire
from shared.checks.__main__ import run_file
from shared.deadlines import scaled
from shared.ranks import devices
from shared.wire import completion, instrumentation
from shared.wire.simulated_nccl import Simulation
from solutions.bucketed_ddp import Bucket
from solutions.collectives import ring_all_reduce
from solutions.overlapped_ddp import OverlappedDDP
from solutions.units import Unit, UnitState
from solutions.zero3 import ZeRO3
from tests.simulated_nccl import (
    ROOT,
    checked_files,
    failures_of,
    losses_of,
    model_for,
    name_of,
    needs_gloo,
    only_first_checks,
    strategies,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulated():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANKS_SIMULATE", "nccl")
        ranks.start(4, detect_mismatch=False)
        yield
        ranks.stop()


# -- how it is switched on


@pytest.mark.parametrize("backend", [None, "gloo:cpu"])
def test_it_is_simulated_on_the_cpu(monkeypatch, backend):
    monkeypatch.setenv("RANKS_BACKEND", "nccl")
    monkeypatch.setattr(devices, "gpu_count", lambda: 4)
    placement = devices.place(4, backend, simulate="nccl")
    assert (placement.simulates, placement.backend, placement.devices) == ("nccl", "gloo", ("cpu",) * 4)
    assert placement.valid.startswith("NCCL is simulated")


@pytest.mark.exhaustive
def test_what_cannot_be_simulated_is_one_sentence(monkeypatch):
    with pytest.raises(ValueError, match=r"^simulate can only be 'nccl', .*, got 'mpi'$"):
        devices.place(2, simulate="mpi")
    with pytest.raises(ValueError, match=r"^NCCL is simulated on the CPU: use backend='gloo:cpu' instead of 'nccl'$"):
        devices.place(2, backend="nccl", simulate="nccl")
    monkeypatch.setenv("RANKS_SIMULATE", "yes")
    with pytest.raises(ValueError, match=r"^RANKS_SIMULATE can only be 'nccl', .*, got 'yes'$"):
        ranks.start(2)


def name_of_the_backend() -> tuple[bool, str]:
    return instrumentation.simulation is not None, dist.get_backend()


@pytest.mark.exhaustive
def test_the_environment_variable_switches_it_on_in_every_group(simulated, monkeypatch):
    monkeypatch.setattr(devices, "gpu_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    on_gpus = devices._place("nccl", 4, link=None).backend  # torch reports it as it was asked for
    assert ranks.run(name_of_the_backend) == [(True, on_gpus)] * 4
    with ranks.world(2):
        assert ranks.run(name_of_the_backend) == [(True, on_gpus)] * 2


# -- wrong code


def use_before_wait() -> None:
    data = torch.ones(4)
    dist.all_reduce(data, async_op=True)
    data + 1


def print_before_wait() -> None:
    data = torch.ones(4)
    dist.all_reduce(data, async_op=True)
    print(f"{data}")


def write_before_wait() -> None:
    data = torch.ones(4)
    work = dist.all_reduce(data, async_op=True)
    data.zero_()
    work.wait()


def use_while_a_ledger_watches() -> None:
    with wire.ledger():
        data = torch.ones(4)
        dist.all_reduce(data, async_op=True)
        dist.barrier()
        data + 1


def change_an_input_in_flight() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    data.add_(1)
    work.wait()


def free_an_output_in_flight() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    gathered.untyped_storage().resize_(0)
    work.wait()


def free_an_input_in_flight() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(gathered, data, async_op=True)
    data.untyped_storage().resize_(0)
    work.wait()


def use_in_another_group() -> None:
    data, other = torch.ones(4), dist.new_group()
    dist.all_reduce(data, async_op=True)
    dist.all_reduce(data, group=other, async_op=True)


def use_on_the_current_stream() -> None:
    data = torch.ones(4)
    dist.all_reduce(data, async_op=True)
    dist.all_reduce(data)


def overwrite_an_input_by_a_collective() -> None:
    data, gathered = torch.ones(4), torch.empty(4 * dist.get_world_size())
    dist.all_gather_into_tensor(gathered, data, async_op=True)
    dist.all_reduce(data)


def use_after_another_groups_wait() -> None:
    data, other, group = torch.ones(4), torch.ones(4), dist.new_group()
    dist.all_reduce(data, async_op=True)
    dist.all_reduce(other, group=group, async_op=True).wait()
    data + 1


def send_and_receive_the_same_memory() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = torch.full((4,), float(rank))
    around = [
        dist.P2POp(dist.isend, values[:3], (rank + 1) % world_size),
        dist.P2POp(dist.irecv, values[1:], (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(around):
        work.wait()


def test_a_batch_that_sends_and_receives_the_same_memory_is_reported(simulated):
    with pytest.raises(
        ranks.CellFailed, match=r"Rank 2 failed: .*NCCLViolation: isend with rank 3 and irecv with rank 1"
    ):
        ranks.run(send_and_receive_the_same_memory)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            use_before_wait,
            r"the output of all_reduce #\d+ \(float32, 4 elements\) was used before wait",
        ),
        (print_before_wait, "the output of all_reduce .* was used before wait"),
        (write_before_wait, "the output of all_reduce .* was written to before wait"),
        (use_while_a_ledger_watches, "the output of all_reduce .* was used before wait"),
        (change_an_input_in_flight, "the input of all_gather_into_tensor .* was written to before wait"),
        (free_an_output_in_flight, "the output of all_gather_into_tensor .* was freed before wait"),
        (free_an_input_in_flight, "the input of all_gather_into_tensor .* was freed before wait"),
        (use_in_another_group, "the output of all_reduce .* was written to before wait"),
        (use_on_the_current_stream, "the output of all_reduce .* was written to before wait"),
        (overwrite_an_input_by_a_collective, "the input of all_gather_into_tensor .* was written to before wait"),
        (use_after_another_groups_wait, "the output of all_reduce .* was used before wait"),
    ],
)
def test_code_that_gloo_accepts_and_nccl_would_not_is_reported(simulated, wrong, message):
    with pytest.raises(ranks.CellFailed, match=message) as failed:
        ranks.run(wrong)
    first_line, *lines = failed.value.explanation.splitlines()
    assert first_line.startswith("Ranks 0–3 failed: ") and "NCCLViolation" in first_line
    assert "It was launched at test_simulated_nccl.py, line" in first_line
    assert "test_simulated_nccl.py, line" in lines[0], "the line that breaks the rule"


# Bugs that gloo hides and NCCL would not: each one replaces a piece of the course's own solutions.


@dataclass(frozen=True)
class Mutant:
    """Wrong code that takes the place of something in solutions/, and a program that uses it."""

    replaces: str
    by: object
    program: Callable[[], torch.Tensor]
    reported: str  # a pattern for what the simulation says


def result_of(mutant: Mutant | None, program: Callable[[], torch.Tensor], on_gloo: bool = False) -> torch.Tensor:
    """Run a program, with the wrong code of a mutant if one is given, on simulated NCCL or on gloo."""
    with contextlib.ExitStack() as changes:
        if on_gloo:
            changes.enter_context(fast_gloo())
        if mutant is not None:
            changes.enter_context(mock.patch(mutant.replaces, mutant.by))
        return program()


@contextlib.contextmanager
def fast_gloo():
    """Leave the simulation, and complete each collective before the next line runs, as a fast network may."""

    def complete(call, work):
        if call.partner is None:
            completion.untimed_wait(work)
        return work

    instrumentation.simulate_nccl(False)
    try:
        with (
            mock.patch.object(instrumentation, "work_wrappers", [complete]),
            mock.patch("solutions.async_collectives.exchanges_directly", lambda *_: False),  # as on NCCL
        ):
            yield
    finally:
        instrumentation.simulate_nccl(True)


# -- no wait()


class NeverWaitedFor(Bucket):
    def wait(self) -> None:
        self.handle = None


def train_ddp() -> torch.Tensor:
    """Train OverlappedDDP for two steps. Returns the parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = OverlappedDDP(module, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(dist.get_rank() + step))).square().mean().backward()
        model.finish_gradient_sync()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


# -- a gradient overwritten in flight


class DividedInFlight(Bucket):
    def pack(self, index: int) -> None:
        super().pack(index)
        self.slices[index].mul_(self.divisor)

    def launch(self) -> None:
        super().launch()
        self.flat.div_(self.divisor)


# -- storage resized before wait()


class ReshardsInFlight(Unit):
    def reshard(self) -> None:
        if self.state is not UnitState.SHARDED:
            for flat_parameter in self.flat_parameters:
                flat_parameter.reshard()
            self.works, self.state = [], UnitState.SHARDED


class EarlyExit(nn.Module):
    """A model that may leave out its last layer, after ZeRO3 has prefetched it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


@torch.no_grad()
def evaluate_zero3() -> torch.Tensor:
    """Return the outputs of three forwards, of which the second leaves out a layer that was prefetched."""
    torch.manual_seed(0)
    model = ZeRO3(EarlyExit())
    return torch.stack([model(torch.ones(4), depth) for depth in (3, 2, 3)])


# -- a ring that sends before it receives


def send_then_receive(outgoing: torch.Tensor, incoming: torch.Tensor, group=None) -> None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sent = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
    received = dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size)
    sent.wait()
    received.wait()


def reduce_around_a_ring() -> torch.Tensor:
    tensor = torch.arange(8.0) + dist.get_rank()
    ring_all_reduce(tensor)
    return tensor


MUTANTS = {
    "no wait()": Mutant(
        "solutions.overlapped_ddp.Bucket",
        NeverWaitedFor,
        train_ddp,
        r"the output of all_reduce #\d+ \(float32, \d+ elements?\) was used before wait\(\)",
    ),
    "a gradient overwritten in flight": Mutant(
        "solutions.overlapped_ddp.Bucket",
        DividedInFlight,
        train_ddp,
        r"the output of all_reduce #\d+ .* was written to before wait\(\)",
    ),
    "storage resized before wait()": Mutant(
        "solutions.units.Unit",
        ReshardsInFlight,
        evaluate_zero3,
        r"the output of all_gather_into_tensor #\d+ .* was freed before wait\(\)",
    ),
    "a ring that sends before it receives": Mutant(
        "solutions.collectives.ring_step",
        send_then_receive,
        reduce_around_a_ring,
        r"[Rr]ank \d waits in send #\d+ to rank \d",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_that_gloo_hides_is_reported(simulated, name):
    mutant = MUTANTS[name]
    right = ranks.run(result_of, None, mutant.program)
    on_gloo = ranks.run(result_of, mutant, mutant.program, on_gloo=True)
    torch.testing.assert_close(on_gloo, right)
    with pytest.raises(ranks.CellFailed, match=mutant.reported):
        ranks.run(result_of, mutant, mutant.program, timeout_s=scaled(30))


# -- hangs


def reduce_alone() -> None:
    print("before")
    if dist.get_rank() != 0:
        data = torch.ones(4)
        dist.all_reduce(data)
        print("the host goes on")


@pytest.mark.exhaustive
def test_a_hang_belongs_to_the_cell_that_caused_it(simulated, capsys):
    with pytest.raises(ranks.CellFailed, match=r"Ranks 1–3 wait in all_reduce #\d+ .* for rank 0") as failed:
        ranks.run(reduce_alone, timeout_s=scaled(10))
    assert not failed.value.restarted
    printed = capsys.readouterr().out
    assert "before" in printed and "the host goes on" in printed
    assert ranks.run(dist.get_rank) == [0, 1, 2, 3]


def compute_with_what_was_cut() -> None:
    print("before")
    if dist.get_rank() != 0:
        data = torch.ones(4)
        dist.all_reduce(data)
        total = data.sum().item()
        get_ipython().user_ns["total"] = total
        print(f"after: {total}")


def test_what_was_cut_ends_with_garbage_and_its_output_is_not_shown(simulated, capsys):
    with pytest.raises(ranks.CellFailed, match=r"Ranks 1–3 wait in all_reduce #\d+ .* for rank 0") as failed:
        ranks.run(compute_with_what_was_cut, timeout_s=scaled(10))
    printed = capsys.readouterr().out
    assert "before" in printed and "after" not in printed
    assert all(outcome.error for rank, outcome in failed.value.outcomes.items() if rank != 0)
    totals = ranks.run(lambda: get_ipython().user_ns.get("total"))
    for rank in (1, 2, 3):
        was_interrupted = failed.value.outcomes[rank].error["kind"] == "KeyboardInterrupt"
        assert (totals[rank] is None and was_interrupted) or math.isnan(totals[rank])


def complete_with(simulation: Simulation, message: str) -> SimpleNamespace:
    """Complete an operation for which gloo raises an error. Returns the operation."""

    def wait() -> None:
        raise RuntimeError(message)

    flight = SimpleNamespace(landed=False)
    flight.land = lambda: setattr(flight, "landed", True)
    simulation.complete(flight, wait)
    return flight


def test_an_operation_ends_without_an_error_if_another_rank_was_cut_first():
    simulation = Simulation()
    threading.Timer(0.2, simulation.cut.set).start()
    assert complete_with(simulation, "[pair.cc:534] Connection closed by peer [127.0.0.1]:4321").landed


def reduced_in_a_thread() -> list[float]:
    group, tensor = dist.new_group(backend="gloo"), torch.ones(3)
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,), kwargs={"group": group})
    thread.start()
    thread.join()
    return tensor.tolist()


def test_what_another_thread_launches_is_not_simulated(simulated):
    assert ranks.run(reduced_in_a_thread) == [[4.0] * 3] * 4


def test_another_error_is_raised_at_once():
    with pytest.raises(RuntimeError, match=r"op\.preamble\.length"):
        complete_with(Simulation(), "[pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4")


# -- right code


def reduce_in_every_way() -> tuple:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    synchronous, asynchronous, chained = torch.ones(4), torch.ones(4), torch.ones(world_size)
    with wire.ledger() as log:
        dist.all_reduce(synchronous)
        work = dist.all_reduce(asynchronous, async_op=True)
        view = asynchronous[1:]  # a view uses no values
        work.wait()
        piece = torch.empty(1)
        dist.reduce_scatter_tensor(piece, chained, async_op=True)
        dist.all_gather_into_tensor(chained, piece, async_op=True).wait()  # both run on the group's stream, in order
        parcel, received = torch.full((2,), float(rank)), torch.empty(2)
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        pair = [dist.P2POp(dist.isend, parcel, right), dist.P2POp(dist.irecv, received, left)]
        for each in dist.batch_isend_irecv(pair):
            each.wait()
        freed = torch.empty(world_size)
        dist.all_gather_into_tensor(freed, torch.ones(1))
        total = freed.sum().item()
        freed.untyped_storage().resize_(0)
    return synchronous.tolist(), view.tolist(), piece.item(), chained.tolist(), received.tolist(), total, log.ops


def test_right_code_computes_the_right_values(simulated):
    for rank, result in enumerate(ranks.run(reduce_in_every_way)):
        synchronous, view, piece, chained, received, total, ops = result
        assert synchronous == [4] * 4 and view == [4] * 3 and piece == 4 and chained == [4] * 4
        assert received == [(rank - 1) % 4] * 2 and total == 4
        assert ops == {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 2, "send": 1, "recv": 1}


def wait_in_other_ways() -> list[float]:
    polled, future, read_only = torch.ones(1), torch.ones(1), torch.full((1,), float(dist.get_rank()))
    work = dist.all_reduce(polled, async_op=True)
    while not work.is_completed():
        pass
    value = dist.all_reduce(future, async_op=True).get_future().wait()[0]
    work = dist.broadcast(read_only, src=0, async_op=True)
    root_may_read = read_only.item() if dist.get_rank() == 0 else 0.0
    work.wait()
    return [polled.item(), value.item(), future.item(), root_may_read, read_only.item()]


def test_there_are_more_ways_to_wait_than_one(simulated):
    assert ranks.run(wait_in_other_ways) == [[4, 4, 4, 0, 0]] * 4


def outputs_in_flight() -> tuple[bool, list[int]]:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int32)
    works = [dist.all_reduce(floats, async_op=True), dist.all_reduce(integers, async_op=True)]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        raw = floats.isnan().all().item(), integers.tolist()
    for work in works:
        work.wait()
    return raw


def test_outputs_hold_garbage_until_the_stream_has_waited(simulated):
    assert ranks.run(outputs_in_flight) == [(True, [0x55555555, 0x55555555])] * 4


def take_turns() -> float:
    rank, received = dist.get_rank(), torch.zeros(1)
    if rank % 2 == 0:
        dist.send(torch.full((1,), float(rank)), rank + 1)
        dist.recv(received, rank + 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(torch.full((1,), float(rank)), rank - 1)
    return received.item()


def test_ranks_may_take_turns(simulated):
    assert ranks.run(take_turns) == [1, 0, 3, 2]


def train_with_torch(wrap: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    if wrap == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for step in range(3):
        inputs = torch.full((2, 8), float(dist.get_rank() + step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_torchs_own_wrappers_break_no_rule(simulated, wrap):
    assert all(loss == loss for losses in ranks.run(train_with_torch, wrap) for loss in losses)


OURS = [(module, path) for module, path in checked_files() if path.parent.name == "solutions"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("module", "path"), [pytest.param(*each, id=name_of(each[1])) for each in OURS])
def test_the_checks_of_right_code_find_no_violation(simulated, module, path):
    """`python -m tests.simulated_nccl` runs all checks at all world sizes, also of variants."""
    with only_first_checks(module):
        assert not failures_of(module, path)


@pytest.fixture(scope="module")
def losses_of_ddp(simulated) -> dict[str, list[list[float]]]:
    return {model: ranks.run(losses_of, "ddp", model) for model in ("mlp", "gpt", "moe")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_trains_without_a_violation(simulated, losses_of_ddp, strategy):
    model = model_for(strategy)
    assert ranks.run(losses_of, strategy, model) == [pytest.approx(losses) for losses in losses_of_ddp[model]]


# -- variants that are right on gloo, but hang on NCCL

NEED_GLOO = {
    path: (module_names(chapter)[0], piece)
    for chapter in chapters()
    for path in sorted((ROOT / "tests" / "variants" / chapter.name).glob("*.py"))
    if (piece := needs_gloo(path))
}


def test_rings_of_isend_and_irecv_need_gloo():
    assert {piece for _, piece in NEED_GLOO.values()} == {"pass_right", "ring_step"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NEED_GLOO, ids=name_of)
def test_a_variant_that_needs_gloo_hangs_on_nccl_and_is_told_why(simulated, path):
    module, piece = NEED_GLOO[path]
    (verdict,) = run_file(module, path, only=piece, check="values")
    assert not verdict.passed
    assert "none of them can continue" in verdict.evidence
    assert "one after another, including isend and irecv, unless they are all in one" in verdict.evidence
