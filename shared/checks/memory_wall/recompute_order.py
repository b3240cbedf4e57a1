"""Judging recomputation where backward does not simply follow forward: later, twice, or when something has changed."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.hints import begin_at
from shared.checks.memory_wall.recompute_values import Drops, gradients_are_those_without_it

SAMPLES, WIDTH = 2, 64
BACKWARDS = (0, 2, 0)  # of which forward: the first first, one never, and one again
after_values = begin_at(gradients_are_those_without_it, "values")


def probe_order(checkpointed, seed: int) -> list[dict]:
    """Run forward three times, once more without gradients, then some backwards. → per backward what went in and out"""
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
            {
                "came": [each.cpu() for each in gradients],
                "x": own[number].detach().cpu(),
                "mask": drops.dropped[number].cpu(),
                "weight": drops.weight.detach().cpu(),
            }
        )
    return found


@after_values
def backward_finds_its_own_forward(attempt: Attempt) -> None:
    said = "one block, forward of batches 1, 2 and 3, and once under no_grad; then backward of batches 1, 3 and 1 again"
    for rank, rounds in enumerate(attempt.run(probe_order, attempt.draw_seed(), context=said)):
        for which, found in zip(BACKWARDS, rounds, strict=True):
            expected = [found["mask"] * found["weight"], (found["x"] * found["mask"]).sum(0)]
            for name, came, want in zip(("the input", "the weight"), found["came"], expected, strict=True):
                if not close(came, want):
                    evidence = f"{said}: batch {which + 1}, the gradient of {name}, {first_difference(came, want)}"
                    raise Wrong({rank: evidence}, "Look at: where does each forward leave what its backward needs?")


# -- inputs that somebody writes into


def probe_changed(checkpointed, seed: int) -> bool:
    """Write into a block's input between forward and backward. → does backward refuse?"""
    torch.manual_seed(seed)
    model = checkpointed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(device_here()))
    x = torch.rand(SAMPLES, WIDTH, device=device_here(), requires_grad=True)
    y = x * 1
    output = model(y)
    with torch.no_grad():
        y.add_(1)
    try:
        output.sum().backward()
    except RuntimeError:
        return True
    return False


@after_values
def changed_inputs_are_refused(attempt: Attempt) -> None:
    for rank, refused in enumerate(attempt.run(probe_changed, attempt.draw_seed())):
        if not refused:
            said = (
                "somebody wrote into a block's input between forward and backward: other activations were computed "
                "again, without a word; expected autograd's RuntimeError"
            )
            raise Wrong({rank: said}, "Look at: with what must tensors be kept so that autograd notices?")


# -- autocast


class Casts(nn.Module):
    """Writes down in which dtype it computes."""

    def __init__(self):
        super().__init__()
        self.weight, self.dtypes = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH), []

    def forward(self, x):
        y = F.linear(x, self.weight)
        self.dtypes.append(y.dtype)
        return y


def probe_autocast(checkpointed, seed: int, inside: bool, wrap: bool = True) -> dict:
    """Run forward in autocast and backward outside, or the other way. → dtypes, and the weight's gradient"""
    torch.manual_seed(seed)
    casts = Casts().to(device_here())
    model = checkpointed(casts) if wrap else casts
    x = torch.rand(SAMPLES, WIDTH, device=device_here())
    kind = device_here().type
    with torch.autocast(kind, torch.bfloat16, enabled=inside):
        output = model(x).sum() + F.linear(x, casts.weight).sum()  # its weight is used outside too
    with torch.autocast(kind, torch.bfloat16, enabled=not inside):
        output.backward()
    return {"dtypes": casts.dtypes, "gradient": casts.weight.grad.cpu()}


@after_values
def autocast_is_that_of_forward(attempt: Attempt) -> None:
    seed = attempt.draw_seed()
    for inside in (True, False):
        places = ("in", "outside") if inside else ("outside", "in")
        said = "a linear layer, forward {} autocast and backward {}".format(*places)
        plain = attempt.run(probe_autocast, seed, inside, False, context=said)
        for rank, found in enumerate(attempt.run(probe_autocast, seed, inside, context=said)):
            dtypes = [str(each).removeprefix("torch.") for each in found["dtypes"]]
            if len(set(dtypes)) > 1:
                evidence = f"{said}: it computes in {dtypes[0]}, and again in {dtypes[1]}"
                raise Wrong({rank: evidence}, "Look at: under which autocast did forward run?")
            if not close(found["gradient"], plain[rank]["gradient"], 0.02):
                difference = first_difference(found["gradient"], plain[rank]["gradient"], 0.02)
                raise Wrong({rank: f"{said}: the gradient of its weight, {difference}"}, "Look at: autocast's cache.")
