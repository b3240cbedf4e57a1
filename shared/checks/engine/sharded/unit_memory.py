"""Check how much a rank holds with ZeRO-3 at every moment: its shards, and the units that are unsharded to compute.

The bytes are counted in three ways, as for ZeRO-1. The memory ledger attributes them to components and follows each
operator. The second count adds up all tensors on this rank. The third count adds up large objects that are not tensors.
"""

from dataclasses import dataclass

import torch

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import hidden_bytes, ignore_existing_objects, living_bytes, settled_bytes
from shared.checks.engine.sharded.unit_training import UnitPlan, layout_of, shard
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models

SLACK = 1.02  # for padding, Adam's step counters and the inputs
SAMPLES, ACTIVATIONS_BYTES = 2, 40_000
# Gradients in backward: those of the unit that computes, those that are packed, those in flight, and the received ones.
UNITS_OF_GRADIENTS = 4
DROPPED, FINISHED = "dropped", "kept until the end of the step, after finish_gradient_sync()"


@dataclass(frozen=True)
class Bytes:
    """The bytes of this rank's shards, and of the root, the largest unit and all units when they are unsharded."""

    shards: float
    root: int
    unit: int
    all_units: int


def bytes_of(plan: UnitPlan, world_size: int) -> Bytes:
    layout = layout_of(plan.model, plan.dtype, plan.options.get("compute_dtype"))
    units = [sum(part.computed.filled_bytes(world_size) for part in unit) for unit in layout.units]
    stored = sum(part.stored.filled_bytes(world_size) for part in layout.parts()) / world_size
    root = sum(part.computed.filled_bytes(world_size) for part in layout.root)
    return Bytes(stored, root, max(units, default=0), sum(units))


@dataclass
class Measured:
    """The bytes that a rank holds."""

    held: dict[str, int]  # in tensors, by moment
    hidden: int  # at the end, in objects that are not tensors
    samples: list[tuple[str, memory.Held]]  # in the last step: the phases, and what was held


def probe_memory(wrapper, plan: UnitPlan, most: dict[str, float], skipped: str, seed: int, x, y) -> Measured:
    """Train three steps and measure the memory of this rank.

    The last step ends in a forward without gradients, which must not unshard everything at once, either.

    Args:
        wrapper: The student's class.
        plan: How to train.
        most: The most bytes that are expected, by moment, so that a rank does not wait longer than necessary.
        skipped: What happens to a forward without a backward before the last step: DROPPED, FINISHED, or "" for none.
        seed: The seed of the model.
        x: The inputs.
        y: The targets.
    """
    ignore_existing_objects()
    return _train(wrapper, plan, most, skipped, seed, x, y)


def _train(wrapper, plan: UnitPlan, most: dict[str, float], skipped: str, seed: int, x, y) -> Measured:
    before_bytes = living_bytes()
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    wrapped = shard(wrapper, module, plan)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)
    held = {}

    def note(moment: str) -> None:
        held[moment] = settled_bytes(most[moment], before_bytes)

    def step(noting: bool) -> None:
        optimizer.zero_grad()
        loss = awkward.loss_of(wrapped, x, y)
        if noting:
            note("after forward")
        loss.backward()
        wrapped.finish_gradient_sync()
        if noting:
            note("after finish_gradient_sync()")
        optimizer.step()

    step(False)
    step(True)
    optimizer.zero_grad()
    note("after the step")
    with torch.no_grad():
        wrapped(x)
    note("after a forward without gradients")
    output = wrapped(x) if skipped else None
    if skipped == FINISHED:
        wrapped.finish_gradient_sync()
    else:
        del output
    with memory.peak(wrapped, optimizer) as peak:
        step(False)
        optimizer.zero_grad()
        with torch.no_grad():
            wrapped(x)
    return Measured(held, hidden_bytes(), [(sample.phase, sample.held) for sample in peak.samples])


def judge_memory(attempt: Attempt, plan: UnitPlan, skipped: str = "") -> None:
    """Check that a rank holds only its shards and the units that it needs.

    Raises:
        Wrong: If a rank holds more.
    """
    size, prefetch = attempt.world_size, plan.options.get("prefetch", 1)
    own = bytes_of(plan, size)
    said_plan = f"{plan}, after a forward without a backward whose output is {skipped}" if skipped else str(plan)
    here = own.root + (0 if plan.options.get("reshard_after_forward", True) else own.all_units)
    state = 3 * own.shards  # the shards and Adam's moments
    most = {
        "after forward": state + here + ACTIVATIONS_BYTES,
        "after finish_gradient_sync()": state + own.shards,
        "after the step": state,
        "after a forward without gradients": state,
    }
    allowed = {moment: SLACK * nbytes + 10_000 for moment, nbytes in most.items()}
    found = attempt.run(probe_memory, plan, allowed, skipped, per_rank=Draw(attempt, [SAMPLES] * size).per_rank)
    for rank, result in enumerate(found):
        for moment, nbytes in result.held.items():
            if nbytes > allowed[moment]:
                message = f"{plan}, {moment}: {nbytes:,} bytes are held; expected {most[moment]:,.0f}"
                raise Wrong({rank: f"{message} ({_said(own, moment, here)})"}, _HINTS[moment])
        if result.hidden > (SLACK - 1) * state + 10_000:
            evidence = f"{result.hidden:,} bytes are in arrays, bytes or storages that are not tensors"
            raise Wrong({rank: f"{plan}: {evidence}"}, "Hint: whose values are they, and does this rank need them?")
        _judge_samples(rank, result.samples, said_plan, own, here, prefetch, skipped)


def _said(own: Bytes, moment: str, here: int) -> str:
    parts = {
        "after forward": f"{here:,} of parameters",
        "after finish_gradient_sync()": f"{own.shards:,.0f} of gradients",
    }
    return ", ".join(
        [f"{own.shards:,.0f} for this rank's shards, twice as much for Adam", *filter(None, [parts.get(moment)])]
    )


_HINTS = {
    "after forward": "Hint: which parameters, and which gradients, are still needed when forward has ended?",
    "after finish_gradient_sync()": "Hint: which gradients and parameters are still in memory after backward?",
    "after the step": "Hint: which object holds a second copy of parameters or gradients?",
    "after a forward without gradients": "Hint: which line reshards the units if there is no backward?",
}
_HINT_ON_PEAK = "Hint: which units are unsharded while one computes, and which of them compute next?"
_HINT_ON_GRADIENTS = "Hint: when is each full gradient freed?"
_HINTS_ON_SKIPPED = {
    DROPPED: "The same step passes without that forward. Hint: what keeps its calls alive, so that they stay in "
    "`open_calls`?",
    FINISHED: "The same step passes without that forward. Hint: which calls are still in `open_calls` after "
    "finish_gradient_sync()?",
}


def _judge_samples(rank: int, samples: list, plan: str, own: Bytes, here: int, prefetch: int, skipped: str) -> None:
    unsharded = min(own.all_units, max(here - own.root, 0) or (1 + prefetch) * own.unit)
    most = {"parameters": own.shards + own.root + unsharded}
    most["gradients"] = own.shards + 2 * own.root + UNITS_OF_GRADIENTS * own.unit
    grown = (
        2 * own.shards + (1 + (skipped == FINISHED)) * ACTIVATIONS_BYTES + own.unit
    )  # Adam's states, activations, and a copy of one unit in flight
    message = {
        "parameters": f"{own.shards:,.0f} for this rank's shards, {own.root:,} for the root, {unsharded:,} for units",
        "gradients": f"{own.shards:,.0f} for this rank's shards, and {UNITS_OF_GRADIENTS} units of gradients",
    }
    for phase, held in samples:
        by = {"parameters": held.parameters_bytes, "gradients": held.gradients_bytes + held.buckets_bytes}
        if phase == "forward":  # the ledger counts a unit in flight as a bucket until a module computes with it
            by = {"parameters": by["parameters"]}
        for what, nbytes in by.items():
            if nbytes > SLACK * most[what]:
                evidence = f"{plan}: in {phase} {nbytes:,} bytes of {what} are held at once; expected {most[what]:,.0f}"
                hint = _HINT_ON_PEAK if what == "parameters" else _HINT_ON_GRADIENTS
                hint = _HINTS_ON_SKIPPED.get(skipped, hint)
                raise Wrong({rank: f"{evidence} ({message[what]})"}, hint)
        in_all = SLACK * (most["parameters"] + (most["gradients"] if phase in ("backward", "step") else 0) + grown)
        if phase in ("forward", "backward") and held.total_bytes > in_all:
            parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in held.by_component().items() if nbytes)
            evidence = f"{plan}: in {phase} {held.total_bytes:,} bytes are held at once; expected at most {in_all:,.0f}"
            raise Wrong(
                {rank: f"{evidence}. The memory ledger lists these: {parts}"},
                _HINTS_ON_SKIPPED.get(skipped, _HINT_ON_PEAK),
            )
