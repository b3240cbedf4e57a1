"""Check clip_grad_norm_(): one norm over the shards of all ranks, for which each rank sends one element."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls, tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.hints import where_it_raises
from shared.checks.engine.sharded.plan import Plan, RunReport, RunStep
from shared.checks.engine.sharded.training import (
    HINT_ON_STALE,
    Causes,
    alone,
    begin,
    judge_states,
    judge_step,
    probe_sharded,
    sends,
    train_and_judge,
)
from shared.checks.engine.training import Draw
from shared.checks.models import awkward

CLIPS, LEAVES = 0.05, 100.0  # the awkward models' gradients have norms between 0.3 and 10
_LARGE = 1e25  # its square is larger than any float32
_HINT_ON_SUM = "Hint: over which elements do you compute the norm, and which values can the ranks add up?"
_HINT_ON_FACTOR = "The norm is right. Hint: by which factor do you scale the gradients?"
_HINT_ON_BOUND = "This is max_norm. Hint: do you return the norm before or after the gradients are scaled?"


@dataclass
class _Clipped(Causes):
    norm: float  # before clipping

    def of(self, *found) -> str:
        below = "Hint: what happens to gradients whose norm is below max_norm?"
        return below if self.plan.max_norm is not None and self.norm <= self.plan.max_norm else super().of(*found)

    def otherwise(self) -> str:
        return _HINT_ON_FACTOR


def clip_and_judge(attempt: Attempt, plan: Plan) -> dict[int, RunReport]:
    """Train on fresh data. Returns what the probe found, by global rank.

    Raises:
        Wrong: If the norm or the parameters of a step differ from those of one process.
    """
    return train_and_judge(attempt, plan, judge=_judge_step)


def _judge_step(found: dict[int, RunReport], expected: RunStep, context: str, causes: Causes) -> None:
    plan, step_index = causes.plan, causes.step_index
    assert plan.max_norm is not None
    last_bound = plan.max_norm if step_index and "model" in plan.zero_grad else None
    norms = {rank: each.steps[step_index].norm for rank, each in found.items()}
    _judge_norms(norms, expected, context, last_bound, plan.max_norm)
    judge_step(found, expected, context, _Clipped(plan, causes.draw, step_index, expected.norm.item()))


def _judge_norms(
    norms: dict[int, torch.Tensor], expected: RunStep, context: str, last_bound: float | None, bound: float
) -> None:
    """Compare the norms of all ranks with that of one process.

    Args:
        norms: By global rank.
        expected: What one process computes in this step.
        context: What was tried.
        last_bound: The max_norm of the previous step, whose mean gradient may still be stored.
        bound: The max_norm of this step.
    """
    size, norm = len(norms), expected.norm.item()
    close_enough = 10 * tolerance_of(expected.state.values()) * max(1.0, norm)
    rounded = all(found.numel() == 1 and abs(found.item() - norm) <= 1e-6 * norm for found in norms.values())
    digits = 12 if rounded else 6
    wrong = {
        rank: f"{context}: the norm is {found.item():.{digits}g}, expected {norm:.{digits}g}"
        for rank, found in norms.items()
        if found.numel() != 1 or not abs(found.item() - norm) <= close_enough
    }
    if wrong:
        found = [norms[rank].item() for rank in norms]
        hint = _HINT_ON_SUM
        if rounded:
            hint = "It is close, but not as precise as float64. Hint: which dtype does your sum have?"
        elif len(set(found)) > 1:
            hint = "Each rank has a different norm. Hint: what must the ranks exchange to know the norm of all shards?"
        elif size > 1 and abs(found[0] - size * norm) <= close_enough * size:
            hint = f"It is {size} times too large. Hint: is it the norm of the mean or of the sum?"
        elif last_bound is not None and abs(found[0] - last_bound) <= 1e-3 * last_bound:
            hint = HINT_ON_STALE
        elif norm > bound and abs(found[0] - bound) <= 1e-3 * bound:
            hint = _HINT_ON_BOUND
        raise Wrong(wrong, hint)
    if len({found.item() for found in norms.values()}) > 1:
        hint = "Replicas drift apart if they are scaled by different norms. Hint: do all ranks add in the same order?"
        raise Wrong(f"{context}: the ranks' norms differ in the last digits", hint)


def clipping_equals_one_process(attempt: Attempt) -> None:
    plans = [Plan("TwoBranches", "SGD"), Plan("Mixed", "AdamW", split=True), Plan("Unused", "UnknownOptimizer")]
    plans.append(Plan("Tied", "SGD", micro_batches=2, zero_grad=("model",)))
    for plan in plans if attempt.world_size in (1, 2) else attempt.random.sample(plans, 1):
        clip_and_judge(attempt, replace(plan, steps=3, max_norm=CLIPS))


def small_gradients_stay(attempt: Attempt) -> None:
    clip_and_judge(attempt, Plan("Plain", "SGD", steps=3, max_norm=LEAVES))


def it_stays_inside_its_group(attempt: Attempt) -> None:
    clip_and_judge(attempt, Plan("Frozen", "SGD", steps=3, max_norm=CLIPS, in_subgroup=True))


def one_more_element_is_sent(attempt: Attempt, plans: Sequence[Plan]) -> None:
    for plan in plans:
        found = clip_and_judge(attempt, replace(plan, steps=2, max_norm=CLIPS))
        for rank, result in found.items():
            for calls in (step.calls for step in result.steps):
                in_clip = calls["clip_grad_norm_()"]
                small = [call for call in in_clip if call.op == "all_reduce" and call.payload_bytes <= 8]
                if len(small) != 1:
                    message = f"{plan}: {describe_calls(in_clip)} in clip_grad_norm_()"
                    expected = "expected one all_reduce of one element besides the gradients' reduce-scatters"
                    raise Wrong({rank: f"{message}; {expected}"}, "Hint: what can a rank add up before it sends?")
                in_clip.remove(small[0])
        sends({"backward() and clip_grad_norm_() and step()": 2})(found, plan)


def of_a_sharded_optimizer(attempt: Attempt) -> None:
    one_more_element_is_sent(attempt, [Plan("Plain"), Plan("Mixed", split=True)])


def large_gradients_do_not_overflow(attempt: Attempt) -> None:
    """Try float32 gradients whose squares are too large for float32."""
    draw, plan = Draw(attempt), Plan("Plain", "SGD", steps=1, max_norm=CLIPS, dtype=torch.float32)
    per_rank = [(seed, x, _LARGE * y) for seed, x, y in draw.per_rank]
    found = attempt.run(probe_sharded, plan, per_rank=per_rank, context=f"{plan}, large gradients")
    expected = alone(plan, plan.build(draw.seeds[0], torch.float64), draw.x, _LARGE * draw.y).steps[0].norm.item()
    for rank, result in enumerate(found):
        norm = result.steps[0].norm.item()
        if not abs(norm - expected) <= 1e-4 * expected:
            evidence = f"{plan}, float32 gradients: the norm is {norm:.6g}, expected {expected:.6g}"
            hint = _HINT_ON_SUM
            if not torch.isfinite(result.steps[0].norm):
                hint = "Hint: how large is the square of a gradient, and which dtype does it have?"
            elif abs(norm - CLIPS) <= 1e-3 * CLIPS:
                hint = _HINT_ON_BOUND
            raise Wrong({rank: evidence}, hint)


def probe_frozen(sharded, seed: int) -> tuple[str, float]:
    """Clip the gradients of a model whose parameters are all frozen. Returns the norm's type and value."""
    module = awkward.build("Plain", seed).to(device_here()).requires_grad_(False)
    norm = begin(sharded, Plan("Plain", "SGD"), module).optimizer.clip_grad_norm_(CLIPS)
    return type(norm).__name__, float(norm)


@where_it_raises({"Error": "Hint: what does clip_shards_() get from a rank that has no gradients?"})
def without_gradients_the_norm_is_zero(attempt: Attempt) -> None:
    context, seed = "a model whose parameters are all frozen", attempt.draw_seed()
    for rank, (kind, norm) in enumerate(attempt.run(probe_frozen, seed, context=context)):
        if (kind, norm) != ("Tensor", 0.0):
            evidence = f"{context}: clip_grad_norm_() returned {norm} of type {kind}; expected a tensor of 0"
            raise Wrong({rank: evidence}, "Hint: what does clip_shards_() return for an empty list?")


def probe_skipped(sharded, plan: Plan, seed: int, x, y) -> list[tuple[dict, torch.Tensor | None]]:
    """Take a step, then discard a mean gradient, as when a norm is not finite, and then take another step.

    Returns:
        The state after each of the two steps, and its norm.
    """
    run = begin(sharded, plan, awkward.build(plan.model, seed).to(device_here()))
    x, y = x.to(device_here()), y.to(device_here())
    run.step(0, x, y)
    run.backward(1, x, y)
    if plan.max_norm is not None:
        run.optimizer.clip_grad_norm_(plan.max_norm)
    elif hasattr(run.optimizer, "reduce_gradients"):  # there may be other ways to average them
        run.optimizer.reduce_gradients()
    run.step(1, awkward.other_branches(x), y)
    return [(step.state, step.norm) for step in run.steps]


def means_may_be_thrown_away(attempt: Attempt) -> None:
    _judge_skipped(attempt, None, "the gradients are averaged and then discarded")


def gradients_may_be_thrown_away(attempt: Attempt) -> None:
    _judge_skipped(attempt, CLIPS, "a gradient is clipped and then discarded")


def _judge_skipped(attempt: Attempt, max_norm: float | None, what: str) -> None:
    for whose in ("optimizer", "model"):
        plan, draw = Plan("TwoBranches", "SGD", steps=2, max_norm=max_norm, zero_grad=(whose,)), Draw(attempt)
        message = f"{plan}; before step 2, {what}"
        found = attempt.run(probe_skipped, plan, per_rank=draw.per_rank, context=message)
        plain = alone(plan, awkward.build(plan.model, draw.seeds[0]), draw.x, draw.y).steps
        first = "" if max_norm is None else _HINT_ON_FACTOR
        second = HINT_ON_STALE if whose == "model" else "Hint: what does zero_grad() not clear?"
        before = {}
        for step_index, (context, last_bound, hint) in enumerate(
            ((f"{plan}, step 1", None, first), (message, max_norm, second))
        ):
            states, norms = ({rank: each[step_index][part] for rank, each in enumerate(found)} for part in (0, 1))
            if max_norm is not None:
                _judge_norms(norms, plain[step_index], context, last_bound, max_norm)
            judge_states(states, plain[step_index].state, before, context, hint=hint)
            before = states
