"""How many bytes of tensors live on this rank: a wrapper that keeps a second copy of the gradients shows.

Whatever Python can reach is counted, in whichever attribute, closure or list it is kept.
"""

import contextlib
import gc
import time

import numpy as np
import torch

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw, descend
from shared.checks.engine.volume import trainable_bytes
from shared.checks.models import awkward
from shared.deadlines import scaled

_SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads let go of a message's tensor a little after it is done
LEAST_HIDDEN_BYTES = 4096  # of an array; programs have many small ones
PADDING_BYTES = 64  # per parameter: some align each gradient


def probe_footprint(wrapper, model: str, options: dict, least_bytes: int, seed: int, x, y) -> dict:
    """Train two steps. → the bytes that have come since the module was built, and those of the gradients' storages"""
    module = awkward.build(model, seed).to(device_here())
    x, y = x.to(device_here()), y.to(device_here())
    before_bytes = living_bytes()
    wrapped = wrapper(module, **options)
    for step in range(3):
        if step:
            descend(module.parameters())
            module.zero_grad()
        awkward.loss_of(wrapped, x, y).backward()
        wrapped.finish_gradient_sync()
    held_bytes = settled_bytes(least_bytes, before_bytes)
    gradients = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in _with_gradient(module)}
    return {"held": held_bytes, "gradients": sum(storage.nbytes() for storage in gradients.values())}


def _with_gradient(module) -> list:
    return [p for p in module.parameters() if p.grad is not None]


def living_bytes() -> int:
    """Add up all storages on this rank's device, each once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device == device_here() and thing.layout is torch.strided:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@contextlib.contextmanager
def only_what_comes():
    """Let counts leave out what is there already.

    That stays frozen: the ranks' server has frozen all that it imported, and a count that saw it would take a second.
    """
    gc.collect()
    gc.freeze()
    yield


def hidden_bytes() -> int:
    """Add up what is no tensor but may have the numbers of one: arrays, bytes, storages. In only_what_comes()."""
    here = gc.get_objects()
    seen = {each.untyped_storage()._cdata for each in here if issubclass(type(each), torch.Tensor)}
    things = {id(thing): thing for thing in gc.get_referents(*here)}.values()
    arrays = [thing.nbytes for thing in things if isinstance(thing, np.ndarray) and thing.base is None]
    raw = [len(thing) for thing in things if isinstance(thing, bytes | bytearray)]
    storages = [each.nbytes() for each in things if type(each) is torch.UntypedStorage and each._cdata not in seen]
    return sum(each for each in arrays + raw + storages if each > LEAST_HIDDEN_BYTES)


def settled_bytes(most_bytes: float, before_bytes: int) -> int:
    """Wait a little where more than expected lives. → bytes that live now and did not before"""
    began_s, held_bytes = time.perf_counter(), living_bytes() - before_bytes
    while held_bytes > most_bytes and time.perf_counter() - began_s < _SETTLES_WITHIN_S:
        time.sleep(0.01)
        held_bytes = min(held_bytes, living_bytes() - before_bytes)
    return held_bytes


def judge_footprint(attempt: Attempt, model: str, options: dict, context: str) -> None:
    """Raises: Wrong where more than one copy of the gradients is held from step to step."""
    draw, one_copy = Draw(attempt), trainable_bytes(model)
    most = one_copy + PADDING_BYTES * len(list(awkward.build(model, 0).parameters()))
    found = attempt.run(probe_footprint, model, options, most, per_rank=draw.per_rank)
    wrong = {
        rank: f"{context}: after three steps {each['held']:,} bytes are held for gradients and buckets; "
        f"the gradients are {one_copy:,} bytes"
        for rank, each in enumerate(found)
        if each["held"] > most
    }
    if wrong:
        raise Wrong(wrong, "Hint: is what has arrived copied out of the bucket, and what is the bucket kept for?")
