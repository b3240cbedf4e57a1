"""How much a rank holds with a sharded optimizer: between steps, and at the peak of one.

Three counts, because each sees what the others do not. The ledger names components, and follows what a step makes;
another adds up every tensor that lives on this rank, in whichever attribute, closure or list it is kept; the third,
what is no tensor but has the numbers of one.
"""

import functools
import time

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.footprint import hidden_bytes, living_bytes, only_what_comes
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.deadlines import scaled
from shared.wire import instrumentation

MODEL = "Large"
_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads let go of a message's tensor a little after it is done
SLACK = 1.01  # fillings, Adam's counts of steps, inputs
# Of a step: what arrives, what is added up, and what Adam needs to compute an update, each of a shard's size.
# gloo's own reduce-scatter is an all-reduce of a whole copy, which is not the student's.
TEMPORARY_SHARDS = 3


def adamw_on_masters():
    """AdamW that keeps float32 masters of what it steps, as lab 06 builds it."""
    return functools.partial(earlier_piece("memory_wall", "MasterWeights"), optimizer_cls=torch.optim.AdamW)


def probe_memory(sharded, dtype: torch.dtype, with_masters: bool, most_bytes: int, seed: int, x, y) -> dict:
    """Train three steps. → bytes held between two steps, in all and by component, and at the peak of the third"""
    with only_what_comes():
        return _train(sharded, dtype, with_masters, most_bytes, seed, x, y)


def _train(sharded, dtype: torch.dtype, with_masters: bool, most_bytes: int, seed: int, x, y) -> dict:
    before_bytes = living_bytes()
    module = awkward.build(MODEL, seed, dtype).to(device_here())
    optimizer = sharded(module.parameters(), adamw_on_masters() if with_masters else torch.optim.AdamW, lr=0.01)
    x, y = x.to(device_here(), dtype), y.to(device_here(), dtype)

    def backward() -> None:
        optimizer.zero_grad()
        awkward.loss_of(module, x, y).backward()

    for _ in range(2):
        backward()
        optimizer.step()
    began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
    while held_bytes > most_bytes and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
        time.sleep(0.01)
        held_bytes = min(held_bytes, living_bytes() - before_bytes)
    held = memory.held(module, optimizer)
    backward()
    with memory.peak(module, optimizer) as peak, instrumentation.listening() as calls:
        optimizer.step()
    on_gloo = dist.get_backend() == "gloo" and any(call.op.startswith("reduce_scatter") for call in calls)
    found = {"all": held_bytes, "hidden": hidden_bytes(), "held": held}
    return found | {"peak": peak.at_peak.held, "backends_copy": on_gloo}


def judge_memory(attempt: Attempt, dtype: torch.dtype, with_masters: bool, with_peak: bool) -> None:
    """Raises: Wrong where a rank holds more than parameters, gradients, and its N-th of the optimizer's state."""
    numbers, each = sum(p.numel() for p in awkward.build(MODEL, 0).parameters()), dtype.itemsize
    size, state_bytes = attempt.world_size, (12 if with_masters else 8) * numbers / attempt.world_size
    most, least = SLACK * (2 * each * numbers + state_bytes), each * numbers + state_bytes
    found = attempt.run(probe_memory, dtype, with_masters, most, per_rank=Draw(attempt).per_rank)
    inner = "AdamW on float32 masters" if with_masters else "AdamW"
    said = f"{numbers:,} parameters of {str(dtype).removeprefix('torch.')}, {inner}, after two steps"
    for rank, result in enumerate(found):
        by_component = result["held"].by_component()
        if by_component["optimizer"] > SLACK * state_bytes:
            evidence = f"the optimizer holds {by_component['optimizer']:,} bytes; expected {state_bytes:,.0f}"
            hint = "Look at: which parameters is the inner optimizer given, and how large are they?"
            raise Wrong({rank: f"{said}, {evidence}"}, hint)
        if (held_bytes := max(result["all"], result["held"].total_bytes)) > most:
            parts = ", ".join(f"{name} {held:,}" for name, held in by_component.items() if held)
            evidence = f"{held_bytes:,} bytes are held; expected {most / SLACK:,.0f}"
            hint = "Look at: what is a second copy of, and who keeps it?"
            raise Wrong({rank: f"{said}, {evidence}. Of what can be named: {parts}"}, hint)
        if result["hidden"] > (SLACK - 1) * most:
            evidence = f"{result['hidden']:,} bytes are in arrays, bytes or storages that are no tensors"
            raise Wrong({rank: f"{said}, {evidence}"}, "Look at: whose numbers are they, and does this rank need them?")
        if result["all"] < least / SLACK:
            evidence = f"{result['all']:,} bytes are in tensors; parameters and state alone are {least:,.0f}"
            raise Wrong({rank: f"{said}, {evidence}"}, "Look at: where is this rank's part of the optimizer's state?")
        temporary = TEMPORARY_SHARDS + size * result["backends_copy"]
        most_in_step = most + temporary * each * numbers / size
        if with_peak and result["peak"].total_bytes > most_in_step:
            evidence = f"at the peak of a step {result['peak'].total_bytes:,} bytes are held; expected at most"
            hint = "Look at: what is made in a step that is as large as all parameters, and what does this rank need?"
            raise Wrong({rank: f"{said}, {evidence} {most_in_step:,.0f}"}, hint)
