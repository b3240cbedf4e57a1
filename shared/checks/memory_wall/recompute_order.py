"""Judge recomputation if backward does not directly follow forward: later, twice, or after something changed."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.memory_wall.recompute_values import Drops, after_dropout, after_values

SAMPLES, WIDTH = 2, 64
BACKWARDS = (0, 2, 0)  # indices of the forwards: the second is never used, and the first one twice


def probe_order(checkpointed, seed: int) -> list[dict]:
    """Run three forwards, one more without gradients, then some backwards. Return inputs and gradients per backward."""
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
                "gradients": [gradient.cpu() for gradient in gradients],
                "x": own[number].detach().cpu(),
                "mask": drops.dropped[number].cpu(),
                "weight": drops.weight.detach().cpu(),
            }
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
            expected = [found["mask"] * found["weight"], (found["x"] * found["mask"]).sum(0)]
            for name, actual, wanted in zip(("the input", "the weight"), found["gradients"], expected, strict=True):
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


def probe_autocast(checkpointed, seed: int, inside: bool, wrap: bool = True) -> dict:
    """Run forward inside autocast and backward outside, or the reverse. Return the dtypes and the weight's gradient."""
    torch.manual_seed(seed)
    casts = Casts().to(device_here())
    model = checkpointed(casts) if wrap else casts
    x = torch.rand(SAMPLES, WIDTH, device=device_here())
    kind = device_here().type
    with torch.autocast(kind, torch.bfloat16, enabled=inside):
        output = model(x).sum() + F.linear(x, casts.weight).sum()  # The weight is also used outside the block.
    with torch.autocast(kind, torch.bfloat16, enabled=not inside):
        output.backward()
    return {"dtypes": casts.dtypes, "gradient": casts.weight.grad.cpu()}


@after_values
def recomputation_uses_forwards_autocast(attempt: Attempt) -> None:
    seed = attempt.draw_seed()
    for inside in (True, False):
        sides = ("inside", "outside") if inside else ("outside", "inside")
        context = "a linear layer, with forward {} autocast and backward {} it".format(*sides)
        plain = attempt.run(probe_autocast, seed, inside, False, context=context)
        for rank, found in enumerate(attempt.run(probe_autocast, seed, inside, context=context)):
            dtypes = [str(each).removeprefix("torch.") for each in found["dtypes"]]
            if len(set(dtypes)) > 1:
                evidence = f"{context}: forward computes in {dtypes[0]}, but the recomputation in {dtypes[1]}"
                raise Wrong({rank: evidence}, "Hint: which autocast state was active in forward?")
            if not nearly_equal(found["gradient"], plain[rank]["gradient"], 0.02):
                difference = first_difference(found["gradient"], plain[rank]["gradient"], 0.02)
                raise Wrong(
                    {rank: f"{context}: the gradient of its weight is wrong: {difference}"},
                    "Hint: which cast weights does autocast keep in its cache?",
                )
