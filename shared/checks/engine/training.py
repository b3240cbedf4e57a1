"""A wrapper trained on ranks, and what one process with all the data gets.

The kernel draws the model's weights and the batch. Rank 0 alone gets the right weights (the others build
their own), and each rank only its own samples: right gradients can only come from the other ranks.
"""

from dataclasses import dataclass, field

import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import (
    by_rank,
    close,
    describe_calls,
    first_difference,
    judge_gradients,
    judge_state,
    refuse_frozen_gradients,
    tolerance_of,
)
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup
from shared.checks.models import awkward
from shared.wire import instrumentation

SAMPLES_PER_RANK = 6
STEPS = 3
LEARNING_RATE = 0.1


class Draw:
    """Weights' seeds and samples for one attempt; every rank's weights differ, and rank 0's are right."""

    def __init__(self, attempt: Attempt, samples_of_rank: list[int] | None = None):
        counts = samples_of_rank or [SAMPLES_PER_RANK] * attempt.world_size
        self.seeds = [attempt.draw_seed() for _ in counts]
        self.x, self.y = awkward.draw_batch(attempt.draw_seed(), sum(counts))
        self.shares = list(zip(self.x.split(counts), self.y.split(counts), strict=True))
        self.per_rank = [(seed, x, y) for seed, (x, y) in zip(self.seeds, self.shares, strict=True)]

    def samples_of(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """→ x and y of these ranks, together"""
        x, y = (torch.cat([self.shares[rank][part] for rank in members]) for part in (0, 1))
        return x, y


@dataclass(frozen=True)
class Training:
    """How a wrapper is built and trained."""

    model: str
    micro_batches: int = 1
    in_subgroup: bool = False
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)  # keywords of the wrapper's constructor besides `group`
    overlaps: bool = False  # backward() may begin to send: what .grad holds right after it is then no rank's own


# -- probes: what runs on a rank, beside the student's code


def frozen_with_gradient(module) -> list[str]:
    return [name for name, p in module.named_parameters() if not p.requires_grad and p.grad is not None]


def probe_training(wrapper, how: Training, seed: int, x, y) -> dict:
    """Wrap, then train with SGD. → what the wrapper did to state and gradients, and when it communicated"""
    group, member = join_subgroup(how.in_subgroup)
    module = awkward.build(how.model, seed, how.dtype).to(device_here())
    if not member:
        return {"outside": True}
    options = how.options | ({"group": group} if how.in_subgroup else {})
    with instrumentation.listening() as building:
        wrapped = wrapper(module, **options)
    _refuse_library_wrappers(wrapped)
    found = {"start": awkward.state_of(module), "building": building, "steps": []}
    x, y = x.to(device_here(), how.dtype), y.to(device_here(), how.dtype)
    for _ in range(STEPS):
        _drop_gradients(module)
        plain = awkward.twin_of(how.model, module) if how.overlaps else None
        with instrumentation.listening() as working:
            _accumulate(wrapped, x, y, how.micro_batches)
        if how.overlaps:
            _accumulate(plain, x, y, how.micro_batches)
        local = awkward.gradients_of(plain if how.overlaps else module)
        with instrumentation.listening() as finishing:
            wrapped.finish_gradient_sync()
        gradients = awkward.gradients_of(module)
        found["steps"].append({"local": local, "gradients": gradients, "working": working, "finishing": finishing})
        found["frozen"] = frozen_with_gradient(module)
        _descend(module)
        x = awkward.other_roads(x)
    found["end"] = awkward.state_of(module)
    return found


# torch's optimizers import the compiler before their first step: a second, in every kernel that checks.
def _drop_gradients(module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = None


def _descend(module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def _accumulate(module, x, y, micro_batches: int) -> None:
    for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
        (awkward.loss_of(module, part_x, part_y) / micro_batches).backward()


def _refuse_library_wrappers(wrapped) -> None:
    for part in [wrapped, *wrapped.modules()]:
        if any(base.__module__.startswith("torch.nn.parallel") for base in type(part).__mro__):
            raise AssertionError("torch's own DistributedDataParallel does the work here: write it by hand")


# -- what one process gets, and the judgement


def one_process(model: str, seed: int, x, y, steps: int = STEPS, ended: dict | None = None) -> list[dict]:
    """→ per step: the gradients on the full batch. ended: takes the state after the last step."""
    module = awkward.build(model, seed)
    gradients = []
    for _ in range(steps):
        _drop_gradients(module)
        awkward.loss_of(module, x, y).backward()
        gradients.append(awkward.gradients_of(module))
        _descend(module)
        x = awkward.other_roads(x)
    if ended is not None:
        ended.update(awkward.state_of(module))
    return gradients


def train(attempt: Attempt, how: Training, draw: Draw) -> list[dict]:
    """Train on the ranks. → per rank, what probe_training found"""
    context = called_alone(attempt) if how.in_subgroup else ""
    return attempt.run(probe_training, how, per_rank=draw.per_rank, context=context)


def train_and_judge(attempt: Attempt, how: Training) -> list[dict]:
    """Train on fresh data. → per rank, what probe_training found

    Raises: Wrong unless it is what one process gets.
    """
    draw = Draw(attempt)
    found = train(attempt, how, draw)
    if how.in_subgroup:
        judge_subgroup_training(found, how.model, draw, attempt)
    elif how.dtype == torch.bfloat16:
        judge_bf16_training(found, how)
    else:
        judge_training(found, how.model, draw)
    return found


def judge_start(found: list[dict], model: str, draw: Draw) -> None:
    """Raises: Wrong unless every rank began with rank 0's state."""
    want = awkward.state_of(awkward.build(model, draw.seeds[0]))
    judge_state({rank: result["start"] for rank, result in enumerate(found)}, want, 0)


def judge_training(found: list[dict], model: str, draw: Draw) -> None:
    """Raises: Wrong unless every rank's gradients, each step, and its state at the end are one process's."""
    ended: dict = {}
    for number, want in enumerate(one_process(model, draw.seeds[0], draw.x, draw.y, ended=ended)):
        steps = [result["steps"][number] for result in found]
        context = f"{awkward.said(model)}, step {number + 1}"
        judge_gradients(by_rank(steps, "gradients"), want, by_rank(steps, "local"), context)
    refuse_frozen_gradients(found, model)
    judge_state({rank: result["end"] for rank, result in enumerate(found)}, found[0]["end"], 0)
    for name, want in ended.items():
        got = found[0]["end"][name]
        if not close(got.double(), want.double(), tolerance_of(ended.values())):
            difference = first_difference(got.double(), want.double())
            raise Wrong(f"{awkward.said(model)}: {name} after the last step, {difference}")


def judge_subgroup_training(found: list[dict], model: str, draw: Draw, attempt: Attempt) -> None:
    """Raises: Wrong unless the subgroup's gradients, each step, are one process's on the subgroup's samples."""
    members = SUBGROUPS[attempt.world_size]
    for number, want in enumerate(one_process(model, draw.seeds[members[0]], *draw.samples_of(members))):
        steps = {rank: found[rank]["steps"][number] for rank in members}
        judge_gradients(
            {rank: step["gradients"] for rank, step in steps.items()},
            want,
            {rank: step["local"] for rank, step in steps.items()},
            f"{called_alone(attempt)}, step {number + 1}",
        )


def judge_bf16_training(found: list[dict], how: Training) -> None:
    """The mean of N bf16 numbers, added in any order, is within N roundings of 2⁻⁸ of the largest.

    Raises: Wrong.
    """
    half = sum(p.nbytes for p in awkward.build(how.model, 0, torch.bfloat16).parameters())
    for name, number in [(name, number) for name in found[0]["start"] for number in range(STEPS)]:
        steps = [result["steps"][number] for result in found]
        own = [step["local"][name] for step in steps]
        if all(gradient is None for gradient in own):
            raise Wrong(f"after backward() the module's {name} has no gradient", "Look at: which module is trained?")
        local = torch.stack([torch.zeros_like(found[0]["start"][name]) if g is None else g for g in own]).double()
        for rank, step in enumerate(steps):
            gradient = step["gradients"][name]
            calls = [*(step["working"] if how.overlaps else []), *step["finishing"]]
            if sum(call.payload_bytes for call in calls) not in (half, 2 * half):
                raise Wrong({rank: f"{describe_calls(calls)}; bf16 gradients are {half} bytes"})
            if gradient.dtype != torch.bfloat16:
                raise Wrong({rank: f"the gradient of {name} became {gradient.dtype}; the parameter is bfloat16"})
            if not close(gradient, local.mean(0), len(found) * 2**-8 * max(1.0, local.abs().max().item())):
                raise Wrong({rank: f"{name}: {first_difference(gradient, local.mean(0), 0.05)}"})
