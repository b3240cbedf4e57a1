"""Every rung of the ladder by name, beside torch's own: module, settings → model to call, optimizer to step.

A model that sends messages in backward() may have no_sync(), which spares them while micro-batches add up. One that
sends after backward(), or waits then for what is under way, has finish_gradient_sync(). ZeRO1 averages gradients in
step(), and ZeRO2 is its own optimizer.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solutions.bucketed_ddp import BucketedDDP
from solutions.manual_ddp import ManualDDP, broadcast_state
from solutions.overlapped_ddp import OverlappedDDP
from solutions.units import default_units
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2
from solutions.zero3 import ZeRO3

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
DEFAULT_CAP_MB = 25.0  # torch's, and ours
Built = tuple[nn.Module, torch.optim.Optimizer]


def ddp(module: nn.Module, settings) -> Built:
    model = DistributedDataParallel(module, bucket_cap_mb=settings.bucket_cap_mb, gradient_as_bucket_view=True)
    return model, optimizer_of(module, settings)


def manual_ddp(module: nn.Module, settings) -> Built:
    return ManualDDP(module), optimizer_of(module, settings)


def bucketed_ddp(module: nn.Module, settings) -> Built:
    return BucketedDDP(module, settings.bucket_cap_mb), optimizer_of(module, settings)


def overlapped_ddp(module: nn.Module, settings) -> Built:
    return OverlappedDDP(module, settings.bucket_cap_mb), optimizer_of(module, settings)


def zero1(module: nn.Module, settings) -> Built:
    broadcast_state(module)  # buffers too, of which an optimizer does not know
    return module, ZeRO1(module.parameters(), OPTIMIZERS[settings.optimizer], lr=settings.learning_rate)


def zero2(module: nn.Module, settings) -> Built:
    model = ZeRO2(module, OPTIMIZERS[settings.optimizer], settings.bucket_cap_mb, lr=settings.learning_rate)
    return model, model


def zero3(module: nn.Module, settings) -> Built:
    model = ZeRO3(module)
    return model, optimizer_of(model, settings)


def zero_redundancy(module: nn.Module, settings) -> Built:
    """torch's ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles much that the others do not need

    model, _ = ddp(module, settings)
    optimizer_cls = OPTIMIZERS[settings.optimizer]
    return model, ZeroRedundancyOptimizer(module.parameters(), optimizer_cls, lr=settings.learning_rate)


def fsdp2(module: nn.Module, settings) -> Built:
    """torch's ZeRO-3."""
    from torch.distributed.fsdp import fully_shard

    broadcast_state(module)
    for unit in default_units(module):
        fully_shard(unit)
    model = fully_shard(module)
    return model, optimizer_of(model, settings)


def fsdp1(module: nn.Module, settings) -> Built:
    """torch's older ZeRO-3: one flat parameter per unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    broadcast_state(module)
    units = set(default_units(module))
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda each: each in units)
    device = next(module.parameters()).device
    model = FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    return model, optimizer_of(model, settings)


def optimizer_of(model: nn.Module, settings) -> torch.optim.Optimizer:
    return OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.learning_rate)


BUILDS = (ddp, manual_ddp, bucketed_ddp, overlapped_ddp, zero1, zero2, zero3, zero_redundancy, fsdp1, fsdp2)
STRATEGIES: dict[str, Callable[..., Built]] = {build.__name__: build for build in BUILDS}
