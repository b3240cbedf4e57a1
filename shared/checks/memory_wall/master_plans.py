"""Run optimizers through a few steps with given gradients, with the same code on the ranks and for the reference."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

STEPS = 5
LATE = 2  # A late group is added before this step.
SHAPES = ((3, 7), (), (5,), (2, 3, 2, 2), (1,), (4, 4))
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": 0.03}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.03, "amsgrad": True}),
}
GROUP_CHANGED = "step_one() changed the group that it was given, which belongs to the caller"
SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS + 1),
}


@dataclass(frozen=True)
class Plan:
    """Describe what is optimized, how, and what happens between the steps."""

    description: str
    optimizer: str
    groups: tuple[dict, ...] = ({},)  # each group's settings; parameters are dealt out to the groups in turn
    late: bool = False  # the last group is added before step LATE
    scheduler: str = ""
    rewritten: dict = field(default_factory=dict)  # settings of the last group, written before step LATE
    written_over: bool = False  # other code writes into the parameters after the first step
    frozen: bool = False  # the first parameter is frozen before step LATE, but gets gradients
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    hint: str = ""


@dataclass
class Data:
    """Hold the parameters a plan starts with, and for each step one gradient or None per parameter."""

    parameters: list[torch.Tensor]
    gradients: list[list[Any]]


@dataclass
class Stepped:
    """Hold the parameters after each step of a plan, and which of an optimizer's usual properties hold."""

    steps: list[list[torch.Tensor]]
    keeps_gradients: bool
    works_in_place: bool  # each parameter has the same memory as before
    is_optimizer: bool
    zeroes_gradients: bool


def draw(seed: int, dtypes: tuple[torch.dtype, ...], missing: float = 0.0) -> Data:
    """Draw parameters of dtypes in turn, and gradients of which some are missing."""
    generator = torch.Generator().manual_seed(seed)

    def draw_tensors() -> list[torch.Tensor]:
        tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return [tensor.to(dtypes[index % len(dtypes)]) for index, tensor in enumerate(tensors)]

    parameters = draw_tensors()
    gradients = [
        [None if torch.rand((), generator=generator) < missing else tensor for tensor in draw_tensors()]
        for _ in range(STEPS)
    ]
    return Data(parameters, gradients)


def with_step(optimizer_type: type) -> type:
    """Give HoldsMasters, which only updates single parameters, a step() for all of them. MasterWeights has its own."""
    if optimizer_type.__name__ != "HoldsMasters":
        return optimizer_type

    class OneByOne(optimizer_type):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    given = dict(group)
                    self.step_one(parameter, group)
                    if group.keys() != given.keys() or any(group[name] is not value for name, value in given.items()):
                        raise AssertionError(GROUP_CHANGED)

    return OneByOne


def deal(parameters: list, groups: int) -> list[list]:
    return [parameters[first::groups] for first in range(groups)]


def run(plan: Plan, build, data: Data, device: torch.device) -> Stepped:
    """Step through a plan.

    Args:
        plan: What happens in each step.
        build: Called as build(groups, **defaults) to make the optimizer.
        data: The parameters to start with, and the gradients.
        device: Where the parameters live.
    """
    parameters = [nn.Parameter(each.to(device, copy=True)) for each in data.parameters]
    addresses = [parameter.data_ptr() for parameter in parameters]
    dealt = deal(parameters, len(plan.groups))
    groups = [{"params": some, **settings} for some, settings in zip(dealt, plan.groups, strict=True)]
    now = groups[:-1] if plan.late else groups
    given = iter(parameters) if plan.groups == ({},) else now  # like module.parameters(), it can be read only once
    optimizer = build(given, **OPTIMIZERS[plan.optimizer][1])
    scheduler = SCHEDULERS[plan.scheduler](optimizer) if plan.scheduler else None
    steps, keeps_gradients = [], True
    for number, gradients in enumerate(data.gradients):
        if number == LATE and plan.late:
            optimizer.add_param_group(groups[-1])
        if number == LATE:
            optimizer.param_groups[-1].update(plan.rewritten)
        if number == 1 and plan.written_over:
            for parameter in parameters:
                parameter.data.add_(1)
        if number == LATE and plan.frozen:
            parameters[0].requires_grad_(False)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(device, parameter.dtype)
        optimizer.step()
        if scheduler:
            scheduler.step()
        steps.append([parameter.detach().cpu().clone() for parameter in parameters])
        same = [_same(parameter.grad, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
        keeps_gradients &= all(same)
    in_place = addresses == [parameter.data_ptr() for parameter in parameters]
    optimizer.zero_grad()
    zeroed = all(parameter.grad is None for parameter in parameters)
    return Stepped(steps, keeps_gradients, in_place, isinstance(optimizer, torch.optim.Optimizer), zeroed)


def _same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


def masters(plan: Plan, data: Data) -> list[list[torch.Tensor]]:
    """Run torch's optimizer on float32 copies that no other code writes into. Return them after each step."""
    whole = Plan(**{**vars(plan), "written_over": False})
    copies = Data([each.float() for each in data.parameters], data.gradients)
    return run(whole, OPTIMIZERS[plan.optimizer][0], copies, torch.device("cpu")).steps


def without_masters(plan: Plan, data: Data) -> list[list[torch.Tensor]]:
    """Run torch's optimizer on the parameters themselves. Return them after each step."""
    return run(plan, OPTIMIZERS[plan.optimizer][0], data, torch.device("cpu")).steps
