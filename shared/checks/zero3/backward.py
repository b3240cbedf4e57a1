"""Judging backward: what is refused, what is forgotten, and what a rank does that has less to do than others."""

import contextlib

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.training import judge_states, plain
from shared.checks.engine.sharded.unit_training import Look, UnitPlan, new_optimizer, refuse_missing, shard, take_step
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models


def probe_refusal(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """Two forwards, two backwards and no finish between them; then a step as it should be."""
    module = unit_models.build(plan.model, seed).to(device_here())
    look, x, y = Look(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    losses = [awkward.loss_of(wrapped, x, y) for _ in range(2)]
    losses[0].backward()
    try:
        losses[1].backward()
    except Exception as error:
        found = {"kind": type(error).__name__, "message": str(error)}
    else:
        return {"kind": None}
    del losses
    wrapped.finish_gradient_sync()
    module.zero_grad()
    take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        _, state = look(lambda: wrapped(x))
    return found | {"state": state}


def a_second_backward_is_refused(attempt: Attempt) -> None:
    plan, draw = UnitPlan("Blocks"), Draw(attempt)
    found = attempt.run(probe_refusal, plan, per_rank=draw.per_rank)
    for rank, result in enumerate(found):
        if result["kind"] is None:
            said = "two backward() with no finish_gradient_sync() between them are accepted; expected a RuntimeError"
            raise Wrong({rank: said}, "Look at: what happens to a gradient whose unit is under way already?")
        if result["kind"] != "RuntimeError" or "finish_gradient_sync" not in result["message"]:
            said = f"a second backward() raises {result['kind']}({result['message'][:80]!r})"
            raise Wrong({rank: f"{said}; expected a RuntimeError that says what to call"})
    alone = plain(plan, plan.build(draw.seeds[0]))
    before = awkward.state_of(alone.module)
    alone.step(0, draw.x, draw.y)
    states = {rank: result["state"] for rank, result in enumerate(found)}
    refuse_missing(states, alone.steps[0]["state"], "after a refused backward()")
    said = "a backward() was refused; then finish_gradient_sync(), and a step as it should be"
    starts = dict.fromkeys(states, before)
    judge_states(
        states, alone.steps[0]["state"], starts, said, hint="Look at: what has finish_gradient_sync() to forget?"
    )


def probe_skipped(wrapper, plan: UnitPlan, finishes: bool, seed: int, x, y) -> dict:
    """A forward whose loss nobody uses, then a step. → the state after it. finishes: in between, with its graph here"""
    module = unit_models.build(plan.model, seed).to(device_here())
    look, x, y = Look(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    output = wrapped(x)
    if finishes:
        wrapped.finish_gradient_sync()
    else:
        del output
    take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        _, state = look(lambda: wrapped(x))
    return {"state": state}


def a_batch_may_be_skipped(attempt: Attempt) -> None:
    """As for a loss that is not finite. The step after it uses parameters on one rank only."""
    for finishes in (True, False):
        plan, draw = UnitPlan("Roads", options={"prefetch": 0}), Draw(attempt)
        said = f"{plan}: a forward that nobody uses, {'finish_gradient_sync(), ' * finishes}and a step"
        found = attempt.run(probe_skipped, plan, finishes, per_rank=draw.per_rank, context=said)
        alone = plain(plan, plan.build(draw.seeds[0]))
        before = awkward.state_of(alone.module)
        alone.step(0, draw.x, draw.y)
        states = {rank: result["state"] for rank, result in enumerate(found)}
        refuse_missing(states, alone.steps[0]["state"], said)
        hint = "Look at: which calls are open that no backward will ever reach?"
        judge_states(states, alone.steps[0]["state"], dict.fromkeys(states, before), said, hint=hint)


def _two_forwards(wrapped, x, y) -> torch.Tensor:
    """A forward whose graph is thrown away, then two forwards. → their loss"""
    wrapped(x)
    one, two = (awkward.loss_of(wrapped, *half) for half in zip(x.chunk(2), y.chunk(2), strict=True))
    return (one + two) / 2


def probe_two_roads(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """A forward that fails, two that share a backward, one before the step. → the state after it"""
    module = unit_models.build(plan.model, seed).to(device_here())
    look, x, y = Look(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    with contextlib.suppress(RuntimeError):
        wrapped(x[:, 1:])
    _two_forwards(wrapped, x, y).backward()
    wrapped.finish_gradient_sync()
    wrapped(x)  # to look at its output, say
    optimizer.step()
    with torch.no_grad():
        _, state = look(lambda: wrapped(x))
    return {"state": state}


def two_forwards_may_share_a_backward(attempt: Attempt) -> None:
    for model in ("Turns", "Tied"):
        plan, draw = UnitPlan(model), Draw(attempt)
        said = f"{plan}: two forwards and one backward() of both, then a forward that nobody uses, and a step"
        found = attempt.run(probe_two_roads, plan, per_rank=draw.per_rank, context=said)
        alone = unit_models.build(model, draw.seeds[0])
        optimizer, before = new_optimizer(plan, alone), awkward.state_of(alone)
        halves = [torch.cat(each) for each in zip(*(x.chunk(2) for x, _ in draw.shares), strict=True)]
        targets = [torch.cat(each) for each in zip(*(y.chunk(2) for _, y in draw.shares), strict=True)]
        _two_forwards(alone, torch.cat(halves), torch.cat(targets)).backward()
        optimizer.step()
        want, states = awkward.state_of(alone), {rank: result["state"] for rank, result in enumerate(found)}
        refuse_missing(states, want, said)
        hint = "Look at: when are the last gradients of a unit there, and what must stay, until then and no longer?"
        judge_states(states, want, dict.fromkeys(states, before), said, hint=hint)
