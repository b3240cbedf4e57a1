"""Judge how much memory a rank holds with a sharded optimizer, between steps and at the peak of a step.

There are three counts, because each sees something that the others miss. The memory ledger names components and follows
the allocations of a step. The second count adds up every tensor that lives on this rank, in whichever attribute,
closure or list it is kept. The third finds objects that are not tensors but may hold the values of one.
"""

import copy
import functools
import time

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import hidden_bytes, ignore_existing_objects, living_bytes
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.deadlines import scaled
from shared.wire import instrumentation

MODEL = "Large"
_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release a message's tensor a little after the message is complete
SLACK = 1.01  # padding, Adam's step counters, inputs
# In a step: a receive buffer, a buffer for the sum, and Adam's temporary for the update, each of a shard's size.
# gloo's own reduce-scatter is an all-reduce of a full copy, which is not the student's fault.
TEMPORARY_SHARDS = 3


def adamw_on_masters():
    """Return AdamW with float32 master weights, as lab 06 builds it."""
    return functools.partial(earlier_piece("memory_wall", "MasterWeights"), optimizer_cls=torch.optim.AdamW)


def probe_memory(sharded, dtype: torch.dtype, with_masters: bool, most_bytes: int, seed: int, x, y) -> dict:
    """Train three steps. Return the bytes held after two, in all and by component, and the peak of the third."""
    ignore_existing_objects()
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
    """Judge that a rank holds the parameters, the gradients, and its shard of the optimizer state.

    Raises:
        Wrong: If it holds more, or less.
    """
    numel, itemsize = sum(p.numel() for p in awkward.build(MODEL, 0).parameters()), dtype.itemsize
    size, state_bytes = attempt.world_size, (12 if with_masters else 8) * numel / attempt.world_size
    most, least = SLACK * (2 * itemsize * numel + state_bytes), itemsize * numel + state_bytes
    found = attempt.run(probe_memory, dtype, with_masters, most, per_rank=Draw(attempt).per_rank)
    inner = "AdamW on float32 masters" if with_masters else "AdamW"
    context = f"{numel:,} {str(dtype).removeprefix('torch.')} parameters, {inner}, after two steps"
    for rank, result in enumerate(found):
        by_component = result["held"].by_component()
        if by_component["optimizer"] > SLACK * state_bytes:
            evidence = f"the optimizer holds {by_component['optimizer']:,} bytes; expected {state_bytes:,.0f}"
            hint = "Hint: which parameters does the inner optimizer get, and how large are they?"
            raise Wrong({rank: f"{context}, {evidence}"}, hint)
        if (held_bytes := max(result["all"], result["held"].total_bytes)) > most:
            named = ", ".join(f"{name} {held:,}" for name, held in by_component.items() if held)
            evidence = f"{held_bytes:,} bytes are held; expected {most / SLACK:,.0f}"
            hint = "Hint: which tensors exist twice, and what keeps them alive?"
            raise Wrong({rank: f"{context}, {evidence}. Of these, by component: {named}"}, hint)
        if result["hidden"] > (SLACK - 1) * most:
            evidence = (
                f"{result['hidden']:,} bytes are in NumPy arrays, bytes objects or storages rather than "
                "tensors; expected none"
            )
            raise Wrong(
                {rank: f"{context}, {evidence}"},
                "Hint: which values do these objects hold, and does this rank need them?",
            )
        if result["all"] < least / SLACK:
            evidence = (
                f"{result['all']:,} bytes are in tensors, but the parameters and this rank's state alone need "
                f"{least:,.0f}"
            )
            raise Wrong({rank: f"{context}, {evidence}"}, "Hint: where is this rank's shard of the optimizer state?")
        temporary = TEMPORARY_SHARDS + size * result["backends_copy"]
        most_in_step = most + temporary * itemsize * numel / size
        if with_peak and result["peak"].total_bytes > most_in_step:
            evidence = f"at the peak of a step {result['peak'].total_bytes:,} bytes are held; expected at most"
            hint = "Hint: what does a step allocate that is as large as all parameters, and would a shard be enough?"
            raise Wrong({rank: f"{context}, {evidence} {most_in_step:,.0f}"}, hint)


# -- judge what a sharded optimizer holds after load_state_dict(): only its shard, with each entry as it was saved


_MOST_MOVED = 0.01  # one step of weight decay changes a parameter by 1/10,000 of its value, before rounding to bf16


def _trained(make, model: str, dtype: torch.dtype, seed: int, x, y) -> tuple[torch.nn.Module, list, dict]:
    """Train a plain optimizer in the same way on all ranks.

    Returns:
        Its model; the parameters in the optimizer's order, from the last layer to the first; and a copy of its state.
        In this order, the first parameters of "Unused" have no state.
    """
    module = awkward.build(model, seed, dtype).to(device_here())
    parameters = list(module.parameters())[::-1]
    optimizer = make(parameters, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        awkward.loss_of(module, x.to(device_here(), dtype), y.to(device_here(), dtype)).backward()
        optimizer.step()
    return module, parameters, copy.deepcopy(optimizer.state_dict())


def probe_held(sharded, most_bytes: float, seed: int, x, y) -> int:
    """Return the bytes of a model and an optimizer that has loaded a plain one's state."""
    *_, saved = _trained(torch.optim.AdamW, MODEL, torch.float32, seed, x, y)
    before_bytes = living_bytes()
    module = awkward.build(MODEL, seed, torch.float32).to(device_here())
    optimizer = sharded(list(module.parameters())[::-1], torch.optim.AdamW, lr=0.01)
    optimizer.load_state_dict(saved)
    began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
    while held_bytes > most_bytes and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
        time.sleep(0.01)
        held_bytes = min(held_bytes, living_bytes() - before_bytes)
    return held_bytes


def no_more_than_its_shard_is_held(attempt: Attempt) -> None:
    numel, draw = sum(p.numel() for p in awkward.build(MODEL, 0).parameters()), Draw(attempt)
    expected = (4 + 4 + 8 / attempt.world_size) * numel
    found = attempt.run(probe_held, SLACK * expected, draw.seeds[0], *draw.shares[0])
    for rank, held_bytes in enumerate(found):
        if held_bytes > SLACK * expected:
            context = f"{numel:,} parameters, AdamW: after load_state_dict(), {held_bytes:,} bytes are held"
            hint = "Hint: does load_state_dict() keep views of larger tensors?"
            raise Wrong({rank: f"{context}; expected {expected:,.0f}"}, hint)


def probe_masters(sharded, model: str, seed: int, x, y) -> dict:
    """Load a state of float32 masters beside bf16 parameters, save it again, and take a step.

    Returns:
        Both states, how many elements of the masters are not representable in bf16 after the step, and by how much the
        step changed the parameters without a loaded state. For these, the saved state may or may not have entries.
    """
    dtype = torch.bfloat16
    module, parameters, saved = _trained(adamw_on_masters(), model, dtype, seed, x, y)
    optimizer = sharded(parameters, adamw_on_masters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(saved))
    again = copy.deepcopy(optimizer.state_dict())
    again["state"] = {index: entries for index, entries in again["state"].items() if index in saved["state"]}
    without = [p for index, p in enumerate(parameters) if p.requires_grad and index not in saved["state"]]
    before = [p.detach().clone() for p in without]
    optimizer.zero_grad()
    awkward.loss_of(module, x.to(device_here(), dtype), y.to(device_here(), dtype)).backward()
    optimizer.step()
    masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    fine = sum(int((each != each.bfloat16()).sum()) for each in masters)
    moved = max((float((p - was).detach().abs().max()) for p, was in zip(without, before, strict=True)), default=0.0)
    return {"saved": saved, "again": again, "fine": fine, "moved": moved}


def masters_come_back(attempt: Attempt) -> None:
    """Require bitwise equality, because nothing is computed in between."""
    for model in ("Plain", "Unused"):
        draw = Draw(attempt)
        found = attempt.run(probe_masters, model, draw.seeds[0], *draw.shares[0])
        context = f"{awkward.describe(model)}, bf16 parameters and float32 masters, loaded and saved again"
        for rank, result in enumerate(found):
            judge_state_dict(rank, result["again"], result["saved"], 0.0, context)
            if not result["fine"]:
                evidence = (
                    f"{context}; after one more step, every element of the masters is representable in bf16, so "
                    "digits were lost"
                )
                raise Wrong({rank: evidence}, "Hint: which dtype did a master pass through when it was copied?")
            if result["moved"] > _MOST_MOVED:
                evidence = (
                    f"{awkward.describe(model)}, the state of bf16 parameters and float32 masters loaded: the next "
                    f"step changes a parameter without a gradient by {result['moved']:.3g}; expected almost 0"
                )
                hint = "Hint: which values does the master of a parameter have that was never updated?"
                raise Wrong({rank: evidence}, hint)
