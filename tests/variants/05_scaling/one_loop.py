"""Times both kinds of step in one loop and sets gradients to None itself."""

import contextlib
import statistics

import torch.distributed as dist


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
