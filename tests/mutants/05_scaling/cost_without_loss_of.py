"""Calls the model itself, without the inputs that loss_of knows.

caught by: communication_cost · values
"""

import statistics

import torch.distributed as dist


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms():
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        model().backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    alone, together = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            alone.append(step_ms())
        together.append(step_ms())
    compute_ms = statistics.median(alone[1:])
    return compute_ms, statistics.median(together[1:]) - compute_ms
