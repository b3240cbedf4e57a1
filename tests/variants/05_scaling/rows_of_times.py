"""Fits with torch's least squares, uses the course's formulas, and sorts a table of times to get the medians."""

import torch
import torch.distributed as dist

from shared import formulas


def fit_alpha_beta(times_s, ranks):
    measured = torch.tensor(list(times_s.values()), dtype=torch.float64)
    megabytes = torch.tensor([size / 1e6 for size in times_s], dtype=torch.float64)
    steps = 2 * (ranks - 1)
    rows = torch.stack([steps / measured, steps * megabytes / ranks / measured], dim=1)
    alpha_s, beta_per_mb = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution.flatten()
    return alpha_s.item(), beta_per_mb.item() / 1e6


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    ready_s = [ready for ready, _ in buckets]
    lasts_s = [formulas.ring_all_reduce_s(size, ranks, alpha_s, beta_s) for _, size in buckets]
    return compute_s + formulas.exposed_s(ready_s, lasts_s, compute_s)


def buckets_of(gradients, cap_bytes):
    """Number the buckets first, and then add up those of equal number."""
    numbers, filled = [], cap_bytes + 1
    for _, size in gradients:
        opens = filled + size > cap_bytes
        filled = size if opens else filled + size
        numbers.append((numbers[-1] if numbers else 0) + opens)
    parts = {}
    for number, gradient in zip(numbers, gradients, strict=True):
        parts.setdefault(number, []).append(gradient)
    return [(part[-1][0], sum(size for _, size in part)) for part in parts.values()]


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    steps = []
    for cap in caps_bytes:
        buckets = [[gradients[0]]]
        for gradient in gradients[1:]:
            if sum(size for _, size in buckets[-1]) + gradient[1] > cap:
                buckets.append([])
            buckets[-1].append(gradient)
        packed = [(bucket[-1][0], sum(size for _, size in bucket)) for bucket in buckets]
        steps.append((predict_step_s(packed, compute_s, ranks, alpha_s, beta_s), cap))
    return min(steps)[1]


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    share = {"weak": 1.0, "strong": 1 / ranks}[kind]
    buckets = []
    for ready_s, size in gradients:
        full = not buckets or buckets[-1][1] + size > cap_bytes
        before = 0 if full else buckets.pop()[1]
        buckets.append((ready_s * share, before + size))
    return compute_s * share / predict_step_s(buckets, compute_s * share, ranks, alpha_s, beta_s)


def _median(times):
    times, middle = sorted(times), len(times) // 2
    return times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2


def _timed(model, loss_of, now_ms):
    for parameter in model.parameters():
        parameter.grad = None
    dist.barrier()
    start = now_ms()
    loss_of(model).backward()
    model.finish_gradient_sync()
    return now_ms() - start


def communication_cost(model, loss_of, now_ms, rounds=10):
    table = []
    while len(table) <= rounds:
        quiet = model.no_sync()
        quiet.__enter__()
        try:
            row = [_timed(model, loss_of, now_ms)]
        finally:
            quiet.__exit__(None, None, None)
        table.append((*row, _timed(model, loss_of, now_ms)))
    alone, together = map(_median, zip(*table[1:], strict=True))
    return alone, together - alone
