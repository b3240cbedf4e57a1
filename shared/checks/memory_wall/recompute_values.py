"""Judging recomputation: the gradients are those without it, the module runs twice, and chance repeats itself."""

import contextlib

import torch
import torch.utils.checkpoint as library
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.hints import where_it_raises
from shared.checks.models import recompute
from shared.checks.models.recompute import MODELS, blocks_of, draw_inputs, loss_of, named_parameters

ROUNDS = 2
RAISED = {
    "incorrect number of gradients": "Look at: backward gives back one value per argument of forward. Which are they?",
    "not have been used in the graph": "Look at: what does autograd.grad do with a parameter that nothing uses?",
    "through the graph a second time": "Look at: on which graph do the recomputed inputs hang?",
}


@contextlib.contextmanager
def library_refused():
    """torch's own checkpoint raises in here, under whichever name it was imported: its inner parts are gone."""
    names = ("CheckpointFunction", "_CheckpointFrame", "check_backward_validity")
    before = {name: getattr(library, name) for name in names}

    class Refuse:
        def __new__(cls, *_, **__):
            raise AssertionError("torch's own checkpoint does the work here: write it by hand")

        apply = __new__

    for name in names:
        setattr(library, name, Refuse)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(library, name, value)


def probe_values(checkpointed, name: str, seed: int, inputs: tuple) -> dict:
    """Run backward twice, gradients adding up, then forward without one. → values, gradients, and runs of each block"""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    x, rows, weights = (each.to(device_here()) for each in inputs)
    found = {"runs": [], "losses": [], "gradients": []}
    with library_refused():
        for number in range(ROUNDS):
            own = x.clone().requires_grad_(number == 1)
            loss = loss_of(model, own, rows, weights)
            found["runs"].append([block.runs for block in blocks_of(model)])
            loss.backward()
            found["runs"].append([block.runs for block in blocks_of(model)])
            found["losses"].append(loss.item())
            gradients = {key: each.grad for key, each in named_parameters(model).items()} | {"the input": own.grad}
            found["gradients"].append({key: None if g is None else g.clone() for key, g in gradients.items()})
        with torch.no_grad():
            found["losses"].append(loss_of(model, x, rows, weights).item())
    found["runs"].append([block.runs for block in blocks_of(model)])
    return found


def plain(block: nn.Module) -> nn.Module:
    return block


@where_it_raises(RAISED)
def gradients_are_those_without_it(attempt: Attempt) -> None:
    for name in MODELS:
        seeds = [attempt.draw_seed() for _ in range(attempt.world_size)]
        inputs = [draw_inputs(seed) for seed in seeds]
        found = attempt.run(probe_values, name, per_rank=list(zip(seeds, inputs, strict=True)), context=name)
        for rank, result in enumerate(found):
            _judge_values(rank, result, _alone(name, seeds[rank], inputs[rank]), name)


def _alone(name: str, seed: int, inputs: tuple) -> dict:
    """What the same model does without wrapped blocks, on the CPU."""
    model = recompute.build(name, seed)
    x, rows, weights = inputs
    found = {"losses": [], "gradients": []}
    for number in range(ROUNDS):
        own = x.clone().requires_grad_(number == 1)
        loss = loss_of(model, own, rows, weights)
        loss.backward()
        found["losses"].append(loss.item())
        gradients = {key: each.grad for key, each in named_parameters(model).items()} | {"the input": own.grad}
        found["gradients"].append({key: None if g is None else g.clone() for key, g in gradients.items()})
    return found | {"losses": [*found["losses"], found["losses"][-1]]}


def _judge_values(rank: int, found: dict, want: dict, name: str) -> None:
    for came, expected in zip(found["losses"], want["losses"], strict=True):
        if not abs(came - expected) <= 1e-10 * max(1.0, abs(expected)):
            said = f"{name}: the loss is {came:.6g}, expected {expected:.6g}"
            raise Wrong({rank: said}, "Look at: what does forward give back?")
    for number, (mine, theirs) in enumerate(zip(found["gradients"], want["gradients"], strict=True), 1):
        for key, expected in theirs.items():
            came, said = mine[key], f"{name}, backward {number}: the gradient of {key}"
            if (came is None) != (expected is None):
                was = "None" if came is None else "a tensor"
                hint = "Look at: of which tensors does autograd want a gradient, and in which order does it take them?"
                raise Wrong({rank: f"{said} is {was}; without checkpoints it is not"}, hint)
            if came is not None and not close(came, expected):
                raise Wrong({rank: f"{said}, {first_difference(came, expected)}"}, _cause(came, expected, number))


def _cause(came: torch.Tensor, expected: torch.Tensor, number: int) -> str:
    if close(came, 2 * expected):
        return "It is twice what it should be. Look at: who else adds to .grad, and on what do recomputed inputs hang?"
    if number == 1 and not came.any():
        return "It is all zeros. Look at: which of the inputs and parameters has a gradient of its own?"
    return "Look at: what is differentiated, with respect to what, and multiplied by which gradient?"


def the_module_runs_twice(attempt: Attempt) -> None:
    for name in ("a block", "a block with three inputs, one of them integers", "two blocks that share a parameter"):
        seed = attempt.draw_seed()
        calls = 2 if "three" in name else 1  # that model runs its block twice
        for rank, result in enumerate(attempt.run(probe_values, name, seed, draw_inputs(seed), context=name)):
            want = [calls * runs for runs in (1, 2, 3, 4, 5)]  # after forward, backward, forward, backward, forward
            for place in range(len(result["runs"][0])):
                runs = [each[place] for each in result["runs"]]
                if runs != want:
                    came, expected = (", ".join(map(str, each)) for each in (runs, want))
                    said = f"{name}: after forward, backward, both again, and forward without a gradient, the module"
                    said += f" had run {came} times; expected {expected}"
                    raise Wrong({rank: said}, "Look at: when does it run, and for how many gradients at once?")


# -- dropout


class Drops(nn.Module):
    """Drops at random, and writes down what."""

    def __init__(self):
        super().__init__()
        self.weight, self.dropped = nn.Parameter(torch.rand(64, dtype=torch.float64) + 0.5), []

    def forward(self, x):
        mask = torch.rand(x.shape, device=x.device) > 0.4
        self.dropped.append(mask)
        return x * mask * self.weight


def _generators() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if device_here().type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


def probe_dropout(checkpointed, seed: int) -> dict:
    """Two blocks that drop, something else random before backward. → per block what was dropped, and the generators"""
    torch.manual_seed(seed)
    drops = [Drops().to(device_here()) for _ in range(2)]
    model = nn.Sequential(*[checkpointed(each) for each in drops])
    for _ in range(ROUNDS):
        output = model(torch.ones(2, 64, dtype=torch.float64, device=device_here()))
        torch.rand(7, device=device_here())
        before = _generators()
        output.sum().backward()
        after = _generators()
    still = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return {"dropped": [each.dropped for each in drops], "still": still}


def dropout_drops_the_same(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_dropout, attempt.draw_seed(), context="two blocks with dropout")):
        for number, masks in enumerate(result["dropped"], 1):
            for first, again in zip(masks[::2], masks[1::2], strict=True):
                if not torch.equal(first, again):
                    differ = int((first != again).sum())
                    said = f"block {number} of two with dropout: {differ} of 128 dropped in forward or backward only"
                    raise Wrong({rank: said}, "Look at: where were the generators in forward?")
            if torch.equal(masks[0], masks[2]):
                said = f"block {number} of two with dropout: the second step drops exactly what the first did"
                raise Wrong({rank: said}, "Look at: who sets the generators, and when?")
        if not result["still"]:
            said = "after backward the generators are not where they were before it"
            raise Wrong({rank: said}, "Look at: what would the next step drop?")
