"""Judge a ZeRO2 that is copied, deleted, saved, and used in ways that must be rejected."""

import contextlib
import copy
import gc

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.sharded.training import Causes, judge_states, on_one_batch, reference
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan, WrapperRun
from shared.wire import instrumentation

COPIED_AFTER = 2  # steps


def probe_copies(zero2, plan: WrapperPlan, index: int, seed: int, x, y) -> dict:
    """Train, copy, train both in turn, then delete the original. Return both states, and what hooks still do."""
    module = awkward.build(plan.model, seed).to(device_here())
    x, y = x.to(device_here()), y.to(device_here())
    first = WrapperRun(zero2, module, plan, index)
    for number in range(COPIED_AFTER):
        first.step(number, x, y)
    both = [first.optimizer, copy.deepcopy(first.optimizer)]
    del first
    found = {"before": awkward.state_of(both[1].module), "states": [], "in backward": []}
    for wrapped in both:
        wrapped.zero_grad()
        with instrumentation.listening() as calls:
            awkward.loss_of(wrapped, x, y).backward()
        found["in backward"].append(len(calls))
    for wrapped in both[::-1]:
        wrapped.finish_gradient_sync()
        wrapped.step()
    found["states"] = [awkward.state_of(wrapped.module) for wrapped in both]
    both[0].zero_grad()
    wrapped = None
    del both[0]
    gc.collect()
    with instrumentation.listening() as found["left"]:
        awkward.loss_of(module, x, y).backward()
    found["gradients"] = all(p.grad is not None for p in module.parameters())
    return found


def copies_and_originals_train_independently(attempt: Attempt) -> None:
    plan, draw = WrapperPlan("Tied", "AdamW", steps=COPIED_AFTER + 1), Draw(attempt)
    per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
    found = attempt.run(probe_copies, plan, per_rank=per_rank)
    for index, name in enumerate(("the original", "its deep copy")):
        states, before = {rank: each["states"][index] for rank, each in enumerate(found)}, _all(found, "before")
        evidence = f"{plan}, copied after {COPIED_AFTER} steps: {name} after one more step, with the two used in turn"
        hint = "Hint: which tensors shared memory in the original, and do they share it in the copy?"
        judge_states(states, on_one_batch(plan, draw).steps[-1]["state"], before, evidence, hint=hint)
        for rank, each in enumerate(found):
            if attempt.world_size > 1 and not each["in backward"][index]:
                evidence = f"{name} launches nothing in its backward()"
                raise Wrong({rank: evidence}, "Hint: on which module's parameters are its hooks registered?")
    for rank, each in enumerate(found):
        if each["left"] or not each["gradients"]:
            does = "computes no gradients" if not each["left"] else f"still sends {describe_calls(each['left'])}"
            evidence = f"the wrapper was deleted, but not its module: backward() of the module {does}"
            raise Wrong({rank: evidence}, "Hint: what keeps the wrapper alive, and which hooks are still registered?")


def _all(found: list[dict], what: str) -> dict[int, dict]:
    return {rank: each[what] for rank, each in enumerate(found)}


def probe_rejections(zero2, plan: WrapperPlan, index: int, what: str, seed: int, x, y) -> dict:
    """Do what must be rejected, then take a normal step."""
    x, y = x.to(device_here()), y.to(device_here())
    run = WrapperRun(zero2, awkward.build(plan.model, seed).to(device_here()), plan, index)
    wrapped, found = run.optimizer, {"before": awkward.state_of(run.module), "kind": None}
    if what != _GRAPH:
        awkward.loss_of(wrapped, x, y).backward()
    with wrapped.no_sync() if what == _SILENT else contextlib.nullcontext():
        try:
            awkward.loss_of(wrapped, x, y).backward(create_graph=what == _GRAPH)
        except Exception as error:
            found |= {"kind": type(error).__name__, "message": str(error)}
    if found["kind"] is not None and what != _GRAPH:
        wrapped.finish_gradient_sync()
        wrapped.zero_grad()
        run.step(0, x, y)
        found["state"] = run.steps[-1]["state"]
    run.module.zero_grad()  # a gradient that is part of a graph keeps itself alive
    return found


_SECOND = "a second backward() before finish_gradient_sync()"
_SILENT = f"{_SECOND}, inside no_sync()"
_GRAPH = "backward(create_graph=True)"


def what_cannot_be_right_is_rejected(attempt: Attempt) -> None:
    plan, draw = WrapperPlan("Plain", "SGD", steps=1), Draw(attempt)
    for what in (_SECOND, _SILENT, _GRAPH):
        per_rank = [(rank, what, *share) for rank, share in enumerate(draw.per_rank)]
        found = attempt.run(probe_rejections, plan, per_rank=per_rank, context=what)
        for rank, each in enumerate(found):
            if each["kind"] is None:
                hint = "The gradient's bucket may already be in flight. Hint: what happens to a second gradient?"
                hint = "Hint: can autograd differentiate through a reduce-scatter?" if what == _GRAPH else hint
                raise Wrong({rank: f"{what} is accepted; expected a RuntimeError"}, hint)
            if each["kind"] != "RuntimeError" or not each["message"].strip():
                context = f"{each['kind']}({each['message'][:80]!r})"
                raise Wrong({rank: f"{what} raises {context}; expected a RuntimeError that says why"})
            if what == _GRAPH and "create_graph" not in each["message"]:
                context = f"{what} raises RuntimeError({each['message'][:80]!r})"
                hint = "Hint: does your code reject it on purpose, or does something else fail?"
                raise Wrong({rank: f"{context}; expected a message that names create_graph"}, hint)
        if what != _GRAPH:
            expected = reference(plan, draw, list(range(attempt.world_size))).steps[-1]["state"]
            states = _all(found, "state")
            context = f"{what}; then finish_gradient_sync(), zero_grad() and a normal step"
            judge_states(states, expected, _all(found, "before"), context)


def probe_state(zero2, plan: WrapperPlan, index: int, seed: int, x, y) -> dict:
    """Train, save the wrapper and its optimizer, load both into another, and take one more step with each."""
    run = WrapperRun(zero2, awkward.build(plan.model, seed).to(device_here()), plan, index)
    x, y = x.to(device_here()), y.to(device_here())
    run.train(x, y)
    other = WrapperRun(zero2, awkward.build(plan.model, seed + 1).to(device_here()), plan, index)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    saved, loaded = run.optimizer.optimizer.state_dict(), awkward.state_of(other.module)
    found = {"saved": saved, "loaded": loaded, "before": run.steps[-2]["state"], "module": run.steps[-1]["state"]}
    other.optimizer.optimizer.load_state_dict(saved)
    for each in (run, other):
        each.step(plan.steps, x, y)
    return found | {"went on": run.steps[-1]["state"], "resumed": other.steps[-1]["state"]}


def both_states_are_plain(attempt: Attempt) -> None:
    plan, draw = WrapperPlan("Frozen", "AdamW", steps=3, scheduler="ExponentialLR"), Draw(attempt)
    per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
    found = attempt.run(probe_state, plan, per_rank=per_rank)
    alone = reference(plan, draw, list(range(attempt.world_size)))
    expected, tolerance = alone.optimizer.state_dict(), tolerance_of(alone.module.parameters())
    for rank, each in enumerate(found):
        judge_state_dict(rank, each["saved"], expected, tolerance, f"{plan}, .optimizer.state_dict()")
        for name, value in each["module"].items():
            if not torch.equal(each["loaded"][name], value):
                evidence = f"after load_state_dict() of another ZeRO2's state_dict(), {name} is not what was saved"
                raise Wrong({rank: evidence}, "Hint: in which flat parameter's memory are the module's parameters?")
            if not torch.equal(each["resumed"][name], each["went on"][name]):
                evidence = (
                    f"after both state_dict()s were loaded into another ZeRO2, {name} differs after one more step"
                )
                raise Wrong({rank: evidence}, "Hint: which shard of .optimizer's state does each rank load?")
    expected = alone.steps[-1]["state"]
    judge_states(_all(found, "module"), expected, _all(found, "before"), str(plan), Causes(plan, draw, plan.steps - 1))
