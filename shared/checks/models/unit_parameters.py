"""Models of blocks whose parameters or buffers are awkward for ZeRO-3: tied, frozen, unused, tiny or of two dtypes.

All of them take x [B, 6] and return [B, 3].
"""

from typing import Any

import torch
from torch import nn

from shared.checks.models.awkward_models import INPUTS, SampleDropout, batch_norm
from shared.checks.models.unit_blocks import WIDTH, Block, Blocks, calm


class TiedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.twin = nn.Linear(width, inner)
        self.twin.weight = self.up.weight

    def compute(self, x):
        return super().compute(x) + self.down(calm(self.twin(x)))


class Tied(Blocks):
    """Two blocks share a weight, and so do the first and the last layer. Each block uses one of its weights twice."""

    block = TiedBlock

    def __init__(self):
        super().__init__(inner=(9, 14, 9))
        self.again = nn.Linear(INPUTS, WIDTH)
        self.again.weight = self.into.weight
        self.blocks[2].get_submodule("down").weight = self.blocks[0].get_parameter("down.weight")

    def last(self, x, y):
        return self.out(y + self.again(x))


class TiedInside(Blocks):
    """Weights are tied only within a block and outside all blocks, because fully_shard accepts no tie between units."""

    block = TiedBlock

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(INPUTS, WIDTH)
        self.again.weight = self.into.weight

    def last(self, x, y):
        return self.out(y + self.again(x))


class Frozen(Blocks):
    """The first layer, the first and the last block, and some parameters between them are frozen."""

    def __init__(self):
        super().__init__()
        for module in (self.into, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)
        self.blocks[1].get_parameter("up.bias").requires_grad_(False)
        self.out.weight.requires_grad_(False)


class FrozenNorms(Blocks):
    """The first layer of each block is frozen: backward still needs it when the block has all of its gradients."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)


class RoadsBlock(Block):
    """A block in which samples with x₀ > 0 use one layer and the others another one."""

    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.high, self.low = nn.Linear(width, width), nn.Linear(width, width)
        self.is_high: Any = None

    def compute(self, x):
        y, out = super().compute(x), torch.zeros_like(x)
        for layer, chosen in ((self.high, self.is_high), (self.low, ~self.is_high)):
            if chosen.any():
                out[chosen] = layer(y[chosen])
        return out


class Branches(Blocks):
    block = RoadsBlock

    def forward(self, x):
        for block in self.blocks:
            block.is_high = x[:, 0] > 0
        return super().forward(x)


class Towers(Branches):
    """Parallel blocks. Each takes the samples themselves, so no input of a block needs a gradient."""

    def called(self):
        return []

    def last(self, x, y):
        return self.out(sum(torch.tanh(block(x[:, :WIDTH])) for block in self.blocks))


class SpareBlock(RoadsBlock):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.spare = nn.Linear(width, inner)


class Spare(Branches):
    """Like Branches, with layers that no rank uses."""

    block = SpareBlock


class FewBlock(Block):
    """A block with fewer elements than ranks: one parameter has no dimensions, and one has no elements."""

    def __init__(self, width: int, inner: int):
        nn.Module.__init__(self)
        self.gain, self.nothing = nn.Parameter(torch.rand(()) + 0.5), nn.Parameter(torch.rand(0, 3))

    def compute(self, x):
        return torch.tanh(x) * self.gain + self.nothing.sum()


class Few(Blocks):
    block = FewBlock


class MixedBlock(Block):
    """A block with a float32 parameter beside float64 ones."""

    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.gain.data = self.gain.data.float()
        return self

    def compute(self, x):
        return super().compute(x * self.gain.to(x.dtype))


class Mixed(Blocks):
    block = MixedBlock


class BufferedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.register_buffer("scale", torch.rand(width) + 0.5)
        self.register_buffer("count", torch.randint(2**53, 2**62, (1,)))  # more digits than a float64 has
        self.register_buffer("shift", torch.rand(width), persistent=False)

    def compute(self, x):
        return super().compute(x) * self.scale + self.shift + self.get_buffer("count") % 7 / 10


class Buffered(Blocks):
    block = BufferedBlock


class DroppedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.dropout, self.samples = SampleDropout(), None

    def compute(self, x):
        return self.dropout(super().compute(x), self.samples)


class Dropped(Blocks):
    """Dropout chosen by the model's inputs, because activations differ between ranks and one process by rounding."""

    block = DroppedBlock

    def forward(self, x):
        for block in self.blocks:
            block.samples = x
        return super().forward(x)


class NormedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.batch_norm = batch_norm(width)

    def compute(self, x):
        return super().compute(self.batch_norm(x))


class Normed(Blocks):
    """Each block begins with a BatchNorm, and that of the last block stays in eval mode."""

    block = NormedBlock

    def __init__(self):
        super().__init__()
        self.blocks[-1].get_submodule("batch_norm").eval()
