"""What the benchmarks compare: the strategies of solutions/strategies.py, baselines, and targets for ours."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import broadcast_state
from solutions.strategies import STRATEGIES, Built, Options

Build = Callable[[nn.Module], Built]

TITLE = {name: strategy.title for name, strategy in STRATEGIES.items()}
ALONE, DDP, DDP_VIEW, FLAT = "module alone", "DDP", TITLE["ddp"], "flat"  # only DDP_VIEW is a strategy


@dataclass(frozen=True)
class Target:
    """The most time or memory that one strategy may take, as a multiple of another."""

    mine: str
    other: str
    most: float


@dataclass(frozen=True)
class Rungs:
    """Strategies and baselines that take turns in one run, by their titles."""

    builds: dict[str, Build]
    times: tuple[Target, ...]
    peaks: tuple[Target, ...]
    carried: tuple[Target, ...] = field(default=())


SGD = Options(torch.optim.SGD, {"lr": 1e-4})
ADAMW = Options(torch.optim.AdamW, {"lr": 1e-4})


def strategies(options: Options, *names: str) -> dict[str, Build]:
    return {TITLE[name]: lambda module, name=name: STRATEGIES[name].build(module, options) for name in names}


def kept(name: str) -> dict[str, Build]:
    """Build a strategy that keeps each unit's parameters unsharded from forward to backward."""
    options = replace(ADAMW, reshard_after_forward=False)
    return {f"{TITLE[name]}, kept": lambda module: STRATEGIES[name].build(module, options)}


def baseline(options: Options, wrap: Callable[[nn.Module], nn.Module]) -> Build:
    def build(module: nn.Module) -> Built:
        model = wrap(module)
        return model, options.build_optimizer(model)

    return build


def beside(name: str, most: float) -> Target:
    """Return the target of one of our strategies relative to its counterpart."""
    return Target(TITLE[name], TITLE[STRATEGIES[name].counterpart], most)


# -- averaging gradients


class FlatDDP(nn.Module):
    """The simplest way to use only one collective: after backward, copy all gradients into a tensor and reduce it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        broadcast_state(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self) -> None:
        parameters = list(self.module.parameters())
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)


AVERAGING = Rungs(
    builds={
        ALONE: baseline(SGD, lambda module: module),
        DDP: baseline(SGD, DistributedDataParallel),
        **strategies(SGD, "ddp"),
        FLAT: baseline(SGD, FlatDDP),
        **strategies(SGD, "manual_ddp", "bucketed_ddp", "overlapped_ddp"),
    },
    times=(beside("overlapped_ddp", 1.0), Target(TITLE["bucketed_ddp"], FLAT, 1.1)),
    # BucketedDDP's buckets are a second copy of the gradients, like DDP's without bucket views. A bucket also keeps its
    # divisor, which has four bytes.
    peaks=(Target(TITLE["bucketed_ddp"], DDP, 1.001), beside("overlapped_ddp", 1.001)),
)

# -- sharding

FSDP2, FSDP2_KEPT, ZERO3_KEPT = TITLE["fsdp2"], f"{TITLE['fsdp2']}, kept", f"{TITLE['zero3']}, kept"
DEEPSPEED = {
    **strategies(ADAMW, "deepspeed1", "deepspeed2"),
    **kept("deepspeed3"),
    **strategies(ADAMW, "deepspeed3"),
}
BESIDE_DEEPSPEED = tuple(
    Target(mine, other, 0.8)
    for mine, other in zip((TITLE["zero1"], TITLE["zero2"], ZERO3_KEPT, TITLE["zero3"]), DEEPSPEED, strict=True)
)

SHARDING = Rungs(
    builds={
        ALONE: baseline(ADAMW, lambda module: module),
        **strategies(ADAMW, "ddp", "zero_redundancy", "zero1"),
        **kept("fsdp2"),
        **strategies(ADAMW, "zero2"),
        **kept("zero3"),
        **strategies(ADAMW, "fsdp2", "zero3"),
        **({} if deepspeed_engine.why_not() else DEEPSPEED),
    },
    times=(
        beside("zero1", 0.95),
        Target(TITLE["zero2"], FSDP2_KEPT, 0.7),
        Target(ZERO3_KEPT, FSDP2_KEPT, 0.7),
        beside("zero3", 0.7),
        *(() if deepspeed_engine.why_not() else BESIDE_DEEPSPEED),
    ),
    peaks=(beside("zero1", 1.0), beside("zero3", 1.0)),
    carried=(Target(TITLE["zero2"], FSDP2_KEPT, 1.0), beside("zero3", 1.0)),
)

# On a GPU, the strategies run one after another. FSDP1 and DeepSpeed are left out: the ladder measures DeepSpeed.
ON_A_GPU: dict[str, Build] = {
    ALONE: baseline(ADAMW, lambda module: module),
    **strategies(ADAMW, "ddp", "manual_ddp", "bucketed_ddp", "overlapped_ddp", "zero_redundancy", "zero1", "zero2"),
    **strategies(ADAMW, "fsdp2", "zero3"),
}

RUNGS = {"averaging": AVERAGING, "sharding": SHARDING}

# -- models


class ManySmall(nn.Module):
    """100 layers of 64×64, with little to compute and little to send, so that the cost per parameter dominates."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)  # without the residual, values would shrink to denormal numbers, which are slow
        return x.square().mean()


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = GPTConfig(vocab_size=256, context=64, layers=6, heads=6, width=384)
    tokens = torch.randint(config.vocab_size, (2, config.context))
    return TinyGPT(config), (tokens, tokens)


MODELS: dict[
    str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]
] = {  # a module that returns the loss, and its inputs
    "TinyGPT": _gpt,
    "many small": lambda: (ManySmall(), (torch.randn(32, 64),)),
}
