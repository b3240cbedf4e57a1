"""Training loops as people write them: zero_grad() either way, and a rank that has nothing to do in some step.

Every rank's wrapper is run through the same loop; the kernel computes each rank's own gradients, and their mean.
"""

import contextlib
from dataclasses import dataclass, field

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import judge_gradients
from shared.checks.engine.framework import Attempt
from shared.checks.engine.latecomers import Meeting, launches_unasked
from shared.checks.engine.steps import Diary
from shared.checks.engine.training import Draw, descend, one_process
from shared.checks.models import awkward
from shared.wire import completion, instrumentation


@dataclass(frozen=True)
class Loop:
    """How a wrapper is built and trained. set_to_none: of the zero_grad() before each step."""

    model: str
    set_to_none: tuple[bool, ...] = (True, True)
    options: dict = field(default_factory=dict)  # keywords of the wrapper's constructor
    idle: tuple[tuple[int, int], ...] = ()  # (rank, step) in which a rank runs no backward at all
    late: int | None = None  # a rank that begins finish_gradient_sync() only when the others have launched `messages`
    messages: int = 0
    token: int = 0  # another in every run


def probe_loop(wrapper, loop: Loop, rank: int, seed: int, x, y) -> dict:
    """→ per step: gradients after finish_gradient_sync(), what was sent before and in it, what was waited for, and
    who had not launched all messages when the late rank's patience ended
    """
    module = awkward.build(loop.model, seed).to(device_here())
    wrapped = wrapper(module, **loop.options)
    x, y = x.to(device_here()), y.to(device_here())
    found = []
    for step, set_to_none in enumerate(loop.set_to_none):
        module.zero_grad(set_to_none=set_to_none)
        with instrumentation.listening() as working:
            if (rank, step) not in loop.idle:
                awkward.loss_of(wrapped, x, y).backward()
        diary = Diary(("all_reduce",))
        with contextlib.ExitStack() as inside:
            missing = _in_company(inside, loop, rank, step)
            inside.enter_context(completion.watching(diary))
            finishing = inside.enter_context(instrumentation.listening(diary.launched, diary.waiting))
            wrapped.finish_gradient_sync()
        gradients = awkward.gradients_of(module)
        events = {"working": working, "finishing": finishing, "events": diary.events, "missing": missing}
        found.append(events | {"gradients": gradients})
        descend(module.parameters())
        x = awkward.other_roads(x)
    return {"steps": found}


def _in_company(inside: contextlib.ExitStack, loop: Loop, rank: int, step: int) -> list[int]:
    """→ on the late rank: who has not launched everything without it"""
    if loop.late is None:
        return []
    inside.enter_context(launches_unasked())
    meeting, launched = Meeting(f"loop{loop.token}/{step}"), []
    if rank == loop.late:
        return meeting.missing()

    def count(*_) -> None:
        launched.append(True)
        if len(launched) == loop.messages:
            meeting.come()

    inside.enter_context(instrumentation.listening(count))
    return []


def loop_and_judge(attempt: Attempt, loop: Loop) -> list[dict]:
    """Run the loop on fresh data. → per rank, what probe_loop found

    Raises: Wrong unless every rank's gradients, each step, are the mean.
    """
    draw = Draw(attempt)
    per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
    found = attempt.run(probe_loop, loop, per_rank=per_rank, context=said(loop))
    module = awkward.build(loop.model, draw.seeds[0])
    for step_index, expected in enumerate(one_process(module, draw.shares, len(loop.set_to_none), idle=loop.idle)):
        gradients = {rank: each["steps"][step_index]["gradients"] for rank, each in enumerate(found)}
        judge_gradients(
            gradients, expected.gradients, dict(enumerate(expected.own)), f"{said(loop)}, step {step_index + 1}"
        )
    return found


def said(loop: Loop) -> str:
    """Say what is out of the ordinary."""
    kinds = set(loop.set_to_none)
    parts = [awkward.said(loop.model)]
    if kinds == {False}:
        parts.append("zero_grad(set_to_none=False)")
    elif len(kinds) > 1:
        parts.append("zero_grad(set_to_none=True) and False in turns")
    parts += [f"rank {rank} runs no backward in step {step + 1}" for rank, step in loop.idle]
    if loop.late is not None:
        parts.append(f"rank {loop.late} comes late")
    return ", ".join(parts)
