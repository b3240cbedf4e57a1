"""Train a sharded optimizer on ranks and compare it with a plain one in one process that has all the data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, first_difference, nearly_equal, tolerance_of, total_of
from shared.checks.engine.failures import Wrong, expect
from shared.checks.engine.sharded.plan import LATE_STEP, Plan, Report, Run, RunReport, RunStep
from shared.checks.engine.sharded.wire import HINT_ON_AGAIN, Phases, judge_traffic
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of
from shared.checks.engine.training import Draw
from shared.checks.models import awkward

Found = TypeVar("Found")  # what a probe returns on a rank that takes part
_LIBRARIES = ("torch.distributed.optim", "torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")
HINT_ON_SHARDS = "Hint: is the gradient of this shard the mean of the same elements, in the same order?"
HINT_ON_OWNERS = "Hint: is this element in the rank's own shard, or does the rank get it from another one?"
HINT_ON_STALE = (
    "model.zero_grad() does not call reset(). Hint: in that case, which line discards the last mean, and which "
    "one the old gradients?"
)
_HINTS_ON_REPLACED = {
    "the module": "Hint: is every nn.Parameter still the same object, even if its memory is replaced?",
    "param_groups": "Hint: which line changes an entry of a param group, and who else uses the same dict?",
}


def begin(piece, plan: Plan, module, group=None, loaded: dict | None = None) -> Run:
    """Build the student's optimizer or wrapper on this rank."""
    reject_libraries([piece])
    further = {} if group is None else {"group": group}
    run = plan.begin(piece, module, further, alone=False, off=dist.get_rank(group), loaded=loaded)
    reject_libraries(type(thing) for thing in memory._reached([run.optimizer]))
    return run


def reject_libraries(types) -> None:
    """Reject classes of libraries that shard optimizers or models.

    Raises:
        AssertionError: If there is one.
    """
    for each in types:
        library = [base for base in getattr(each, "__mro__", ()) if base.__module__.startswith(_LIBRARIES)]
        if library:
            raise AssertionError(f"your code uses {library[0].__name__}: write it by hand")


def probe_sharded(piece, plan: Plan, seed: int, x, y) -> RunReport | None:
    """Train. Returns what the run has recorded, or None on a rank that does not take part."""
    group, member = join_subgroup(plan.in_subgroup)
    if not member:
        return None
    module = awkward.build(plan.model, seed, plan.dtype).to(device_here())
    if not plan.wraps:  # an optimizer does not know the buffers, so the training loop makes them equal
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
    own = {id(p) for p in module.parameters()}
    run, x = begin(piece, plan, module, group), x.to(device_here(), plan.dtype)
    start = awkward.state_of(run.module)
    run.train(x, y.to(device_here(), plan.dtype))
    return replace(run.report(own, x), start=start)


def reference(plan: Plan, draw: Draw, members: list[int], samples_of: list[int] | None = None) -> Run:
    """Train with a plain optimizer in this process.

    Args:
        plan: How to train.
        draw: The seeds and samples.
        members: The ranks that take part. The model is that of the first one.
        samples_of: The ranks whose samples to train on; by default, all members.
    """
    dtype = torch.float64 if plan.dtype.itemsize < 4 else plan.dtype
    return alone(plan, plan.build(draw.seeds[members[0]], dtype), *draw.samples_of(samples_of or members))


def plain(plan: Plan, module, loaded: dict | None = None) -> Run:
    """Give the module a plain optimizer in this process, before the first step."""
    return Run(module, lambda params, cls, **settings: cls(params, **settings), plan, loaded=loaded)


def alone(plan: Plan, module, x, y, loaded: dict | None = None) -> Run:
    """Train a plain optimizer in this process."""
    return plain(plan, module, loaded).train(x, y)


def on_one_batch(plan: Plan, draw: Draw) -> Run:
    """Train a plain optimizer in this process on the same batch in each step."""
    run = plain(plan, plan.build(draw.seeds[0]))
    for step_index in range(plan.steps):
        run.step(step_index, draw.x, draw.y)
    return run


def describe_plan(attempt: Attempt, plan: Plan) -> str:
    return f"{called_alone(attempt)}, {plan}" if plan.in_subgroup else str(plan)


def train(attempt: Attempt, plan: Plan, draw: Draw, probe: Callable[..., Found | None]) -> dict[int, Found]:
    """Run the probe. Returns its results by global rank, for the ranks that take part."""
    results = attempt.run(probe, plan, per_rank=draw.per_rank, context=describe_plan(attempt, plan))
    return {rank: results[rank] for rank in members_of(attempt, plan.in_subgroup)}


def train_and_judge(attempt: Attempt, plan: Plan, probe=probe_sharded, judge=None) -> dict[int, RunReport]:
    """Train on fresh data. Returns what the probe found, by global rank.

    Args:
        attempt: The attempt.
        plan: How to train.
        probe: The probe.
        judge: Judges a step, with the arguments of judge_step(), which it is by default.

    Raises:
        Wrong: If a rank's state differs after a step from that of one process.
    """
    if plan.max_norm is None:
        factor = attempt.sizes.learning_rate_factor
        plan = replace(plan, steps=attempt.sizes.steps(plan.steps), learning_rate_factor=factor)
    draw, context = Draw(attempt), describe_plan(attempt, plan)
    found = train(attempt, plan, draw, probe)
    _reject_replaced_parameters(found, context)
    steps = reference(plan, draw, list(found)).steps
    for step_index, expected in enumerate(steps):
        (judge or judge_step)(found, expected, f"{context}, step {step_index + 1}", Causes(plan, draw, step_index))
        losses = {rank: each.steps[step_index].loss for rank, each in found.items()}
        if plan.closure and not _mean_is(losses, expected.loss, tolerance_of(expected.state.values())):
            message = f"{context}: step(closure) returned {losses}; expected the value that closure() returned"
            raise Wrong(message, "Hint: what happens to the result of closure()?")
    judge_evaluation(plan, draw, found, steps, context)
    return found


def trains(
    plans: Sequence[Plan] | Callable[[Attempt], Sequence[Plan]],
    *claims: Callable[[dict[int, RunReport], Any], None],  # the second argument is the plan
    probe=probe_sharded,
) -> Callable[[Attempt], None]:
    """Return the judge of a check: every training equals that of one process, and the claims hold for it.

    Args:
        plans: The trainings, or a function that draws them.
        claims: Functions of what the probe found, by global rank, and the plan.
        probe: The probe.
    """

    def judge(attempt: Attempt) -> None:
        for plan in plans(attempt) if callable(plans) else plans:
            found = train_and_judge(attempt, plan, probe)
            for claim in claims:
                claim(found, plan)

    return judge


def sends(rounds_in: dict[str, int]) -> Callable[[dict[int, RunReport], Plan], None]:
    """Return the claim that each step sends the flat tensors this many times in each phase: see judge_traffic()."""
    return lambda found, plan: judge_traffic(
        sent_in(found), plan.flats(), str(plan), rounds_in, HINT_ON_AGAIN * plan.wraps
    )


def sent_in(found: dict[int, RunReport]) -> dict[int, list[Phases]]:
    """Return what each rank sent in each step, by global rank."""
    return {rank: [step.calls for step in result.steps] for rank, result in found.items()}


def judge_building(found: dict[int, RunReport], plan: Plan) -> None:
    """Check that the constructor sends each parameter, and a wrapper's also each buffer, at most once.

    Raises:
        Wrong: If it sends more bytes.
    """
    module = awkward.build(plan.model, 0)
    other = [*(p for p in module.parameters() if not p.requires_grad), *(module.buffers() if plan.wraps else ())]
    most = sum(each.nbytes for each in other) + sum(flat.filled_bytes(len(found)) for flat in plan.flats())
    expect(
        {rank: result.building for rank, result in found.items()},
        lambda calls: sum(call.payload_bytes for call in calls) <= most,
        lambda calls: f"{plan}, in the constructor: {describe_calls(calls)}; expected at most {most} bytes",
        f"Hint: how many times is each parameter{' and each buffer' * plan.wraps} sent?",
    )


def starts_equal(found: dict[int, RunReport], plan: Plan) -> None:
    """Check that all ranks start with the same bits.

    Raises:
        Wrong: If one does not.
    """
    frozen = [name for name, p in awkward.build(plan.model, 0).named_parameters() if not p.requires_grad]
    for rank, result in found.items():
        for name, expected in found[min(found)].start.items():
            if not torch.equal(result.start[name], expected):
                hint = "Hint: which parameters does the model use although the optimizer never updates them?"
                hint = "Hint: what does a module hold besides trainable parameters?" if plan.wraps else hint
                evidence = f"{awkward.describe(plan.model)}: before the first step, {name} differs from rank 0's"
                raise Wrong({rank: evidence}, hint if plan.wraps or name in frozen else "")


def _reject_replaced_parameters(found: dict[int, RunReport], context: str) -> None:
    wrong = {rank: result.replaced for rank, result in found.items() if result.replaced}
    if wrong:
        where = wrong[min(wrong)]
        evidence = f"{context}: nn.Parameter objects in {where} were replaced"
        raise Wrong(dict.fromkeys(wrong, evidence), _HINTS_ON_REPLACED[where])


def _mean_is(losses: dict, expected: torch.Tensor, tolerance: float) -> bool:
    """Return whether the mean of these losses is the expected one. All ranks have equally many samples."""
    if not all(isinstance(each, torch.Tensor) and each.numel() == 1 for each in losses.values()):
        return False
    mean = total_of(each.detach().cpu().double().reshape(()) for each in losses.values()) / len(losses)
    return nearly_equal(mean, expected.double().reshape(()), tolerance)


def judge_step(found: Mapping[int, Report], reference: RunStep, context: str, causes: "Causes") -> None:
    """Compare the state after one step, on every rank, with that of one process.

    Args:
        found: What the probe found, by global rank.
        reference: What Run has recorded of this step.
        context: What was tried.
        causes: The possible causes, for the index of the step.

    Raises:
        Wrong: If a parameter or a buffer differs.
    """
    step_index = causes.step_index
    states = {rank: each.steps[step_index].state for rank, each in found.items()}
    before = {rank: each.steps[step_index - 1].state if step_index else each.start for rank, each in found.items()}
    judge_states(states, reference.state, before, context, causes)
    for (rank, state), buffers in zip(states.items() if reference.buffers else (), reference.buffers, strict=True):
        for name, expected in buffers.items():
            if not nearly_equal(state[name], expected, tolerance_of(buffers.values())):
                hint = awkward.HINT_ON_FORWARDS if awkward.is_statistic(name) else ""
                raise Wrong({rank: f"{context}: {name}, {first_difference(state[name], expected)}"}, hint)


def judge_evaluation(plan: Plan, draw: Draw, found: Mapping[int, Report], steps: list[RunStep], context: str) -> None:
    """Compare the ranks' outputs in eval mode after the last step with those of one process.

    Probes without a wrapper do not evaluate.

    Raises:
        Wrong: If an output differs.
    """
    for index, (rank, result) in enumerate(found.items()):
        if plan.model not in awkward.HAVE_MODES or result.evaluated is None:
            continue
        state = steps[-1].state | (steps[-1].buffers[index] if steps[-1].buffers else {})
        expected = awkward.evaluate(plan.build(0), state, draw.shares[rank][0])
        if not nearly_equal(result.evaluated, expected):
            message = f"{context}: after eval(), the output is wrong: {first_difference(result.evaluated, expected)}"
            raise Wrong({rank: message}, awkward.HINT_ON_MODES)


@dataclass
class Causes:
    """Find the mistake that gives a wrong result, by comparing the result with trainings that make that mistake."""

    plan: Plan
    draw: Draw
    step_index: int

    def of(self, rank: int, found: torch.Tensor, name: str, members: list[int], tolerance: float) -> str:
        size, plan = len(members), self.plan
        others = [
            (
                plan,
                [rank],
                "It is the result for this rank's samples only. Hint: which line adds the other ranks' gradients?",
            ),
            (
                replace(plan, loss_scale=size),
                members,
                f"The gradients are {size} times too large. Hint: are they summed or averaged?",
            ),
            (
                replace(plan, loss_scale=1 / size),
                members,
                f"The gradients are {size} times too small. Hint: how many times are they divided?",
            ),
        ]
        if plan.scheduler:
            message = (
                "It is the result with the settings of step 1. Hint: how does the inner optimizer get the new settings?"
            )
            others.append((replace(plan, scheduler=""), members, message))
        if plan.split:
            message = "Hint: which settings does each param group have, and does the inner optimizer have them too?"
            others.append((replace(plan, split=False), members, message))
        if plan.max_norm is not None:
            others.append(
                (
                    replace(plan, max_norm=1e9),
                    members,
                    "It is the result without clipping. Hint: which tensors are scaled, and which does step() use?",
                )
            )
        for other, whose, hint in others:
            if size > 1 or whose == members:
                expected = reference(other, self.draw, members, whose).steps[self.step_index].state
                if name in expected and nearly_equal(found, expected[name], tolerance):
                    return hint
        return self.otherwise()

    def otherwise(self) -> str:
        """Return the hint for values that match no known mistake."""
        plan = self.plan
        if "model" in plan.zero_grad and self.step_index:
            return HINT_ON_STALE
        if plan.late and self.step_index >= LATE_STEP:
            return "Hint: what does __init__() do with its parameters that add_param_group() does not do?"
        if plan.split or plan.scheduler:
            return "Hint: which settings does each param group have by now, and does the inner optimizer have them?"
        return plan.hint_on_later_steps if self.step_index else ""


def judge_states(
    states: dict[int, dict], reference: dict, before: dict, context: str, causes: Causes | None = None, hint: str = ""
) -> None:
    """Compare every rank's state after a step with that of one process.

    Args:
        states: The states after the step, by global rank.
        reference: The state of one process after the step.
        before: The states before the step, by global rank; empty if what is judged is not a step.
        context: What was tried.
        causes: The possible causes.
        hint: The hint for values that match no known mistake.

    Raises:
        Wrong: If they differ.
    """
    tolerance, members = tolerance_of(reference.values()), list(states)
    for name, expected in reference.items():
        wrong = {
            rank: f"{context}: {name}, {first_difference(state[name], expected, tolerance)}"
            for rank, state in states.items()
            if not nearly_equal(state[name], expected, tolerance) or not state[name].isfinite().all()
        }
        if not wrong:
            continue
        rank = min(wrong)
        found = states[rank][name]
        unchanged = before and _differs_where_unchanged(found, expected, before[rank][name], tolerance)
        if len(wrong) < len(states):
            cause = "The other ranks are right. Hint: which shards does each rank receive, and from which rank?"
        elif before and torch.equal(found, before[rank][name]):
            hint = "whose memory does the model use, and is every shard reduced, updated and sent?"
            cause = f"This step did not change it. Hint: {hint}"
        else:
            cause = causes.of(rank, found, name, members, tolerance) if causes and found.shape == expected.shape else ""
        raise Wrong(wrong, cause or hint or (HINT_ON_OWNERS if unchanged else HINT_ON_SHARDS))


def _differs_where_unchanged(
    found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor, tolerance: float
) -> bool:
    """Return whether all elements are right except for some that still have their value from before the step."""
    if not found.shape == expected.shape == before.shape:
        return False
    return nearly_equal(torch.where(found == before, expected, found), expected, tolerance)
