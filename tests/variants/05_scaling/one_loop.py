"""Computes with plain loops: one for both kinds of step, and one for the buckets while they are sent."""

import contextlib
import statistics

import torch.distributed as dist


def fit_alpha_beta(times_s, ranks):
    uu = uv = vv = u_sum = v_sum = 0.0
    for size, time_s in times_s.items():
        u = 2 * (ranks - 1) / time_s
        v = u * size / ranks
        uu, uv, vv, u_sum, v_sum = uu + u * u, uv + u * v, vv + v * v, u_sum + u, v_sum + v
    beta_s = (v_sum - uv * u_sum / uu) / (vv - uv * uv / uu)
    return (u_sum - beta_s * uv) / uu, beta_s


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


def best_cap_bytes(gradients, caps_bytes, compute_s, ranks, alpha_s, beta_s):
    best, best_s = None, float("inf")
    for cap in caps_bytes:
        time_s = predict_step_s(buckets_of(gradients, cap), compute_s, ranks, alpha_s, beta_s)
        if time_s < best_s:
            best, best_s = cap, time_s
    return best


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    if kind == "weak":
        buckets = buckets_of(gradients, cap_bytes)
        return compute_s / predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s)
    shorter = [(ready_s / ranks, size) for ready_s, size in gradients]
    step_s = predict_step_s(buckets_of(shorter, cap_bytes), compute_s / ranks, ranks, alpha_s, beta_s)
    return compute_s / (ranks * step_s)


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
    alone, together = (statistics.median(ms[quiet][1:]) for quiet in (True, False))
    return alone, together - alone
