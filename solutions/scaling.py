# Built by `make notebooks` from source/05_scaling/lab.py: edit that, not this.
"""A cost model of a step of data parallelism, and the measurement that tests it."""

import math
import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shared.formulas import ring_all_reduce_s


def tokens_needed(
    parameters: float,
    flops_per_s: float,
    ranks: int,
    alpha_s: float,
    beta_s: float,
    buckets: int = 1,
    bytes_each: int = 2,
) -> float:
    """Return with how many tokens per rank a backward lasts as long as the all-reduces of its gradients.

    Args:
        parameters: The number of parameters of the model.
        flops_per_s: The operations that a rank computes per second.
        buckets: How many all-reduces there are. Their buckets have equal sizes.
        bytes_each: The bytes of the gradient of one parameter.
    """
    backward_s_per_token = 4 * parameters / flops_per_s
    bucket_bytes = bytes_each * parameters / buckets
    all_reduces_s = buckets * ring_all_reduce_s(bucket_bytes, ranks, alpha_s, beta_s)
    return all_reduces_s / backward_s_per_token


def buckets_of(gradients: list[tuple[float, int]], cap_bytes: int) -> list[tuple[float, int]]:
    """Pack gradients into buckets of at most cap_bytes, in order. Each is (ready_s, size_bytes), as its gradients are.

    A gradient that is larger than the cap gets a bucket of its own.
    """
    buckets = []
    for ready_s, size_bytes in gradients:
        if buckets and buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets


def predict_step_s(
    buckets: list[tuple[float, int]], compute_s: float, ranks: int, alpha_s: float, beta_s: float
) -> float:
    """Predict the time of a step whose buckets are all-reduced one after another, during backward.

    Args:
        buckets: (ready_s, size_bytes) of each bucket, in launch order.
        compute_s: When backward ends, in seconds since the start of the step.
    """
    free_s = 0.0  # when the link is free again
    for ready_s, size_bytes in buckets:
        free_s = max(free_s, ready_s) + ring_all_reduce_s(size_bytes, ranks, alpha_s, beta_s)
    return max(compute_s, free_s)


def efficiency(
    gradients: list[tuple[float, int]],
    compute_s: float,
    cap_bytes: int,
    ranks: int,
    alpha_s: float,
    beta_s: float,
    kind: str = "weak",
) -> float:
    """Predict the efficiency of data parallelism on several ranks.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in a step of one rank.
        compute_s: When backward ends, in a step of one rank.
        kind: "weak", if every rank has a batch of its own, or "strong", if they share one.
    """
    share = 1 / ranks if kind == "strong" else 1.0
    ready = [(share * ready_s, size_bytes) for ready_s, size_bytes in gradients]
    buckets = buckets_of(ready, cap_bytes)
    step_s = predict_step_s(buckets, share * compute_s, ranks, alpha_s, beta_s)
    return share * compute_s / step_s


def micro_batches_needed(compute_s: float, exposed_s: float, target: float) -> int:
    """Return how many micro-batches a step must accumulate, so that ranks compute for a part `target` of it.

    Args:
        compute_s: How long a rank computes for one micro-batch.
        exposed_s: The exposed communication after the last one.
        target: Between 0 and 1, both excluded.
    """
    # m · compute_s / (m · compute_s + exposed_s) ≥ target
    return max(1, math.ceil(target * exposed_s / ((1 - target) * compute_s)))


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
        compute_ms, the median time of a step without communication, and exposed_ms, the median of how much longer the
        step with communication is in the same round.
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
    pairs = zip(without_sync_ms[1:], with_sync_ms[1:], strict=True)
    exposed_ms = statistics.median(longer - shorter for shorter, longer in pairs)
    return compute_ms, exposed_ms
