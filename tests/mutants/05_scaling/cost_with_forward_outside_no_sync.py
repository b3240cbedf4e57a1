"""Enters no_sync() only for backward.

caught by: communication_cost · measuring
"""

import contextlib
import statistics

import torch.distributed as dist


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms(context):
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss = loss_of(model)
        with context:
            loss.backward()
            model.finish_gradient_sync()
        return now_ms() - began_ms

    alone_ms, together_ms = [], []
    for _ in range(rounds + 1):
        alone_ms.append(step_ms(model.no_sync()))
        together_ms.append(step_ms(contextlib.nullcontext()))
    compute_ms = statistics.median(alone_ms[1:])
    return compute_ms, statistics.median(together_ms[1:]) - compute_ms
