"""Judge loops that call ZeRO2 in unusual orders: every gradient must be synchronized exactly once.

A loop is written as code, and shown as code if it fails.
"""

import copy
import gc
from dataclasses import dataclass, replace

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.sharded.training import Causes, judge_states, on_one_batch, reference
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan, WrapperRun, begin
from shared.wire import instrumentation, sent_bytes_of

# -- judge a ZeRO2 that is copied, deleted, saved, and used in ways that must be rejected


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


FINISH, STEP, ZERO_GRAD = "zero2.finish_gradient_sync()", "zero2.step()", "zero2.zero_grad()"
SENT = ("backward()", FINISH, ZERO_GRAD)
KEPT = ("with zero2.no_sync(): backward()", ZERO_GRAD)


@dataclass(frozen=True)
class Loop:
    """Describe a loop as lines of code up to one step.

    Attributes:
        lines: The code.
        hint: The hint if the loop fails.
        backwards: How many backwards contribute to the step.
        idle: Whether one rank skips the last backward.
    """

    lines: tuple[str, ...]
    hint: str
    backwards: int = 1
    idle: bool = False


_LEFT_BEHIND = "Hint: where are gradients stored by then, and which of them does zero_grad() miss?"
LOOPS = (
    Loop((*SENT, *KEPT, "backward()", STEP), _LEFT_BEHIND, idle=True),
    Loop((*KEPT, *SENT, "backward()", STEP), _LEFT_BEHIND, idle=True),
    Loop(
        ("backward()", FINISH, "backward()", STEP),
        "Hint: which gradients were computed after the synchronization, and how does step() know about them?",
        backwards=2,
    ),
    Loop(
        ("backward()", FINISH, "with zero2.no_sync(): backward()", STEP),
        "Hint: which gradients came after the synchronization, and which attribute tells step() about them?",
        backwards=2,
    ),
    Loop(
        (f"with zero2.no_sync(): backward(); {FINISH}", STEP),
        "Hint: what does finish_gradient_sync() synchronize inside no_sync()?",
    ),
    Loop(("backward()", FINISH, FINISH, STEP), "Hint: what remains to be done in a second finish_gradient_sync()?"),
    Loop(
        ("backward()", "zero2.clip_grad_norm_(0.05)", ZERO_GRAD, "backward()", STEP),
        "Hint: what does clip_grad_norm_() keep if no step follows, and does zero_grad() drop it?",
    ),
)


def probe_lines(zero2, plan: WrapperPlan, lines: tuple[str, ...], index: int, seed: int, x, y) -> dict:
    """Run a loop. Return the state before and after it."""
    x, y = x.to(device_here()), y.to(device_here())
    run = WrapperRun(zero2, awkward.build(plan.model, seed).to(device_here()), plan, index)
    before, last = awkward.state_of(run.module), max(n for n, line in enumerate(lines) if "backward()" in line)
    x_at_work, y_at_work, _ = run._at_work(0, x, y)

    for number, line in enumerate(lines):
        inputs, targets = (x_at_work, y_at_work) if number == last else (x, y)

        def backward(inputs=inputs, targets=targets):
            if len(inputs):
                awkward.loss_of(run.optimizer, inputs, targets).backward()

        exec(line, {"zero2": run.optimizer, "backward": backward})
    return {"before": before, "state": awkward.state_of(run.module)}


def every_loop_trains(attempt: Attempt) -> None:
    """Include a rank without a backward, which must make the same decision about synchronizing as the others."""
    for loop in LOOPS:
        idle = (0, attempt.random.randrange(attempt.world_size)) if loop.idle and attempt.world_size > 1 else None
        plan, draw = WrapperPlan("Plain", "SGD", steps=1, idle=idle), Draw(attempt)
        per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
        context = ", ".join(f"`{line}`" for line in loop.lines)
        if idle:
            context += f", and rank {idle[1]} skips the last backward()"
        try:
            found = attempt.run(probe_lines, plan, loop.lines, per_rank=per_rank, context=context)
        except Wrong as wrong:
            if wrong.hangs:
                wrong.hint = (
                    "Some ranks synchronize and others do not. Hint: which condition decides this, and is it "
                    "the same on all ranks?"
                )
            raise
        alone = reference(replace(plan, loss_scale=loop.backwards), draw, list(range(attempt.world_size)))
        states, before = ({rank: each[what] for rank, each in enumerate(found)} for what in ("state", "before"))
        try:
            judge_states(states, alone.steps[-1]["state"], before, context)
        except Wrong as wrong:
            wrong.hint = loop.hint
            raise


@dataclass(frozen=True)
class Silence:
    """Describe lines after which a step must synchronize, although no rank has run a backward() since.

    Attributes:
        lines: The code.
        hint: The hint if the step does not.
    """

    lines: tuple[str, ...]
    hint: str


SILENCES = (
    Silence(
        (f"with zero2.no_sync(): {FINISH}",),
        "Hint: inside no_sync(), what does finish_gradient_sync() set synced to on a rank without gradients?",
    ),
    Silence(
        ("backward()", FINISH, "backward()", STEP),
        "Hint: `sync.done` may still be True because of an earlier step. Which call sets it to False, and when?",
    ),
    Silence(
        ("backward()", ZERO_GRAD),
        "Hint: `sync.done` may still be True because of a skipped step. Which call sets it to False, and when?",
    ),
)


def probe_silent_step(
    zero2, plan: WrapperPlan, lines: tuple[str, ...], seed: int, x, y
) -> tuple[bool | None, list[instrumentation.Call]]:
    """Run the lines. Return `synced`, and what the step() after them sends, without a backward() before it."""
    run = begin(zero2, plan, awkward.build(plan.model, seed).to(device_here()))

    def backward():
        awkward.loss_of(run.optimizer, x.to(device_here()), y.to(device_here())).backward()

    for line in lines:
        exec(line, {"zero2": run.optimizer, "backward": backward})
    synced = getattr(run.optimizer, "synced", None)
    with instrumentation.listening() as calls:
        run.optimizer.step()
    return synced, calls


def every_step_synchronizes(attempt: Attempt) -> None:
    """Let no rank run a backward(), because a rank that skips the synchronization alone would make the others hang."""
    plan, size = WrapperPlan("Plain", "SGD"), attempt.world_size
    gathered_bytes = sum(bucket.filled_bytes(size) for bucket in plan.buckets()) * (size - 1) / size
    for silence in SILENCES:
        lines = ", ".join(f"`{line}`" for line in silence.lines)
        context = f"{lines}, and then `{STEP}`, before which no rank runs backward()"
        found = attempt.run(probe_silent_step, plan, silence.lines, per_rank=Draw(attempt).per_rank, context=context)
        for rank, (synced, calls) in enumerate(found):
            if sum(sent_bytes_of(call, rank) for call in calls) <= gathered_bytes:
                evidence = f"{context}: {STEP} all-gathers parameters, but reduce-scatters no gradients"
                why = "A rank that has gradients would wait for this one forever."
                if synced is False:
                    evidence += ", although synced is False"
                    hint = "Hint: what must step() do if synced and pending are both False? And what if done is True?"
                    raise Wrong({rank: evidence}, f"{why} {hint}")
                raise Wrong({rank: evidence}, f"{why} {silence.hint}")
