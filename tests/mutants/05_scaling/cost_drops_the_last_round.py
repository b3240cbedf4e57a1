"""Leaves out the last round instead of the first one.

caught by: communication_cost · values
"""

import statistics

import torch.distributed as dist


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms():
        model.zero_grad()
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
    compute_ms = statistics.median(alone_ms[:-1])
    return compute_ms, statistics.median(together_ms[:-1]) - compute_ms
