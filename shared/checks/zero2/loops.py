"""Loops that use ZeRO2 in an order of their own: what was not synchronised yet is, and what was is not again.

A loop is written as code, and shown as that when it goes wrong.
"""

from dataclasses import dataclass, replace

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.training import judge_states, reference
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero2.training import Travel, TravelRun

FINISH, STEP, FORGET = "zero2.finish_gradient_sync()", "zero2.step()", "zero2.zero_grad()"
SENT = ("backward()", FINISH, FORGET)
KEPT = ("with zero2.no_sync(): backward()", FORGET)


@dataclass(frozen=True)
class Loop:
    """lines: code, up to one step. backwards: how many count in it. idle: does one rank leave the last one out?"""

    lines: tuple[str, ...]
    hint: str
    backwards: int = 1
    idle: bool = False


_FORGETS = "Look at: where are gradients by then, and which of them does zero_grad() forget?"
LOOPS = (
    Loop((*SENT, *KEPT, "backward()", STEP), _FORGETS, idle=True),
    Loop((*KEPT, *SENT, "backward()", STEP), _FORGETS, idle=True),
    Loop(
        ("backward()", FINISH, "backward()", STEP),
        "Look at: what has come since the synchronisation, and who notices?",
        backwards=2,
    ),
    Loop(
        (f"with zero2.no_sync(): backward(); {FINISH}", STEP),
        "Look at: inside no_sync(), what has finish_gradient_sync() synchronised?",
    ),
    Loop(("backward()", FINISH, FINISH, STEP), "Look at: what is left to do for a second finish_gradient_sync()?"),
    Loop(
        ("backward()", "zero2.clip_grad_norm_(0.05)", FORGET, "backward()", STEP),
        "Look at: what does clip_grad_norm_() leave behind where no step comes, and does zero_grad() forget it?",
    ),
)


def probe_lines(zero2, plan: Travel, lines: tuple[str, ...], place: int, seed: int, x, y) -> dict:
    """→ the state before the loop, and after it"""
    x, y = x.to(device_here()), y.to(device_here())
    run = TravelRun(zero2, awkward.build(plan.model, seed).to(device_here()), plan, place)
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
    """Whether gradients are synchronised, a rank without a backward must know as the others do."""
    for loop in LOOPS:
        idle = (0, attempt.random.randrange(attempt.world_size)) if loop.idle and attempt.world_size > 1 else None
        plan, draw = Travel("Plain", "SGD", steps=1, idle=idle), Draw(attempt)
        per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
        context = ", ".join(f"`{line}`" for line in loop.lines)
        if idle:
            context += f", where rank {idle[1]} leaves out the last backward()"
        try:
            found = attempt.run(probe_lines, plan, loop.lines, per_rank=per_rank, context=context)
        except Wrong as wrong:
            if wrong.hangs:
                wrong.hint = "Look at: what does each rank know of what was sent, and what does zero_grad() do with it?"
            raise
        alone = reference(replace(plan, loss_scale=loop.backwards), draw, list(range(attempt.world_size)))
        states, before = ({rank: each[what] for rank, each in enumerate(found)} for what in ("state", "before"))
        try:
            judge_states(states, alone.steps[-1]["state"], before, context)
        except Wrong as wrong:
            wrong.hint = loop.hint
            raise
