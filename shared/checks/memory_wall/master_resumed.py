"""Judge a checkpoint of master weights: training continues as if it had never been interrupted."""

import functools
import io

import torch
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, deal, draw
from shared.checks.memory_wall.master_values import after_groups, after_values, judge_steps

SAVED_AFTER = 3  # steps
HINT = (
    "torch's own state_dict() saves what is in self.state, and load_state_dict() casts it to the parameters' dtype.\n"
    "Hint: what does your state_dict() contain after a step, and which dtype does it have after loading?"
)
_SAVED = f"saved after step {SAVED_AFTER} and loaded into"
PLANS = (  # plans, and whether the optimizer that loads has stepped before
    (Plan(f"AdamW, two groups, {_SAVED} a new one", "AdamW", ({}, {"lr": 0.1, "weight_decay": 0.0}), hint=HINT), False),
    (Plan(f"SGD with momentum, {_SAVED} a new one", "SGD with momentum", hint=HINT), False),
    (Plan(f"AdamW, {_SAVED} one that has trained differently", "AdamW", hint=HINT), True),
)


def probe_resumed(master_weights, plan: Plan, used: bool, data: Data) -> list[list[torch.Tensor]]:
    """Step, save, and continue with a new optimizer on new parameters. Return the parameters after each later step."""
    optimizer_cls, defaults = OPTIMIZERS[plan.optimizer]
    build = functools.partial(master_weights, optimizer_cls=optimizer_cls, **defaults)

    def begin(values: list[torch.Tensor]) -> tuple[list, torch.optim.Optimizer]:
        parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in values]
        dealt = deal(parameters, len(plan.groups))
        groups = [{"params": some, **settings} for some, settings in zip(dealt, plan.groups, strict=True)]
        return parameters, build(groups)

    def step(parameters: list, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(device_here(), parameter.dtype)
        optimizer.step()

    parameters, optimizer = begin(data.parameters)
    for gradients in data.gradients[:SAVED_AFTER]:
        step(parameters, optimizer, gradients)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = [parameter.detach() for parameter in parameters]
    parameters, optimizer = begin(saved)
    if used:
        step(parameters, optimizer, [-2 * gradient for gradient in data.gradients[0]])
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.data.copy_(value)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    steps = []
    for gradients in data.gradients[SAVED_AFTER:]:
        step(parameters, optimizer, gradients)
        steps.append([parameter.detach().cpu().clone() for parameter in parameters])
    return steps


@after_values
@after_groups
def training_goes_on(attempt: Attempt) -> None:
    for plan, used in PLANS:
        data = draw(attempt.draw_seed(), plan.dtypes)
        for rank, steps in enumerate(attempt.run(probe_resumed, plan, used, data, context=plan.description)):
            judge_steps(rank, steps, plan, data, first=SAVED_AFTER + 1)
