"""Judging step(closure): the closure runs first, once, with gradients enabled, and its value comes back."""

import functools

import torch
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, draw
from shared.checks.memory_wall.master_values import after_values, judge_steps

PLAN = Plan(
    "SGD, gradients that a closure writes", "SGD", hint="Look at: when does the closure run, before or after the step?"
)


def probe_closure(master_weights, data: Data, values: list[float]) -> dict:
    """Step with closures. → per step the parameters, what step gave back, and whether gradients were enabled"""
    optimizer_cls, defaults = OPTIMIZERS[PLAN.optimizer]
    build = functools.partial(master_weights, optimizer_cls=optimizer_cls)
    parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in data.parameters]
    optimizer = build(parameters, **defaults)
    found = {"steps": [], "came": [], "enabled": []}
    for gradients, value in zip(data.gradients, values, strict=True):
        enabled = []

        def closure(gradients=gradients, value=value, enabled=enabled):
            enabled.append(torch.is_grad_enabled())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(device_here(), parameter.dtype)
            return value

        found["came"].append(repr(optimizer.step(closure)))
        found["enabled"].append(enabled)
        found["steps"].append([parameter.detach().cpu().clone() for parameter in parameters])
    return found


@after_values
def a_closure_runs_first(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), PLAN.dtypes)
    values = [round(attempt.random.uniform(1, 9), 3) for _ in data.gradients]
    for rank, found in enumerate(attempt.run(probe_closure, data, values, context="step(closure)")):
        for came, want, enabled in zip(found["came"], values, found["enabled"], strict=True):
            if len(enabled) != 1:
                said = f"step(closure) called the closure {len(enabled)} times; expected once"
                raise Wrong({rank: said}, "Look at: who calls it, and where?")
            if not enabled[0]:
                said = "gradients are not enabled inside the closure: its backward() has nothing to go through"
                raise Wrong({rank: said}, "Look at: what does the decorator of step() switch off?")
            if came != repr(want):
                said = f"the closure returned {want}, and step(closure) {came}"
                raise Wrong({rank: said}, "Look at: what does step() give back?")
        judge_steps(rank, found["steps"], PLAN, data)
