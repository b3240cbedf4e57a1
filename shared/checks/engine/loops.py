"""Training loops as people write them: with both kinds of zero_grad(), and with ranks that skip a backward.

Every rank runs its wrapper through the same loop. The kernel computes each rank's own gradients and their mean.
"""

import contextlib
from dataclasses import dataclass, field

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import judge_gradients
from shared.checks.engine.late_ranks import Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.steps import Event, EventLog
from shared.checks.engine.training import Draw, descend, one_process
from shared.checks.models import awkward
from shared.wire import completion, instrumentation


@dataclass(frozen=True)
class Loop:
    """How a wrapper is built and trained."""

    model: str
    set_to_none: tuple[bool, ...] = (True, True)  # of the zero_grad() before each step
    options: dict = field(default_factory=dict)  # keyword arguments of the wrapper's constructor
    idle: tuple[tuple[int, int], ...] = ()  # (rank, step) pairs in which the rank runs no backward
    late: int | None = None  # a rank that begins finish_gradient_sync() only when the others have launched `messages`
    messages: int = 0
    token: int = 0  # a different one in every run


@dataclass
class LoopStep:
    """What a rank recorded of one step."""

    gradients: dict[str, torch.Tensor | None]
    working: list[instrumentation.Call]  # in forward and backward
    finishing: list[instrumentation.Call]  # in finish_gradient_sync()
    events: list[Event]  # the launches and waits in it
    missing: list[int]  # on the late rank, the ranks that had not launched all their messages without it
    replaced: list[str]  # the parameters whose gradient has another address after finish_gradient_sync() than before


@rehearsed
def probe_loop(wrapper, loop: Loop, rank: int, seed: int, x, y) -> list[LoopStep]:
    """Run the loop and return a record of each step."""
    module = awkward.build(loop.model, seed).to(device_here())
    wrapped = wrapper(module, **loop.options)
    x, y = x.to(device_here()), y.to(device_here())
    found = []
    for step, set_to_none in enumerate(loop.set_to_none):
        module.zero_grad(set_to_none=set_to_none)
        with instrumentation.listening() as working:
            if (rank, step) not in loop.idle:
                awkward.loss_of(wrapped, x, y).backward()
        log, before = EventLog(("all_reduce",)), _places(module)
        with contextlib.ExitStack() as inside:
            missing = _in_company(inside, loop, rank, step)
            inside.enter_context(completion.watching(log))
            finishing = inside.enter_context(instrumentation.listening(log.launched, log.waiting))
            wrapped.finish_gradient_sync()
        gradients = awkward.gradients_of(module)
        after = _places(module)
        replaced = [name for name, place in before.items() if place != after.get(name)]
        found.append(LoopStep(gradients, working, finishing, log.events, missing, replaced))
        descend(module.parameters())
        x = awkward.other_branches(x)
    return found


def _places(module) -> dict[str, int]:
    """Return the address of each gradient, by the parameter's name."""
    return {name: p.grad.data_ptr() for name, p in module.named_parameters() if p.grad is not None}


def _in_company(inside: contextlib.ExitStack, loop: Loop, rank: int, step: int) -> list[int]:
    """Make one rank late. Returns, on that rank, the ranks that have not launched all their messages without it."""
    if loop.late is None:
        return []
    inside.enter_context(launches_unasked())
    meeting, launched = Rendezvous(f"loop{loop.token}/{step}"), []
    if rank == loop.late:
        return meeting.missing()

    def count(*_) -> None:
        launched.append(True)
        if len(launched) == loop.messages:
            meeting.arrive(with_the_stream=False)

    inside.enter_context(instrumentation.listening(count))
    return []


def loop_and_judge(attempt: Attempt, loop: Loop) -> list[list[LoopStep]]:
    """Run the loop on fresh data and return what each rank recorded of each step.

    Raises:
        Wrong: If a gradient is not the mean over the ranks.
    """
    draw = Draw(attempt)
    per_rank = [(rank, *share) for rank, share in enumerate(draw.per_rank)]
    found = attempt.run(probe_loop, loop, per_rank=per_rank, context=describe(loop))
    module = awkward.build(loop.model, draw.seeds[0])
    for step_index, expected in enumerate(one_process(module, draw.shares, len(loop.set_to_none), idle=loop.idle)):
        gradients = {rank: steps[step_index].gradients for rank, steps in enumerate(found)}
        judge_gradients(
            gradients, expected.gradients, dict(enumerate(expected.own)), f"{describe(loop)}, step {step_index + 1}"
        )
    return found


def describe(loop: Loop) -> str:
    """Describe what is unusual about a loop."""
    kinds = set(loop.set_to_none)
    parts = [awkward.describe(loop.model)]
    if kinds == {False}:
        parts.append("zero_grad(set_to_none=False)")
    elif len(kinds) > 1:
        parts.append("zero_grad() with set_to_none=True and False in turn")
    for rank in sorted({rank for rank, _ in loop.idle}):
        steps = [str(step + 1) for each, step in loop.idle if each == rank]
        parts.append(f"rank {rank} runs no backward in step{'s' * (len(steps) > 1)} {' and '.join(steps)}")
    if loop.late is not None:
        parts.append(f"rank {loop.late} starts finish_gradient_sync() late")
    return ", ".join(parts)
