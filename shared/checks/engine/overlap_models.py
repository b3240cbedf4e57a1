"""Models that report how far backward has come, so that a check can tell which gradients exist at a moment."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.buckets import MB, Message, bytes_of, plan
from shared.checks.models import awkward

LEAST_BUCKETS = 4


class _Mark(torch.autograd.Function):
    """Returns its input, and reports when backward reaches it."""

    @staticmethod
    def forward(ctx, x, tell):
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell()
        return gradient, None


class Chain(nn.Module):
    """A sequence of layers. It calls `passed(index)` when backward is done with all layers from `index` on."""

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.passed: Any = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(self._marked(torch.tanh(x) if index else x, index))
        return self._marked(x, len(self.layers))

    def _marked(self, x, index: int):
        return x if self.passed is None else _Mark.apply(x, lambda: self.passed(index))


class Fork(nn.Module):
    """Two branches whose order depends on the first sample, and a last layer that the first sample may skip.

    Backward first reaches the branch that was computed last.
    """

    def __init__(self, widths: tuple[int, ...]):
        super().__init__()
        _, trunk, left, right, *_ = widths
        self.trunk = nn.Linear(awkward.INPUTS, trunk)
        self.left = nn.Sequential(nn.Linear(trunk, left), nn.Tanh(), nn.Linear(left, awkward.OUTPUTS))
        self.right = nn.Sequential(nn.Linear(trunk, right), nn.Tanh(), nn.Linear(right, awkward.OUTPUTS))
        self.last = nn.Linear(awkward.OUTPUTS, awkward.OUTPUTS)

    def forward(self, x):
        trunk = torch.tanh(self.trunk(x))
        branches = [self.left, self.right] if x[0, 0] > 0 else [self.right, self.left]
        out = sum(branch(trunk) for branch in branches)
        return out + self.last(out) if x[0, 1] > 0 else out


_MODELS = {"Chain": Chain, "Fork": Fork}


@dataclass(frozen=True)
class Sizes:
    """A model, the cap of the buckets for its gradients, and other keyword arguments of the wrapper."""

    model: str
    widths: tuple[int, ...]
    bucket_cap_mb: float
    options: dict = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """Build the model in float64 from its own seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _MODELS[self.model](self.widths).double()

    def messages(self) -> list[Message]:
        """Return the messages that a wrapper sends in a step, in order."""
        return [Message("float64", bytes_of(bucket)) for bucket in plan(self.build(0).parameters(), self.bucket_cap_mb)]

    def full_by(self, index: int) -> int:
        """Return how many buckets of a chain are full when backward is done with all layers from `index` on."""
        module = self.build(0)
        layers = list(module.get_submodule("layers").children())
        done = {id(p) for layer in layers[index:] for p in layer.parameters()}
        full = [all(id(p) in done for p in bucket) for bucket in plan(module.parameters(), self.bucket_cap_mb)]
        return [*full, False].index(False)

    def __str__(self) -> str:
        return f"{_SAID[self.model]}, {len(self.messages())} buckets"


_SAID = {"Chain": "a chain of layers", "Fork": "a model with two branches"}


def draw_sizes(attempt: Attempt, model: str = "Chain", options: dict | None = None) -> Sizes:
    """Draw widths and a cap that give several buckets of different sizes, so that a size identifies a bucket."""
    while True:
        inner = attempt.random.sample(range(4, 14), 4)
        cap_mb = attempt.random.randrange(320, 800, 8) / MB
        sizes = Sizes(model, (awkward.INPUTS, *inner, awkward.OUTPUTS), cap_mb, options or {})
        found = [message.nbytes for message in sizes.messages()]
        if len(found) >= LEAST_BUCKETS and len(set(found)) == len(found):
            return sizes
