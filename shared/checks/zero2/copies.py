"""Judge a ZeRO2 that is copied, deleted, saved, and used in ways that must be rejected."""

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


def probe_graph(zero2, plan: WrapperPlan, index: int, seed: int, x, y) -> tuple[str | None, str]:
    """Call backward(create_graph=True). Return the kind of its error, or None, and the message."""
    x, y = x.to(device_here()), y.to(device_here())
    run = WrapperRun(zero2, awkward.build(plan.model, seed).to(device_here()), plan, index)
    try:
        awkward.loss_of(run.optimizer, x, y).backward(create_graph=True)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        run.module.zero_grad()  # a gradient that is part of a graph keeps itself alive
    return None, ""


def a_graph_is_rejected(attempt: Attempt) -> None:
    plan, what = WrapperPlan("Plain", "SGD", steps=1), "backward(create_graph=True)"
    per_rank = [(rank, *share) for rank, share in enumerate(Draw(attempt).per_rank)]
    for rank, (kind, message) in enumerate(attempt.run(probe_graph, plan, per_rank=per_rank, context=what)):
        if kind is None:
            hint = "Hint: can autograd differentiate through a reduce-scatter?"
            raise Wrong({rank: f"{what} is accepted; expected a RuntimeError"}, hint)
        context = f"{what} raises {kind}({message[:80]!r})"
        if kind != "RuntimeError" or not message.strip():
            raise Wrong({rank: f"{context}; expected a RuntimeError that says why"})
        if "create_graph" not in message:
            hint = "Hint: does your code reject it on purpose, or does something else fail?"
            raise Wrong({rank: f"{context}; expected a message that names create_graph"}, hint)


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
