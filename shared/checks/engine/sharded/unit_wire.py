"""Check what ZeRO-3 sends: two all-gathers of each unit, for forward and for backward, and one reduce-scatter.

The root, and every unit that stays unsharded from forward to backward, is all-gathered once.
"""

import contextlib
from dataclasses import replace

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.training import train
from shared.checks.engine.sharded.unit_training import (
    UnitPlan,
    UnitReport,
    layout_of,
    new_optimizer,
    probe_units,
    shard,
    take_step,
)
from shared.checks.engine.sharded.wire import Flat, judge_rounds
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.wire.instrumentation import Call

_NOT_REACHED = {"Frozen": (0,)}  # units that backward does not reach
_CALLS = {"Twice": (2, 2, 1)}  # how often a forward calls each unit
_TOO_LITTLE = "all ranks together send"
_HINT_ON_LITTLE = "Hint: how many times in a step does a rank need the other ranks' shards of a unit?"
_HINT_ON_FORWARD = "It also sends the gradients. Hint: when does forward() call finish_gradient_sync() itself?"
HINT_ON_MUCH = (
    "Hint: which units are all-gathered, and how often? And which part of a gradient does the owner of a shard need?"
)


def of_training(plan: UnitPlan) -> list[Flat]:
    """Return the flat tensors that are all-gathered or reduced in a step, each as many times as that happens."""
    layout = layout_of(plan.model, plan.dtype, plan.options.get("compute_dtype"))
    kept = not plan.options.get("reshard_after_forward", True)
    sent: list[Flat] = []
    for index, unit in enumerate((*layout.units, layout.root)):
        reached = index not in _NOT_REACHED.get(plan.model, ()) and index < len(layout.units)
        stays = kept or (plan.keeps_last and index == len(layout.units) - 1)
        for part in unit:
            sent += [part.computed] * (_calls(plan, index) + (reached and not stays) + part.trainable)
    return sent * plan.micro_batches


def of_evaluation(plan: UnitPlan) -> list[Flat]:
    layout = layout_of(plan.model, plan.dtype, plan.options.get("compute_dtype"))
    units = enumerate((*layout.units, layout.root))
    return [part.computed for index, unit in units for part in unit for _ in range(_calls(plan, index))]


def _calls(plan: UnitPlan, index: int) -> int:
    calls = _CALLS.get(plan.model, ())
    return calls[index] if index < len(calls) else 1


def judge_sent(calls: dict[int, list], flats: list[Flat], context: str) -> None:
    """Check what the ranks send, with hints for units.

    Raises:
        Wrong: If it is not what the flat tensors need.
    """
    try:
        judge_rounds(calls, flats, 1, context)
    except Wrong as wrong:
        if _TOO_LITTLE in wrong.evidence and "no message" not in wrong.evidence:
            wrong.hint = _HINT_ON_LITTLE
        elif "which bytes must a rank send" in wrong.hint:
            wrong.hint = HINT_ON_MUCH
        raise


def judge_building(plan: UnitPlan, building: dict[int, list[Call]]) -> None:
    """Check that building the wrapper sends each parameter and buffer at most once, with padding.

    Raises:
        Wrong: If more is sent.
    """
    parts, size = layout_of(plan.model, plan.dtype).parts(), len(building)
    buffers = sum(each.nbytes for each in unit_models.build(plan.model, 0, plan.dtype).buffers())
    most = buffers + sum(part.stored.filled_bytes(size) for part in parts)
    for rank, calls in building.items():
        if sum(call.payload_bytes for call in calls) > most:
            message = f"{plan}, in the constructor: {describe_calls(calls)}; expected at most {most} bytes"
            raise Wrong({rank: message}, "Hint: is each parameter sent once?")


def judge_unit_traffic(attempt: Attempt, plans: list[UnitPlan]) -> None:
    """Check that each step, and each forward without gradients, sends what it needs and no more.

    Raises:
        Wrong: If one does not.
    """
    for plan in plans:
        judge_traffic(plan, train(attempt, plan, Draw(attempt), probe_units))


def judge_traffic(plan: UnitPlan, found: dict[int, UnitReport]) -> None:
    """Check what probe_units has found, by global rank.

    Raises:
        Wrong: If a step, or a forward without gradients, sends more or less than it needs.
    """
    judge_building(plan, {rank: result.building for rank, result in found.items()})
    _judge_evaluating(plan, {rank: result.evaluating for rank, result in found.items()}, "before the first step")
    for number in range(plan.steps):
        steps = {rank: result.steps[number] for rank, result in found.items()}
        training = {rank: step.training for rank, step in steps.items()}
        judge_sent(training, of_training(plan), f"{plan}, step {number + 1}")
        _judge_evaluating(plan, {rank: step.evaluating for rank, step in steps.items()}, f"after step {number + 1}")


def _judge_evaluating(plan: UnitPlan, calls: dict[int, list], when: str) -> None:
    gathered = of_evaluation(plan)
    try:
        judge_sent(calls, gathered, f"{plan}, a forward without gradients {when}")
    except Wrong as wrong:
        parts = layout_of(plan.model, plan.dtype, plan.options.get("compute_dtype")).parts()
        reduced = [part.computed for part in parts if part.trainable]
        with contextlib.suppress(Wrong):
            judge_rounds(calls, gathered + reduced, 1, "")
            wrong.hint = _HINT_ON_FORWARD
        raise


def probe_turns(wrapper, plan: UnitPlan, seed: int, x, y) -> list[list[Call]]:
    """Train without a forward between the steps. Returns the calls of each step."""
    wrapped = shard(wrapper, unit_models.build(plan.model, seed).to(device_here()), plan)
    optimizer, x, y = new_optimizer(plan, wrapped), x.to(device_here()), y.to(device_here())
    return [take_step(wrapped, optimizer, plan, x, y).training for _ in range(plan.steps)]


def nothing_travels_in_vain(attempt: Attempt) -> None:
    """Let the order of the units change, and one not be called. Its gradients are zeros, but are still reduced."""
    layout = layout_of("Turns")
    for prefetch in (1, 2):
        plan = UnitPlan("Turns", steps=4, options={"prefetch": prefetch})
        found = attempt.run(probe_turns, plan, per_rank=Draw(attempt).per_rank, context=str(plan))
        for number in range(1, plan.steps + 1):
            called = (0, 2) if number % 3 == 0 else (0, 1, 2)
            flats = [part.computed for part in layout.root] * 2
            for index, unit in enumerate(layout.units):
                flats += [part.computed for part in unit] * (3 if index in called else 1)
            calls = {rank: steps[number - 1] for rank, steps in enumerate(found)}
            judge_sent(calls, flats, f"{plan}, step {number}, which calls {len(called)} blocks")


def one_element_more_travels(attempt: Attempt) -> None:
    """A norm needs one element of each rank, in one collective."""
    for model in ("Mixed", "Blocks"):
        plan = UnitPlan(model, steps=2, max_norm=0.05)
        for rank, result in train(attempt, plan, Draw(attempt), probe_units).items():
            for number, step in enumerate(result.steps, 1):
                calls = step.clipping
                most = 2 if attempt.world_size == 1 else attempt.world_size  # an all_gather is fine, too
                if len(calls) > 1 or sum(call.payload_bytes for call in calls) > 8 * most:
                    message = f"{plan}, clip_grad_norm_ in step {number}: {describe_calls(calls)}; expected one element"
                    raise Wrong({rank: message}, "Hint: what must a rank know about the other ranks' shards?")


def bf16_halves_what_travels(attempt: Attempt) -> None:
    """float32 parameters that compute in bfloat16 need half the bytes, with shards and their gradients in float32.

    A bfloat16 model stays in bfloat16 throughout.
    """
    computing = UnitPlan("Blocks", dtype=torch.float32, steps=2, options={"compute_dtype": torch.bfloat16})
    for plan in (UnitPlan("Blocks", dtype=torch.bfloat16, steps=2), replace(computing, micro_batches=3)):
        found = train(attempt, plan, Draw(attempt), probe_units)
        for number in range(plan.steps):
            training = {rank: result.steps[number].training for rank, result in found.items()}
            judge_sent(training, of_training(plan), f"{plan}, step {number + 1}")
        for rank, result in found.items():
            hint = "Hint: in which dtype does the optimizer compute?"
            wrong = {kind for kinds in result.dtypes for kind in kinds if kind not in (plan.dtype, None)}
            if wrong:
                message = f"{plan}: parameters() or their gradients are {', '.join(map(str, wrong))}"
                raise Wrong({rank: f"{message}; expected {plan.dtype}, as in the model"}, hint)
            if plan.dtype == torch.float32 and result.few_digits:
                message = f"{plan}: after the last micro-batch, the gradients are rounded to bfloat16"
                raise Wrong({rank: f"{message}; expected the precision of float32"}, hint)
