# Built by `make notebooks` from source/05_scaling/lab.py: edit that, not this.
"""A cost model of a step of data parallelism, and the measurement that tests it."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shared.formulas import ring_all_reduce_s


def fit_alpha_beta(times_s: dict[int, float], ranks: int) -> tuple[float, float]:
    """Fit α and β to the times of ring all-reduces, by least squares of the relative error.

    Args:
        times_s: The measured seconds of an all-reduce, by the size of its tensor in bytes.
        ranks: How many ranks took part.

    Returns:
        alpha_s and beta_s, in seconds per step and in seconds per byte.
    """
    steps = 2 * (ranks - 1)
    u = [steps / time_s for time_s in times_s.values()]
    v = [steps / ranks * size / time_s for size, time_s in times_s.items()]
    uu, vv = sum(x * x for x in u), sum(x * x for x in v)
    uv = sum(x * y for x, y in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    alpha_s = (sum(u) * vv - sum(v) * uv) / determinant
    beta_s = (sum(v) * uu - sum(u) * uv) / determinant
    return alpha_s, beta_s


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


def buckets_of(gradients: list[tuple[float, int]], cap_bytes: int) -> list[tuple[float, int]]:
    """Pack gradients into buckets of at most cap_bytes, in order.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in the order in which they are ready.

    Returns:
        (ready_s, size_bytes) of each bucket.
    """
    buckets = []
    for ready_s, size_bytes in gradients:
        if buckets and buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets


def best_cap_bytes(
    gradients: list[tuple[float, int]],
    caps_bytes: list[int],
    compute_s: float,
    ranks: int,
    alpha_s: float,
    beta_s: float,
) -> int:
    """Return the cap with which the predicted step is shortest.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in the order in which they are ready.
        caps_bytes: The caps to try.
        compute_s: When backward ends, in seconds since the start of the step.
    """

    def step_s(cap_bytes: int) -> float:
        return predict_step_s(buckets_of(gradients, cap_bytes), compute_s, ranks, alpha_s, beta_s)

    return min(caps_bytes, key=step_s)


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
