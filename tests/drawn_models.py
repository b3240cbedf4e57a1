"""The model of the property tests: blocks of any width, which may be frozen, tied, or used by some or no samples."""

from dataclasses import dataclass

import torch
from torch import nn

INPUTS, OUTPUTS = 3, 2


@dataclass(frozen=True)
class Block:
    """y + down(tanh(up(y))) · gain"""

    inner: int
    bias: bool = True
    frozen: str = ""  # "", "up" or "all"
    road: str = "all"  # which samples use it: "all", "none", or "some" for those with x₀ > 0, on some ranks none
    tied_to: int | None = None  # the index of the earlier block whose up.weight it shares
    calls: int = 1  # the number of calls in one forward


@dataclass(frozen=True)
class Net:
    width: int
    blocks: tuple[Block, ...]
    first_frozen: bool
    seed: int


class DrawnBlock(nn.Module):
    def __init__(self, block: Block, width: int, shared: nn.Parameter | None):
        super().__init__()
        inner = block.inner if shared is None else shared.shape[0]
        self.road = block.road
        self.up, self.down = nn.Linear(width, inner, block.bias), nn.Linear(inner, width, block.bias)
        self.gain = nn.Parameter(torch.rand(()) + 0.5)
        if shared is not None:
            self.up.weight = shared

    def forward(self, y: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if self.road == "all":
            return y + self.added(y)
        out = y.clone()
        if chosen.any():
            out[chosen] += self.added(y[chosen])
        return out

    def added(self, y: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(y))) * self.gain


class Model(nn.Module):
    """x [B, 3] → [B, 2]"""

    def __init__(self, net: Net, rank: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(net.seed + rank)
            self.net, self.into = net, nn.Linear(INPUTS, net.width)
            self.blocks = nn.ModuleList()
            for block in net.blocks:
                shared = None if block.tied_to is None else self.blocks[block.tied_to].up.weight
                self.blocks.append(DrawnBlock(block, net.width, shared))
            self.out = nn.Linear(net.width, OUTPUTS)
        self.double()
        self.into.requires_grad_(not net.first_frozen)
        for block, module in zip(net.blocks, self.blocks, strict=True):
            frozen = {"": [], "up": [module.up], "all": [module]}[block.frozen]
            for layer in frozen:
                layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x)
        for block, module in zip(self.net.blocks, self.blocks, strict=True):
            for _ in range(block.calls if block.road != "none" else 0):
                y = module(y, x[:, 0] > 0)
        return self.out(y)
