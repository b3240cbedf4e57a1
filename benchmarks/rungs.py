"""What the ladder compares: each rung and torch's own, by name, and how fast ours are meant to be."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine
from shared.models import GPTConfig, TinyGPT
from solutions.bucketed_ddp import BucketedDDP
from solutions.manual_ddp import ManualDDP, broadcast_state
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2
from solutions.zero3 import ZeRO3

ALONE, DDP, DDP_VIEW, FLAT = "module alone", "DDP", "DDP, bucket view", "flat"
ZERO_REDUNDANCY, FSDP2, FSDP2_KEPT, ZERO3_KEPT = "ZeroRedundancyOptimizer", "FSDP2", "FSDP2, kept", "ZeRO3, kept"
Built = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Aim:
    """What one strategy is to take at most, as a multiple of another's."""

    mine: str
    other: str
    most: float


@dataclass(frozen=True)
class Rungs:
    """Strategies that take turns in one run; each is module → model to call, optimizer to step."""

    builds: dict[str, Callable[[nn.Module], Built]]
    times: tuple[Aim, ...]
    peaks: tuple[Aim, ...]
    carried: tuple[Aim, ...] = field(default=())


# -- averaging gradients


class FlatDDP(nn.Module):
    """The obvious way to spare messages: copy all gradients into one tensor after backward, and send that."""

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


def _viewed(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def _with_sgd(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Built]:
    return lambda module: (wrap(module), torch.optim.SGD(module.parameters(), lr=1e-4))


AVERAGING = Rungs(
    builds={
        ALONE: _with_sgd(lambda module: module),
        DDP: _with_sgd(DistributedDataParallel),
        DDP_VIEW: _with_sgd(_viewed),
        FLAT: _with_sgd(FlatDDP),
        "ManualDDP": _with_sgd(ManualDDP),
        "BucketedDDP": _with_sgd(BucketedDDP),
        "OverlappedDDP": _with_sgd(OverlappedDDP),
    },
    times=(Aim("OverlappedDDP", DDP_VIEW, 1.0), Aim("BucketedDDP", FLAT, 1.1)),
    # Buckets filled after backward stand beside all its gradients, as DDP's own do unless they are the gradients'
    # memory. A bucket keeps its divisor, four bytes.
    peaks=(Aim("BucketedDDP", DDP, 1.001), Aim("OverlappedDDP", DDP_VIEW, 1.001)),
)

# -- sharding


def _with_adamw(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Built]:
    def build(module: nn.Module) -> Built:
        model = wrap(module)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    return build


def _zero_redundancy(module: nn.Module) -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _viewed(module)
    settings = {"lr": 1e-4, "parameters_as_bucket_view": True}
    return model, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **settings)


def _zero1(module: nn.Module) -> Built:
    return module, ZeRO1(module.parameters(), torch.optim.AdamW, lr=1e-4)


def _zero2(module: nn.Module) -> Built:
    model = ZeRO2(module, torch.optim.AdamW, lr=1e-4)
    return model, model


def _fsdp2(reshard_after_forward: bool) -> Callable[[nn.Module], Built]:
    from torch.distributed.fsdp import fully_shard

    def wrap(module: nn.Module) -> nn.Module:
        for layer in module.layers_to_shard():
            fully_shard(layer, reshard_after_forward=reshard_after_forward)
        return fully_shard(module)

    return _with_adamw(wrap)


def _zero3(reshard_after_forward: bool) -> Callable[[nn.Module], Built]:
    return _with_adamw(
        lambda module: ZeRO3(module, module.layers_to_shard(), reshard_after_forward=reshard_after_forward)
    )


def _deepspeed(stage: int, prefetch_numbers: int = 0) -> Callable[[nn.Module], Built]:
    ahead = {"prefetch_numbers": prefetch_numbers}
    return lambda module: deepspeed_engine.engine(module, stage, torch.optim.AdamW, **ahead, lr=1e-4)


DEEPSPEED = {
    "DeepSpeed 1": _deepspeed(1),
    "DeepSpeed 2": _deepspeed(2),
    "DeepSpeed 3, kept": _deepspeed(3, prefetch_numbers=1_200_000),
    "DeepSpeed 3": _deepspeed(3),
}
BESIDE_DEEPSPEED = tuple(
    Aim(mine, other, 0.8) for mine, other in zip(("ZeRO1", "ZeRO2", ZERO3_KEPT, "ZeRO3"), DEEPSPEED, strict=True)
)

SHARDING = Rungs(
    builds={
        ALONE: _with_adamw(lambda module: module),
        DDP_VIEW: _with_adamw(_viewed),
        ZERO_REDUNDANCY: _zero_redundancy,
        "ZeRO1": _zero1,
        FSDP2_KEPT: _fsdp2(False),
        "ZeRO2": _zero2,
        ZERO3_KEPT: _zero3(False),
        FSDP2: _fsdp2(True),
        "ZeRO3": _zero3(True),
        **({} if deepspeed_engine.why_not() else DEEPSPEED),
    },
    times=(
        Aim("ZeRO1", ZERO_REDUNDANCY, 0.95),
        Aim("ZeRO2", FSDP2_KEPT, 0.7),
        Aim(ZERO3_KEPT, FSDP2_KEPT, 0.7),
        Aim("ZeRO3", FSDP2, 0.7),
        *(() if deepspeed_engine.why_not() else BESIDE_DEEPSPEED),
    ),
    peaks=(Aim("ZeRO1", ZERO_REDUNDANCY, 1.0), Aim("ZeRO3", FSDP2, 1.0)),
    carried=(Aim("ZeRO2", FSDP2_KEPT, 1.0), Aim("ZeRO3", FSDP2, 1.0)),
)

ON_A_GPU: dict[str, Callable[[nn.Module], Built]] = {
    ALONE: _with_adamw(lambda module: module),
    DDP_VIEW: _with_adamw(_viewed),
    "ManualDDP": _with_adamw(ManualDDP),
    "BucketedDDP": _with_adamw(BucketedDDP),
    "OverlappedDDP": _with_adamw(OverlappedDDP),
    ZERO_REDUNDANCY: _zero_redundancy,
    "ZeRO1": _zero1,
    "ZeRO2": _zero2,
    FSDP2: _fsdp2(True),
    "ZeRO3": _zero3(True),
}

RUNGS = {"averaging": AVERAGING, "sharding": SHARDING}

# -- models


class ManySmall(nn.Module):
    """100 layers of 64×64: little to compute and little to send, so that what each parameter costs stands out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)  # added: 100 layers in a row would fade to denormal numbers, which are slow
        return x.square().mean()

    def layers_to_shard(self) -> list[nn.Module]:
        return list(self.layers)


class BenchmarkGPT(TinyGPT):
    def layers_to_shard(self) -> list[nn.Module]:
        return list(self.blocks)


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = GPTConfig(vocab_size=256, context=64, layers=6, heads=6, width=384)
    tokens = torch.randint(config.vocab_size, (2, config.context))
    return BenchmarkGPT(config), (tokens, tokens)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {  # module → loss, and its inputs
    "TinyGPT": _gpt,
    "many small": lambda: (ManySmall(), (torch.randn(32, 64),)),
}
