# Built by `make notebooks` from source/05_scaling/lab.py: edit that, not this.
"""Measuring how much of a training step is computation, and how much longer communication makes it."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn


def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure how long a step computes, and how much longer it takes because of communication.

    Args:
        model: A wrapper with finish_gradient_sync() and no_sync().
        loss_of: Runs forward and returns the loss: loss_of(model).
        now_ms: Reads the clock, in milliseconds.
        rounds: How many rounds count, after one more round that warms up.

    Returns:
        compute_ms, the median time of a step without communication, and exposed_ms, by how much the median step with
        communication is longer.
    """

    def step_ms() -> float:
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    without_sync_ms, with_sync_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            without_sync_ms.append(step_ms())
        with_sync_ms.append(step_ms())
    compute_ms = statistics.median(without_sync_ms[1:])  # the first round warms up
    exposed_ms = statistics.median(with_sync_ms[1:]) - compute_ms
    return compute_ms, exposed_ms
