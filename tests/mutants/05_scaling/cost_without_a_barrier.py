"""Has no barrier before a step, so an early rank also measures how late the others are.

caught by: communication_cost · measuring
"""

import statistics


def communication_cost(model, loss_of, now_ms, rounds=10):
    def step_ms():
        model.zero_grad()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    alone_ms, together_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            alone_ms.append(step_ms())
        together_ms.append(step_ms())
    compute_ms = statistics.median(alone_ms[1:])
    return compute_ms, statistics.median(together_ms[1:]) - compute_ms
