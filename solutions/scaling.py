# Built by `make notebooks` from source/05_scaling/lab.py: edit that, not this.
"""What a training step spends on computing, and what communication adds to it."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn


def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure what a step spends on computing, and what communication adds to it.

    Args:
        model: a wrapper with finish_gradient_sync() and no_sync().
        loss_of: runs forward: loss_of(model) is the loss.
        now_ms: reads the clock.
        rounds: how many rounds count, after one that warms up.

    Returns:
        compute_ms, the median step without communication; exposed_ms, by how much the median step with it is longer.
    """

    def step_ms() -> float:
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    alone_ms, together_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            alone_ms.append(step_ms())
        together_ms.append(step_ms())
    compute_ms = statistics.median(alone_ms[1:])
    return compute_ms, statistics.median(together_ms[1:]) - compute_ms
