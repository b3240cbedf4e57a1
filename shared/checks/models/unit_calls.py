"""Models of blocks that are called in ways that are awkward for ZeRO-3: nested, twice, recomputed or in another order.

All of them take x [B, 6] and return [B, 3].
"""

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shared.checks.models.unit_blocks import Block, Blocks


class NestedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.inside = Block(width, inner + 2)

    def compute(self, x):
        return super().compute(self.inside(x)) * self.norm.weight


class Nested(Blocks):
    """Each block contains another one, so there are nested units."""

    block = NestedBlock


class Twice(Blocks):
    """Some blocks are called more than once in a forward."""

    def called(self):
        return [self.blocks[index] for index in (0, 1, 1, 2, 0)]


class Checkpointed(Blocks):
    """Blocks that are recomputed in backward."""

    def run(self, block, y):
        return checkpoint(block, y, use_reentrant=False)


class Recomputed(Blocks):
    """Blocks that are recomputed to their end. By default, torch stops when it has all activations that it needs."""

    def run(self, block, y):
        with set_checkpoint_early_stop(False):
            return checkpoint(block, y, use_reentrant=False)


class BundleBlock(Block):
    """A block that takes keyword arguments and returns a dict of which not everything is used."""

    def forward(self, *, bundle):
        y = super().forward(bundle["rest"][0])
        return {"unused": y * 2, "rest": (y, [y.detach(), None])}


class Bundles(Blocks):
    block = BundleBlock

    def run(self, block, y):
        return block(bundle={"rest": (y,)})["rest"][0]


class Turns(Blocks):
    """Calls its blocks in another order in each step, sometimes not all of them. Without gradients, it calls all."""

    def __init__(self):
        super().__init__()
        self.turn = 0

    def called(self):
        self.turn += torch.is_grad_enabled()
        forwards = list(self.blocks)
        if not torch.is_grad_enabled():
            return forwards
        return [forwards[:1] + forwards[2:], forwards, forwards[::-1]][self.turn % 3]


class Backwards(Blocks):
    """Calls its blocks from the last to the first."""

    def called(self):
        return list(self.blocks)[::-1]
