"""A sharded optimizer trained on ranks, and what a plain one in one process gets from all the data."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import close, first_difference, tolerance_of
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.plan import LATE_STEP, Plan, Run
from shared.checks.engine.subgroups import SUBGROUPS, called_alone, join_subgroup
from shared.checks.engine.training import Draw
from shared.checks.models import awkward

_LIBRARIES = ("torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")
LOOK_AT_SHARDS = "Look at: is the gradient of this shard the mean of the same shard, in the same order?"
LOOK_AT_THE_PAST = "The steps before are right. Look at: what does an optimizer keep from step to step?"
LOOK_AT_STALE = "model.zero_grad() does not call reset(). Look at: which line drops the last mean then?"


def begin(sharded, plan: Plan, module, group=None, loaded: dict | None = None) -> Run:
    """Build the student's optimizer on this rank."""
    further = {} if group is None else {"group": group}

    def make(params, cls, **settings):
        return sharded(params, cls, **settings, **further)

    refuse_libraries([sharded])
    run = Run(module, make, plan, False, dist.get_rank(group), loaded)
    refuse_libraries(type(thing) for thing in memory._reached([run.optimizer]))
    return run


def refuse_libraries(types) -> None:
    """Raises AssertionError if a library's class is among them."""
    for each in types:
        library = [base for base in getattr(each, "__mro__", ()) if base.__module__.startswith(_LIBRARIES)]
        if library:
            raise AssertionError(f"{library[0].__name__} does the work here: write it by hand")


def probe_sharded(sharded, plan: Plan, seed: int, x, y) -> dict:
    """Train. Returns the state that the ranks start with, and what each step did."""
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return {"outside": True}
    run = begin(sharded, plan, awkward.build(plan.model, seed, plan.dtype).to(device_here()), group)
    start, own = awkward.state_of(run.module), {id(p) for p in run.module.parameters()}
    theirs = {id(p) for each in run.optimizer.param_groups for p in each["params"]}
    run.train(x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype))
    dtypes = {name: p.dtype for name, p in run.module.named_parameters()}
    left = {id(p) for p in run.module.parameters()} == own >= theirs
    return {"start": start, "steps": run.steps, "building": run.building, "dtypes": dtypes, "left": left}


def reference(plan: Plan, draw: Draw, members: list[int]) -> Run:
    """Train a plain optimizer in this process on the members' samples."""
    return alone(plan, awkward.build(plan.model, draw.seeds[members[0]]), *draw.samples_of(members))


def alone(plan: Plan, module, x, y, loaded: dict | None = None) -> Run:
    """Train a plain optimizer in this process."""
    return Run(module, lambda params, cls, **settings: cls(params, **settings), plan, loaded=loaded).train(x, y)


def train_and_judge(attempt: Attempt, plan: Plan, probe=probe_sharded) -> dict[int, dict]:
    """Train on fresh data. Returns what the probe found, by global rank.

    Raises:
        Wrong: unless every rank has after every step what one process has.
    """
    draw = Draw(attempt)
    members = SUBGROUPS[attempt.world_size] if plan.in_subgroup else list(range(attempt.world_size))
    context = f"{called_alone(attempt)}, {plan}" if plan.in_subgroup else str(plan)
    results = attempt.run(probe, plan, per_rank=draw.per_rank, context=context)
    found = {rank: results[rank] for rank in members}
    for number, want in enumerate(reference(plan, draw, members).steps):
        states = {rank: each["steps"][number]["state"] for rank, each in found.items()}
        before = {rank: each["steps"][number - 1]["state"] if number else each["start"] for rank, each in found.items()}
        judge_states(states, want["state"], before, f"{context}, step {number + 1}", Causes(plan, draw, number))
        losses = {rank: each["steps"][number]["loss"] for rank, each in found.items()}
        if plan.closure and not _mean_is(losses, want["loss"], tolerance_of(want["state"].values())):
            said = f"{context}: step(closure) returned {losses}; expected what closure() returned"
            raise Wrong(said, "Look at: what happens to the result of closure()?")
    if not all(each["left"] for each in found.values()):
        hint = "Look at: is every nn.Parameter still the same object, with other memory?"
        raise Wrong(f"{context}: the module, or param_groups, holds other nn.Parameters than before", hint)
    return found


def _mean_is(losses: dict, want: torch.Tensor, tolerance: float) -> bool:
    """Tell whether these are the losses that the closures of ranks with equally many samples returned."""
    if not all(isinstance(each, torch.Tensor) and each.numel() == 1 for each in losses.values()):
        return False
    mean = sum(each.detach().cpu().double().reshape(()) for each in losses.values()) / len(losses)
    return close(mean, want.double().reshape(()), tolerance)


@dataclass
class Causes:
    """Other trainings to compare with when something is wrong: which mistake gives this result?"""

    plan: Plan
    draw: Draw
    number: int  # of the step

    def of(self, rank: int, found: torch.Tensor, name: str, members: list[int], tolerance: float) -> str:
        size, plan = len(members), self.plan
        others = [
            (
                plan,
                [rank],
                "It is what this rank's samples alone give. Look at: which line brings in the other ranks' gradients?",
            ),
            (
                replace(plan, loss_scale=size),
                members,
                f"The gradients are {size} times too large. Look at: are they summed, or averaged?",
            ),
            (
                replace(plan, loss_scale=1 / size),
                members,
                f"The gradients are {size} times too small. Look at: how many times are they divided?",
            ),
        ]
        if plan.scheduler:
            said = "It is what the first step's settings give. Look at: how does the inner optimizer get new ones?"
            others.append((replace(plan, scheduler=""), members, said))
        if plan.split:
            said = "Look at: which settings does each param group have, and does the inner optimizer have them too?"
            others.append((replace(plan, split=False), members, said))
        if plan.max_norm is not None:
            others.append(
                (
                    replace(plan, max_norm=1e9),
                    members,
                    "It is the result without clipping. Look at: which tensors are scaled, and which are used?",
                )
            )
        for other, whose, hint in others:
            if size > 1 or whose == members:
                want = reference(other, self.draw, whose).steps[self.number]["state"][name]
                if close(found, want, tolerance):
                    return hint
        if "model" in plan.zero_grad and self.number:
            return LOOK_AT_STALE
        if plan.late and self.number >= LATE_STEP:
            return "Look at: what happened to the first parameters in __init__(), but not to those that join later?"
        if plan.split or plan.scheduler:
            return "Look at: which settings does each param group have by now, and does the inner optimizer have them?"
        return LOOK_AT_THE_PAST if self.number else ""


def judge_states(
    states: dict[int, dict], want: dict, before: dict, context: str, causes: Causes | None = None, hint: str = ""
) -> None:
    """Compare every rank's state after a step with that of one process.

    Args:
        states: by global rank, after the step.
        before: by global rank, before the step.
        hint: for values that do not tell the cause.

    Raises:
        Wrong: if they differ.
    """
    tolerance, members = tolerance_of(want.values()), list(states)
    for name, expected in want.items():
        wrong = {
            rank: f"{context}: {name}, {first_difference(state[name], expected, tolerance)}"
            for rank, state in states.items()
            if not close(state[name], expected, tolerance) or not state[name].isfinite().all()
        }
        if not wrong:
            continue
        rank = min(wrong)
        found = states[rank][name]
        if len(wrong) < len(states):
            cause = "The other ranks are right. Look at: which shard reaches which rank, and from where?"
        elif torch.equal(found, before[rank][name]):
            cause = "This step did not change it. Look at: which memory does the model use, and is every shard sent?"
        else:
            cause = causes.of(rank, found, name, members, tolerance) if causes and found.shape == expected.shape else ""
        raise Wrong(wrong, cause or hint or LOOK_AT_SHARDS)
