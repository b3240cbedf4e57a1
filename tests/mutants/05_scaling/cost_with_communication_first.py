"""Begins each round with the step outside no_sync().

caught by: communication_cost · measuring
"""

import statistics

import torch.distributed as dist


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms():
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    alone, together = [], []
    for _ in range(rounds + 1):
        together.append(step_ms())
        with model.no_sync():
            alone.append(step_ms())
    compute_ms = statistics.median(alone[1:])
    return compute_ms, statistics.median(together[1:]) - compute_ms
