"""A model of blocks, each of which may be a unit: the plain one, one whose passing is told, and one of some size.

While a block runs, its parameters are whole: then it calls `tell(block)`.
"""

import torch
from torch import nn

from shared.checks.models.awkward import INPUTS, OUTPUTS

WIDTH, INNER = 5, (9, 14, 23)  # no world size divides the blocks' sizes, and no two of them are near each other
listeners: list = []  # functions of a module whose forward begins


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
        return self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A layer, blocks, a layer."""

    block = Block

    def __init__(self, width: int = WIDTH, inner: tuple[int, ...] = INNER):
        super().__init__()
        self.into, self.out = nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS)
        self.blocks = nn.ModuleList(self.block(width, each) for each in inner)

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
    """Passes its input on, and tells when forward and backward come by."""

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
    """Calls passed("forward", place), or "backward", when that is about to enter a block."""

    def __init__(self):
        super().__init__(inner=(*INNER, 37))
        self.passed = None

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
    """Eight blocks of one size, in which nearly all of its parameters are."""

    def __init__(self):
        super().__init__(48, (192,) * 8)
