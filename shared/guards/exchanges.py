"""How wrappers exchange gradients, as far as guards must know: what to check before, and how to send NaN instead.

A guard makes one whenever gradients are averaged, from the attributes that the exchange reads from the wrapper, or from
its `sync`.
"""

import contextlib
import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.guards.backwards import forget_backward
from shared.guards.guard import Guard
from shared.guards.tensors import name_of, reject_gradient


class Exchange:
    """What all exchanges have."""

    is_sharded = False  # whether parameters lie in flat parameters, and ranks get shards of the mean
    clip_with = ""  # what to call instead of torch's gradient clipping, if gradients are sharded
    has_hooks = False  # whether gradients are exchanged in backward, by hooks that call call_hook()
    asks_first = False  # whether ranks ask each other for problems first, instead of looking for NaN in a mean
    adds_up = False  # whether gradients are added up over the ranks, so that doing it twice would be wrong

    def __init__(self, wrapper):
        """Take from a wrapper what its exchange needs."""

    def attach(self, guard: Guard) -> None:
        """Prepare the guard and the wrapper, once it is built."""

    def check(self) -> None:
        """Raise a RuntimeError if the gradients cannot be exchanged."""

    def send_nan(self) -> None:
        """Take part in the collectives of this step with NaN: see [Note: raising on every rank]."""
        raise NotImplementedError

    def mean(self) -> torch.Tensor | None:
        """Return a mean of this step in which all ranks would find the NaN of one."""
        raise NotImplementedError


class PerParameter(Exchange):
    """One all-reduce for each parameter, in finish_gradient_sync(), as in chapter 02."""

    def __init__(self, wrapper):
        self.guard: Guard = wrapper.guard

    def send_nan(self) -> None:
        snapshot = self.guard.snapshot
        for parameter, (is_trained, dtype, device) in zip(snapshot.parameters.values(), snapshot.states, strict=True):
            if is_trained:
                nan = torch.full(parameter.shape, math.nan, dtype=dtype, device=device)
                dist.all_reduce(nan, group=self.guard.alarm.group)

    def mean(self) -> torch.Tensor | None:
        parameters = self.guard.snapshot.parameters.values()
        return next((p.grad for p in parameters if p.requires_grad and p.numel()), None)


class PerBucket(Exchange):
    """One all-reduce for each of the wrapper's `buckets`, in finish_gradient_sync(), as in chapter 03."""

    def __init__(self, wrapper):
        self.buckets: Sequence = wrapper.buckets

    def check(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                reject_gradient(parameter)

    def send_nan(self) -> None:
        launch_nan(self.buckets)
        wait_for(self.buckets)

    def mean(self) -> torch.Tensor | None:
        return next((bucket.flat for bucket in reversed(self.buckets) if bucket.flat.numel()), None)


class Overlapped(PerBucket):
    """One all-reduce per bucket, launched in backward by the wrapper's `sync`, a GradientSync, as in chapter 04."""

    has_hooks = True

    def __init__(self, owner):
        self.sync: Any = getattr(owner, "sync", owner)
        self.guard: Guard = owner.guard
        self.buckets = self.sync.queue.buckets

    def attach(self, guard: Guard) -> None:
        guard.awaits_finish = hasattr(self.sync.synchronize, "__wrapped__")  # by @synchronizes
        self.sync.guard = guard
        guard.exchange_of = type(self)
        guard.notes_versions = not self.is_sharded

    def check(self) -> None:
        self.guard.reject_changed(self.buckets)

    def send_nan(self) -> None:
        abandon(self.sync)


class Sharded(Overlapped):
    """One reduce-scatter per bucket, launched in backward by the wrapper's `sync`, as in chapter 08."""

    is_sharded = True
    clip_with = "the wrapper's clip_grad_norm_(max_norm)"

    def attach(self, guard: Guard) -> None:
        super().attach(guard)
        guard.snapshot.flat_parameters = [bucket.flat_parameter for bucket in self.buckets]

    def check(self) -> None:
        """Raise nothing: pack() moves gradients into buckets, where nobody changes them."""

    def mean(self) -> torch.Tensor | None:
        means = [bucket.flat_parameter.shard.grad for bucket in reversed(self.buckets)]
        return next((mean for mean in means if mean is not None and mean.numel()), None)


class Joint(Exchange):
    """The exchange of a model that the ranks compute together, as in chapters 14 and 16.

    A mean of equal means is the mean, but a sum of equal sums is too large. So finish_gradient_sync() does nothing if
    there is no new gradient, and backward() raises if it would add one to a sum.
    """

    asks_first, adds_up = True, True

    def __init__(self, wrapper: nn.Module):
        self.module = next(wrapper.children())

    def attach(self, guard: Guard) -> None:
        guard.is_joint = True
        guard.watch_again(self.module)  # its experts are sharded now
        for parameter in guard.snapshot.parameters.values():
            if parameter.requires_grad:
                parameter.register_hook(partial(reject_sum, weakref.ref(guard), weakref.ref(parameter)))

    def check(self) -> None:
        for parameter in self.module.parameters():
            reject_gradient(parameter)

    def mean(self) -> None:
        """Return None: the ranks have asked already."""


def reject_sum(to_guard: weakref.ref[Guard], to: weakref.ref[nn.Parameter], _gradient: torch.Tensor) -> None:
    """Raise a RuntimeError if backward() is about to add a gradient to one that is the sum over the ranks."""
    guard, parameter = to_guard(), to()
    if guard is None or parameter is None or id(parameter) not in guard.summed:
        return
    guard.summed.discard(id(parameter))
    if parameter.grad is not None and parameter.grad.any():
        raise RuntimeError(
            f"backward() would add to a gradient of {name_of(parameter)} that finish_gradient_sync() has added up over "
            "the ranks already: call zero_grad() after each step, and finish_gradient_sync() once, after all backward()"
        )


class InBackward(Sharded):
    """One reduce-scatter per bucket, launched in backward by an optimizer's `sync`, as in chapter 07 with a module."""

    def attach(self, guard: Guard) -> None:
        super().attach(guard)
        guard.syncs_at_step = True

    def check(self) -> None:
        for bucket, missing in zip(self.buckets, self.sync.queue.missing, strict=True):
            for index in missing:
                bucket.reject_stale(index)


class AtStep(Exchange):
    """One reduce-scatter for each flat parameter, by an optimizer's step(), as in chapter 07.

    Args:
        all_gradients: the optimizer's FlatGradients.
    """

    is_sharded = True

    def __init__(self, all_gradients: Iterable):
        self.all_gradients = list(all_gradients)

    def check(self) -> None:
        for gradients in self.all_gradients:
            for parameter in gradients.layout.parameters:
                reject_gradient(parameter)

    def send_nan(self) -> None:
        for gradients in self.all_gradients:
            gradients.send_nan()

    def mean(self) -> torch.Tensor | None:
        return next((gradients.flat_parameter.shard.grad for gradients in self.all_gradients), None)


def abandon(sync) -> None:
    """End a step of a GradientSync on a rank that raises: launch the remaining buckets with NaN, and begin anew."""
    queue = sync.queue
    sync.queue = type(queue)(queue.buckets)
    with contextlib.suppress(AttributeError):  # In another style, one of them is a property.
        sync.done = True  # as on the other ranks, which raise at the end of their backward()
        sync.pending = False
    sync.guard.versions.clear()
    forget_backward(sync)
    launch_nan(queue.buckets[queue.launched :])
    wait_for(queue.buckets)


def launch_nan(buckets: Iterable) -> None:
    """Launch buckets full of NaN."""
    for bucket in buckets:
        if bucket.flat is None:  # Chapter 08 allocates it when the first gradient is packed.
            bucket.flat = torch.empty_like(bucket.flat_parameter.flat_param)
        bucket.flat.fill_(math.nan)
        bucket.launch()


def wait_for(buckets: Iterable) -> None:
    """Wait for all buckets that are in flight."""
    for bucket in buckets:
        with contextlib.suppress(RuntimeError):  # Chapter 03 raises it if nothing is in flight.
            bucket.wait()
