"""Check what a Bucket does in each step: copy gradients into its flat tensor, send that in one message, and wait."""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shared.checks.engine.attempts import Attempt, on_each
from shared.checks.engine.buckets import describe_messages
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import judge_gradients, nearly_equal, tolerance_of
from shared.checks.engine.failures import NOT_WRITTEN, Wrong
from shared.checks.engine.late_ranks import PATIENCE_S, Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.steps import EventLog
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.wire import completion, instrumentation

SHAPES = [(3, 5), (7,), (), (2, 3, 2, 2), (4, 1)]
_ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)
_HINT_ON_WAITING = "Hint: which method waits for the all-reduce?"


@dataclass(frozen=True)
class Steps:
    """What every rank does with its bucket."""

    set_to_none: tuple[bool, ...]  # of the zero_grad() before each step
    dtype: torch.dtype = torch.float64
    in_subgroup: bool = False
    late: int | None = None  # a rank that launches only after the others' launch() has returned
    token: int = 0  # a different one in every run

    def describe(self, step: int) -> str:
        ways = "" if all(self.set_to_none) else f", after zero_grad(set_to_none={self.set_to_none[step]})"
        late = "" if self.late is None else f", rank {self.late} launches late"
        return f"step {step + 1}{ways}{late}"


@dataclass
class Stepped:
    """One step of a bucket. An address is that of a gradient, or None if there is no gradient."""

    gradients: dict[str, torch.Tensor | None]
    types: list[tuple[tuple[int, ...], torch.dtype] | None]  # of the gradients
    calls: list[instrumentation.Call]
    early: int  # the number of collectives that pack() launched
    waited_in_launch: bool
    missing: list[int]  # on the late rank, the ranks whose launch() did not return before its own
    packed: list[int | None]  # addresses after pack()
    waited: list[int | None]  # addresses after wait()
    memory_bytes: list[int]  # of each storage that holds gradients
    stayed: bool = True  # whether the addresses were the same before pack()
    tied: list[str] = field(default_factory=list)  # the parameters with a .grad before the first step, in that step


@rehearsed
def probe_bucket(bucket_class, steps: Steps, rank: int, gradients: list[list[torch.Tensor | None]]) -> list[Stepped]:
    """Run steps of backward, pack, launch and wait.

    Args:
        bucket_class: The student's class.
        steps: What to do.
        gradients: For each step, the gradient of each parameter; None if the parameter is not used.
    """
    group, member = join_subgroup(steps.in_subgroup)
    if not member:
        return []
    parameters = [nn.Parameter(torch.zeros(shape, dtype=steps.dtype, device=device_here())) for shape in SHAPES]
    with instrumentation.listening() as building:
        bucket = bucket_class(parameters, group) if steps.in_subgroup else bucket_class(parameters)
    tied = [name for name, parameter in zip(_names(), parameters, strict=True) if parameter.grad is not None]
    found = []
    for index, (set_to_none, own) in enumerate(zip(steps.set_to_none, gradients, strict=True)):
        for parameter, gradient in zip(parameters, own, strict=True):
            _zero_grad(parameter, set_to_none)
            if gradient is not None:
                (parameter * gradient.to(device_here())).sum().backward()
        before = _places(parameters)
        meeting = None if steps.late is None else Rendezvous(f"bucket{steps.token}/{index}")
        step = _pack_launch_wait(bucket, parameters, meeting, rank == steps.late)
        step.stayed = before == step.packed
        found.append(step)
        dist.barrier(group)
    found[0].calls, found[0].tied = building + found[0].calls, tied
    return found


def _zero_grad(parameter: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.zero_()


def _pack_launch_wait(bucket, parameters: list, meeting: Rendezvous | None, is_late: bool) -> Stepped:
    log, missing = EventLog(("all_reduce",)), []
    unasked = launches_unasked() if meeting else contextlib.nullcontext()
    with unasked, completion.watching(log), instrumentation.listening(log.launched, log.waiting) as calls:
        for index in torch.randperm(len(parameters)).tolist():
            bucket.pack(index)
        early, packed = len(calls), _places(parameters)
        if is_late and meeting:
            missing = meeting.missing()
        bucket.launch()
        if meeting:
            meeting.arrive()
        waited_in_launch = any(event.kind == "wait" for event in log.events)
        bucket.wait()
        values = [None if p.grad is None else p.grad.detach().cpu().clone() for p in parameters]
    storages = [p.grad.untyped_storage() for p in parameters if p.grad is not None]
    return Stepped(
        gradients=dict(zip(_names(), values, strict=True)),
        types=[None if value is None else (tuple(value.shape), value.dtype) for value in values],
        calls=calls,
        early=early,
        waited_in_launch=waited_in_launch,
        missing=missing,
        packed=packed,
        waited=_places(parameters),
        memory_bytes=list({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
    )


def _places(parameters: list) -> list[int | None]:
    """Return the address of each gradient."""
    return [None if parameter.grad is None else parameter.grad.data_ptr() for parameter in parameters]


def _names() -> list[str]:
    return [f"parameter {index} of shape {_listed(shape)}" for index, shape in enumerate(SHAPES)]


def _draw(attempt: Attempt, steps: Steps, used: float) -> list[list[list]]:
    """Draw a gradient for each rank, step and parameter, or None with probability 1 − used."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())

    def one(shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(steps.dtype)
        return drawn if attempt.random.random() < used else None

    return [[[one(shape) for shape in SHAPES] for _ in steps.set_to_none] for _ in range(attempt.world_size)]


def _run(attempt: Attempt, steps: Steps, drawn: list) -> dict[int, list[Stepped]]:
    """Run probe_bucket. Returns its results by rank of the group."""
    context = called_alone(attempt) if steps.in_subgroup else f"gradients of shapes {', '.join(map(_listed, SHAPES))}"
    found = attempt.run(probe_bucket, steps, per_rank=[(rank, own) for rank, own in enumerate(drawn)], context=context)
    members = members_of(attempt, steps.in_subgroup)
    return {rank: found[rank] for rank in members}


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _listed(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _judge_values(attempt: Attempt, steps: Steps, used: float = 1.0) -> dict[int, list[Stepped]]:
    """Run probe_bucket on fresh data. Returns its results by rank of the group.

    Raises:
        Wrong: If the gradients of a step are not the mean over the ranks.
    """
    drawn = _draw(attempt, steps, used)
    found = _run(attempt, steps, drawn)
    for index in range(len(steps.set_to_none)):
        own = {rank: dict(zip(_names(), drawn[rank][index], strict=True)) for rank in found}
        expected = {
            name: sum(zeros if each[name] is None else each[name] for each in own.values()) / len(own)
            for name, zeros in zip(_names(), map(_zeros, SHAPES), strict=True)
        }
        gradients = {rank: each[index].gradients for rank, each in found.items()}
        context = f"{called_alone(attempt)}, {steps.describe(index)}" if steps.in_subgroup else steps.describe(index)
        try:
            judge_gradients(gradients, expected, own, context)
        except Wrong as wrong:
            before = {rank: each[index - 1].gradients for rank, each in found.items()} if index else {}
            raise Wrong(wrong.evidence, _left_over(gradients, expected, before, own) or wrong.hint) from None
    return found


def _left_over(gradients: dict[int, dict], expected: dict, before: dict[int, dict], own: dict[int, dict]) -> str:
    """Recognize a gradient that contains the old value of its slice, which is the mean of the previous step.

    Args:
        gradients: The gradients after this step, by rank and name.
        expected: The mean over the ranks, by name.
        before: The gradients after the previous step.
        own: The gradient that each rank has computed in this step; None if the parameter is not used there.
    """
    for rank, held in before.items():
        for name, tensor in gradients[rank].items():
            if tensor is None or held[name] is None or not held[name].any():
                continue
            missing = sum(own[other][name] is None for other in own)
            for senders, hint in (
                (missing, "Hint: if .grad is None on a rank, is the slice set to zero there?"),
                (len(before), "Hint: is the gradient copied into the slice or added to it?"),
            ):
                if senders and nearly_equal(tensor, expected[name] + senders * held[name], tolerance_of([tensor])):
                    return f"It contains the slice's old value from the previous step. {hint}"
    return ""


each_gradient_becomes_the_mean = on_each(_judge_values, Steps((True, True)))


def it_survives_zero_grad(attempt: Attempt) -> None:
    """zero_grad() either sets .grad to None, or writes zeros into the slice itself."""
    for ways in ((True, True, True), (False, False, False), (True, False, True, False)):
        found = _judge_values(attempt, Steps(ways))
        for rank, steps in found.items():
            for index, step in enumerate(steps[1:], 1):
                if not ways[index] and not step.stayed:
                    message = (
                        f"step {index + 1}, after zero_grad(set_to_none=False): .grad was the slice, but no longer is"
                    )
                    raise Wrong({rank: message}, "Hint: what must pack() do if .grad is already the slice?")


def none_counts_as_zeros(attempt: Attempt) -> None:
    """A different set of gradients is None in each step. The slice's value from the last step is not a gradient."""
    try:
        _judge_values(attempt, Steps((True, True, True, False, True)), used=0.5)
    except Wrong as wrong:
        if wrong.evidence != NOT_WRITTEN:
            wrong.hint = f"{wrong.hint} (In each step, some gradients are None on some ranks.)".strip()
        raise


def it_waits_when_asked_to(attempt: Attempt) -> None:
    late = attempt.random.randrange(attempt.world_size)
    found = _judge_values(attempt, Steps((True, True), late=late, token=attempt.draw_seed()))
    for rank, steps in found.items():
        for step in steps:
            if step.early:
                message = f"pack() launched collectives: {step.early} in all; expected none"
                raise Wrong({rank: message}, "Hint: which method sends the bucket?")
            if step.waited_in_launch:
                message = "launch() waited until its all-reduce was complete; expected it to return at once"
                raise Wrong({rank: message}, _HINT_ON_WAITING)
    for step in found[late]:
        if step.missing:
            message = f"while rank {late} had launched nothing, launch() did not return within {PATIENCE_S:g} s"
            raise Wrong(dict.fromkeys(step.missing, message), _HINT_ON_WAITING)


def it_sends_one_message(attempt: Attempt) -> None:
    for dtype in (torch.float64, torch.float32):
        steps = Steps((True, False, True), dtype)
        want_bytes = _ELEMENTS * dtype.itemsize
        for rank, found in _run(attempt, steps, _draw(attempt, steps, 0.7)).items():
            for step in found:
                if [(call.op, call.payload_bytes) for call in step.calls] != [("all_reduce", want_bytes)]:
                    message = f"{describe_messages(step.calls)}; expected 1 all_reduce of {want_bytes} bytes"
                    raise Wrong({rank: message}, "Hint: which tensor holds all gradients of the bucket?")


def gradients_are_slices(attempt: Attempt) -> None:
    steps = Steps((True, True, False))
    want_bytes = _ELEMENTS * steps.dtype.itemsize
    for rank, found in _run(attempt, steps, _draw(attempt, steps, 0.7)).items():
        if found[0].tied:
            message = f"before the first pack(), {found[0].tied[0]} already has a .grad; expected None"
            raise Wrong({rank: message}, "Hint: which of your methods set .grad?")
        for step in found:
            for name, shape, kind in zip(_names(), SHAPES, step.types, strict=True):
                if kind != (tuple(shape), steps.dtype):
                    problem = "is None" if kind is None else f"has the shape {_listed(kind[0])} in {kind[1]}"
                    raise Wrong({rank: f"{name}: .grad {problem} after wait()"}, "Hint: what is .grad after pack()?")
            if step.memory_bytes != [want_bytes]:
                many = len(step.memory_bytes)
                message = f"the gradients use {many} storage{'s' if many > 1 else ''} with a total of "
                message += f"{sum(step.memory_bytes)} bytes; expected one storage of {want_bytes} bytes"
                raise Wrong({rank: message}, "Hint: what is .grad after pack()?")
            if step.waited != step.packed:
                message = "a gradient has a different address after wait() than after pack()"
                raise Wrong({rank: message}, "Hint: which line copies the gradient?")


def only_its_group_takes_part(attempt: Attempt) -> None:
    _judge_values(attempt, Steps((True, True), in_subgroup=True), used=0.7)
