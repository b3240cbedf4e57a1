"""Measures all steps without communication first and then all steps with it, so drift counts as communication.

caught by: communication_cost · measuring
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

    with model.no_sync():
        alone_ms = [step_ms() for _ in range(rounds + 1)]
    together_ms = [step_ms() for _ in range(rounds + 1)]
    compute_ms = statistics.median(alone_ms[1:])
    return compute_ms, statistics.median(together_ms[1:]) - compute_ms
