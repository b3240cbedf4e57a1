"""Returns the time of a step with communication as the computing time.

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
    step_with_sync_ms = statistics.median(together_ms[1:])
    return step_with_sync_ms, step_with_sync_ms - statistics.median(alone_ms[1:])
