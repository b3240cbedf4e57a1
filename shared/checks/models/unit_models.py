"""Build models of blocks by name. ZeRO-3 may unshard their blocks one at a time, and careless versions fail on them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shared.checks.models.unit_blocks import Block, Blocks, Deep, Passed
from shared.checks.models.unit_parameters import (
    Branches,
    Buffered,
    Dropped,
    Few,
    Frozen,
    FrozenNorms,
    Mixed,
    Normed,
    Spare,
    Tied,
    TiedInside,
    Towers,
)

# -- blocks that are called in awkward ways
#
# All of them take x [B, 6] and return [B, 3].


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


@dataclass(frozen=True)
class Kind:
    """A model, its description for a student, and which of its modules are units.

    `units` is "" for the blocks, which is the default, "nested" for the blocks and those inside them, or "none".
    """

    description: str
    cls: type[nn.Module]
    units: str = ""


KINDS = {
    "Blocks": Kind("blocks", Blocks),
    "Tied": Kind("blocks, some of which share a weight", Tied),
    "TiedInside": Kind("a weight used twice within a unit", TiedInside),
    "Frozen": Kind("frozen parameters and frozen blocks", Frozen),
    "FrozenNorms": Kind("blocks that begin with a frozen layer", FrozenNorms),
    "Branches": Kind("parameters in blocks that only some ranks use", Branches),
    "Towers": Kind("parallel blocks, with parameters that only some ranks use", Towers),
    "Spare": Kind("parameters in blocks that only some ranks or no rank uses", Spare),
    "Few": Kind("blocks with fewer elements than ranks", Few),
    "Mixed": Kind("blocks with parameters of two dtypes", Mixed),
    "Buffered": Kind("buffers", Buffered),
    "Dropped": Kind("blocks with dropout", Dropped),
    "Normed": Kind("blocks with BatchNorm, one of them in eval mode", Normed),
    "Nested": Kind("nested units", Nested, "nested"),
    "Twice": Kind("blocks called more than once", Twice),
    "Checkpointed": Kind("checkpointed blocks", Checkpointed),
    "Recomputed": Kind("checkpointed blocks that are recomputed to their end", Recomputed),
    "Bundles": Kind("blocks that take keyword arguments and return a dict", Bundles),
    "Turns": Kind("blocks called in another order in each step", Turns),
    "Backwards": Kind("blocks called from last to first", Backwards),
    "Whole": Kind("blocks, and units=[]", Blocks, "none"),
    "Passed": Kind("four blocks", Passed),
    "Deep": Kind("eight blocks", Deep),
    "DeepWhole": Kind("eight blocks, and units=[]", Deep, "none"),
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """Build a model from its own seed. On the meta device, it has no values."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return KINDS[name].cls().to(dtype)


def units_of(name: str, module) -> list[nn.Module]:
    """List the modules that are to be unsharded one at a time."""
    inside = [block.inside for block in module.blocks] if KINDS[name].units == "nested" else []
    return [] if KINDS[name].units == "none" else [*module.blocks, *inside]


def describe(name: str) -> str:
    return f"a model with {KINDS[name].description}"
