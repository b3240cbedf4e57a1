"""Check unusual steps: with gradients that were already used, and with parameters in bfloat16."""

from dataclasses import dataclass

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal
from shared.checks.engine.failures import Wrong
from shared.checks.engine.rejections import Error, error_of, judge_errors
from shared.checks.engine.sharded.plan import Plan, RunReport
from shared.checks.engine.sharded.training import (
    HINT_ON_STALE,
    alone,
    begin,
    judge_states,
    plain,
    probe_sharded,
    sent_in,
)
from shared.checks.engine.sharded.wire import judge_traffic
from shared.checks.engine.training import Draw
from shared.checks.models import awkward


@dataclass
class Refused:
    error: Error
    before: dict[str, torch.Tensor]  # the state before the first step
    after: dict[str, torch.Tensor]  # the state after the last one


def probe_refusal(sharded, plan: Plan, seed: int, x, y) -> Refused:
    """Take a step, then one with gradients that were already used, which must raise, and then a valid one."""
    run = begin(sharded, plan, awkward.build(plan.model, seed).to(device_here()))
    x, y = x.to(device_here()), y.to(device_here())
    before = awkward.state_of(run.module)
    run.step(0, x, y)
    run.backward(0, x, y)
    error = error_of(run.optimizer.step)
    run.step(1, x, y)
    return Refused(error, before, awkward.state_of(run.module))


def used_up_gradients_are_rejected(attempt: Attempt) -> None:
    for whose in ("optimizer", "model"):
        plan, draw = Plan("Plain", zero_grad=(whose,)), Draw(attempt)
        found = attempt.run(probe_refusal, plan, per_rank=draw.per_rank)
        hint = "The second backward() adds to old gradients. Hint: what does their memory contain after a step?"
        context = "backward(), step(), and again without zero_grad()"
        judge_errors([each.error for each in found], context, names="zero_grad", hint=hint)
        run = plain(plan, plan.build(draw.seeds[0]))
        run.step(0, draw.x, draw.y)
        run.step(1, draw.x, draw.y)
        states = {rank: each.after for rank, each in enumerate(found)}
        before = {rank: each.before for rank, each in enumerate(found)}
        context = f"after a rejected step, {whose}.zero_grad(), backward() and step()"
        hint = HINT_ON_STALE if whose == "model" else ""
        judge_states(states, run.steps[-1].state, before, context, hint=hint)


def probe_hooks(sharded, seed: int, x, y) -> dict[str, int]:
    """Take two steps. Returns how many times each of torch's hooks on step() has run."""
    for base in sharded.__mro__:  # torch adds hooks to the step() of a class when it is first instantiated
        own = vars(base).get("step")
        if own is not None and base is not torch.optim.Optimizer and not getattr(own, "hooked", False):
            base.step = torch.optim.Optimizer.profile_hook_step(own)
            base.step.hooked = True
    run = begin(sharded, Plan("Plain"), awkward.build("Plain", seed).to(device_here()))
    found = {"pre": 0, "post": 0}

    def count(name: str):
        found[name] += 1

    run.optimizer.register_step_pre_hook(lambda *_: count("pre"))
    run.optimizer.register_step_post_hook(lambda *_: count("post"))
    for step_index in range(2):
        run.step(step_index, x.to(device_here()), y.to(device_here()))
    return found


def hooks_run_once(attempt: Attempt) -> None:
    for rank, found in enumerate(attempt.run(probe_hooks, per_rank=Draw(attempt).per_rank)):
        for name, times in found.items():
            if times != 2:
                evidence = f"in 2 steps, a hook registered with register_step_{name}_hook() runs {times} times"
                hint = "Hint: which methods that step() calls are themselves a step() of this optimizer?"
                raise Wrong({rank: f"{evidence}; expected 2"}, hint)


def bf16_stays_bf16(attempt: Attempt) -> None:
    plan = Plan("TwoBranches", "SGD", steps=2, dtype=torch.bfloat16)
    found = judge_bf16(attempt, plan)
    judge_traffic(sent_in(dict(enumerate(found))), plan.flats(), f"{plan}, bfloat16", {"step()": 2})


def judge_bf16(attempt: Attempt, plan: Plan) -> list[RunReport]:
    """Compare training in bfloat16 with float64 from the same start. Returns what the probe found, by rank.

    A bfloat16 has 8 bits of precision. Each step rounds parameters by 2⁻⁹ of their size. It rounds gradients by a few
    2⁻⁹ of their size, but only a tenth of a gradient is used. Gradients that are summed instead of averaged, or that
    come from one rank only, have errors as large as themselves, which is a few tenths.

    Raises:
        Wrong: If the parameters differ by more than rounding, differ between ranks, or have another dtype.
    """
    draw = Draw(attempt)
    found = attempt.run(probe_sharded, plan, per_rank=draw.per_rank)
    start = awkward.build(plan.model, draw.seeds[0], torch.bfloat16).double()
    run = alone(plan, start, draw.x, draw.y)
    for name, expected in run.steps[-1].state.items():
        for rank, result in enumerate(found):
            state = result.steps[-1].state[name]
            if state.dtype != torch.bfloat16:
                message = f"after the last step, {name} is {state.dtype}; expected bfloat16, as at the start"
                raise Wrong({rank: message}, "Hint: what is the dtype of the update that you add to it?")
            if not torch.equal(state, found[0].steps[-1].state[name]):
                raise Wrong(
                    {rank: f"{plan}: {name} differs from rank 0's"}, "Hint: which rank does each rank receive it from?"
                )
            if not nearly_equal(state, expected, 0.03):
                hint = (
                    "That is more than a rounding error. Hint: is it the mean over all ranks of this step's gradients?"
                )
                raise Wrong({rank: f"{plan}, bfloat16: {name}, {first_difference(state, expected, 0.03)}"}, hint)
    return found
