"""Computes with plain loops: one for both kinds of step, and one for the buckets while they are sent."""

import contextlib
import statistics

import torch.distributed as dist


def tokens_needed(parameters, flops_per_s, ranks, alpha_s, beta_s, buckets=1, bytes_each=2):
    time_s = 0.0
    for _ in range(buckets):
        time_s += 2 * (ranks - 1) * (alpha_s + bytes_each * parameters / buckets / ranks * beta_s)
    return time_s * flops_per_s / (4 * parameters)


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    complete_s = 0.0
    for ready_s, size in buckets:
        begin_s = ready_s if ready_s > complete_s else complete_s
        complete_s = begin_s + 2 * (ranks - 1) * (alpha_s + beta_s * size / ranks)
    exposed_s = max(0.0, complete_s - compute_s)
    return compute_s + exposed_s


def buckets_of(gradients, cap_bytes):
    buckets, ready_s, filled = [], 0.0, 0
    for now_s, size in gradients:
        if filled and filled + size > cap_bytes:
            buckets.append((ready_s, filled))
            filled = 0
        ready_s, filled = now_s, filled + size
    return [*buckets, (ready_s, filled)] if filled else buckets


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    if kind == "weak":
        buckets = buckets_of(gradients, cap_bytes)
        return compute_s / predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s)
    shorter = [(ready_s / ranks, size) for ready_s, size in gradients]
    step_s = predict_step_s(buckets_of(shorter, cap_bytes), compute_s / ranks, ranks, alpha_s, beta_s)
    return compute_s / (ranks * step_s)


def micro_batches_needed(compute_s, exposed_s, target):
    count = 1
    while count * compute_s < target * (count * compute_s + exposed_s):
        count += 1
    return count


def communication_cost(model, loss_of, now_ms, rounds=10):
    ms = {True: [], False: []}
    for turn in range(2 * rounds + 2):
        quiet = turn % 2 == 0
        with contextlib.ExitStack() as inside:
            if quiet:
                inside.enter_context(model.no_sync())
            for parameter in model.parameters():
                parameter.grad = None
            dist.barrier()
            before = now_ms()
            loss = loss_of(model)
            loss.backward()
            model.finish_gradient_sync()
            ms[quiet].append(now_ms() - before)
    extra = [ms[False][turn] - ms[True][turn] for turn in range(1, rounds + 1)]
    return statistics.median(ms[True][1:]), statistics.median(extra)
