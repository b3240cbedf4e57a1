"""Models with a block in the middle, for which a careless recomputation gives wrong results.

Each is built twice from one seed: with wrapped blocks on the ranks, and without in the kernel, for comparison. All take
x [B, 6] and rows [B], which are indices of a table's rows.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

WIDTH, ROWS, SAMPLES = 6, 5, 4


class Block(nn.Module):
    """A block that counts how many times it runs."""

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
    """A block with two inputs that are used differently, and a third one of integers."""

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
    """A block that uses one parameter twice and another one not at all."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(WIDTH, 9)
        self.again.weight = self.up.weight
        self.spare = nn.Parameter(torch.rand(3))

    def compute(self, x):
        return self.down(F.gelu(self.up(x)) * self.again(x.square()))


class Returns(Block):
    """A block that multiplies its input by a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def compute(self, x):
        return x * self.scale


class Model(nn.Module):
    """A layer, the block and another layer."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.block = wrap(block)

    def forward(self, x, rows):
        return self.last(self.block(torch.tanh(self.first(x))))


class Bare(Model):
    """The block comes first, so none of its inputs needs a gradient."""

    def forward(self, x, rows):
        return self.last(self.block(x))


class Manifold(Model):
    """Calls a block with three inputs, first when the last input needs a gradient, then when none does."""

    def forward(self, x, rows):
        return self.last(self.block(x, rows, self.first(x))) + self.last(self.block(x, rows, x))


class Same(Model):
    """Passes the same tensor for two of the inputs."""

    def forward(self, x, rows):
        y = self.first(x)
        return self.last(self.block(y, rows, y))


class TiedOutside(Model):
    """A parameter of the block is also used before and after the block."""

    def __init__(self, block: Any, wrap):
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
    """Two wrapped blocks, one after the other, which share a parameter."""

    def __init__(self, block: Any, wrap):
        super().__init__(block, wrap)
        second: Any = type(block)()
        second.up.weight = block.up.weight
        self.second = wrap(second)

    def forward(self, x, rows):
        return self.last(self.second(self.block(self.first(x))))


class AllFrozen(Model):
    """No parameter of the block needs a gradient, but its input does."""

    def __init__(self, block: nn.Module, wrap):
        super().__init__(block, wrap)
        block.requires_grad_(False)


MODELS = {  # the description for a student: the classes of the model and of the block
    "a block": (Model, Block),
    "a block whose input needs no gradient": (Bare, Block),
    "a block with three inputs, one of them integers": (Manifold, ThreeInputs),
    "a block that gets the same tensor twice": (Same, ThreeInputs),
    "a block with frozen parameters": (Model, Frozen),
    "a block with only frozen parameters": (AllFrozen, Block),
    "a block that uses one parameter twice and another one not at all": (Model, Twice),
    "a block that scales its input": (Model, Returns),
    "a block with a parameter that is also used outside it": (TiedOutside, UsesTied),
    "two blocks that share a parameter": (TwoBlocks, Block),
}


def build(name: str, seed: int, wrap=lambda block: block) -> Any:
    """Build a model from its own seed, with wrapped blocks."""
    outer, block = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return outer(block(), wrap).double()


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by the names that they have without wrappers."""
    return {name.replace("module.", ""): parameter for name, parameter in model.named_parameters()}


def draw_inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw x [B, 6], rows [B], and weights for the output [B, 6]."""
    generator = torch.Generator().manual_seed(seed)
    x, weights = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, torch.randint(ROWS, (SAMPLES,), generator=generator), weights


def loss_of(model: nn.Module, x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    output = model(x, rows)
    if not isinstance(output, torch.Tensor):
        raise AssertionError("the block did not return a tensor: does forward() return the module's output?")
    return (output * weights).sum()
