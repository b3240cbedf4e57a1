"""Build models of blocks by name. ZeRO-3 may unshard their blocks one at a time, and careless versions fail on them.

When the forward of a block begins, it calls the listeners, because its parameters are unsharded then.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shared.checks.models import awkward_models
from shared.checks.models.awkward import INPUTS, OUTPUTS
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
    """Eight blocks of the same size, which hold nearly all of the model's parameters."""

    widens = False

    def __init__(self):
        super().__init__(48, (192,) * 8)


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


def build(name: str, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    """Build a model from its own seed. On the meta device, it has no values."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return KINDS[name].cls().to(dtype)


def units_of(name: str, module: nn.Module) -> list[nn.Module]:
    """List the modules that are to be unsharded one at a time."""
    inside = [block.inside for block in module.blocks] if KINDS[name].units == "nested" else []
    return [] if KINDS[name].units == "none" else [*module.blocks, *inside]


def describe(name: str) -> str:
    return f"a model with {KINDS[name].description}"
