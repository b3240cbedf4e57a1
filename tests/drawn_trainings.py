"""The model of the property tests, and its training on a rank and in one process with all the data."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from solutions import overlapped_flat
from solutions.strategies import STRATEGIES, Options

OURS = [each for each in STRATEGIES.values() if each.provider == "course" and not each.splits_layers]
DDP = [strategy.name for strategy in OURS if strategy.stage == 0]
ZERO = [strategy.name for strategy in OURS if strategy.stage > 0]
INPUTS, OUTPUTS = 3, 2
SAMPLES = 12  # in a micro-batch over all ranks; divisible by 1, 2, 3 and 4

# -- the model: blocks of any width, which may be frozen, tied, or used by some or no samples


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


# -- the training


@dataclass(frozen=True)
class Training:
    wrapper: str
    net: Net
    rates: tuple[float, ...]  # the learning rate of each step
    optimizer: str = "SGD"
    options: tuple[tuple[str, object], ...] = ()
    accumulate: int = 1  # the number of micro-batches in a step
    no_sync: bool = True  # use no_sync() for all micro-batches except the last, if the wrapper has it
    cap_mb: float = 25.0
    max_norm: float | None = None
    second_group: bool = False  # a second param group with a smaller learning rate
    set_to_none: bool = True
    reshard_after_forward: bool = True
    prefetch: int = 1
    overlap: bool = False  # give ZeRO1 its module

    def micro_batch(self, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(1000 * step + number)
        x = torch.randn(SAMPLES, INPUTS, generator=draw, dtype=torch.float64)
        return x, torch.randn(SAMPLES, OUTPUTS, generator=draw, dtype=torch.float64)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean() / self.accumulate

    @property
    def optimizer_cls(self) -> type[torch.optim.Optimizer]:
        return getattr(torch.optim, self.optimizer)

    def groups_of(self, module: nn.Module) -> list[dict]:
        """Return one param group or two, of which the second gets every other parameter."""
        parameters = list(module.parameters())
        if not self.second_group:
            return [{"params": parameters}]
        return [{"params": parameters[::2]}, {"params": parameters[1::2]}]

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate and the weight decay of this step, as a scheduler may change both."""
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = self.rates[step] / (1 + number)
            group["weight_decay"] = 0.1 * number + 0.05 * step


# -- one process


def alone(training: Training, steps: range | None = None) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    """Train with all the data. Returns the model, its optimizer, and the norms of gradients before clipping."""
    model, norms = Model(training.net), []
    optimizer = training.optimizer_cls(groups_of_one(training, model), lr=0.0, **dict(training.options))
    for step in range(len(training.rates)) if steps is None else steps:
        optimizer.zero_grad()
        for number in range(training.accumulate):
            training.loss(model, *training.micro_batch(step, number)).backward()
        trained = [each for each in model.parameters() if each.requires_grad]
        for each in trained if STRATEGIES[training.wrapper].stage == 3 else ():  # its gradients of None count as zeros
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        norm = nn.utils.clip_grad_norm_(trained, training.max_norm or float("inf"))
        norms += [norm.item()] if training.max_norm else []
        training.schedule(optimizer, step)
        optimizer.step()
    return model, optimizer, norms


def groups_of_one(training: Training, module: nn.Module) -> list[dict]:
    takes_groups = "param_groups" in STRATEGIES[training.wrapper].supports
    return training.groups_of(module) if takes_groups else [{"params": list(module.parameters())}]


# -- on a rank


def options_of(training: Training, group) -> Options:
    takes_groups = training.second_group and "param_groups" in STRATEGIES[training.wrapper].supports
    return Options(
        training.optimizer_cls,
        {"lr": 0.0, **dict(training.options)},
        training.cap_mb,
        prefetch=training.prefetch,
        reshard_after_forward=training.reshard_after_forward,
        overlap_parameters=training.overlap,
        group=group,
        param_groups=training.groups_of if takes_groups else None,
    )


class Rank:
    """A training on one rank. Each rank starts with its own values, which those of the first rank must replace."""

    def __init__(self, group, training: Training):
        self.training, self.group = training, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.module = Model(training.net, self.rank)
        overlapped_flat.LEAST_CAP_MB = training.cap_mb
        overlapped_flat.LEAST_IN_FLIGHT_MB = 0.0
        self.model, self.optimizer = STRATEGIES[training.wrapper].build(self.module, options_of(training, group))
        self.groups = getattr(self.optimizer, "optimizer", self.optimizer)  # ZeRO2 has an inner optimizer
        self.norms: list[float] = []

    def backward(self, step: int) -> None:
        """Run backward on this rank's samples of all micro-batches, and synchronize."""
        self.optimizer.zero_grad(set_to_none=self.training.set_to_none)
        for number in range(self.training.accumulate):
            x, y = self.training.micro_batch(step, number)
            own = slice(self.rank, None, self.world_size)
            last = number == self.training.accumulate - 1
            with self.no_sync() if self.silent and not last else contextlib.nullcontext():
                self.training.loss(self.model, x[own], y[own]).backward()
                if self.eager or last:
                    getattr(self.model, "finish_gradient_sync", lambda: None)()

    @property
    def silent(self) -> bool:
        return self.training.overlap or (self.training.no_sync and hasattr(self.model, "no_sync"))

    def no_sync(self):
        return (self.optimizer if self.training.overlap else self.model).no_sync()

    @property
    def eager(self) -> bool:
        """Return whether each micro-batch sends its gradients. With experts, they may be averaged only once."""
        if STRATEGIES[self.training.wrapper].shards_experts:
            return False
        return not self.silent and (not self.training.no_sync or hasattr(self.model, "units"))

    def step(self, step: int) -> None:
        if self.training.max_norm:
            self.norms.append(self.clip().item())
        self.training.schedule(self.groups, step)
        self.optimizer.step()

    def clip(self) -> torch.Tensor:
        for each in (self.model, self.optimizer):
            if hasattr(each, "clip_grad_norm_"):
                return each.clip_grad_norm_(self.training.max_norm)
        trained = [each for each in self.module.parameters() if each.requires_grad]
        return nn.utils.clip_grad_norm_(trained, self.training.max_norm)

    def train(self, steps: range | None = None) -> None:
        for step in range(len(self.training.rates)) if steps is None else steps:
            self.backward(step)
            self.step(step)

    def whole_state(self) -> dict[str, torch.Tensor]:
        full = getattr(self.model, "full_state_dict", self.module.state_dict)()
        return {name: value.detach().clone() for name, value in full.items()}
