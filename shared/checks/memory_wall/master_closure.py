"""Judge step(closure): the closure runs first, once, with gradients enabled, and step() returns its value."""

import functools

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, draw
from shared.checks.memory_wall.master_values import after_values, judge_steps

PLAN = Plan(
    "SGD, gradients written by a closure", "SGD", hint="Hint: when does the closure run, before or after the step?"
)


def probe_closure(master_weights, data: Data, values: list[float]) -> dict:
    """Step with closures. Return, for each step, the parameters, the result of step(), and whether grad was enabled."""
    optimizer_cls, defaults = OPTIMIZERS[PLAN.optimizer]
    build = functools.partial(master_weights, optimizer_cls=optimizer_cls)
    parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in data.parameters]
    optimizer = build(parameters, **defaults)
    found = {"steps": [], "returned": [], "enabled": []}
    for gradients, value in zip(data.gradients, values, strict=True):
        enabled = []

        def closure(gradients=gradients, value=value, enabled=enabled):
            enabled.append(torch.is_grad_enabled())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(device_here(), parameter.dtype)
            return value

        found["returned"].append(repr(optimizer.step(closure)))
        found["enabled"].append(enabled)
        found["steps"].append([parameter.detach().cpu().clone() for parameter in parameters])
    return found


@after_values
def a_closure_runs_first(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), PLAN.dtypes)
    values = [round(attempt.random.uniform(1, 9), 3) for _ in data.gradients]
    for rank, found in enumerate(attempt.run(probe_closure, data, values, context="step(closure)")):
        for actual, expected, enabled in zip(found["returned"], values, found["enabled"], strict=True):
            if len(enabled) != 1:
                evidence = f"step(closure) called the closure {len(enabled)} times; expected once"
                raise Wrong({rank: evidence}, "Hint: which line calls the closure, and how often does it run?")
            if not enabled[0]:
                evidence = "gradients are disabled inside the closure, so its backward() would find no graph"
                raise Wrong(
                    {rank: evidence},
                    "Hint: what does the decorator of step() disable, and how can the closure enable it again?",
                )
            if actual != repr(expected):
                evidence = f"step(closure) returned {actual}; expected {expected}, the value that the closure returned"
                raise Wrong({rank: evidence}, "Hint: what does step() return?")
        judge_steps(rank, found["steps"], PLAN, data)
