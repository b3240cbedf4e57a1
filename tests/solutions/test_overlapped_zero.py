"""ZeRO-1 with its module, and ZeRO-2: all-gathers overlap the next forward, and training is that of one process.

The functions without `test_` run on the ranks. A habit is what a training loop does. It runs on the ranks and in one
process, and both must observe the same tensors.
"""

import contextlib
import copy
import io
import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from shared import ranks, wire
from shared.guards.in_flight import InFlightParameter
from solutions import overlapped_flat
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2

pytestmark = [pytest.mark.slow, pytest.mark.chapter("zero1", "zero2")]

SMALL_MB = 0.0005  # so that a few layers are in several buckets
SAMPLES, WIDTH = 12, 8


class Net(nn.Module):
    """Four layers, of which the first and the last share a weight, a frozen one, and one that a batch may not use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.uses_rare = self.checkpoints = False

    def forward(self, x):
        for layer in (*self.layers, self.frozen):
            step = lambda x, layer=layer: x + torch.tanh(layer(x))  # noqa: E731
            x = checkpoint(step, x, use_reentrant=False) if self.checkpoints else step(x)
        return torch.cat([x[:1] + self.rare(x[:1]), x[1:]]) if self.uses_rare else x


class Loop:
    """A model and its optimizer, on a rank or in one process (kind "alone")."""

    def __init__(self, kind: str, optimizer: str = "AdamW", seed: int = 0):
        self.kind, self.name, self.seen = kind, optimizer, []
        self.rank, self.size = (0, 1) if kind == "alone" else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(seed + self.rank)  # The ranks must begin with the values of rank 0.
        self.module = Net().double()
        settings = {"lr": 0.01, "weight_decay": 0.1} | ({"momentum": 0.9} if optimizer == "SGD" else {})
        optimizer_cls = getattr(torch.optim, optimizer)
        overlapped_flat.LEAST_CAP_MB = SMALL_MB
        overlapped_flat.LEAST_IN_FLIGHT_MB = 0.0
        self.model = self.module
        if kind == "alone":
            self.optimizer = optimizer_cls(self.module.parameters(), **settings)
        elif kind == "zero1":
            decayed = [p for p in self.module.parameters() if p.dim() > 1]
            others = [p for p in self.module.parameters() if p.dim() == 1]
            groups = [{"params": decayed}, {"params": others}]
            self.optimizer = ZeRO1(groups, optimizer_cls, module=self.module, **settings)
        else:
            self.model = self.optimizer = ZeRO2(self.module, optimizer_cls, SMALL_MB, **settings)

    def loss(self, number: int) -> torch.Tensor:
        x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        own = slice(self.rank, None, self.size)
        return (self.model(x[own]) - y[own]).square().mean()

    def backward(self, number: int) -> None:
        self.loss(number).backward()

    def use_rare(self, uses: bool) -> None:
        """Let the first sample, which is on rank 0, use the rare layer, or let no sample use it."""
        self.module.uses_rare = uses and self.rank == 0

    def no_sync(self):
        return contextlib.nullcontext() if self.kind == "alone" else self.optimizer.no_sync()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def see(self, *tensors: torch.Tensor) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors]

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer if self.kind == "zero2" else self.optimizer

    def states(self) -> tuple[dict, dict]:
        return copy.deepcopy((self.module.state_dict(), self.inner.state_dict()))

    def load(self, states: tuple[dict, dict]) -> None:
        self.module.load_state_dict(states[0])
        self.inner.load_state_dict(states[1])


# -- habits: each takes a Loop


def plain(loop):
    for number in range(4):
        loop.step(number)


def accumulates_in_no_sync_only(loop):
    for number in range(3):
        loop.optimizer.zero_grad()
        with loop.no_sync():
            loop.backward(number)
        loop.optimizer.step()


def evaluates(loop):
    for number in range(3):
        loop.step(number)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
        loop.module.eval()
        with torch.no_grad() if number % 2 else torch.inference_mode():
            loop.see(loop.module(x), loop.module.layers[number].weight * 1)
        loop.module.train()


def reads_between_steps(loop):
    for number in range(5):
        loop.step(number)
        reads = [
            lambda: parameters_to_vector(loop.module.parameters()),
            lambda: torch.cat([value.flatten() for value in loop.module.state_dict().values()]),
            lambda: torch.from_numpy(loop.module.layers[1].weight.detach().numpy()),
            lambda: torch.tensor([p.norm().item() for p in loop.module.parameters()]),
            lambda: torch.stack(torch._foreach_norm(list(loop.module.parameters()))),
        ]
        loop.see(reads[number]())


def saves_and_resumes(loop):
    plain(loop)
    loop.see(*loop.module.state_dict().values())
    states = loop.states()
    other = Loop(loop.kind, loop.name, seed=17)
    other.load(states)
    for number in range(4, 7):
        other.step(number)
        loop.step(number)
    loop.see(*other.module.state_dict().values())


def loads_while_in_flight(loop):
    plain(loop)
    states = loop.states()
    loop.step(4)
    loop.load(states)
    for number in range(5, 7):
        loop.step(number)


def copies_the_module(loop):
    plain(loop)
    copied = copy.deepcopy(loop.module)
    loop.see(*copied.state_dict().values())
    file = io.BytesIO()
    loop.step(4)
    torch.save(loop.module, file)
    file.seek(0)
    loop.see(*torch.load(file, weights_only=False).state_dict().values())
    loop.step(5)
    loop.see(*copied.state_dict().values())


def trains_a_copy(loop):
    plain(loop)
    if loop.kind == "zero2":
        other = copy.copy(loop)
        other.model = other.optimizer = copy.deepcopy(loop.model)
        other.module = other.model.module
    else:
        other = copy.copy(loop)
        other.module, other.optimizer = copy.deepcopy((loop.module, loop.optimizer))
        other.model = other.module
    other.step(10)
    loop.step(11)
    loop.see(*other.module.state_dict().values())


def fails_in_forward(loop):
    for number in range(4):
        loop.step(number)
        with contextlib.suppress(RuntimeError):
            loop.module(torch.ones(1, WIDTH + 1, dtype=torch.float64))  # which has too many columns


def fails_between_step_and_forward(loop):
    for number in range(4):
        try:
            loop.step(number)
            raise ValueError("a callback failed")
        except ValueError:
            pass


def trains_two_models(loop):
    other = Loop(loop.kind, "SGD", seed=5)
    for number in range(3):
        loop.step(number)
        other.step(number)
    loop.see(*other.module.state_dict().values())


def changes_weights_between_steps(loop):
    for number in range(4):
        loop.step(number)
        with torch.no_grad():
            loop.module.layers[number % 4].bias.mul_(0.5)
            torch._foreach_clamp_max_(list(loop.module.layers[1].parameters()), 0.1)


def zeroes_by_the_module(loop):
    for number in range(3):
        loop.module.zero_grad()
        loop.backward(number)
        loop.optimizer.step()
        if loop.kind == "zero2":
            loop.optimizer.zero_grad()


def recomputes(loop):
    loop.module.checkpoints = True
    plain(loop)


def uses_some_layers_only_in_no_sync(loop):
    for number in range(3):
        loop.optimizer.zero_grad()
        with loop.no_sync():
            loop.use_rare(True)
            loop.backward(number)
        loop.use_rare(False)
        loop.backward(number + 10)
        loop.optimizer.step()


def penalizes_weights(loop):
    for number in range(3):
        loop.optimizer.zero_grad()
        (loop.loss(number) + 0.01 * sum(p.square().sum() for p in loop.module.parameters())).backward()
        loop.optimizer.step()


def never_reads_some_parameters(loop):
    for number in range(3):
        loop.use_rare(number == 0)
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward(number)
        loop.optimizer.step()


HABITS = {habit.__name__: habit for habit in list(globals().values()) if getattr(habit, "__code__", None)
          and habit.__module__ == __name__ and habit.__code__.co_varnames[:1] == ("loop",)}  # fmt: skip
"""All functions above that take a Loop. test_real_models_ddp.py has those that fit every wrapper."""


def observed(kind: str, name: str, optimizer: str) -> list[torch.Tensor]:
    loop = Loop(kind, optimizer)
    HABITS[name](loop)
    return [*loop.seen, *(value.detach().clone() for value in loop.module.state_dict().values())]


@pytest.mark.parametrize("name", HABITS)
@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_loop_trains_as_in_one_process(four_ranks, kind, name):
    for world_size, optimizer in ((1, "AdamW"), (2, "AdamW"), (4, "AdamW"), (2, "SGD")):
        expected = observed("alone", name, optimizer)
        with ranks.world(world_size):
            for found in ranks.run(observed, kind, name, optimizer):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, check_dtype=False)


# -- what cannot be right raises on every rank


def backward_twice(loop):
    loop.backward(0)
    loop.backward(1)
    loop.optimizer.step()


def step_in_no_sync(loop):
    with loop.no_sync():
        loop.backward(0)
        loop.optimizer.step()


def backward_after_clipping(loop):
    loop.backward(0)
    loop.optimizer.clip_grad_norm_(1.0)
    loop.backward(1)
    loop.optimizer.step()


def step_twice(loop):
    loop.step(0)
    loop.optimizer.step()


def no_zero_grad_and_no_backward_on_rank_1(loop):
    loop.step(0)
    if loop.rank == 0:
        loop.backward(1)
    loop.optimizer.step()


def gradients_changed(loop):
    loop.module.uses_rare = True  # on every rank, so that backward launches all buckets
    loop.backward(0)
    loop.module.layers[2].weight.grad.mul_(2.0)
    loop.optimizer.step()


def gradients_dropped(loop):
    loop.backward(0)
    loop.module.zero_grad()
    loop.optimizer.step()


def stepped_by_another_optimizer(loop):
    loop.backward(0)
    torch.optim.SGD(loop.module.parameters(), lr=0.1).step()


def frozen_later(loop):
    loop.module.layers[1].weight.requires_grad_(False)
    loop.backward(0)


def replaced_later(loop):
    loop.step(0)
    loop.module.layers[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
    loop.backward(0)


def more_parameters(loop):
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def part_of_the_module(loop):
    ZeRO1(loop.module.layers[1].parameters(), torch.optim.SGD, module=loop.module, lr=0.1)


def another_module(loop):
    ZeRO1(loop.module.parameters(), torch.optim.SGD, module=loop.module.layers[1], lr=0.1)


REFUSED = {  # by habit: a part of the message; test_real_models_ddp.py has more
    backward_twice: "reduced the gradient of parameter .* in the optimizer's no_sync",
    step_in_no_sync: r"call step\(\) and clip_grad_norm_\(\) outside no_sync",
    backward_after_clipping: r"the gradient of parameter .* clip_grad_norm_\(\) after the last backward",
    step_twice: r"the gradient of parameter .* Call its zero_grad\(\) after each step\(\)",
    no_zero_grad_and_no_backward_on_rank_1: r"Call its zero_grad\(\) after each step\(\)",
    gradients_changed: r"the gradient of parameter 'layers.* was changed .* scale the loss",
    gradients_dropped: r"the gradient of parameter .* was dropped .* call the optimizer's zero_grad\(\), on all ranks",
    stepped_by_another_optimizer: r"gradients are sharded: call step\(\) of ZeRO1",
    frozen_later: "parameter 'layers.1.weight' was frozen after",
    replaced_later: "parameter 'layers.1.weight' was replaced",
    more_parameters: "has all parameters of its module",
    part_of_the_module: "parameter 'layers.0.weight' of the module is missing",
    another_module: r"parameter #0 of shape \[8, 8\] is not in the module",
}


def error_of(name: str) -> str:
    loop = Loop("zero1")
    habit = next(habit for habit in REFUSED if habit.__name__ == name)
    try:
        habit(loop)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("name", [habit.__name__ for habit in REFUSED])
def test_a_mistake_raises_on_every_rank(four_ranks, name):
    expected = next(words for habit, words in REFUSED.items() if habit.__name__ == name)
    with ranks.world(2):
        for found in ranks.run(error_of, name, timeout_s=20.0):
            assert re.search(expected, found), found


# -- ranks that do different things


def without_backward_on_rank_1(kind: str) -> list[torch.Tensor]:
    """Train, while rank 1 has no samples in some steps. In one process, its share of the mean is zero.

    Before step 2, all ranks skip a step: they drop the gradients of a backward without stepping.
    """
    loop = Loop(kind)
    for number in range(4):
        loop.optimizer.zero_grad()
        if number == 2:
            loop.model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
            loop.optimizer.zero_grad()
        if kind == "alone" or loop.rank == 0 or number == 0:
            own = slice(0, None, 2) if kind == "alone" and number else slice(None)
            x, y = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            x, y = (each[own] if kind == "alone" else each[loop.rank :: 2] for each in (x, y))
            ((loop.model(x) - y).square().mean() / (2 if kind == "alone" and number else 1)).backward()
        loop.optimizer.step()
    return [value.detach().clone() for value in loop.module.state_dict().values()]


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_a_rank_without_backward_takes_part(four_ranks, kind):
    expected = without_backward_on_rank_1("alone")
    with ranks.world(2):
        for found in ranks.run(without_backward_on_rank_1, kind):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# -- what is in flight


def in_flight_after_each_call(kind: str) -> dict[str, list[bool]]:
    loop, found = Loop(kind), {}

    def look(when: str) -> None:
        found[when] = [type(layer.bias) is InFlightParameter for layer in loop.module.layers]

    loop.step(0)
    look("step")
    loop.optimizer.zero_grad()
    look("zero_grad")
    loop.module.layers[0].weight.sum()
    look("read one")
    loop.module.layers[3].bias.sum()
    loop.module.layers[1].bias.sum()
    loop.inner.finish_parameter_sync()
    look("finish_parameter_sync")
    loop.step(1)
    loop.loss(2)
    look("forward")
    return found


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_parameters_are_in_flight_until_somebody_reads_them(four_ranks, kind):
    with ranks.world(2):
        for found in ranks.run(in_flight_after_each_call, kind):
            assert found["step"] == found["zero_grad"] == [True] * 4
            assert 0 < sum(found["read one"]) <= 4
            assert found["finish_parameter_sync"] == found["forward"] == [False] * 4


def seen_by_an_alias() -> tuple[list[bool], list[bool]]:
    """Read the parameters by aliases from before the step, while rank 1 is late, and again when they are complete.

    Returns:
        Whether the last element of each is NaN.
    """
    loop = Loop("zero1")
    aliases = [p.data for p in loop.module.parameters() if p.requires_grad]
    loop.optimizer.zero_grad()
    loop.backward(0)
    loop.optimizer.reduce_gradients()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    loop.optimizer.step()
    early = [alias.isnan().any().item() for alias in aliases]
    loop.optimizer.finish_parameter_sync()
    return early, [alias.isnan().any().item() for alias in aliases]


def test_a_reader_that_cannot_wait_gets_nan(four_ranks):
    with ranks.world(2):
        early, complete = ranks.run(seen_by_an_alias)[0]
    assert sum(early) >= len(early) // 2, early  # Rank 0 has the others in its own shard.
    assert not any(complete)


def sent(with_module: bool) -> tuple[float, int]:
    loop = Loop("alone")
    loop.kind, loop.rank, loop.size = "zero1", dist.get_rank(), dist.get_world_size()
    module = loop.module if with_module else None
    loop.optimizer = ZeRO1(loop.module.parameters(), torch.optim.AdamW, module=module, lr=0.01)
    loop.step(0)
    with wire.ledger() as log:
        loop.step(1)
        loop.inner.finish_parameter_sync()
    return log.sent_bytes, len(loop.optimizer.flat_parameters)


def test_a_module_does_not_change_the_bytes_sent(four_ranks):
    with ranks.world(4):
        (plain_bytes, _), (overlapped_bytes, buckets) = (ranks.run(sent, which)[0] for which in (False, True))
    assert buckets > 3
    padding_bytes = 2 * buckets * 3 * 8
    assert plain_bytes <= overlapped_bytes <= plain_bytes + padding_bytes


class OwnParameter(nn.Parameter):
    """A class that the parameter must not lose."""


def trained_with_an_own_class() -> tuple[list[torch.Tensor], bool]:
    loop = Loop("alone")
    loop.kind, loop.rank, loop.size = "zero1", dist.get_rank(), dist.get_world_size()
    loop.module.layers[1].weight = OwnParameter(loop.module.layers[1].weight.detach())
    loop.optimizer = ZeRO1(loop.module.parameters(), torch.optim.AdamW, module=loop.module, lr=0.01, weight_decay=0.1)
    plain(loop)
    return [p.detach().clone() for p in loop.module.parameters()], type(loop.module.layers[1].weight) is OwnParameter


def test_a_parameter_of_an_own_class_is_complete_after_the_step(four_ranks):
    alone = Loop("alone")
    plain(alone)
    with ranks.world(2):
        for found, kept in ranks.run(trained_with_an_own_class):
            torch.testing.assert_close(found, list(alone.module.parameters()), rtol=1e-9, atol=1e-9)
            assert kept


def reduce_scatters_in_flight() -> tuple[int, int]:
    """Return the number of buckets, and how many of them are in flight at most after one has been launched."""
    loop, counts = Loop("zero1"), []
    loop.module.uses_rare = True
    buckets = loop.optimizer.gradients

    def counted(launch):
        launch()
        counts.append(sum(bucket.in_flight is not None for bucket in buckets))

    for bucket in buckets:
        bucket.launch = partial(counted, bucket.launch)
    loop.backward(0)
    loop.optimizer.step()
    return len(counts), max(counts)


def test_one_reduce_scatter_at_a_time_is_in_flight(four_ranks):
    with ranks.world(2):
        for buckets, in_flight in ranks.run(reduce_scatters_in_flight):
            assert buckets > 3 and in_flight == 1
