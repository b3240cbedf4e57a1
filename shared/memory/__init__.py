"""The bytes that this rank holds, by component: now, and at the peak of a training step.

    memory.held(module, optimizer)                  # what persists between steps

    with memory.peak(module, optimizer) as peak:    # around a training step
        module(x, y).backward()
        optimizer.step()
    peak.peak_bytes, peak.held, peak.samples

Memory belongs to storages, not to tensors. Each storage is therefore counted once and in full, no matter how many views
or tied tensors share it. It counts for the first of these components that has a tensor in it:

    parameters   registered with a module
    gradients    `.grad` of parameters and of master weights
    optimizer    the state of every optimizer, and tensors in its param_groups that are not parameters: master weights
    buffers      registered with a module
    buckets      read or written by a collective, and the bytes of a gradient's storage outside the gradient (padding)
    activations  created while autograd recorded: in forward, or recomputed in backward
    other        everything else: inputs, temporaries, tensors in any attribute of a module or an optimizer

Memory that ZeRO-3 unshards counts as parameters if a module computes with it as a registered parameter, and as buckets
otherwise. A tensor on the meta device holds 0 bytes, and so does a storage resized to 0. A DTensor counts as its local
tensor.

Not counted: memory inside a kernel (workspaces, gloo's copies), tensors that only a closure or C++ keeps alive (except
DDP's buckets), compiled code, and sparse layouts other than COO. NumPy's memory counts once per tensor made from it.

All this is the same on a CPU and on a GPU. Other models that live in the same process, as in a lab, do not count.
CUDA's allocator counts the whole process and rounds each tensor up, so its peak, `Peak.allocator_bytes`, is larger.
"""

import contextlib
import time
import types
from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared import tables
from shared.memory import storages


@dataclass(frozen=True)
class Held:
    """Bytes by component."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0
    buckets_bytes: int = 0
    activations_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.by_component().values())

    def by_component(self) -> dict[str, int]:
        return {component: getattr(self, f"{component}_bytes") for component in storages.COMPONENTS}

    def table(self, note: str = "") -> tables.Table:
        """Show the components that hold any bytes, and the total."""
        rows = [[name, f"{held:,}"] for name, held in self.by_component().items() if held]
        return tables.Table(["component", "bytes"], [*rows, ["total", f"{self.total_bytes:,}"]], note)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def held(module: nn.Module | None = None, optimizer=None, *, extra: dict | None = None) -> Held:
    """Count the bytes that a module and its optimizer hold now. Only `peak` can count activations.

    Args:
        optimizer: A torch optimizer, or an object that has `.state` or keeps an optimizer in an attribute.
        extra: More tensors by component, such as {"buckets": [flat]}.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If no argument is given, or extra names an unknown component.
    """
    _check(module, optimizer, extra)
    split = Counter()
    for use in storages.uses(_roles(module, optimizer, extra)).values():
        split.update(use.split())
    for wrapper in _reached([module]):
        if isinstance(wrapper, DistributedDataParallel):
            split["buckets"] += _hidden_bucket_bytes(wrapper)
    return _held(split)


@dataclass(frozen=True)
class Sample:
    """The memory that was in use after one operator."""

    seconds: float  # since the start of the block
    phase: str  # "start", "forward", "backward" or "step"; each phase lasts until the next one begins
    held: Held


@dataclass(repr=False)
class Peak:
    """Memory over a block: one sample at its start, one after each operator, and one at its end."""

    samples: list[Sample] = field(default_factory=list)
    # The peak of CUDA's allocator, including rounding, workspaces and everything else in this process; None on a CPU.
    allocator_bytes: int | None = None

    @property
    def at_peak(self) -> Sample:
        if not self.samples:
            raise RuntimeError("The peak is known only after the block has ended. Read it after the with-block.")
        return max(self.samples, key=lambda sample: sample.held.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the tracked storages held at any moment.

        The tracked storages are those of the module, the optimizer and `extra`, and those that an operator of the block
        created or used.
        """
        return self.at_peak.held.total_bytes

    @property
    def held(self) -> Held:
        """The bytes that the tracked storages held at their peak, by component."""
        return self.at_peak.held

    @property
    def phase(self) -> str:
        return self.at_peak.phase

    def table(self) -> tables.Table:
        return self.held.table(note=f"at the peak, in {self.phase}: {self.peak_bytes:,} bytes")

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@contextlib.contextmanager
def peak(module: nn.Module | None = None, optimizer=None, *, extra: dict | None = None):
    """Follow every storage on the module's device through the block. Yields a Peak, to be read after the block.

    A storage counts from the operator that creates it or first uses it until its last owner frees it. (After a
    collective, gloo's threads may do so slightly later.) Storages of the module and the optimizer, and DDP's buckets,
    count from the start. Each operator takes about 20 µs longer inside the block, so measure time elsewhere. On CUDA,
    the allocator's peak is reset.

    Raises:
        TypeError: As in `held`.
        ValueError: As in `held`.
    """
    _check(module, optimizer, extra)
    watch = storages.Watch(lambda: _roles(module, optimizer, extra))
    result = Peak()
    on_cuda = watch.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(watch.device)
    try:
        with watch.hooks(), watch:
            yield result
    finally:
        result.samples = [Sample(seconds, phase, _held(split)) for seconds, phase, split in watch.history()]
        if on_cuda:
            result.allocator_bytes = torch.cuda.max_memory_allocated(watch.device)


_GLOO_S = 0.1  # within which gloo's threads free what they have sent


def kept_for_backward(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Run forward and backward, and return the bytes that forward keeps for backward, in activations and buckets.

    Buckets count because they contain activations that a collective has read or written. The module's output counts in
    place of its input, which belongs to the module before it.
    """
    with peak(module) as watched:
        output = module(*inputs)
        time.sleep(_GLOO_S)
    output.sum().backward()
    kept = watched.samples[-1].held
    return kept.activations_bytes + kept.buckets_bytes


def _held(split: dict[str, int]) -> Held:
    return Held(**{f"{component}_bytes": split.get(component, 0) for component in storages.COMPONENTS})


def _roles(module, optimizer, extra) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each component, in the order in which components claim storages."""
    reached = _reached([module, optimizer])
    tensors = _tensors(reached)
    modules = [thing for thing in reached if isinstance(thing, nn.Module)]
    optimizers = [thing for thing in reached if isinstance(thing, Optimizer) or thing is optimizer]
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    optimized = [tensor for group in groups for tensor in group["params"]]
    roles = {
        "parameters": _tensors(parameter for each in modules for parameter in each._parameters.values()) or optimized,
        "gradients": _tensors(tensor.grad for tensor in tensors if tensor.is_leaf),
        "optimizer": optimized + _tensors(_reached([getattr(each, "state", None) for each in optimizers])),
        "buffers": _tensors(buffer for each in modules for buffer in each._buffers.values()),
        "other": tensors,
    }
    extra_roles = {component: _tensors(_reached([given])) for component, given in (extra or {}).items()}
    return {name: roles.get(name, []) + extra_roles.get(name, []) for name in storages.COMPONENTS}


def _reached(roots: list) -> list:
    """Return every object reachable from the roots through attributes and containers, each one once."""
    found, waiting = {}, list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in found or isinstance(thing, type | types.ModuleType):
            continue
        found[id(thing)] = thing
        if isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            waiting += thing
        else:
            waiting += getattr(thing, "__dict__", {}).values()
    return list(found.values())


def _tensors(things) -> list[torch.Tensor]:
    return [thing for thing in things if isinstance(thing, torch.Tensor)]


def _hidden_bucket_bytes(ddp: DistributedDataParallel) -> int:
    """Ask DDP for the size of its buckets, which live in C++. Gradients that view them are counted elsewhere."""
    sizes = ddp._get_ddp_logging_data()["bucket_sizes"]  # "1048576, 4096"
    gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    views = gradients if ddp.gradient_as_bucket_view else []
    return sum(map(int, sizes.split(","))) - sum(gradient.nbytes for gradient in views)


def _check(module, optimizer, extra) -> None:
    """Raise if the arguments are not objects whose memory can be counted."""
    if module is None and optimizer is None and extra is None:
        raise ValueError("There is nothing to measure: pass a module, an optimizer or extra tensors.")
    if not isinstance(module, nn.Module | None):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    contains_one = any(isinstance(thing, Optimizer) for thing in _reached([optimizer]))
    if not (optimizer is None or contains_one or hasattr(optimizer, "state")):
        raise TypeError(f"optimizer must have .state or contain a torch optimizer, got {type(optimizer).__name__}")
    if not isinstance(extra, dict | None):
        raise TypeError(
            f'extra must be a dict of tensors by component, such as {{"buckets": [flat]}}, got {type(extra).__name__}'
        )
    unknown = [name for name in extra or {} if name not in storages.COMPONENTS]
    if unknown:
        known = ", ".join(storages.COMPONENTS)
        raise ValueError(f"extra names an unknown component, {unknown[0]!r}. The components are {known}.")
