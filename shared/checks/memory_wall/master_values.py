"""Judging master weights: each parameter is the rounded copy of what a float32 optimizer would have."""

import functools

import torch
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.hints import begin_at, where_it_raises
from shared.checks.memory_wall.master_plans import OPTIMIZERS, Data, Plan, draw, masters, run, without_masters

# A dozen float32 operations on numbers of size 1, in another order or fused: each rounds by 6e-8. A master may then lie
# on the other side of where bfloat16 rounds up; so a parameter must be what some number this near is rounded to.
MARGIN = 2e-6

VALUES = (
    Plan("SGD", "SGD", hint="Look at: which tensors does inner step, what is rounded, and which way does the copy go?"),
    Plan("SGD with momentum", "SGD with momentum", hint="Look at: what must live from one step to the next?"),
    Plan("Adam", "Adam", hint="Look at: what must live from one step to the next?"),
    Plan("AdamW", "AdamW", hint="Look at: do the defaults reach the optimizer of each master?"),
    Plan("Adam with amsgrad", "Adam with amsgrad", hint="Look at: whose names has what an optimizer remembers?"),
    Plan("SGD, parameters of float16", "SGD", dtypes=(torch.float16,), hint="Look at: to which dtype is it rounded?"),
    Plan(
        "SGD, and somebody wrote into the parameters before step 2",
        "SGD",
        written_over=True,
        hint="The master decides. Look at: is it a copy of its own, of each dtype?",
    ),
)
GROUPS = (
    Plan("SGD, two groups", "SGD", ({}, {"lr": 0.5}), hint="Look at: whose settings does an inner optimizer get?"),
    Plan(
        "AdamW, three groups",
        "AdamW",
        ({"lr": 0.2}, {"weight_decay": 0.0, "betas": (0.5, 0.6)}, {}),
        hint="Look at: which settings may differ between groups?",
    ),
    Plan(
        "SGD with momentum, a group added before step 3",
        "SGD with momentum",
        ({}, {"lr": 0.02, "momentum": 0.5}),
        late=True,
        hint="Look at: when does a parameter get its master, and what does add_param_group know of the group?",
    ),
)
SCHEDULES = (
    Plan("SGD under StepLR", "SGD", scheduler="StepLR", hint="Look at: when are the settings read?"),
    Plan(
        "Adam under OneCycleLR, which changes betas too",
        "Adam",
        scheduler="OneCycleLR",
        hint="Look at: which settings does a scheduler find in `defaults` and in the groups, and which does it write?",
    ),
    Plan(
        "AdamW, the last group's lr, weight_decay and maximize written before step 3",
        "AdamW",
        ({}, {}),
        rewritten={"lr": 0.3, "weight_decay": 0.0, "maximize": True},
        hint="Look at: when are the settings read, and of which group?",
    ),
)
MISSING = Plan("AdamW, gradients of None here and there", "AdamW")
SMALL_LR = 2**-10  # of which every sum is a float32
SMALL = Plan("SGD, parameters of 1, every update 1/1024", "SGD", ({"lr": SMALL_LR},), dtypes=(torch.bfloat16,))
SMALL_STEPS = 200
BEGUN = {
    "KeyError: '": "inner takes a state that is not empty for one that has begun. Look at: what does it find of a "
    "master that it steps for the first time?"
}


def probe_masters(master_weights, plan: Plan, data: Data) -> dict:
    build = functools.partial(master_weights, optimizer_cls=OPTIMIZERS[plan.optimizer][0])
    return run(plan, build, data, device_here())


def judge_plan(attempt: Attempt, plan: Plan, missing: float = 0.0) -> None:
    """Try a plan with fresh numbers on each rank.

    Raises: Wrong unless every parameter is the rounded master, after each step.
    """
    data = [draw(attempt.draw_seed(), plan.dtypes, missing) for _ in range(attempt.world_size)]
    found = attempt.run(probe_masters, plan, per_rank=[(each,) for each in data], context=plan.said)
    for rank, (result, own) in enumerate(zip(found, data, strict=True)):
        judge_steps(rank, result["steps"], plan, own)
        _judge_manners(rank, result, plan)


def judge_steps(rank: int, steps: list[list[torch.Tensor]], plan: Plan, data: Data, first: int = 1) -> None:
    """Judge the parameters after steps first, first + 1, … Raises: Wrong."""
    for number, (parameters, want) in enumerate(zip(steps, masters(plan, data)[first - 1 :], strict=True), first):
        for place, (parameter, master) in enumerate(zip(parameters, want, strict=True)):
            dtype = data.parameters[place].dtype
            said = f"{plan.said}, after step {number}: a parameter of {str(dtype).removeprefix('torch.')}"
            if parameter.dtype != dtype:
                raise Wrong({rank: f"{said} is {parameter.dtype} now"}, "Look at: whose dtype may change?")
            if not is_rounded(parameter, master):
                difference = first_difference(parameter, master.to(dtype), MARGIN)
                raise Wrong({rank: f"{said}, {difference}"}, _cause(parameter, plan, data, number, place))


def is_rounded(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    """Is parameter what master, or a number within the margin, is rounded to?"""
    margin = MARGIN * max(1.0, master.abs().max().item())
    low, high = ((master + off).to(parameter.dtype) for off in (-margin, margin))
    return parameter.shape == master.shape and bool(((low <= parameter) & (parameter <= high)).all())


def _cause(parameter: torch.Tensor, plan: Plan, data: Data, number: int, place: int) -> str:
    if torch.equal(parameter, data.parameters[place]):
        return f"It is what it was at the start. {plan.hint}"
    if parameter.dtype == torch.bfloat16 and torch.equal(parameter, without_masters(plan, data)[number - 1][place]):
        return "It is what bfloat16 alone gives. Look at: from where does a step read, the master or the parameter?"
    return plan.hint


def _judge_manners(rank: int, result: dict, plan: Plan) -> None:
    """What any torch optimizer does, and does not do."""
    if not result["kind"]:
        raise Wrong({rank: "it is no torch.optim.Optimizer"}, "Look at: what does the class derive from?")
    if not result["in place"]:
        said = f"{plan.said}: a parameter's memory is another one after the steps"
        raise Wrong({rank: said}, "Others may hold views of it, flat buckets for one. Look at: how is it written?")
    if not result["gradients kept"]:
        raise Wrong({rank: f"{plan.said}: step() changed a parameter's .grad"}, "Look at: who clears gradients?")
    if not result["zeroed"]:
        hint = "Look at: which parameters are in the groups?"
        raise Wrong({rank: f"{plan.said}: zero_grad() leaves gradients"}, hint)


# -- the checks


@where_it_raises(BEGUN)
def parameters_are_rounded_masters(attempt: Attempt) -> None:
    for plan in VALUES:
        judge_plan(attempt, plan)


after_values = begin_at(parameters_are_rounded_masters, "values")


@after_values
def groups_have_settings_of_their_own(attempt: Attempt) -> None:
    for plan in GROUPS:
        judge_plan(attempt, plan)


@after_values
def settings_are_those_of_now(attempt: Attempt) -> None:
    for plan in SCHEDULES:
        judge_plan(attempt, plan)


@after_values
def masters_move_where_parameters_would_not(attempt: Attempt) -> None:
    """bfloat16's neighbours of 1 are 0.0039 below and 0.0078 above: one update is lost, 200 are not.

    So many, because a master that is rounded now and then loses what has come together since.
    """
    sign = attempt.random.choice((-1.0, 1.0))
    count = attempt.random.randint(3, 9)
    ones = [torch.ones(count, dtype=torch.bfloat16)]
    data = Data(ones, [[torch.full((count,), sign, dtype=torch.bfloat16)] for _ in range(SMALL_STEPS)])
    for rank, result in enumerate(attempt.run(probe_masters, SMALL, data)):
        last = result["steps"][-1][0]
        if torch.equal(last, ones[0]):
            want = f"{1 - sign * SMALL_LR * SMALL_STEPS:.3f}"
            said = f"{SMALL.said}: after {SMALL_STEPS} steps they are still 1; expected about {want}"
            raise Wrong({rank: said}, "Look at: where does the part of an update live that bfloat16 cannot hold?")
        judge_steps(rank, result["steps"], SMALL, data)


@after_values
def what_has_no_gradient_stays(attempt: Attempt) -> None:
    data = draw(attempt.draw_seed(), MISSING.dtypes, 0.5)
    data.gradients[-1] = [torch.zeros_like(each) for each in data.parameters]  # a gradient of zeros is one
    for rank, result in enumerate(attempt.run(probe_masters, MISSING, data, context=MISSING.said)):
        before = data.parameters
        for number, (after, gradients) in enumerate(zip(result["steps"], data.gradients, strict=True), 1):
            for old, new, gradient in zip(before, after, gradients, strict=True):
                if gradient is None and not torch.equal(old, new):
                    said = f"step {number}: a parameter without a gradient moved, {first_difference(new, old, 0.0)}"
                    raise Wrong({rank: said}, "Look at: what do weight decay and momentum do to a gradient of zeros?")
            before = after
        judge_steps(rank, result["steps"], MISSING, data)


# -- inside another optimizer, as ZeRO-1 will hold it


def probe_inside(master_weights, data: Data, lr: float) -> dict:
    """Build it for its defaults, then add a group of a view into a flat tensor, as ZeRO-1 does."""
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
    return {"steps": steps, "defaults": sorted(inner.defaults)}


@after_values
def another_optimizer_may_hold_it(attempt: Attempt) -> None:
    data, lr = draw(attempt.draw_seed(), (torch.bfloat16,)), attempt.random.uniform(0.05, 0.1)
    context = "built on an empty tensor, its groups cleared, then given a group whose parameter is a view"
    master = torch.cat([each.flatten() for each in data.parameters]).float()
    part = nn.Parameter(master[1:-1])
    reference = torch.optim.AdamW([part], lr=lr, weight_decay=0.3)
    found = attempt.run(probe_inside, data, lr, context=context)
    for number, gradients in enumerate(data.gradients):
        part.grad = torch.cat([each.flatten() for each in gradients])[1:-1].float()
        reference.param_groups[0]["lr"] /= 2
        reference.step()
        for rank, result in enumerate(found):
            if "betas" not in result["defaults"]:
                said = f"optimizer.defaults has {', '.join(result['defaults'])}; AdamW's has betas too"
                raise Wrong({rank: said}, "Look at: what does torch.optim.Optimizer.__init__ take for its defaults?")
            if not is_rounded(result["steps"][number], master):
                difference = first_difference(result["steps"][number], master.bfloat16(), MARGIN)
                said = f"{context}; after step {number + 1}: {difference}"
                hint = "Look at: where are masters made, when are settings read, and how is a parameter written?"
                raise Wrong({rank: said}, hint)
