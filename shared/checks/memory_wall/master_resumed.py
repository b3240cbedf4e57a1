"""Judge a checkpoint of master weights: training continues as if it had never been interrupted.

The checkpoint of HoldsMasters, which has no load_state_dict() yet, is a copy of its state.
"""

import copy
import functools
import io

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, deal, draw, with_step
from shared.checks.memory_wall.master_values import after_groups, after_plain, after_values, judge_steps

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

COPIED = Plan(
    f"Adam, with its state copied into a second optimizer after step {SAVED_AFTER}",
    "Adam",
    dtypes=(torch.bfloat16,),
    hint="load_state_dict() will replace the tensors in self.state in the same way. Hint: in the next step, where does "
    "`inner` find the state of a master, and who has put it there?",
)
STATE = ("exp_avg", "exp_avg_sq", "master", "step")


def _step(parameters: list, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(device_here(), parameter.dtype)
    optimizer.step()


def probe_copied(holds_masters, data: Data) -> dict:
    """Step, copy parameters and state, and continue with a second optimizer.

    Returns:
        The names in each parameter's state when it was copied, and the parameters after each later step.
    """
    optimizer_cls, defaults = OPTIMIZERS[COPIED.optimizer]
    build = functools.partial(with_step(holds_masters), optimizer_cls=optimizer_cls, **defaults)
    parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in data.parameters]
    optimizer = build(parameters)
    for gradients in data.gradients[:SAVED_AFTER]:
        _step(parameters, optimizer, gradients)
    states = [optimizer.state[parameter] for parameter in parameters]
    names = [sorted(map(str, state)) for state in states]
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizer = build(parameters)
    for parameter, state in zip(parameters, states, strict=True):
        optimizer.state[parameter] = copy.deepcopy(state)
    steps = []
    for gradients in data.gradients[SAVED_AFTER:]:
        _step(parameters, optimizer, gradients)
        steps.append([parameter.detach().cpu().clone() for parameter in parameters])
    return {"names": names, "steps": steps}


@after_plain
def the_state_is_enough(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), COPIED.dtypes)
    for rank, found in enumerate(attempt.run(probe_copied, data, context=COPIED.description)):
        for names in found["names"]:
            if names != list(STATE):
                evidence = (
                    f"after {SAVED_AFTER} steps with Adam, the keys of self.state[parameter] are "
                    f"{', '.join(names)}; expected {', '.join(STATE)}"
                )
                raise Wrong({rank: evidence}, "Hint: which dict does `inner` fill, and where are its entries expected?")
        judge_steps(rank, found["steps"], COPIED, data, first=SAVED_AFTER + 1)


def probe_resumed(master_weights, plan: Plan, used: bool, data: Data) -> list[list[torch.Tensor]]:
    """Step, save, and continue with a new optimizer on new parameters. Return the parameters after each later step."""
    optimizer_cls, defaults = OPTIMIZERS[plan.optimizer]
    build = functools.partial(master_weights, optimizer_cls=optimizer_cls, **defaults)

    def begin(values: list[torch.Tensor]) -> tuple[list, torch.optim.Optimizer]:
        parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in values]
        dealt = deal(parameters, len(plan.groups))
        groups = [{"params": some, **settings} for some, settings in zip(dealt, plan.groups, strict=True)]
        return parameters, build(groups)

    parameters, optimizer = begin(data.parameters)
    for gradients in data.gradients[:SAVED_AFTER]:
        _step(parameters, optimizer, gradients)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = [parameter.detach() for parameter in parameters]
    parameters, optimizer = begin(saved)
    if used:
        _step(parameters, optimizer, [-2 * gradient for gradient in data.gradients[0]])
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.data.copy_(value)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    steps = []
    for gradients in data.gradients[SAVED_AFTER:]:
        _step(parameters, optimizer, gradients)
        steps.append([parameter.detach().cpu().clone() for parameter in parameters])
    return steps


@after_values
@after_groups
def training_goes_on(attempt: Attempt) -> None:
    for plan, used in PLANS:
        data = draw(attempt.draw_seed(), plan.dtypes)
        for rank, steps in enumerate(attempt.run(probe_resumed, plan, used, data, context=plan.description)):
            judge_steps(rank, steps, plan, data, first=SAVED_AFTER + 1)
