"""Judge how much memory a rank holds with a sharded optimizer, and what it keeps of a state that it has loaded."""

import copy
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, earlier_piece
from shared.checks.engine.failures import expect
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.sharded.held import SLACK, Expected, Held, Observer, judge_held
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.wire import instrumentation

MODEL, TRAINED = "Large", "after two steps"
# In a step: a receive buffer, a buffer for the sum, and Adam's temporary for the update, each of a shard's size.
# gloo's own reduce-scatter is an all-reduce of a full copy, which is not the student's fault.
TEMPORARY_SHARDS = 3


def adamw_on_masters():
    """Return AdamW with float32 master weights, as lab 06 builds it."""
    return functools.partial(earlier_piece("memory_wall", "MasterWeights"), optimizer_cls=torch.optim.AdamW)


@dataclass
class Footprint:
    held: Held  # after two steps
    peak: int  # the most bytes in the third step
    backends_copy: bool  # whether gloo has allocated a full copy in it


def probe_memory(sharded, dtype: torch.dtype, with_masters: bool, most_bytes: float, seed: int, x, y) -> Footprint:
    """Train three steps. Return what was held."""
    observer = Observer({TRAINED: most_bytes})
    module = awkward.build(MODEL, seed, dtype).to(device_here())
    optimizer = sharded(module.parameters(), adamw_on_masters() if with_masters else torch.optim.AdamW, lr=0.01)
    x, y = x.to(device_here(), dtype), y.to(device_here(), dtype)

    def backward() -> None:
        optimizer.zero_grad()
        awkward.loss_of(module, x, y).backward()

    for _ in range(2):
        backward()
        optimizer.step()
    observer.note(TRAINED)
    held = observer.report(module, optimizer)
    backward()
    with memory.peak(module, optimizer) as peak, instrumentation.listening() as calls:
        optimizer.step()
    on_gloo = dist.get_backend() == "gloo" and any(call.op.startswith("reduce_scatter") for call in calls)
    return Footprint(held, peak.at_peak.held.total_bytes, on_gloo)


def _judge_memory(attempt: Attempt, dtype: torch.dtype, with_masters: bool, with_peak: bool) -> None:
    """Judge that a rank holds the parameters, the gradients, and its shard of the optimizer state."""
    numel, size = sum(p.numel() for p in awkward.build(MODEL, 0).parameters()), attempt.world_size
    parameters, state = dtype.itemsize * numel, (12 if with_masters else 8) * numel / size
    expected = Expected({TRAINED: 2 * parameters + state}, state, least=parameters + state)
    found = attempt.run(probe_memory, dtype, with_masters, expected.moments[TRAINED], per_rank=Draw(attempt).per_rank)
    inner = "AdamW on float32 masters" if with_masters else "AdamW"
    context = f"{numel:,} {str(dtype).removeprefix('torch.')} parameters, {inner}"
    judge_held({rank: each.held for rank, each in enumerate(found)}, expected, context)
    for rank, result in enumerate(found if with_peak else ()):
        temporary = TEMPORARY_SHARDS + size * result.backends_copy
        most = SLACK * expected.moments[TRAINED] + temporary * parameters / size
        evidence = f"{context}, at the peak of a step {result.peak:,} bytes are held; expected at most {most:,.0f}"
        hint = "Hint: what does a step allocate that is as large as all parameters, and would a shard be enough?"
        expect({rank: result.peak}, lambda nbytes, most=most: nbytes <= most, evidence, hint)


def the_state_is_sharded(attempt: Attempt) -> None:
    _judge_memory(attempt, torch.float32, with_masters=False, with_peak=attempt.world_size == 4)


def master_weights_are_sharded(attempt: Attempt) -> None:
    _judge_memory(attempt, torch.bfloat16, with_masters=True, with_peak=False)


# -- after load_state_dict(): only this rank's shard is held, with each entry as it was saved

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
    return settled_bytes(most_bytes, before_bytes)


def no_more_than_its_shard_is_held(attempt: Attempt) -> None:
    numel, draw = sum(p.numel() for p in awkward.build(MODEL, 0).parameters()), Draw(attempt)
    most = SLACK * (4 + 4 + 8 / attempt.world_size) * numel
    found = dict(enumerate(attempt.run(probe_held, most, draw.seeds[0], *draw.shares[0])))
    context = f"{numel:,} parameters, AdamW: after load_state_dict(), more than {most:,.0f} bytes are held"
    hint = "Hint: does load_state_dict() keep views of larger tensors?"
    expect(found, lambda held_bytes: held_bytes <= most, lambda held_bytes: f"{context}: {held_bytes:,}", hint)


@dataclass
class Loaded:
    saved: dict  # the state that was loaded
    again: dict  # the same state, saved again; without entries of parameters that had no state
    fine: int  # how many elements of the masters are not representable in bf16 after another step
    moved: float  # by how much that step changed the parameters without a loaded state


def probe_masters(sharded, model: str, seed: int, x, y) -> Loaded:
    """Load a state of float32 masters beside bf16 parameters, save it again, and take a step."""
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
    return Loaded(saved, again, fine, moved)


def masters_come_back(attempt: Attempt) -> None:
    """Require bitwise equality, because nothing is computed in between."""
    for model in ("Plain", "Unused"):
        draw = Draw(attempt)
        found = dict(enumerate(attempt.run(probe_masters, model, draw.seeds[0], *draw.shares[0])))
        context = f"{awkward.describe(model)}, bf16 parameters and float32 masters, loaded and saved again"
        for rank, result in found.items():
            judge_state_dict(rank, result.again, result.saved, 0.0, context)
        evidence = f"{context}; after one more step, every element of the masters is representable in bf16"
        hint = "Hint: which dtype did a master pass through when it was copied?"
        expect(found, lambda own: own.fine, f"{evidence}, so digits were lost", hint)
        expect(
            found,
            lambda own: own.moved <= _MOST_MOVED,
            lambda own, context=context: (
                f"{context}: the next step changes a parameter without a gradient by {own.moved:.3g}; expected almost 0"
            ),
            "Hint: which values does the master of a parameter have that was never updated?",
        )
