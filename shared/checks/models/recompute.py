"""Models with a block in their middle, for which a careless recomputation is wrong.

Each is built twice from one seed: with its blocks wrapped, on the ranks, and without, where it is judged. All take
x [B, 6] and rows [B], numbers of a table's rows.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

WIDTH, ROWS, SAMPLES = 6, 5, 4


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.runs = 0
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, *inputs):
        self.runs += 1
        return self.compute(*inputs)

    def compute(self, x):
        return self.down(F.gelu(self.up(x)))


class ThreeInputs(Block):
    """Two inputs in different places of the sum, and one of whole numbers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def compute(self, x, rows, y):
        return super().compute(x * torch.sigmoid(y)) * self.table(rows) + y


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)
        self.down.bias.requires_grad_(False)


class Twice(Block):
    """A parameter used twice, and one not at all."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(WIDTH, 9)
        self.again.weight = self.up.weight
        self.spare = nn.Parameter(torch.rand(3))

    def compute(self, x):
        return self.down(F.gelu(self.up(x)) * self.again(x.square()))


class Returns(Block):
    """Its input is its output, somewhat changed by a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def compute(self, x):
        return x * self.scale


class Model(nn.Module):
    """A layer, the block, a layer."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = wrap(block)

    def forward(self, x, rows):
        return self.last(self.block(torch.tanh(self.first(x))))


class Bare(Model):
    """The block comes first: no input of it needs a gradient."""

    def forward(self, x, rows):
        return self.last(self.block(x))


class Manifold(Model):
    """Three inputs, of which the last needs a gradient, or none does."""

    def forward(self, x, rows):
        return self.last(self.block(x, rows, self.first(x))) + self.last(self.block(x, rows, x))


class Same(Model):
    """One tensor for two of the inputs."""

    def forward(self, x, rows):
        y = self.first(x)
        return self.last(self.block(y, rows, y))


class TiedOutside(Model):
    """A parameter of the block is used before it, and after it."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__(block, wrap)
        self.first.weight = self.last.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        block.tied = self.first.weight
        block.up.weight = nn.Parameter(torch.rand(9, WIDTH))

    def forward(self, x, rows):
        return super().forward(x, rows) @ self.first.weight


class UsesTied(Block):
    def compute(self, x):
        return super().compute(x @ self.tied)


class TwoBlocks(Model):
    """Two wrapped blocks in a row, which have a parameter in common."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__(block, wrap)
        second = type(block)()
        second.up.weight = block.up.weight
        self.second = wrap(second)

    def forward(self, x, rows):
        return self.last(self.second(self.block(self.first(x))))


class AllFrozen(Model):
    """Nothing in the block needs a gradient, but its input does."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__(block, wrap)
        block.requires_grad_(False)


MODELS = {  # what is said of it: how it is built
    "a block": (Model, Block),
    "a block whose input needs no gradient": (Bare, Block),
    "a block of three inputs, one of whole numbers": (Manifold, ThreeInputs),
    "a block that gets one tensor twice": (Same, ThreeInputs),
    "a block with frozen parameters": (Model, Frozen),
    "a block all of whose parameters are frozen": (AllFrozen, Block),
    "a block that uses a parameter twice, and another not at all": (Model, Twice),
    "a block that scales its input": (Model, Returns),
    "a block whose parameter is used outside too": (TiedOutside, UsesTied),
    "two blocks that share a parameter": (TwoBlocks, Block),
}


def build(name: str, seed: int, wrap=lambda block: block) -> nn.Module:
    """Build a model from its own seed, its blocks wrapped."""
    outer, block = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return outer(block(), wrap).double()


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name parameters as if no block were wrapped."""
    return {name.replace("module.", ""): parameter for name, parameter in model.named_parameters()}


def draw_inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ x [B, 6], rows [B], and what the output is weighted with [B, 6]"""
    generator = torch.Generator().manual_seed(seed)
    x, weights = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, torch.randint(ROWS, (SAMPLES,), generator=generator), weights


def loss_of(model: nn.Module, x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    output = model(x, rows)
    if not isinstance(output, torch.Tensor):
        raise AssertionError("the block gave back no tensor: does forward return what the module returns?")
    return (output * weights).sum()
