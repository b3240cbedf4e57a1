"""Judge the state of master weights: its memory, a checkpoint of it, and step(closure).

The checkpoint of HoldsMasters, which has no load_state_dict() yet, is a copy of its state.
"""

import copy
import functools
import gc
import io
from dataclasses import dataclass, field

import torch
from torch import nn

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import PADDING_BYTES, hidden_bytes, ignore_existing_objects, living_bytes
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, deal, draw, with_step
from shared.checks.memory_wall.master_values import after_groups, after_plain, after_values, judge_steps

# -- judge the memory of master weights: what stays between steps, and what a step needs in addition


PARAMETERS = 16  # All have the same size, so one gradient is a sixteenth of all gradients.
STAYS = {"Adam": (torch.optim.Adam, {}, 12), "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, 8)}
FLOAT32_BYTES = 4
TEMPORARIES = 3  # float32 tensors of one parameter's size: its gradient, and two temporaries of the optimizer


def _set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def _update(attempt: Attempt) -> str:
    """Return the method that the exercise is about."""
    return "step_one()" if attempt.piece == "HoldsMasters" else "step()"


def probe_stays(master_weights, numel: int, optimizer: str) -> int:
    """Step twice and drop the gradients. Return the bytes allocated since the optimizer was built that still live."""
    optimizer_cls, defaults, _ = STAYS[optimizer]
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    ignore_existing_objects()
    masters = with_step(master_weights)(parameters, optimizer_cls=optimizer_cls, lr=0.01, **defaults)
    for _ in range(2):
        _set_gradients(parameters)
        masters.step()
        masters.zero_grad()
    return living_bytes() + hidden_bytes()


def twelve_bytes_stay(attempt: Attempt) -> None:
    for optimizer, (_, _, each_bytes) in STAYS.items():
        numel = attempt.random.randint(1500, 2500)
        for rank, held_bytes in enumerate(attempt.run(probe_stays, numel, optimizer)):
            elements = PARAMETERS * numel
            if held_bytes > each_bytes * elements + PADDING_BYTES * PARAMETERS:
                evidence = (
                    f"{optimizer}, {PARAMETERS} parameters of {numel:,} elements in bfloat16: between "
                    "steps, the optimizer "
                    f"holds {held_bytes / elements:.1f} bytes per element besides the parameters; expected {each_bytes}"
                )
                hint = f"Hint: which tensors are still alive when {_update(attempt)} has returned?"
                raise Wrong({rank: evidence}, hint)


def probe_step(master_weights, numel: int) -> int:
    """Step once, then measure a second step. Return how many more bytes live at its peak than before it."""
    parameters = [nn.Parameter(torch.randn(numel, device=device_here()).bfloat16()) for _ in range(PARAMETERS)]
    build = functools.partial(with_step(master_weights), optimizer_cls=torch.optim.SGD)
    masters = build(parameters, lr=0.01, momentum=0.9)
    _set_gradients(parameters)
    masters.step()
    _set_gradients(parameters)
    gc.collect()
    living = [candidate for candidate in gc.get_objects() if type(candidate) in (torch.Tensor, nn.Parameter)]
    with memory.peak(nn.ParameterList(parameters), masters, extra={"other": living}) as peak:
        masters.step()
    return peak.held.total_bytes - peak.samples[0].held.total_bytes


def one_gradient_at_a_time(attempt: Attempt) -> None:
    numel = attempt.random.randint(1500, 2500)
    one_bytes = FLOAT32_BYTES * numel
    for rank, extra_bytes in enumerate(attempt.run(probe_step, numel)):
        if extra_bytes > TEMPORARIES * one_bytes:
            evidence = (
                f"{PARAMETERS} parameters whose gradients take {one_bytes:,} bytes each in float32: at its "
                f"peak, {_update(attempt)} holds {extra_bytes:,} bytes more than before it; "
                "expected about the bytes of one gradient"
            )
            raise Wrong(
                {rank: evidence}, "Hint: how many float32 gradients exist at the same time, and when is each one freed?"
            )


# -- judge step(closure): the closure runs first, once, with gradients enabled, and step() returns its value


PLAN = Plan(
    "SGD, gradients written by a closure", "SGD", hint="Hint: when does the closure run, before or after the step?"
)


@dataclass
class WithClosures:
    """What steps with closures do, each list by step."""

    steps: list[list[torch.Tensor]] = field(default_factory=list)  # the parameters after it
    returned: list[str] = field(default_factory=list)
    enabled: list[list[bool]] = field(default_factory=list)  # for each call of the closure, whether grad was enabled


def probe_closure(master_weights, data: Data, values: list[float]) -> WithClosures:
    optimizer_cls, defaults = OPTIMIZERS[PLAN.optimizer]
    build = functools.partial(master_weights, optimizer_cls=optimizer_cls)
    parameters = [nn.Parameter(value.to(device_here(), copy=True)) for value in data.parameters]
    optimizer = build(parameters, **defaults)
    found = WithClosures()
    for gradients, value in zip(data.gradients, values, strict=True):
        enabled = []

        def closure(gradients=gradients, value=value, enabled=enabled):
            enabled.append(torch.is_grad_enabled())
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(device_here(), parameter.dtype)
            return value

        found.returned.append(repr(optimizer.step(closure)))
        found.enabled.append(enabled)
        found.steps.append([parameter.detach().cpu().clone() for parameter in parameters])
    return found


@after_values
def a_closure_runs_first(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), PLAN.dtypes)
    values = [round(attempt.random.uniform(1, 9), 3) for _ in data.gradients]
    for rank, found in enumerate(attempt.run(probe_closure, data, values, context="step(closure)")):
        for actual, expected, enabled in zip(found.returned, values, found.enabled, strict=True):
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
        judge_steps(rank, found.steps, PLAN, data)


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


@dataclass
class Continued:
    names: list[list[str]]  # in each parameter's state when it was copied
    steps: list[list[torch.Tensor]]  # the parameters after each later step


def probe_copied(holds_masters, data: Data) -> Continued:
    """Step, copy parameters and state, and continue with a second optimizer."""
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
    return Continued(names, steps)


@after_plain
def the_state_is_enough(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), COPIED.dtypes)
    for rank, found in enumerate(attempt.run(probe_copied, data, context=COPIED.description)):
        for names in found.names:
            if names != list(STATE):
                evidence = (
                    f"after {SAVED_AFTER} steps with Adam, the keys of self.state[parameter] are "
                    f"{', '.join(names)}; expected {', '.join(STATE)}"
                )
                raise Wrong({rank: evidence}, "Hint: which dict does `inner` fill, and where are its entries expected?")
        judge_steps(rank, found.steps, COPIED, data, first=SAVED_AFTER + 1)


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
