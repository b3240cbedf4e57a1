"""Judge backward: what is rejected, what must be reset, and several forwards."""

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.training import judge_states, plain
from shared.checks.engine.sharded.unit_training import (
    StateReader,
    UnitPlan,
    has_memory,
    new_optimizer,
    reject_missing,
    shard,
    take_step,
)
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models


def probe_second_backward(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """Run two forwards, two backwards without finish between them, then a normal step. Return the state and error."""
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
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
        _, state = read_state(lambda: wrapped(x))
    return found | {"state": state}


def a_second_backward_is_rejected(attempt: Attempt) -> None:
    plan, draw = UnitPlan("Blocks"), Draw(attempt)
    found = attempt.run(probe_second_backward, plan, per_rank=draw.per_rank)
    for rank, result in enumerate(found):
        if result["kind"] is None:
            evidence = (
                "a second backward() without finish_gradient_sync() in between is accepted; expected a RuntimeError"
            )
            raise Wrong(
                {rank: evidence}, "Hint: what happens to a second gradient when the first one is already packed?"
            )
        if result["kind"] != "RuntimeError" or "finish_gradient_sync" not in result["message"]:
            evidence = f"a second backward() raises {result['kind']}({result['message'][:80]!r})"
            raise Wrong({rank: f"{evidence}; expected a RuntimeError that names finish_gradient_sync()"})
    alone = plain(plan, plan.build(draw.seeds[0]))
    before = awkward.state_of(alone.module)
    alone.step(0, draw.x, draw.y)
    states = {rank: result["state"] for rank, result in enumerate(found)}
    reject_missing(states, alone.steps[0]["state"], "after a rejected backward()")
    evidence = "after a rejected backward(), finish_gradient_sync() and a normal step"
    starts = dict.fromkeys(states, before)
    judge_states(
        states, alone.steps[0]["state"], starts, evidence, hint="Hint: what must finish_gradient_sync() reset?"
    )


def probe_unsharded(wrapper, seed: int, x, y) -> dict[str, int]:
    """Return the bytes of unsharded parameters after finish_gradient_sync(), by unit. The first unit gets the data."""
    torch.manual_seed(seed)
    first, last = nn.Linear(x.shape[1], 8), nn.Linear(8, y.shape[1])
    module = nn.Sequential(first, nn.GELU(), last).double().to(device_here())
    wrapped = wrapper(module, units=[first, last], prefetch=0)
    kept = {"the first unit": [*first.parameters()], "the last unit": [*last.parameters()]}
    F.mse_loss(wrapped(x.to(device_here())), y.to(device_here())).backward()
    wrapped.finish_gradient_sync()
    return {name: sum(p.nbytes for p in unit if has_memory(p)) for name, unit in kept.items()}


def nothing_stays_unsharded(attempt: Attempt) -> None:
    for rank, result in enumerate(attempt.run(probe_unsharded, per_rank=Draw(attempt).per_rank)):
        for unit, held_bytes in result.items():
            if held_bytes:
                evidence = f"after finish_gradient_sync(), {unit} of two still has {held_bytes:,} bytes of parameters"
                hint = "Its inputs are data, without a gradient. Hint: which hook does autograd not call for it?"
                raise Wrong({rank: f"{evidence}; expected 0"}, hint)


def probe_skipped(wrapper, plan: UnitPlan, finishes: bool, seed: int, x, y) -> dict:
    """Run a forward whose output is not used, then a step. Return the state after it.

    Args:
        wrapper: The student's class.
        plan: What is trained, and how.
        finishes: Whether to call finish_gradient_sync() in between, while the output still exists.
        seed: For the model.
        x: This rank's inputs.
        y: This rank's targets.
    """
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    output = wrapped(x)
    if finishes:
        wrapped.finish_gradient_sync()
    else:
        del output
    take_step(wrapped, optimizer, plan, x, y)
    with torch.no_grad():
        _, state = read_state(lambda: wrapped(x))
    return {"state": state}


def a_batch_may_be_skipped(attempt: Attempt) -> None:
    """Skip a batch, as training loops do if a loss is not finite. The next step uses parameters on one rank only."""
    for finishes in (True, False):
        plan, draw = UnitPlan("Branches", options={"prefetch": 0}), Draw(attempt)
        context = f"{plan}: a forward whose output is not used, {'finish_gradient_sync(), ' * finishes}and a step"
        found = attempt.run(probe_skipped, plan, finishes, per_rank=draw.per_rank, context=context)
        alone = plain(plan, plan.build(draw.seeds[0]))
        before = awkward.state_of(alone.module)
        alone.step(0, draw.x, draw.y)
        states = {rank: result["state"] for rank, result in enumerate(found)}
        reject_missing(states, alone.steps[0]["state"], context)
        hint = "Hint: which forward calls are still recorded as open, although backward will never reach them?"
        judge_states(states, alone.steps[0]["state"], dict.fromkeys(states, before), context, hint=hint)


def _two_forwards(wrapped, x, y) -> torch.Tensor:
    """Run a forward whose graph is dropped, then two forwards. Return the loss of the two."""
    wrapped(x)
    one, two = (awkward.loss_of(wrapped, *half) for half in zip(x.chunk(2), y.chunk(2), strict=True))
    return (one + two) / 2


def probe_two_forwards(wrapper, plan: UnitPlan, seed: int, x, y) -> dict:
    """Run a forward that fails, two that share a backward, and one before the step. Return the state after it."""
    module = unit_models.build(plan.model, seed).to(device_here())
    read_state, x, y = StateReader(module), x.to(device_here()), y.to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = new_optimizer(plan, wrapped)
    with contextlib.suppress(RuntimeError):
        wrapped(x[:, 1:])
    _two_forwards(wrapped, x, y).backward()
    wrapped.finish_gradient_sync()
    wrapped(x)  # for example, to log its output
    optimizer.step()
    with torch.no_grad():
        _, state = read_state(lambda: wrapped(x))
    return {"state": state}


def two_forwards_may_share_a_backward(attempt: Attempt) -> None:
    for model in ("Turns", "Tied"):
        plan, draw = UnitPlan(model), Draw(attempt)
        context = (
            f"{plan}: two forwards and one backward() of both, then a forward whose output is not used, and a step"
        )
        found = attempt.run(probe_two_forwards, plan, per_rank=draw.per_rank, context=context)
        alone = unit_models.build(model, draw.seeds[0])
        optimizer, before = new_optimizer(plan, alone), awkward.state_of(alone)
        halves = [torch.cat(each) for each in zip(*(x.chunk(2) for x, _ in draw.shares), strict=True)]
        targets = [torch.cat(each) for each in zip(*(y.chunk(2) for _, y in draw.shares), strict=True)]
        _two_forwards(alone, torch.cat(halves), torch.cat(targets)).backward()
        optimizer.step()
        expected, states = awkward.state_of(alone), {rank: result["state"] for rank, result in enumerate(found)}
        reject_missing(states, expected, context)
        hint = "Hint: when has backward finished with a unit that was called in both forwards?"
        judge_states(states, expected, dict.fromkeys(states, before), context, hint=hint)
