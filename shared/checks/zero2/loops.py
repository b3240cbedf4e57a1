"""Judge loops that call ZeRO2 in unusual orders: every gradient must be synchronized exactly once.

A loop is written as code, and shown as code if it fails.
"""

import copy
import gc
from dataclasses import dataclass, field, replace

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, tolerance_of
from shared.checks.engine.failures import Wrong, expect
from shared.checks.engine.hints import where_it_raises
from shared.checks.engine.sharded.plan import Run
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.sharded.training import Causes, begin, judge_states, on_one_batch, reference
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan
from shared.wire import instrumentation, sent_bytes_of

# -- a ZeRO2 that is copied, deleted and saved


COPIED_AFTER = 2  # steps


def _begin(zero2, plan: WrapperPlan, seed: int) -> Run:
    return begin(zero2, plan, awkward.build(plan.model, seed).to(device_here()))


@dataclass
class Copied:
    before: dict[str, torch.Tensor]  # the state when it was copied
    launches: list[int] = field(default_factory=list)  # in the backward of the original, and in that of the copy
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of the original and of the copy
    left: list[instrumentation.Call] = field(default_factory=list)  # what hooks of the deleted original still send
    has_gradients: bool = False  # whether the module of the deleted original still gets gradients


def probe_copies(zero2, plan: WrapperPlan, seed: int, x, y) -> Copied:
    """Train, copy, train both in turn, then delete the original."""
    x, y, first = x.to(device_here()), y.to(device_here()), _begin(zero2, plan, seed)
    module = first.module
    for number in range(COPIED_AFTER):
        first.step(number, x, y)
    both = [first.optimizer, copy.deepcopy(first.optimizer)]
    del first
    found = Copied(awkward.state_of(both[1].module))
    for wrapped in both:
        wrapped.zero_grad()
        with instrumentation.listening() as calls:
            awkward.loss_of(wrapped, x, y).backward()
        found.launches.append(len(calls))
    for wrapped in both[::-1]:
        wrapped.finish_gradient_sync()
        wrapped.step()
    found.states = [awkward.state_of(wrapped.module) for wrapped in both]
    both[0].zero_grad()
    wrapped = None
    del both[0]
    gc.collect()
    with instrumentation.listening() as found.left:
        awkward.loss_of(module, x, y).backward()
    found.has_gradients = all(p.grad is not None for p in module.parameters())
    return found


def copies_and_originals_train_independently(attempt: Attempt) -> None:
    plan, draw = WrapperPlan("Tied", "AdamW", steps=COPIED_AFTER + 1), Draw(attempt)
    found = attempt.run(probe_copies, plan, per_rank=draw.per_rank)
    for index, name in enumerate(("the original", "its deep copy")):
        states = {rank: each.states[index] for rank, each in enumerate(found)}
        before = {rank: each.before for rank, each in enumerate(found)}
        evidence = f"{plan}, copied after {COPIED_AFTER} steps: {name} after one more step, with the two used in turn"
        hint = "Hint: which tensors shared memory in the original, and do they share it in the copy?"
        expected = on_one_batch(plan, draw).steps[-1].state
        judge_states(states, expected, before, evidence, hint=hint)
        launched = {rank: each.launches[index] for rank, each in enumerate(found) if attempt.world_size > 1}
        hint = "Hint: on which module's parameters are its hooks registered?"
        expect(launched, bool, f"{name} launches nothing in its backward()", hint)
    for rank, each in enumerate(found):
        does = f"still sends {describe_calls(each.left)}" if each.left else "computes no gradients"
        evidence = f"the wrapper was deleted, but not its module: backward() of the module {does}"
        hint = "Hint: what keeps the wrapper alive, and which hooks are still registered?"
        expect({rank: each}, lambda own: own.has_gradients and not own.left, evidence, hint)


@dataclass
class Saved:
    optimizer: dict  # the state of .optimizer
    before: dict[str, torch.Tensor]  # the wrapper, before the last step of the plan
    module: dict[str, torch.Tensor]  # after it
    loaded: dict[str, torch.Tensor]  # the other wrapper, after it has loaded the first one's state
    went_on: dict[str, torch.Tensor]  # the first one, after one more step
    resumed: dict[str, torch.Tensor]  # the other one, after the same step


def probe_state(zero2, plan: WrapperPlan, seed: int, x, y) -> Saved:
    """Train, save the wrapper and its optimizer, load both into another, and take one more step with each."""
    run, other = _begin(zero2, plan, seed), _begin(zero2, plan, seed + 1)
    x, y = x.to(device_here()), y.to(device_here())
    run.train(x, y)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    saved, loaded = run.optimizer.optimizer.state_dict(), awkward.state_of(other.module)
    before, after = (each.state for each in run.steps[-2:])
    other.optimizer.optimizer.load_state_dict(saved)
    for each in (run, other):
        each.step(plan.steps, x, y)
    return Saved(saved, before, after, loaded, run.steps[-1].state, other.steps[-1].state)


@where_it_raises(
    {"no attribute 'optimizer'": "Hint: which optimizer does a scheduler write to, and whose state is saved?"}
)
def both_states_are_plain(attempt: Attempt) -> None:
    plan, draw = WrapperPlan("Frozen", "AdamW", steps=3, scheduler="ExponentialLR"), Draw(attempt)
    found = attempt.run(probe_state, plan, per_rank=draw.per_rank)
    alone = reference(plan, draw, list(range(attempt.world_size)))
    expected, tolerance = alone.optimizer.state_dict(), tolerance_of(alone.module.parameters())
    for rank, each in enumerate(found):
        judge_state_dict(rank, each.optimizer, expected, tolerance, f"{plan}, .optimizer.state_dict()")
        for name, value in each.module.items():
            if not torch.equal(each.loaded[name], value):
                evidence = f"after load_state_dict() of another ZeRO2's state_dict(), {name} is not what was saved"
                raise Wrong({rank: evidence}, "Hint: in which flat parameter's memory are the module's parameters?")
            if not torch.equal(each.resumed[name], each.went_on[name]):
                both = "after both state_dict()s were loaded into another ZeRO2"
                evidence = f"{both}, {name} differs after one more step"
                raise Wrong({rank: evidence}, "Hint: which shard of .optimizer's state does each rank load?")
    states = {rank: each.module for rank, each in enumerate(found)}
    before = {rank: each.before for rank, each in enumerate(found)}
    judge_states(states, alone.steps[-1].state, before, str(plan), Causes(plan, draw, plan.steps - 1))


# -- loops in unusual orders

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

    def __str__(self) -> str:
        return ", ".join(f"`{line}`" for line in self.lines)


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
SILENCES = (  # the last of these lines must synchronize, although no rank runs a backward() before it
    Loop(
        (f"with zero2.no_sync(): {FINISH}", STEP),
        "Hint: inside no_sync(), what does finish_gradient_sync() set synced to on a rank without gradients?",
    ),
    Loop(
        ("backward()", FINISH, "backward()", STEP, FINISH),
        "Hint: `sync.done` may still be True because of an earlier step. Which call sets it to False, and when?",
    ),
    Loop(
        ("backward()", ZERO_GRAD, STEP),
        "Hint: `sync.done` may still be True because of a skipped step. Which call sets it to False, and when?",
    ),
)


@dataclass
class Looped:
    before: dict[str, torch.Tensor]  # the state before the loop
    after: dict[str, torch.Tensor] = field(default_factory=dict)
    synced: bool | None = None  # before the last line
    calls: list[instrumentation.Call] = field(default_factory=list)  # what the last line sends


def probe_loop(zero2, plan: WrapperPlan, lines: tuple[str, ...], seed: int, x, y) -> Looped:
    """Run a loop, and observe its last line."""
    x, y, run = x.to(device_here()), y.to(device_here()), _begin(zero2, plan, seed)
    found = Looped(awkward.state_of(run.module))
    last = max((number for number, line in enumerate(lines) if "backward()" in line), default=None)
    for number, line in enumerate(lines):
        inputs, targets, _ = run.at_work(0, x, y) if number == last else (x, y, 1.0)

        def backward(inputs=inputs, targets=targets):
            if len(inputs):
                awkward.loss_of(run.optimizer, inputs, targets).backward()

        found.synced = getattr(run.optimizer, "synced", None)
        with instrumentation.listening() as found.calls:
            exec(line, {"zero2": run.optimizer, "backward": backward})
    found.after = awkward.state_of(run.module)
    return found


def every_loop_trains(attempt: Attempt) -> None:
    """Include a rank without a backward, which must make the same decision about synchronizing as the others."""
    for loop in LOOPS:
        idle = (0, attempt.random.randrange(attempt.world_size)) if loop.idle and attempt.world_size > 1 else None
        plan, draw = WrapperPlan("Plain", "SGD", steps=1, idle=idle), Draw(attempt)
        context = f"{loop}{f', and rank {idle[1]} skips the last backward()' if idle else ''}"
        try:
            found = attempt.run(probe_loop, plan, loop.lines, per_rank=draw.per_rank, context=context)
        except Wrong as wrong:
            if wrong.hangs:
                wrong.hint = (
                    "Some ranks synchronize and others do not. Hint: which condition decides this, and is it the same "
                    "on all ranks?"
                )
            raise
        alone = reference(replace(plan, loss_scale=loop.backwards), draw, list(range(attempt.world_size)))
        states = {rank: each.after for rank, each in enumerate(found)}
        before = {rank: each.before for rank, each in enumerate(found)}
        try:
            judge_states(states, alone.steps[-1].state, before, context)
        except Wrong as wrong:
            wrong.hint = loop.hint
            raise


def every_step_synchronizes(attempt: Attempt) -> None:
    """Let no rank run a backward(), because a rank that skips the synchronization alone would make the others hang."""
    plan, size = WrapperPlan("Plain", "SGD"), attempt.world_size
    gathered_bytes = sum(bucket.filled_bytes(size) for bucket in plan.flats()) * (size - 1) / size
    for loop in SILENCES:
        context, last = f"{loop}, before which no rank runs backward()", loop.lines[-1]
        found = attempt.run(probe_loop, plan, loop.lines, per_rank=Draw(attempt).per_rank, context=context)
        for rank, each in enumerate(found):
            if sum(sent_bytes_of(call, rank) for call in each.calls) <= (gathered_bytes if last == STEP else 0):
                evidence, hint = f"{context}: {last} reduce-scatters no gradients", loop.hint
                if each.synced is False and last == STEP:
                    evidence += ", although synced is False"
                    hint = "Hint: what must step() do if synced and pending are both False? And what if done is True?"
                raise Wrong({rank: evidence}, f"A rank that has gradients would wait for this one forever. {hint}")
