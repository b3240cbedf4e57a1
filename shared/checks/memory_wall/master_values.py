"""Judge master weights: each parameter is the rounded copy of what a float32 optimizer would hold."""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.hints import begin_at, where_it_raises
from shared.checks.memory_wall.master_plans import (
    GROUP_CHANGED,
    OPTIMIZERS,
    Data,
    Plan,
    Stepped,
    draw,
    masters,
    run,
    with_step,
    without_masters,
)

# A dozen float32 operations on values of size 1, reordered or fused, each round by 6e-8. The master may then lie on the
# other side of a bfloat16 rounding boundary, so a parameter must equal some value this close to the master, rounded.
MARGIN = 2e-6

BFLOAT16 = (torch.bfloat16,)
ONE_PARAMETER = (
    Plan(
        "SGD",
        "SGD",
        dtypes=BFLOAT16,
        hint="Hint: which tensors does `inner` update, and which tensor is copied into which?",
    ),
    Plan(
        "Adam",
        "Adam",
        dtypes=BFLOAT16,
        hint="Hint: when step_one() is called again, where is the state that `inner` wrote last time?",
    ),
    Plan(
        "AdamW",
        "AdamW",
        dtypes=BFLOAT16,
        hint="Hint: does `inner` get the defaults and all settings of the group?",
    ),
)
VALUES = (
    Plan(
        "SGD", "SGD", hint="Hint: which tensors does the inner optimizer update, and which tensor is copied into which?"
    ),
    Plan("SGD with momentum", "SGD with momentum", hint="Hint: which state must survive from one step to the next?"),
    Plan("Adam", "Adam", hint="Hint: which state must survive from one step to the next?"),
    Plan("AdamW", "AdamW", hint="Hint: does the optimizer of each master get the defaults?"),
    Plan(
        "Adam with amsgrad", "Adam with amsgrad", hint="Hint: which names do the entries in the optimizer's state have?"
    ),
    Plan(
        "SGD, float16 parameters", "SGD", dtypes=(torch.float16,), hint="Hint: to which dtype is each master rounded?"
    ),
    Plan(
        "SGD, with other code writing into the parameters before step 2",
        "SGD",
        written_over=True,
        hint="The masters hold the true values. Hint: does each master have memory of its own, for every dtype?",
    ),
)
OTHER_DTYPES = VALUES[-2:]
GROUPS = (
    Plan(
        "SGD, two groups",
        "SGD",
        ({}, {"lr": 0.5}),
        hint="Hint: which group does step_one() get with each parameter?",
    ),
    Plan(
        "AdamW, three groups",
        "AdamW",
        ({"lr": 0.2}, {"weight_decay": 0.0, "betas": (0.5, 0.6)}, {}),
        hint="Hint: which settings may differ between groups?",
    ),
    Plan(
        "SGD with momentum, a group added before step 3",
        "SGD with momentum",
        ({}, {"lr": 0.02, "momentum": 0.5}),
        late=True,
        hint="Hint: when does a parameter get its master, and what does add_param_group() receive?",
    ),
)
SCHEDULES = (
    Plan(
        "SGD with StepLR",
        "SGD",
        scheduler="StepLR",
        hint="Hint: from which dict does `inner` read lr, and who puts the current lr there?",
    ),
    Plan(
        "Adam with OneCycleLR, which also changes betas",
        "Adam",
        scheduler="OneCycleLR",
        hint="Hint: which settings does a scheduler read from `defaults` and the groups, and which does it write?",
    ),
    Plan(
        "AdamW, with the last group's lr, weight_decay and maximize changed before step 3",
        "AdamW",
        ({}, {}),
        rewritten={"lr": 0.3, "weight_decay": 0.0, "maximize": True},
        hint="Hint: when are the settings read, and from which group?",
    ),
)
MISSING = Plan(
    "AdamW, with some gradients None",
    "AdamW",
    hint="Hint: does a step treat a gradient of None like a gradient of zeros?",
)
FROZEN = Plan(
    "AdamW, with a parameter frozen after backward and before step 3",
    "AdamW",
    frozen=True,
    hint="Hint: does a parameter whose requires_grad is False still have a gradient?",
)
SMALL_LR = 2**-10  # Every multiple of it is a float32.
SMALL = Plan(
    "SGD, parameters that start at 1, each update 1/1024",
    "SGD",
    ({"lr": SMALL_LR},),
    dtypes=(torch.bfloat16,),
    hint="Hint: does any step round a master?",
)
SMALL_STEPS = 200
_NOT_BEGUN = (
    "The inner optimizer treats a nonempty state as initialized. Hint: what does it find in the state of a master that "
    "it updates for the first time?"
)
_NO_SETTING = (
    "The inner optimizer reads this setting from its group. Hint: which dict contains all settings, and which of them "
    "does inner's group have?"
)
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step")
_SETTINGS = {name for kind in (torch.optim.SGD, torch.optim.AdamW) for name in kind([torch.empty(0)]).defaults}
RAISED = {f"KeyError: '{name}'": _NOT_BEGUN for name in _STATE} | {
    f"KeyError: '{name}'": _NO_SETTING for name in sorted(_SETTINGS)
}
RAISED |= {GROUP_CHANGED: "Hint: does `inner` get this dict itself, or one of its own?"}
NO_GRADIENT = {
    "'NoneType' object has no attribute": "Hint: does every parameter that step() updates have a gradient?",
}


def probe_masters(master_weights, plan: Plan, data: Data) -> Stepped:
    build = functools.partial(with_step(master_weights), optimizer_cls=OPTIMIZERS[plan.optimizer][0])
    return run(plan, build, data, device_here())


def judge_plan(attempt: Attempt, plan: Plan, missing: float = 0.0) -> None:
    """Try a plan with fresh values on each rank.

    Raises:
        Wrong: Unless every parameter is the rounded master after each step.
    """
    data = [draw(attempt.draw_seed(), plan.dtypes, missing) for _ in range(attempt.world_size)]
    found = attempt.run(probe_masters, plan, per_rank=[(each,) for each in data], context=plan.description)
    for rank, (result, own) in enumerate(zip(found, data, strict=True)):
        judge_steps(rank, result.steps, plan, own)
        _judge_optimizer(rank, result, plan, attempt.piece)


def judge_steps(rank: int, steps: list[list[torch.Tensor]], plan: Plan, data: Data, first: int = 1) -> None:
    """Judge the parameters after steps first, first + 1, …

    Raises:
        Wrong: If a parameter is not its rounded master.
    """
    for number, (parameters, expected) in enumerate(zip(steps, masters(plan, data)[first - 1 :], strict=True), first):
        for index, (parameter, master) in enumerate(zip(parameters, expected, strict=True)):
            dtype = data.parameters[index].dtype
            context = f"{plan.description}, after step {number}: a {str(dtype).removeprefix('torch.')} parameter"
            if parameter.dtype != dtype:
                raise Wrong(
                    {rank: f"{context} is now {parameter.dtype}"},
                    "Hint: which tensors may have another dtype than the parameters?",
                )
            if not is_rounded(parameter, master):
                difference = first_difference(parameter, master.to(dtype), MARGIN)
                raise Wrong({rank: f"{context} is wrong: {difference}"}, _cause(parameter, plan, data, number, index))


def is_rounded(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether the parameter is the rounded master, or a rounded value within the margin of it."""
    margin = MARGIN * max(1.0, master.abs().max().item())
    low, high = ((master + off).to(parameter.dtype) for off in (-margin, margin))
    return parameter.shape == master.shape and bool(((low <= parameter) & (parameter <= high)).all())


def _cause(parameter: torch.Tensor, plan: Plan, data: Data, number: int, index: int) -> str:
    if torch.equal(parameter, data.parameters[index]):
        return f"The parameter has not changed since the start. {plan.hint}"
    if parameter.dtype == torch.bfloat16 and torch.equal(parameter, without_masters(plan, data)[number - 1][index]):
        return "This is the result of training in bfloat16 alone. Hint: does a step read the master or the parameter?"
    return plan.hint


def _judge_optimizer(rank: int, result: Stepped, plan: Plan, piece: str) -> None:
    """Check what holds for every torch optimizer."""
    if not result.is_optimizer:
        raise Wrong(
            {rank: f"{piece}(...) is not a torch.optim.Optimizer"},
            f"Hint: which class does {piece} derive from?",
        )
    if not result.works_in_place:
        evidence = f"{plan.description}: a parameter's memory is not the same after the steps as before"
        raise Wrong(
            {rank: evidence},
            "Other code may hold views of a parameter, such as flat buckets. Hint: how do you write into its memory?",
        )
    if not result.keeps_gradients:
        raise Wrong(
            {rank: f"{plan.description}: step() changed a parameter's .grad"}, "Hint: which method clears gradients?"
        )
    if not result.zeroes_gradients:
        hint = "Hint: which parameters are in param_groups?"
        raise Wrong({rank: f"{plan.description}: zero_grad() leaves gradients; expected None"}, hint)


# -- the checks


one_parameter_is_its_rounded_master = where_it_raises(RAISED)(on_each(judge_plan, *ONE_PARAMETER))


after_plain = begin_at(one_parameter_is_its_rounded_master, "plain")


every_dtype_has_a_master_of_its_own = after_plain(on_each(judge_plan, *OTHER_DTYPES))
parameters_are_rounded_masters = where_it_raises(RAISED)(on_each(judge_plan, *VALUES))


after_values = begin_at(parameters_are_rounded_masters, "values")


groups_have_settings_of_their_own = after_values(on_each(judge_plan, *GROUPS))


after_groups = begin_at(groups_have_settings_of_their_own, "groups")


settings_are_those_of_now = on_each(judge_plan, *SCHEDULES)


@after_values
@after_groups
def masters_move_where_parameters_would_not(attempt: Attempt) -> None:
    """Take 200 or more updates, each too small for bfloat16, whose neighbors of 1 are 0.0039 below and 0.0078 above.

    There are so many steps because a master that is rounded occasionally loses what it has accumulated since.
    """
    sign = attempt.random.choice((-1.0, 1.0))
    count, steps = attempt.random.randint(3, 9), attempt.sizes.steps(SMALL_STEPS)
    ones = [torch.ones(count, dtype=torch.bfloat16)]
    data = Data(ones, [[torch.full((count,), sign, dtype=torch.bfloat16)] for _ in range(steps)])
    for rank, result in enumerate(attempt.run(probe_masters, SMALL, data)):
        last = result.steps[-1][0]
        if torch.equal(last, ones[0]):
            expected = f"{1 - sign * SMALL_LR * steps:.3f}"
            evidence = f"{SMALL.description}: after {steps} steps the parameters are still 1; expected about {expected}"
            raise Wrong(
                {rank: evidence}, "Hint: which tensor keeps the part of an update that bfloat16 cannot represent?"
            )
        judge_steps(rank, result.steps, SMALL, data)


@after_values
@where_it_raises(NO_GRADIENT)
def what_has_no_gradient_stays(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), MISSING.dtypes, 0.5)
    data.gradients[-1] = [torch.zeros_like(each) for each in data.parameters]  # A gradient of zeros is not None.
    for rank, result in enumerate(attempt.run(probe_masters, MISSING, data, context=MISSING.description)):
        before = data.parameters
        for number, (after, gradients) in enumerate(zip(result.steps, data.gradients, strict=True), 1):
            for old, new, gradient in zip(before, after, gradients, strict=True):
                if gradient is None and not torch.equal(old, new):
                    evidence = (
                        f"step {number}: a parameter without a gradient changed: {first_difference(new, old, 0.0)}"
                    )
                    raise Wrong(
                        {rank: evidence}, "Hint: what would weight decay and momentum do with a gradient of zeros?"
                    )
            before = after
        judge_steps(rank, result.steps, MISSING, data)
    judge_plan(attempt, FROZEN)


# -- inside another optimizer, as in ZeRO-1


@dataclass
class Held:
    steps: list[torch.Tensor]  # the flat tensor after each step
    defaults: list[str]  # the names of the optimizer's defaults


def probe_inside(master_weights, data: Data, lr: float) -> Held:
    """Build it only for its defaults, then add a group with a view of a flat tensor, as ZeRO-1 does."""
    build = functools.partial(master_weights, optimizer_cls=torch.optim.AdamW)
    inner = build([{"params": [nn.Parameter(torch.empty(0))]}], lr=lr)
    inner.param_groups.clear()
    flat = torch.cat([each.flatten() for each in data.parameters]).to(device_here())
    shard = nn.Parameter(flat[1:-1])
    inner.add_param_group({**inner.defaults, "params": [shard], "weight_decay": 0.3})
    steps = []
    for gradients in data.gradients:
        shard.grad = torch.cat([each.flatten() for each in gradients])[1:-1].to(device_here())
        inner.param_groups[0].update(lr=inner.param_groups[0]["lr"] / 2)
        inner.step()
        steps.append(flat.cpu().clone())
    return Held(steps, sorted(inner.defaults))


@after_values
@after_groups
def another_optimizer_may_hold_it(attempt: Attempt) -> None:
    data, lr = draw(attempt.draw_seed(), (torch.bfloat16,)), attempt.random.uniform(0.05, 0.1)
    context = "built on an empty tensor, with its groups cleared and a group added whose parameter is a view"
    master = torch.cat([each.flatten() for each in data.parameters]).float()
    part = nn.Parameter(master[1:-1])
    reference = torch.optim.AdamW([part], lr=lr, weight_decay=0.3)
    found = attempt.run(probe_inside, data, lr, context=context)
    for number, gradients in enumerate(data.gradients):
        part.grad = torch.cat([each.flatten() for each in gradients])[1:-1].float()
        reference.param_groups[0]["lr"] /= 2
        reference.step()
        for rank, result in enumerate(found):
            if "betas" not in result.defaults:
                evidence = (
                    f"optimizer.defaults contains {', '.join(result.defaults)}; expected AdamW's, including betas"
                )
                raise Wrong({rank: evidence}, "Hint: what do you pass to torch.optim.Optimizer.__init__ as defaults?")
            if not is_rounded(result.steps[number], master):
                difference = first_difference(result.steps[number], master.bfloat16(), MARGIN)
                evidence = f"{context}; after step {number + 1}: {difference}"
                hint = "Hint: where are masters created, when are settings read, and how is a parameter written?"
                raise Wrong({rank: evidence}, hint)
