"""Judge forward alone: its values, and that each unit is unsharded while it computes and resharded afterwards."""

from dataclasses import dataclass, field

import torch

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import first_difference, nearly_equal, tolerance_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.sharded.unit_memory import ACTIVATIONS_BYTES, SAMPLES, SLACK, bytes_of
from shared.checks.engine.sharded.unit_training import StateReader, UnitPlan, judge_start, shard
from shared.checks.engine.sharded.unit_wire import judge_building, judge_sent, of_evaluation
from shared.checks.engine.training import Draw
from shared.checks.models import unit_models
from shared.wire import instrumentation

_HINT_ON_CALLS = "Hint: are a unit's parameters unsharded each time the unit is called?"


@dataclass
class Forwarded:
    """What a rank saw in several forwards."""

    building: list[instrumentation.Call]
    outputs: list[torch.Tensor] = field(default_factory=list)
    calls: list[list[instrumentation.Call]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # with which the last forward computed
    owned: int = 0  # the number of elements of parameters()


def probe_forward(wrapper, plan: UnitPlan, recorded: tuple[bool, ...], seed: int, x, y) -> Forwarded:
    """Run forwards, with or without gradients."""
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    read_state, x = StateReader(module), x.to(device_here(), plan.dtype)
    with instrumentation.listening() as building:
        wrapped = shard(wrapper, module, plan)
    found = Forwarded(building)
    for records in recorded:
        with torch.set_grad_enabled(records), instrumentation.listening() as calls:
            output, found.state = read_state(lambda: wrapped(x))
        found.outputs.append(output.detach().cpu().clone())
        found.calls.append(calls)
        del output
    found.owned = sum(p.numel() for p in wrapped.parameters())
    return found


def judge_outputs(attempt: Attempt, plan: UnitPlan) -> None:
    """Check that a forward computes what one process computes, with gradients and without.

    Raises:
        Wrong: If it does not, or if a rank does not start with the first rank's parameters.
    """
    draw = Draw(attempt)
    results = attempt.run(probe_forward, plan, (True, False), per_rank=draw.per_rank, context=str(plan))
    found = dict(enumerate(results))
    judge_start({rank: each.state for rank, each in found.items()}, plan, draw.seeds[0], str(plan))
    module = unit_models.build(plan.model, draw.seeds[0])
    for rank, result in found.items():
        with torch.no_grad():
            expected = module(draw.shares[rank][0])
        for output, how in zip(
            result.outputs, ("with gradients", "without gradients, after one with gradients"), strict=True
        ):
            if not nearly_equal(output, expected, tolerance_of(module.parameters())):
                evidence = f"{plan}, forward {how}: {first_difference(output, expected)}"
                raise Wrong({rank: evidence}, _HINT_ON_CALLS)


def judge_forward_wire(attempt: Attempt, plan: UnitPlan) -> None:
    """Check that each forward all-gathers every unit once.

    Raises:
        Wrong: If a forward sends more or less than that.
    """
    draw = Draw(attempt)
    found = attempt.run(probe_forward, plan, (False, False, True), per_rank=draw.per_rank, context=str(plan))
    judge_building(plan, {rank: result.building for rank, result in enumerate(found)})
    for number, how in enumerate(("without gradients", "without gradients, a second time", "with gradients")):
        calls = {rank: result.calls[number] for rank, result in enumerate(found)}
        judge_sent(calls, of_evaluation(plan), f"{plan}, forward {how}")


@dataclass
class Held:
    """The bytes that a rank holds, by moment."""

    after: dict[str, int]  # in all living tensors
    peaks: dict[str, tuple[int, int]]  # at the peak of each forward: in parameters, and in all


def probe_held(wrapper, plan: UnitPlan, most: dict[str, float], seed: int, x, y) -> Held:
    """Build the wrapper and run forwards without gradients and with gradients."""
    before_bytes = living_bytes()
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    wrapped, x = shard(wrapper, module, plan), x.to(device_here(), plan.dtype)
    held, peaks = {"when built": settled_bytes(most["when built"], before_bytes)}, {}
    for moment in ("after a forward without gradients", "after a forward with gradients"):
        with torch.set_grad_enabled("without" not in moment), memory.peak(wrapped) as peak:
            output = wrapped(x)
        peaks[moment] = max(sample.held.parameters_bytes for sample in peak.samples), peak.held.total_bytes
        held[moment] = settled_bytes(most[moment], before_bytes)
        del output
    return Held(held, peaks)


def judge_forward_memory(attempt: Attempt, plan: UnitPlan) -> None:
    """Check that a forward unshards one unit at a time, and afterwards holds only what backward needs.

    Raises:
        Wrong: If a rank holds more.
    """
    own = bytes_of(plan, attempt.world_size)
    kept = own.all_units if "reshard_after_forward" in plan.options else 0
    most = {
        "when built": own.shards,
        "after a forward without gradients": own.shards,
        "after a forward with gradients": own.shards + own.root + kept + ACTIVATIONS_BYTES,
    }
    allowed = {moment: SLACK * nbytes + 10_000 for moment, nbytes in most.items()}
    draw = Draw(attempt, [SAMPLES] * attempt.world_size)
    for rank, result in enumerate(attempt.run(probe_held, plan, allowed, per_rank=draw.per_rank)):
        for moment, nbytes in result.after.items():
            if nbytes > allowed[moment]:
                evidence = f"{plan}, {moment}: {nbytes:,} bytes are held; expected {most[moment]:,.0f}"
                raise Wrong({rank: evidence}, "Hint: when is each unit resharded, and which other tensors have memory?")
        for moment, (parameters_bytes, total_bytes) in result.peaks.items():
            unsharded = kept if kept and "without" not in moment else own.unit
            expected = own.shards + own.root + unsharded
            if parameters_bytes > SLACK * expected or total_bytes > SLACK * (expected + own.unit) + ACTIVATIONS_BYTES:
                held = max(parameters_bytes, total_bytes)
                evidence = f"{plan}, in {moment.removeprefix('after ')}: {held:,} bytes are held at once"
                raise Wrong(
                    {rank: f"{evidence}; expected {expected:,.0f}"},
                    "Hint: which units have finished forward by then, and have they been resharded?",
                )
