"""How a chapter describes a split model, and what one process computes with the whole model.

A chapter subclasses `Case` once for each model that its checks try. The methods run on the ranks unless their
docstring says otherwise. The ranks import the chapter's module by name.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import formulas
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.training import LEARNING_RATE, descend

STEPS = 3
Phase = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Shard:
    """The rank's shard of a tensor of the whole model.

    Attributes:
        tensor: What the rank holds: for a parameter, the rank's own parameter, with its .grad.
        dim: The dimension along which the whole tensor is split; None where the rank holds all of it.
        index: The indices along `dim` of the rank's rows, in order. Everything after them is padding.
    """

    tensor: torch.Tensor
    dim: int | None = None
    index: Sequence[int] = ()

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a whole tensor that belong to this shard."""
        if self.dim is None:
            return whole
        return whole.index_select(self.dim, torch.tensor(list(self.index), dtype=torch.long))  # it may be empty

    def without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shard's shape without its padding."""
        return tensor if self.dim is None else tensor.narrow(self.dim, 0, min(len(self.index), tensor.shape[self.dim]))


@dataclass(frozen=True)
class Collective:
    """A collective, or a send, that a rank may need: its operation and the bytes of the full buffer."""

    op: str  # all_reduce, all_gather, reduce_scatter, broadcast or send
    nbytes: int

    def __str__(self) -> str:
        return f"{self.op} of {self.nbytes:,} bytes"

    def sent_bytes(self, size: int) -> float:
        """Return the bytes that one rank sends in a ring; for a broadcast, the mean over the ranks."""
        if self.op == "send":
            return self.nbytes
        if self.op == "all_reduce":
            return formulas.all_reduce_sent_bytes(self.nbytes, size)
        return formulas.ring_fraction(size) * self.nbytes

    def messages(self, size: int) -> int:
        """Return how many messages a rank sends at most if it uses sends and receives only."""
        return 1 if self.op == "send" else (size - 1) * (2 if self.op == "all_reduce" else 1)


class Case:
    """A model, and how the checks split it with the student's piece.

    Attributes:
        differentiates_inputs: Whether every rank must have the whole gradient of the inputs.
        has_usual_batches: Whether batches must have the usual number of samples, even if sizes are drawn.
        context: Begins the evidence, where it has to say which case failed.
        hint_on_loss: The hint on a wrong loss, where nothing else is known about it.
        hint_on_output: The same for an output.
        hint_on_gradient: The same for a gradient.
    """

    differentiates_inputs = True
    has_usual_batches = False
    context = ""
    hint_on_loss = "Hint: which ranks know the loss, and over how many samples is it computed?"
    hint_on_output = "Hint: which part of this output does each rank compute, and how are the parts combined?"
    hint_on_gradient = "Hint: which gradient arrives at this layer's output, and is it the same on every rank?"

    def build_model(self, seed: int) -> nn.Module:
        """Build the whole model in float64. Runs in the kernel, too."""
        raise NotImplementedError

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the inputs and targets of one step. Runs in the kernel."""
        raise NotImplementedError

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the loss. Runs in the kernel, too."""
        return F.mse_loss(output, y)

    def split(self, piece, module: nn.Module, group):
        """Build the student's object from the whole model, which every rank has.

        Args:
            piece: The student's class or function.
            module: The whole model. Nothing else refers to it.
            group: The process group over which to split it; None for the world.
        """
        return piece(module, group)

    def train(self, split, x: torch.Tensor, y: torch.Tensor, phase: Phase):
        """Run forward and backward.

        Args:
            split: What split() returned.
            phase: Returns a context manager. Collectives are counted by the phase in which they are launched.

        Returns:
            The output and the loss. The output is a tensor, a `Shard` of the whole output, or None. The loss is None
            if no rank computes all of it.
        """
        with phase("forward"):
            output = split(x)
            loss = self.loss_of(output, y)
        with phase("backward"):
            loss.backward()
        return output, loss

    def shards(self, split) -> dict[str, Shard]:
        """Return the parameters that this rank holds, by their names in the whole model."""
        raise NotImplementedError

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        """Return how many bytes of parameters a rank may hold. Runs in the kernel.

        Args:
            module: The whole model.
            index: The rank's index in the group.
            size: The number of ranks in the group.
        """
        raise NotImplementedError

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        """Return what a rank must send in each phase of one step. Runs in the kernel."""
        raise NotImplementedError

    def larger(self) -> "Case":
        """Return a case whose model has at least 100 KB, so that its memory can be measured."""
        raise NotImplementedError


def split_bytes(module: nn.Module, size: int, is_split: Callable[[str], bool]) -> int:
    """Return the bytes that a rank holds when some parameters are split evenly and the others replicated.

    Args:
        module: The whole model.
        size: The number of ranks.
        is_split: Tells from a parameter's name whether it is split.
    """
    return sum(p.nbytes // size if is_split(name) else p.nbytes for name, p in module.named_parameters())


class Draw:
    """The seed of a whole model and one batch per step, for ranks that work together.

    Args:
        attempt: The attempt that draws.
        case: The model.
        steps: The number of steps, each with a batch of its own.
        times: The factor by which batches are larger than usual.
    """

    def __init__(self, attempt: Attempt, case: Case, steps: int = STEPS, times: int = 1):
        self.seed, self.learning_rate = attempt.draw_seed(), LEARNING_RATE * attempt.sizes.learning_rate_factor / times
        generator = torch.Generator().manual_seed(attempt.draw_seed())
        self.batches = [_joined([case.draw_batch(generator) for _ in range(times)]) for _ in range(steps)]


def _joined(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


@dataclass(frozen=True)
class Step:
    """What one process computes in one step."""

    output: torch.Tensor
    loss: torch.Tensor
    input_gradient: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    before: dict[str, torch.Tensor]  # the parameters before the step
    after: dict[str, torch.Tensor]


def one_process(case: Case, draw: Draw) -> list[Step]:
    """Train the whole model with SGD in this process."""
    module, steps = case.build_model(draw.seed), []
    for x, y in draw.batches:
        module.zero_grad()
        before = parameters_of(module)
        x = x.clone().requires_grad_(case.differentiates_inputs)
        output = module(x)
        loss = case.loss_of(output, y)
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        descend(module.parameters(), draw.learning_rate)
        after = parameters_of(module)
        steps.append(Step(output.detach(), loss.detach(), x.grad, gradients, before, after))
    return steps


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the parameters."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}
