"""Computes with NumPy, folds buckets by reduce(), and measures both kinds of step by one closure each."""

import functools

import numpy as np
import torch.distributed as dist


def tokens_needed(parameters, flops_per_s, ranks, alpha_s, beta_s, buckets=1, bytes_each=2):
    latency_s, bytes_s = 2 * (ranks - 1) * buckets * alpha_s, 2 * (1 - 1 / ranks) * bytes_each * parameters * beta_s
    return float(np.sum([latency_s, bytes_s]) * flops_per_s / parameters / 4)


def predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s):
    def send(free_s, bucket):
        ready_s, size = bucket
        return max(free_s, ready_s) + 2 * (ranks - 1) * (alpha_s + size / ranks * beta_s)

    return max(compute_s, functools.reduce(send, buckets, 0.0))


def buckets_of(gradients, cap_bytes):
    def put(buckets, gradient):
        if buckets and buckets[-1][1] + gradient[1] <= cap_bytes:
            return [*buckets[:-1], (gradient[0], buckets[-1][1] + gradient[1])]
        return [*buckets, tuple(gradient)]

    return functools.reduce(put, gradients, [])


def efficiency(gradients, compute_s, cap_bytes, ranks, alpha_s, beta_s, kind="weak"):
    shrink = ranks if kind == "strong" else 1
    ready = np.array([each[0] for each in gradients]) / shrink
    gradients = list(zip(ready.tolist(), (size for _, size in gradients), strict=True))
    alone_s = compute_s / shrink
    return alone_s / predict_step_s(buckets_of(gradients, cap_bytes), alone_s, ranks, alpha_s, beta_s)


def micro_batches_needed(compute_s, exposed_s, target):
    few = np.arange(1, 100_000)
    return int(few[np.argmax(few * compute_s >= target * (few * compute_s + exposed_s))])


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms():
        model.zero_grad()
        dist.barrier()
        start = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - start

    def quiet_ms():
        with model.no_sync():
            return step_ms()

    table = np.array([(quiet_ms(), step_ms()) for _ in range(rounds + 1)])
    return float(np.median(table[1:, 0])), float(np.median(np.diff(table[1:], axis=1)))
