"""Bugs that gloo hides and NCCL would not: each one replaces a piece of the course's own solutions.

All functions run on the ranks.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from shared.wire import completion, instrumentation
from solutions.bucketed_ddp import Bucket
from solutions.collectives import ring_all_reduce
from solutions.overlapped_ddp import OverlappedDDP
from solutions.units import Unit, UnitState
from solutions.zero3 import ZeRO3


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
