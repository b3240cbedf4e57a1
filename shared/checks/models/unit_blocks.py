"""Models of blocks, each of which may be a unit: a plain one, one that reports its progress, and a large one.

When a block's forward begins, it calls the listeners, because its parameters are unsharded then.
"""

from typing import Any

import torch
from torch import nn

from shared.checks.models import awkward_models
from shared.checks.models.awkward import INPUTS, OUTPUTS

WIDTH, INNER = 5, (9, 14, 23)  # no world size divides the blocks' sizes, and all of them differ clearly
listeners: list = []  # functions that are called with a module when its forward begins


def widening() -> int:
    """Return a factor for the inner width of blocks. It is 1, except where the awkward models are wide.

    A block's number of elements leaves the same remainder as usual when it is divided by any world size up to 4.
    """
    return 1 + 12 * (awkward_models.WIDTH // 1000)


def tell(module: nn.Module) -> None:
    for listener in listeners:
        listener(module)


class Block(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        tell(self)
        return x + self.compute(x)

    def compute(self, x):
        return self.down(calm(torch.tanh(self.up(self.norm(x)))))


def calm(hidden: torch.Tensor) -> torch.Tensor:
    """Scale the inner activations so that a wide block can be trained with the learning rate of a narrow one."""
    return hidden * widening() ** -0.5


class Blocks(nn.Module):
    """A layer, some blocks and another layer. The numbers in `inner` are the blocks' usual inner widths."""

    block, widens = Block, True

    def __init__(self, width: int = WIDTH, inner: tuple[int, ...] = INNER):
        super().__init__()
        self.into, self.out = nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS)
        self.blocks = nn.ModuleList(self.block(width, each * (widening() if self.widens else 1)) for each in inner)

    def forward(self, x):
        tell(self)
        dtype, x = x.dtype, x.to(self.into.weight.dtype)
        y = self.into(x)
        for block in self.called():
            y = self.run(block, y)
        return self.last(x, y).to(dtype)

    def called(self) -> list[nn.Module]:
        return list(self.blocks)

    def run(self, block: nn.Module, y):
        return block(y)

    def last(self, x, y):
        return self.out(y)


class _Mark(torch.autograd.Function):
    """Returns its input, and reports when forward and backward reach it."""

    @staticmethod
    def forward(ctx, x, tell_forward, tell_backward):
        ctx.tell = tell_backward
        tell_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell()
        return gradient, None, None


class Passed(Blocks):
    """Blocks that call passed("forward", index) or passed("backward", index) right before that enters a block."""

    def __init__(self):
        super().__init__(inner=(*INNER, 37))
        self.passed: Any = None

    def forward(self, x):
        y = self._mark(self.into(x), 0)
        for index, block in enumerate(self.blocks, 1):
            y = self._mark(block(y), index)
        return self.out(y)

    def _mark(self, y, index: int):
        def tell(phase: str, block: int) -> None:
            if 0 <= block < len(self.blocks):
                self.passed(phase, block)

        if self.passed is None:
            return y
        return _Mark.apply(y, lambda: tell("forward", index), lambda: tell("backward", index - 1))


class Deep(Blocks):
    """Eight blocks of the same size, which hold nearly all of the model's parameters."""

    widens = False

    def __init__(self):
        super().__init__(48, (192,) * 8)
