"""Judge what a sharded optimizer holds after load_state_dict(): only its shard, with each entry as it was saved."""

import copy
import time

import torch

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes
from shared.checks.engine.sharded.state_dicts import judge_state_dict
from shared.checks.engine.training import Draw
from shared.checks.models import awkward
from shared.checks.zero1.memory import MODEL, SLACK, adamw_on_masters
from shared.deadlines import scaled

_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release a message's tensor a little after the message is complete

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
