"""Every rung of the ladder by name, beside torch's own: module, settings → model to call, optimizer to step.

A model that sends messages in backward() has no_sync(), which spares them while micro-batches add up. One that sends
after backward(), or waits then for what is under way, has finish_gradient_sync().
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solutions.bucketed_ddp import BucketedDDP
from solutions.manual_ddp import ManualDDP
from solutions.overlapped_ddp import OverlappedDDP

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
DEFAULT_CAP_MB = 25.0  # torch's, and ours
Built = tuple[nn.Module, torch.optim.Optimizer]


def ddp(module: nn.Module, settings) -> Built:
    # a cap that is given, be it the default's 25, would be the first bucket's too: ours begins with one of 1 MB
    cap_mb = None if settings.bucket_cap_mb == DEFAULT_CAP_MB else settings.bucket_cap_mb
    model = DistributedDataParallel(module, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    return model, optimizer_of(module, settings)


def manual_ddp(module: nn.Module, settings) -> Built:
    return ManualDDP(module), optimizer_of(module, settings)


def bucketed_ddp(module: nn.Module, settings) -> Built:
    return BucketedDDP(module, settings.bucket_cap_mb), optimizer_of(module, settings)


def overlapped_ddp(module: nn.Module, settings) -> Built:
    return OverlappedDDP(module, settings.bucket_cap_mb), optimizer_of(module, settings)


def optimizer_of(module: nn.Module, settings) -> torch.optim.Optimizer:
    return OPTIMIZERS[settings.optimizer](module.parameters(), lr=settings.learning_rate)


STRATEGIES: dict[str, Callable[..., Built]] = {
    build.__name__: build for build in (ddp, manual_ddp, bucketed_ddp, overlapped_ddp)
}
