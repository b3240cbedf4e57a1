"""Run a wrapper that launches collectives in backward() on a rank, and record what it does, in order."""

import contextlib
import copy
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from shared.checks.engine.candidate import device_here
from shared.checks.engine.late_ranks import Rendezvous, launches_unasked, rehearsed
from shared.checks.engine.overlap_models import Sizes
from shared.checks.engine.rejections import error_of
from shared.checks.models import awkward
from shared.deadlines import scaled
from shared.wire import completion, instrumentation

LATE_S = scaled(0.25)
SETTLES_WITHIN_S = scaled(1.0)  # gloo's threads release the tensor of a message shortly after it completes


@dataclass(frozen=True)
class Micro:
    """A micro-batch, and whether it is computed inside no_sync()."""

    x: torch.Tensor
    y: torch.Tensor
    silent: bool = False


class Waits(completion.Watcher):
    """Counts the waits that happen in hooks. At the end of backward(), autograd evaluates no node any more."""

    in_hooks = 0

    def waited(self, work_id, began) -> None:
        self.in_hooks += torch._C._current_autograd_node() is not None
        super().waited(work_id, began)


class Stop(BaseException):
    """An error that ends a training loop. Like KeyboardInterrupt in an interrupted cell, it is not an Exception."""


def wrap(wrapper, sizes: Sizes, seed: int, group=None) -> tuple[Any, Any]:
    """Build a module and wrap it. Returns the wrapper and the module."""
    module = sizes.build(seed).to(device_here())
    further = {} if group is None else {"group": group}
    return wrapper(module, bucket_cap_mb=sizes.bucket_cap_mb, **sizes.options, **further), module


def _loss(wrapped, x, y) -> torch.Tensor:
    return awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here()))


def probe_order(wrapper, sizes: Sizes, seed: int, x, y) -> list[instrumentation.Call]:
    """Run one step in a group that sends nothing, where it does no harm if ranks launch in different orders."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

    wrapped, _ = wrap(wrapper, sizes, seed, dist.new_group(backend="fake"))
    with instrumentation.listening() as calls:
        _loss(wrapped, x, y).backward()
        wrapped.finish_gradient_sync()
    return calls


@dataclass
class Progress:
    """What was launched in one step."""

    launched: dict[int, int]  # how many messages, when backward was done with each layer
    waits: int  # in hooks
    working: list[instrumentation.Call]  # in forward and backward
    calls: list[instrumentation.Call]  # in the whole step


def probe_progress(wrapper, sizes: Sizes, seed: int, x, y) -> list[Progress]:
    """Run two steps on a chain of layers."""
    wrapped, module = wrap(wrapper, sizes, seed)
    steps = []
    for set_to_none in (True, False):
        module.zero_grad(set_to_none)
        waits, launched = Waits(), {}
        with launches_unasked(), completion.watching(waits), instrumentation.listening() as calls:
            module.passed = lambda index, launched=launched, calls=calls: launched.setdefault(index, len(calls))
            _loss(wrapped, x, y).backward()
            done = Progress(launched, waits.in_hooks, calls[:], calls)
            wrapped.finish_gradient_sync()
        steps.append(done)
    return steps


@dataclass
class Late:
    """What happened in two steps with a late rank."""

    missing: list[int]  # the ranks whose backward had not come far enough in the first step after PATIENCE_S
    gradients: dict[str, torch.Tensor | None]  # of the second step


@rehearsed
def probe_late(wrapper, sizes: Sizes, token: int, late: int, seed: int, x, y) -> Late:
    """Run two steps with a late rank.

    In the first one, rank `late` sends nothing in backward until the backward of all other ranks has reached the first
    layer. In the second one, it is only a little late.
    """
    wrapped, module = wrap(wrapper, sizes, seed)
    meeting, missing = Rendezvous(f"late{token}"), []

    def stand_by(index: int) -> None:
        if index == len(module.layers):
            missing[:] = meeting.missing()

    def arrive(index: int) -> None:
        if index == 1:
            meeting.arrive()

    is_late = dist.get_rank() == late
    module.passed = stand_by if is_late else arrive
    with launches_unasked():
        dist.barrier()
        _loss(wrapped, x, y).backward()
        module.passed = None
        module.zero_grad()
        if is_late:
            time.sleep(LATE_S)
        _loss(wrapped, x, y).backward()
    return Late(missing, awkward.gradients_of(module))


@dataclass
class Accumulated:
    """What happened in one step of micro-batches."""

    gradients: dict[str, torch.Tensor | None]
    silent: list[instrumentation.Call]  # inside no_sync()
    loud: list[instrumentation.Call]  # outside no_sync()


def probe_steps(wrapper, sizes: Sizes, set_to_none: bool, seed: int, steps: list[list[Micro]]) -> list[Accumulated]:
    """Run steps of micro-batches."""
    wrapped, module = wrap(wrapper, sizes, seed)
    found = []
    for micro_batches in steps:
        module.zero_grad(set_to_none)
        silent, loud = [], []
        for micro in micro_batches:
            with wrapped.no_sync() if micro.silent else contextlib.nullcontext(), instrumentation.listening() as calls:
                (_loss(wrapped, micro.x, micro.y) / len(micro_batches)).backward()
            (silent if micro.silent else loud).extend(calls)
        with instrumentation.listening() as calls:
            wrapped.finish_gradient_sync()
        found.append(Accumulated(awkward.gradients_of(module), silent, [*loud, *calls]))
    return found


@dataclass
class Left:
    calls: dict[str, list[instrumentation.Call]]  # by part of the script
    swallowed: bool  # whether no_sync() swallowed an exception
    pending: Any  # sync.pending after the exception; None if there is no such attribute


def probe_leaving(wrapper, sizes: Sizes, seed: int, x, y) -> Left:
    """Enter and leave no_sync() in several ways."""
    wrapped, another = (wrap(wrapper, sizes, seed)[0] for _ in range(2))
    message: dict[str, list[instrumentation.Call]] = {}

    def step(name: str, finish: bool = True, which=wrapped) -> None:
        with instrumentation.listening() as calls:
            _loss(which, x, y).backward()
            if finish:
                which.finish_gradient_sync()
        message.setdefault(name, []).extend(calls)

    with wrapped.no_sync():
        step("finish_gradient_sync() inside no_sync()")
        step("another wrapper, while the first is silent", which=another)
        with wrapped.no_sync():
            step("inside two nested no_sync()")
        step("inside no_sync(), after an inner one has ended")
        with contextlib.suppress(Stop), wrapped.no_sync():
            raise Stop
        step("inside no_sync(), after an exception like KeyboardInterrupt has left an inner one")
    step("after no_sync()")
    swallowed = False
    with contextlib.suppress(Stop):
        with wrapped.no_sync():
            step("inside a second no_sync()", finish=False)
            raise Stop
        swallowed = True
    pending = getattr(getattr(wrapped, "sync", None), "pending", None)
    step("after an exception like KeyboardInterrupt has left no_sync()")
    return Left(message, swallowed, pending)


def probe_graph(wrapper, sizes: Sizes, seed: int, x, y) -> tuple[str, str]:
    """Call backward(create_graph=True). Returns its error."""
    wrapped, module = wrap(wrapper, sizes, seed)
    error = error_of(lambda: _loss(wrapped, x, y).backward(create_graph=True))
    module.zero_grad()  # a gradient that is part of a graph keeps itself alive
    return error


def probe_memory(wrapper, sizes: Sizes, most_bytes: float, seed: int, x, y) -> dict[str, int]:
    """Return the bytes in the storages of gradients and of all tensors that were sent, at two moments of a step."""
    wrapped, module = wrap(wrapper, sizes, seed)
    sent: dict[int, tuple[StorageWeakRef, int]] = {}
    found = {}

    def note(_call, _work, tensors) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            sent[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def held_bytes() -> int:
        gc.collect()
        alive = {key: nbytes for key, (storage, nbytes) in sent.items() if not storage.expired()}
        own = [p.grad.untyped_storage() for p in module.parameters() if p.grad is not None]
        return sum((alive | {storage._cdata: storage.nbytes() for storage in own}).values())

    def settled_bytes() -> int:
        """Return the bytes that are held, after a short wait if they are more than expected."""
        began_s = time.monotonic()
        while (held := held_bytes()) > most_bytes and time.monotonic() - began_s < SETTLES_WITHIN_S:
            time.sleep(0.01)
        return held

    with instrumentation.listening(launched=note):
        for _ in range(2):
            module.zero_grad()
            _loss(wrapped, x, y).backward()
            found["when backward() has ended"] = settled_bytes()  # gloo's thread frees a message after its wait()
    return found


@dataclass
class Lives:
    """What a wrapper, its copy and another wrapper did, and then the first wrapper's module."""

    working: list[list[instrumentation.Call]]  # of each wrapper, in backward
    gradients: list[dict[str, torch.Tensor | None]]  # of each wrapper
    left: list[instrumentation.Call]  # in a backward of the module alone
    others: int  # how many times that backward has called a hook that is not the wrapper's
    own: dict[str, torch.Tensor | None]  # the gradients of that backward
    anew: list[instrumentation.Call] = field(default_factory=list)  # when the module is wrapped again


def probe_lives(wrapper, sizes: Sizes, seed: int, x, y) -> Lives:
    """Use a wrapper, its copy and another wrapper alternately; then delete the first one and wrap its module again."""
    first, module = wrap(wrapper, sizes, seed)
    others = []  # calls of a hook that is not the wrapper's
    next(module.parameters()).register_post_accumulate_grad_hook(lambda _: others.append(True))
    wrapped = [first, copy.deepcopy(first), wrap(wrapper, sizes, seed)[0]]
    del first
    working = []
    for loss in [_loss(each, x, y) for each in wrapped]:
        with instrumentation.listening() as calls:
            loss.backward()
        working.append(calls)
    for each in wrapped[::-1]:
        each.finish_gradient_sync()
    gradients = [awkward.gradients_of(each.module) for each in wrapped]
    del wrapped[0], each
    gc.collect()
    module.zero_grad()
    others.clear()
    with instrumentation.listening() as calls:
        _loss(module, x, y).backward()
    found = Lives(working, gradients, calls, len(others), awkward.gradients_of(module))
    if calls:
        return found
    module.zero_grad()
    anew = wrapper(module, bucket_cap_mb=sizes.bucket_cap_mb)
    with instrumentation.listening() as found.anew:
        _loss(anew, x, y).backward()
        anew.finish_gradient_sync()
    return found
