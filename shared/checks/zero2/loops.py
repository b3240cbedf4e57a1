"""Judge loops that call ZeRO2 in unusual orders: every gradient must be synchronized exactly once.

A loop is written as code, and shown as code if it fails.
"""

from dataclasses import dataclass, replace

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.training import judge_states, reference
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.training import WrapperPlan, WrapperRun, begin
from shared.wire import instrumentation, sent_bytes_of

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
        ("backward()", FINISH, "backward()", STEP, ZERO_GRAD),
        "Hint: `sync.done` may still be True because of an earlier step. Which call sets it to False, and when?",
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
                    raise Wrong(
                        {rank: evidence}, f"{why} Hint: what must step() do if synced and pending are both False?"
                    )
                raise Wrong({rank: evidence}, f"{why} {silence.hint}")
