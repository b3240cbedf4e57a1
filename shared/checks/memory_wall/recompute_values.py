"""Judge recomputation: gradients are unchanged, the module runs twice, and random numbers repeat."""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.utils.checkpoint as library
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.hints import begin_at, where_it_raises
from shared.checks.models import recompute
from shared.checks.models.recompute import MODELS, blocks_of, draw_inputs, loss_of, named_parameters

ROUNDS = 2
OUTSIDE = {"first": "before", "last": "after"}  # layers of the surrounding model
RAISED = {
    "incorrect number of gradients": (
        "Hint: backward() returns one value for each argument of forward(). Which arguments does yours have?"
    ),
    "not have been used in the graph": "Hint: what does torch.autograd.grad do with a parameter that was not used?",
    "through the graph a second time": "Hint: to which graph do the recomputed inputs belong?",
    "floating point": "Hint: which of the saved inputs required a gradient in forward?",
    "does not have a grad_fn": (
        "Hint: is the tensor that you differentiate computed under enable_grad? And where do you pass the gradient "
        "that backward() receives?"
    ),
    "only for scalar outputs": "Hint: where do you pass the gradient that backward() receives?",
    "`inputs` argument to `grad()` cannot be empty": (
        "None of the tensors that you pass requires a gradient. Hint: what exactly do you save in forward, and does a "
        "copy that is made there require a gradient?"
    ),
    "does not require grad": "Hint: which of these tensors require a gradient?",
}


@contextlib.contextmanager
def library_rejected():
    """Make torch's own checkpoint raise under whichever name it was imported, by replacing its internals."""
    names = ("CheckpointFunction", "_CheckpointFrame", "check_backward_validity")
    before = {name: getattr(library, name) for name in names}

    class Rejected:
        def __new__(cls, *_, **__):
            raise AssertionError("this uses torch's own checkpoint: write it by hand instead")

        apply = __new__

    for name in names:
        setattr(library, name, Rejected)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(library, name, value)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)  # after each backward
    runs: list[list[int]] = field(default_factory=list)  # how often each block has run, after each direction


def probe_values(checkpointed, name: str, seed: int, inputs: tuple) -> Trained:
    """Run backward twice, accumulating, then forward alone."""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    x, rows, weights = (each.to(device_here()) for each in inputs)
    found = Trained()
    with library_rejected():
        for number in range(ROUNDS):
            own = x.clone().requires_grad_(number == 1)
            loss = loss_of(model, own, rows, weights)
            found.runs.append([block.runs for block in blocks_of(model)])
            loss.backward()
            found.runs.append([block.runs for block in blocks_of(model)])
            found.losses.append(loss.item())
            gradients = {key: each.grad for key, each in named_parameters(model).items()} | {"the input": own.grad}
            found.gradients.append({key: None if g is None else g.clone() for key, g in gradients.items()})
        with torch.no_grad():
            found.losses.append(loss_of(model, x, rows, weights).item())
    found.runs.append([block.runs for block in blocks_of(model)])
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


after_values = begin_at(gradients_are_those_without_it, "values")


def _alone(name: str, seed: int, inputs: tuple) -> Trained:
    """Compute the same model without wrapped blocks, on the CPU."""
    model = recompute.build(name, seed)
    x, rows, weights = inputs
    found = Trained()
    for number in range(ROUNDS):
        own = x.clone().requires_grad_(number == 1)
        loss = loss_of(model, own, rows, weights)
        loss.backward()
        found.losses.append(loss.item())
        gradients = {key: each.grad for key, each in named_parameters(model).items()} | {"the input": own.grad}
        found.gradients.append({key: None if g is None else g.clone() for key, g in gradients.items()})
    found.losses.append(found.losses[-1])
    return found


def _judge_values(rank: int, found: Trained, alone: Trained, name: str) -> None:
    for actual, expected in zip(found.losses, alone.losses, strict=True):
        if not abs(actual - expected) <= 1e-10 * max(1.0, abs(expected)):
            evidence = f"{name}: the loss is {actual:.6g}, expected {expected:.6g}"
            raise Wrong({rank: evidence}, "Hint: what does forward() return?")
    for number, (mine, theirs) in enumerate(zip(found.gradients, alone.gradients, strict=True), 1):
        for key, expected in theirs.items():
            actual, evidence = mine[key], f"{name}, backward {number}: the gradient of {_named(key)}"
            if (actual is None) != (expected is None):
                was = "None" if actual is None else "a tensor"
                hint = "Hint: for which tensors does autograd expect a gradient, and in which order?"
                if actual is None:
                    hint = "Hint: for which tensors do you compute gradients, and did the module use these tensors?"
                if actual is None and key.startswith(("first.", "the input")):
                    hint = "Hint: which inputs of the recomputed block require a gradient?"
                raise Wrong({rank: f"{evidence} is {was}; without checkpointing it is not"}, hint)
            if actual is not None and expected is not None and not nearly_equal(actual, expected):
                raise Wrong(
                    {rank: f"{evidence} is wrong: {first_difference(actual, expected)}"},
                    _cause(actual, expected, number),
                )


def _named(key: str) -> str:
    """Name a parameter and, if it is outside of the block, the place of its layer."""
    layer, _, _ = key.partition(".")
    return f"{key} (in the layer {OUTSIDE[layer]} the block)" if layer in OUTSIDE else key


def _cause(actual: torch.Tensor, expected: torch.Tensor, number: int) -> str:
    if nearly_equal(actual, 2 * expected):
        return (
            "It is twice as large as expected. Hint: what else adds to .grad, and to which graph do recomputed "
            "inputs belong?"
        )
    if number == 1 and not actual.any():
        return "It is all zeros. Hint: which inputs and parameters get a gradient from the recomputation?"
    return "Hint: which outputs are differentiated, with respect to which tensors, and with which incoming gradient?"


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return function(*args, **(kwargs or {}))


def _products_of_backward(model: nn.Module, inputs: tuple) -> int:
    loss = loss_of(model, *inputs)
    with _Products() as products:
        loss.backward()
    return products.count


def probe_products(checkpointed, name: str, seed: int, inputs: tuple) -> int:
    """Return how many matrix products a backward computes."""
    model = recompute.build(name, seed, checkpointed).to(device_here())
    return _products_of_backward(model, tuple(each.to(device_here()) for each in inputs))


@after_values
def the_module_runs_twice(attempt: Attempt) -> None:
    for name in ("a block", "a block with three inputs, one of them integers", "two blocks that share a parameter"):
        seed = attempt.draw_seed()
        calls = 2 if "three" in name else 1  # This model runs its block twice per forward.
        for rank, result in enumerate(attempt.run(probe_values, name, seed, draw_inputs(seed), context=name)):
            # after forward, backward, forward, backward, forward
            expected_runs = [calls * runs for runs in (1, 2, 3, 4, 5)]
            for index in range(len(result.runs[0])):
                runs = [each[index] for each in result.runs]
                if runs != expected_runs:
                    actual, expected = (", ".join(map(str, each)) for each in (runs, expected_runs))
                    evidence = (
                        f"{name}: after forward, backward, forward, backward, and a forward without gradients, the "
                        f"module had run {actual} times; expected {expected}"
                    )
                    raise Wrong(
                        {rank: evidence},
                        "Hint: when does the module run, and how many gradients does one recomputation give?",
                    )
    _judge_products(attempt)


def _judge_products(attempt: Attempt) -> None:
    for name in ("a block", "a block whose input needs no gradient"):
        seed = attempt.draw_seed()
        inputs = draw_inputs(seed)
        model = recompute.build(name, seed)
        with _Products() as recomputed:
            model.block(inputs[0])
        expected = _products_of_backward(model, inputs) + recomputed.count
        for rank, count in enumerate(attempt.run(probe_products, name, seed, inputs, context=name)):
            if count > expected:
                evidence = (
                    f"{name}: backward computed {count} matrix products; expected {expected}, for one recomputation "
                    "of the block and one backward"
                )
                hint = "Hint: how often does autograd run through the recomputed graph, and for which gradients?"
                raise Wrong({rank: evidence}, hint)


# -- dropout


class Drops(nn.Module):
    """Drop elements at random, and log the masks."""

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


@dataclass
class Dropped:
    masks: list[list[torch.Tensor]]  # of each block
    restores_generators: bool  # whether backward leaves the generators as they were


def probe_dropout(checkpointed, seed: int) -> Dropped:
    """Run two blocks with dropout."""
    torch.manual_seed(seed)
    drops = [Drops().to(device_here()) for _ in range(2)]
    model = nn.Sequential(*[checkpointed(each) for each in drops])
    for _ in range(ROUNDS):
        output = model(torch.ones(2, 64, dtype=torch.float64, device=device_here()))
        torch.rand(7, device=device_here())
        before = _generators()
        output.sum().backward()
        after = _generators()
    restored = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return Dropped([each.dropped for each in drops], restored)


@after_values
def dropout_drops_the_same(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_dropout, attempt.draw_seed(), context="two blocks with dropout")):
        for number, masks in enumerate(result.masks, 1):
            for first, again in zip(masks[::2], masks[1::2], strict=True):
                if not torch.equal(first, again):
                    differ = int((first != again).sum())
                    evidence = (
                        f"block {number} of two with dropout: the masks of forward and backward differ in "
                        f"{differ} of 128 elements"
                    )
                    raise Wrong({rank: evidence}, "Hint: which state did the random number generators have in forward?")
            if torch.equal(masks[0], masks[2]):
                evidence = (
                    f"block {number} of two with dropout: the second step drops exactly the same elements as the first"
                )
                raise Wrong({rank: evidence}, "Hint: which line sets the generators' state, and when?")
        if not result.restores_generators:
            evidence = "backward changed the state of the random number generators; expected it to be restored"
            raise Wrong({rank: evidence}, "Hint: which elements would the next step drop?")


after_dropout = begin_at(dropout_drops_the_same, "dropout")
