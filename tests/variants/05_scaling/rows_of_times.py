"""Uses the course's formulas, and sorts a table of times to get the medians."""

import torch.distributed as dist

from shared import formulas


def tokens_needed(parameters, flops_per_s, ranks, alpha_s, beta_s, buckets=1, bytes_each=2):
    sizes = [bytes_each * parameters / buckets] * buckets
    lasts_s = sum(formulas.ring_all_reduce_s(size, ranks, alpha_s, beta_s) for size in sizes)
    return lasts_s / (4 * parameters) * flops_per_s


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


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    share = {"weak": 1.0, "strong": 1 / ranks}[kind]
    buckets = []
    for ready_s, size in gradients:
        full = not buckets or buckets[-1][1] + size > cap_bytes
        before = 0 if full else buckets.pop()[1]
        buckets.append((ready_s * share, before + size))
    return compute_s * share / predict_step_s(buckets, compute_s * share, ranks, alpha_s, beta_s)


def micro_batches_needed(compute_s, exposed_s, target):
    wanted_s = exposed_s * target / (1 - target)  # as long as this, all micro-batches together must compute
    return 1 if wanted_s <= compute_s else -int(-wanted_s // compute_s)


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
    alone = [row[0] for row in table[1:]]
    return _median(alone), _median([together - quiet for quiet, together in table[1:]])
