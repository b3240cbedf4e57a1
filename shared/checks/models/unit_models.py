"""Models made of blocks that a ZeRO-3 may gather one by one, and on which a careless one is wrong.

All take x [B, 6] and give [B, 3].
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shared.checks.models import awkward
from shared.checks.models.awkward import INPUTS
from shared.checks.models.unit_blocks import WIDTH, Block, Blocks, Deep, Passed


class TiedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.twin = nn.Linear(width, inner)
        self.twin.weight = self.up.weight

    def compute(self, x):
        return super().compute(x) + self.down(self.twin(x))


class Tied(Blocks):
    """Two blocks have a weight in common, the first and the last layer too, and each block uses one twice."""

    block = TiedBlock

    def __init__(self):
        super().__init__(inner=(9, 14, 9))
        self.again = nn.Linear(INPUTS, WIDTH)
        self.again.weight = self.into.weight
        self.blocks[2].down.weight = self.blocks[0].down.weight

    def last(self, x, y):
        return self.out(y + self.again(x))


class TiedInside(Blocks):
    """Only within a block, and around all of them: torch's fully_shard takes no tie between two units."""

    block = TiedBlock

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(INPUTS, WIDTH)
        self.again.weight = self.into.weight

    def last(self, x, y):
        return self.out(y + self.again(x))


class Frozen(Blocks):
    """The first layer and the first block take no gradient, nor does the last block, nor some of what is between."""

    def __init__(self):
        super().__init__()
        for each in (self.into, self.blocks[0], self.blocks[2]):
            each.requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)
        self.out.weight.requires_grad_(False)


class FrozenNorms(Blocks):
    """Backward needs a block's norm when it has all of its gradients."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)


class RoadsBlock(Block):
    """Samples with x₀ > 0 take one layer, the others another."""

    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.high, self.low = nn.Linear(width, width), nn.Linear(width, width)
        self.is_high = None

    def compute(self, x):
        y, out = super().compute(x), torch.zeros_like(x)
        for layer, chosen in ((self.high, self.is_high), (self.low, ~self.is_high)):
            if chosen.any():
                out[chosen] = layer(y[chosen])
        return out


class Roads(Blocks):
    block = RoadsBlock

    def forward(self, x):
        for block in self.blocks:
            block.is_high = x[:, 0] > 0
        return super().forward(x)


class Towers(Roads):
    """Blocks side by side. Each takes the samples themselves, so that no input of a block needs a gradient."""

    def called(self):
        return []

    def last(self, x, y):
        return self.out(sum(torch.tanh(block(x[:, :WIDTH])) for block in self.blocks))


class SpareBlock(RoadsBlock):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.spare = nn.Linear(width, inner)


class Spare(Roads):
    """As Roads, with layers that nobody uses."""

    block = SpareBlock


class FewBlock(Block):
    """Fewer numbers than ranks: one of no dimension, one with no element."""

    def __init__(self, width: int, inner: int):
        nn.Module.__init__(self)
        self.gain, self.nothing = nn.Parameter(torch.rand(()) + 0.5), nn.Parameter(torch.rand(0, 3))

    def compute(self, x):
        return torch.tanh(x) * self.gain + self.nothing.sum()


class Few(Blocks):
    block = FewBlock


class MixedBlock(Block):
    """A float32 parameter beside float64 ones."""

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
        return super().compute(x) * self.scale + self.shift + self.count % 7 / 10


class Buffered(Blocks):
    block = BufferedBlock


class DroppedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.dropout, self.samples = awkward.SampleDropout(), None

    def compute(self, x):
        return self.dropout(super().compute(x), self.samples)


class Dropped(Blocks):
    """The model's inputs choose what is dropped: activations differ between ranks and one process by rounding."""

    block = DroppedBlock

    def forward(self, x):
        for block in self.blocks:
            block.samples = x
        return super().forward(x)


class NormedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.batch_norm = awkward.batch_norm(width)

    def compute(self, x):
        return super().compute(self.batch_norm(x))


class Normed(Blocks):
    """Each block begins with a BatchNorm; the last one's stays in eval mode."""

    block = NormedBlock

    def __init__(self):
        super().__init__()
        self.blocks[-1].batch_norm.eval()


class NestedBlock(Block):
    def __init__(self, width: int, inner: int):
        super().__init__(width, inner)
        self.inside = Block(width, inner + 2)

    def compute(self, x):
        return super().compute(self.inside(x)) * self.norm.weight


class Nested(Blocks):
    """Each block holds another: units inside units."""

    block = NestedBlock


class Twice(Blocks):
    """Blocks that are called more than once in a forward."""

    def called(self):
        return [self.blocks[index] for index in (0, 1, 1, 2, 0)]


class Checkpointed(Blocks):
    """Blocks that are computed again in backward."""

    def run(self, block, y):
        return checkpoint(block, y, use_reentrant=False)


class Recomputed(Blocks):
    """The same, to the end of each block: torch stops when it has all that it needs."""

    def run(self, block, y):
        with set_checkpoint_early_stop(False):
            return checkpoint(block, y, use_reentrant=False)


class BundleBlock(Block):
    """Takes keywords, and gives a dict of which not everything is used."""

    def forward(self, *, bundle):
        y = super().forward(bundle["rest"][0])
        return {"unused": y * 2, "rest": (y, [y.detach(), None])}


class Bundles(Blocks):
    block = BundleBlock

    def run(self, block, y):
        return block(bundle={"rest": (y,)})["rest"][0]


class Turns(Blocks):
    """Calls its blocks forwards, backwards, and not all of them, in turns; all of them where nobody trains."""

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


@dataclass(frozen=True)
class Kind:
    said: str
    cls: type[nn.Module]
    units: str = ""  # "": the blocks, which are the default; "nested": those inside too; "none"


KINDS = {
    "Blocks": Kind("blocks", Blocks),
    "Tied": Kind("blocks, some of which share a weight", Tied),
    "TiedInside": Kind("a weight used twice within a unit", TiedInside),
    "Frozen": Kind("frozen parameters, and frozen blocks", Frozen),
    "FrozenNorms": Kind("blocks that begin with a frozen layer", FrozenNorms),
    "Roads": Kind("parameters in blocks that only some ranks use", Roads),
    "Towers": Kind("blocks side by side, with parameters that only some ranks use", Towers),
    "Spare": Kind("parameters in blocks that only some ranks use, or none", Spare),
    "Few": Kind("blocks of fewer numbers than ranks", Few),
    "Mixed": Kind("blocks of two dtypes", Mixed),
    "Buffered": Kind("buffers", Buffered),
    "Dropped": Kind("blocks with dropout", Dropped),
    "Normed": Kind("blocks with BatchNorm, one of them in eval mode", Normed),
    "Nested": Kind("units inside units", Nested, "nested"),
    "Twice": Kind("blocks called more than once", Twice),
    "Checkpointed": Kind("checkpointed blocks", Checkpointed),
    "Recomputed": Kind("checkpointed blocks that are computed again to their end", Recomputed),
    "Bundles": Kind("blocks that take keywords and give a dict", Bundles),
    "Turns": Kind("blocks called in another order each time", Turns),
    "Backwards": Kind("blocks called from last to first", Backwards),
    "Whole": Kind("blocks, and units=[]", Blocks, "none"),
    "Passed": Kind("four blocks", Passed),
    "Deep": Kind("eight blocks", Deep),
    "DeepWhole": Kind("eight blocks, and units=[]", Deep, "none"),
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model from its own seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return KINDS[name].cls().to(dtype)


def units_of(name: str, module: nn.Module) -> list[nn.Module]:
    """List the modules that are to be gathered one by one."""
    inside = [block.inside for block in module.blocks] if KINDS[name].units == "nested" else []
    return [] if KINDS[name].units == "none" else [*module.blocks, *inside]


def said(name: str) -> str:
    return f"a model with {KINDS[name].said}"
