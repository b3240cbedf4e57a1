"""Judge what recomputation keeps, when hooks run, and a backward that does not directly follow its forward."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.memory_wall.recompute_values import Drops, after_dropout, after_values
from shared.checks.models import recompute
from shared.checks.models.recompute import MODELS, draw_inputs, loss_of, named_parameters

# -- judge what a checkpointed module keeps between forward and backward
#
# The bytes of storages are counted, because autograd keeps the tensors that it saves in C++.


MANY_SAMPLES, INPUTS = 32, 256
SLACK_BYTES = 16_384  # saved states of random number generators, about 5,000 bytes each


class Wide(nn.Module):
    """Keep several tensors of [32, width] for backward, computed from two inputs."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(INPUTS, width), nn.Linear(width, width), nn.Linear(width, INPUTS)

    def forward(self, x, y):
        return self.down(F.gelu(self.middle(F.gelu(self.up(x * y)))))


@dataclass
class Kept:
    """How many more bytes live after each forward and each backward than before, without the results."""

    forward_bytes: list[int] = field(default_factory=list)
    backward_bytes: list[int] = field(default_factory=list)


def probe_kept(checkpointed, width: int, checkpoints: bool) -> Kept:
    """Run forward and backward twice."""
    block = Wide(width).to(device_here())
    model = checkpointed(block) if checkpoints else block
    found = Kept()
    for _ in range(2):
        x, y = (torch.randn(MANY_SAMPLES, INPUTS, device=device_here(), requires_grad=True) for _ in range(2))
        for each in (*block.parameters(), x, y):
            each.grad = torch.zeros_like(each)
        own = {"other": [*block.parameters(), *(p.grad for p in block.parameters()), x, y, x.grad, y.grad]}
        with memory.peak(model, extra=own) as peak:
            output = model(x, y)
        found.forward_bytes.append(_grown(peak) - output.nbytes)
        with memory.peak(model, extra=own) as peak:
            output.sum().backward()
            output = None
        found.backward_bytes.append(_grown(peak))
    return found


def _grown(peak: memory.Peak) -> int:
    return peak.samples[-1].held.total_bytes - peak.samples[0].held.total_bytes


@after_values
def only_inputs_are_kept(attempt: Attempt) -> None:
    width = attempt.random.randint(450, 600)
    plain_bytes = attempt.run(probe_kept, width, False)[0].forward_bytes[0]
    for rank, found in enumerate(attempt.run(probe_kept, width, True)):
        for number, kept_bytes in enumerate(found.forward_bytes, 1):
            if kept_bytes > SLACK_BYTES:
                evidence = (
                    f"a module that keeps {plain_bytes:,} bytes of activations: when checkpointed, it keeps "
                    f"{kept_bytes:,} "
                    f"bytes besides its inputs and its output after forward {number}; expected none"
                )
                raise Wrong({rank: evidence}, "Hint: what does autograd record during forward, and what else is saved?")
        for number, kept_bytes in enumerate(found.backward_bytes, 1):
            if kept_bytes > SLACK_BYTES:
                evidence = f"{kept_bytes:,} more bytes are held after backward {number} than before it; expected none"
                raise Wrong({rank: evidence}, "Hint: which tensor of forward or the recomputation do you still hold?")


def probe_left(checkpointed, width: int) -> int:
    """Train once, then drop inputs and gradients. Return the bytes that still live besides the loss."""
    model = checkpointed(Wide(width).to(device_here()))
    leaf = torch.zeros(1, device=device_here(), requires_grad=True)  # A graph keeps its leaves alive.
    before_bytes = living_bytes()

    def forward() -> torch.Tensor:
        return model(*(torch.randn(MANY_SAMPLES, INPUTS, device=device_here()) + leaf for _ in range(2))).sum()

    loss = forward()
    loss.backward()
    model.zero_grad()
    return living_bytes() - before_bytes - loss.nbytes


@after_values
def nothing_is_left(attempt: Attempt) -> None:
    width = attempt.random.randint(450, 600)
    for rank, left_bytes in enumerate(attempt.run(probe_left, width)):
        if left_bytes > SLACK_BYTES:
            evidence = (
                f"{left_bytes:,} bytes are still held after backward, although inputs and gradients were "
                "deleted; expected none "
                f"(the two inputs had {2 * MANY_SAMPLES * INPUTS * 4:,} bytes)"
            )
            raise Wrong({rank: evidence}, "Hint: where do you save the inputs, and can autograd free them there?")


# -- judge when gradient hooks run: a wrapper such as OverlappedDDP sends each gradient when its hook is called


TIMES = 2


def probe_hooks(checkpointed, name: str, seed: int, inputs: tuple) -> list[list[tuple]]:
    """Run backward twice, accumulating. Return, for each backward, whose hooks ran, with .grad as it was then."""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    x, rows, weights = (each.to(device_here()) for each in inputs)
    hook_calls, rounds = [], []
    for key, parameter in named_parameters(model).items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda each, key=key: hook_calls.append((key, None if each.grad is None else each.grad.clone()))
            )
    for _ in range(TIMES):
        hook_calls.clear()
        loss_of(model, x, rows, weights).backward()
        rounds.append(hook_calls[:])
    return rounds


@after_values
def hooks_see_whole_gradients_once(attempt: Attempt) -> None:
    for name in MODELS:
        seed = attempt.draw_seed()
        inputs = draw_inputs(seed)
        model = recompute.build(name, seed)
        loss_of(model, *inputs).backward()
        expected = {key: parameter.grad for key, parameter in named_parameters(model).items()}
        for rank, rounds in enumerate(attempt.run(probe_hooks, name, seed, inputs, context=name)):
            for number, hook_calls in enumerate(rounds, 1):
                _judge_round(rank, hook_calls, expected, number, f"{name}, backward {number}")


def _judge_round(rank: int, hook_calls: list[tuple], expected_gradients: dict, number: int, context: str) -> None:
    names = [
        name for name, gradient in hook_calls if gradient is not None
    ]  # A hook also runs if a function returns None.
    for name, gradient in expected_gradients.items():
        if names.count(name) != (expected := int(gradient is not None)):
            evidence = f"{context}: the hook of {name} was called {names.count(name)} times; expected {expected}"
            raise Wrong({rank: evidence}, "Hint: which code writes into .grad, and how often in one backward?")
    for name, seen in hook_calls:
        if seen is not None and not nearly_equal(seen, number * expected_gradients[name]):
            difference = first_difference(seen, number * expected_gradients[name])
            hint = "Hint: which part of the gradient is still missing when the hook is called?"
            raise Wrong({rank: f"{context}: when the hook of {name} ran, its .grad was incomplete: {difference}"}, hint)


SAMPLES, WIDTH = 2, 64
BACKWARDS = (0, 2, 0)  # indices of the forwards: the second is never used, and the first one twice


@dataclass
class Backward:
    gradients: list[torch.Tensor]  # of the input and of the weight
    x: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor


def probe_order(checkpointed, seed: int) -> list[Backward]:
    """Run three forwards, one more without gradients, then some backwards."""
    torch.manual_seed(seed)
    drops = Drops().to(device_here())
    model = checkpointed(drops)
    own = [torch.rand(SAMPLES, WIDTH, dtype=torch.float64, device=device_here()) + 1 for _ in range(3)]
    outputs = [model(x.requires_grad_()) for x in own]
    with torch.no_grad():
        model(own[0])
    found = []
    for number in BACKWARDS:
        wanted = own[number], drops.weight
        gradients = torch.autograd.grad(outputs[number].sum(), wanted, retain_graph=True)
        found.append(
            Backward(
                [gradient.cpu() for gradient in gradients],
                x=own[number].detach().cpu(),
                mask=drops.dropped[number].cpu(),
                weight=drops.weight.detach().cpu(),
            )
        )
    return found


@after_values
@after_dropout
def backward_finds_its_own_forward(attempt: Attempt) -> None:
    context = (
        "one block, forward of batches 1, 2 and 3, and once under no_grad; then backward of batches 1, 3 and 1 again"
    )
    for rank, rounds in enumerate(attempt.run(probe_order, attempt.draw_seed(), context=context)):
        for which, found in zip(BACKWARDS, rounds, strict=True):
            expected = [found.mask * found.weight, (found.x * found.mask).sum(0)]
            for name, actual, wanted in zip(("the input", "the weight"), found.gradients, expected, strict=True):
                if not nearly_equal(actual, wanted):
                    evidence = (
                        f"{context}: batch {which + 1}, the gradient of {name} is wrong: "
                        f"{first_difference(actual, wanted)}"
                    )
                    raise Wrong({rank: evidence}, "Hint: where does each forward save what its backward needs?")


# -- inputs and parameters that other code writes into


def probe_changed(checkpointed, seed: int, what: str) -> bool:
    """Write into a block's input or parameter between forward and backward. Return whether backward raises."""
    torch.manual_seed(seed)
    model = checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device_here()))
    x = torch.rand(SAMPLES, WIDTH, device=device_here(), requires_grad=True)
    y = x * 1
    output = model(y)
    with torch.no_grad():
        (y if what == "input" else next(model.parameters())).add_(1)
    try:
        output.sum().backward()
    except RuntimeError:
        return True
    return False


@after_values
def changed_inputs_are_rejected(attempt: Attempt) -> None:
    for what in ("input", "parameter"):
        for rank, rejected in enumerate(attempt.run(probe_changed, attempt.draw_seed(), what)):
            if not rejected:
                evidence = (
                    f"a block's {what} was changed in place between forward and backward, and backward silently "
                    "recomputed different activations; expected autograd's RuntimeError"
                )
                hint = "Hint: how must a tensor be saved so that autograd notices in-place changes?"
                raise Wrong({rank: evidence}, hint)


# -- autocast


class Casts(nn.Module):
    """Log the dtype of each computation."""

    def __init__(self):
        super().__init__()
        self.weight, self.dtypes = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH), []

    def forward(self, x):
        y = F.linear(x, self.weight)
        self.dtypes.append(y.dtype)
        return y


@dataclass
class Computed:
    dtypes: list[torch.dtype]  # of each computation of the block
    gradient: torch.Tensor  # of its weight


def probe_autocast(checkpointed, seed: int, inside: bool, wrap: bool = True) -> Computed:
    """Run forward inside autocast and backward outside, or the reverse."""
    torch.manual_seed(seed)
    casts = Casts().to(device_here())
    model = checkpointed(casts) if wrap else casts
    x = torch.rand(SAMPLES, WIDTH, device=device_here())
    kind = device_here().type
    with torch.autocast(kind, torch.bfloat16, enabled=inside):
        output = model(x).sum() + F.linear(x, casts.weight).sum()  # The weight is also used outside the block.
    with torch.autocast(kind, torch.bfloat16, enabled=not inside):
        output.backward()
    assert casts.weight.grad is not None  # The weight is also used outside the block.
    return Computed(casts.dtypes, casts.weight.grad.cpu())


@after_values
def recomputation_uses_forwards_autocast(attempt: Attempt) -> None:
    seed = attempt.draw_seed()
    for inside in (True, False):
        sides = ("inside", "outside") if inside else ("outside", "inside")
        context = "a linear layer, with forward {} autocast and backward {} it".format(*sides)
        plain = attempt.run(probe_autocast, seed, inside, False, context=context)
        for rank, found in enumerate(attempt.run(probe_autocast, seed, inside, context=context)):
            dtypes = [str(each).removeprefix("torch.") for each in found.dtypes]
            if len(set(dtypes)) > 1:
                evidence = f"{context}: forward computes in {dtypes[0]}, but the recomputation in {dtypes[1]}"
                raise Wrong({rank: evidence}, "Hint: which autocast state was active in forward?")
            if not nearly_equal(found.gradient, plain[rank].gradient, 0.02):
                difference = first_difference(found.gradient, plain[rank].gradient, 0.02)
                raise Wrong(
                    {rank: f"{context}: the gradient of its weight is wrong: {difference}"},
                    "Hint: which cast weights does autocast keep in its cache?",
                )
