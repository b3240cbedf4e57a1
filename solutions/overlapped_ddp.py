# Built by `make notebooks` from source/04_overlap/lab.py: edit that, not this.
"""Data parallelism with overlap: each bucket's all-reduce starts while backward still computes."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from shared import guards
from shared.guards import at_end_of_backward
from solutions.bucketed_ddp import Bucket, assign_buckets
from solutions.manual_ddp import broadcast_state


class GradientBucket(Protocol):
    """Declares the members that a launch queue needs. Chapter 03's Bucket and chapter 08's ShardedBucket have them."""

    parameters: list[nn.Parameter]

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index] into the flat tensor; None counts as zeros."""

    def launch(self) -> None:
        """Launch the collective that averages the flat tensor, and return at once."""

    def wait(self) -> None:
        """Wait until the collective is complete."""


class LaunchQueue:
    """Launches buckets in a fixed order, the same on every rank, each as soon as it is full and next.

    `missing[bucket_index]` holds the indices of the gradients that are not packed yet. `launched` is the number of
    buckets launched so far.
    """

    def __init__(self, buckets: Sequence[GradientBucket]):
        self.buckets = buckets
        self._begin()

    def add(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that is ready, and launch every bucket that is full and next.

        Communication: one collective per bucket launched.
        """
        self.buckets[bucket_index].pack(index)
        self.missing[bucket_index].remove(index)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1

    def finish(self) -> None:
        """Launch the remaining buckets, wait for all of them, and get ready for the next backward."""
        for bucket_index, indices in enumerate(self.missing):
            for index in sorted(indices):
                self.add(bucket_index, index)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()

    def _begin(self) -> None:
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self.launched = 0


def watch_gradients(buckets: Sequence[GradientBucket], on_gradient: Callable[[int, int], None]) -> None:
    """Call the method on_gradient(bucket_index, index) whenever backward() has completed a gradient of a bucket.

    The hooks hold the method's object by a weak reference, because a strong one would keep it alive through its own
    hooks. They are removed when the object is gone.
    """
    method = weakref.WeakMethod(on_gradient)
    index_of = {
        id(parameter): (bucket_index, index)
        for bucket_index, bucket in enumerate(buckets)
        for index, parameter in enumerate(bucket.parameters)
    }
    hooks = contextlib.ExitStack()
    for bucket in buckets:
        for parameter in bucket.parameters:
            handle = parameter.register_post_accumulate_grad_hook(
                lambda completed: guards.call_hook(method(), completed, *index_of[id(completed)])
            )
            hooks.callback(handle.remove)
    weakref.finalize(on_gradient.__self__, hooks.close)


class GradientSync:
    """Launches the collectives of buckets while backward computes, and waits for them when it ends."""

    def __init__(self, buckets: Sequence[GradientBucket]):
        self.queue, self.enabled, self.pending, self.done = LaunchQueue(buckets), True, False, False
        watch_gradients(buckets, self.on_gradient)

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Note a gradient that backward() has just completed, and add it to the queue unless no_sync() is active."""
        self.pending = True
        if self.enabled:
            at_end_of_backward(self.synchronize)
            self.queue.add(bucket_index, index)

    @guards.synchronizes
    def synchronize(self) -> None:
        """Launch the remaining buckets, and wait until every gradient is averaged."""
        self.queue.finish()
        self.pending, self.done = False, True

    def finish(self) -> None:
        """Synchronize, unless a backward has done so since the last call; inside no_sync(), do nothing."""
        if self.enabled:
            if self.pending or not self.done:
                self.synchronize()
            self.done = False

    @contextlib.contextmanager
    def no_sync(self):
        """Let gradients accumulate on this rank, without communication."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        watch_gradients(self.queue.buckets, self.on_gradient)  # deepcopy does not copy hooks


@guards.guarded(guards.Overlapped)
class OverlappedDDP(nn.Module):
    """Train a replica of module on each rank of the group, and average gradients while backward computes.

    When backward() returns, every gradient is the mean over the ranks. So all ranks must run equally many backward()
    outside no_sync(). Where one may run none, all ranks call finish_gradient_sync() in every step. If no rank has used
    a parameter, its gradient is zeros, or None if you send −0.0 for None (exercise 2.3). `.module` is the module.

    A compressor (chapter 19) makes buckets that send less. Without one, gradients are sent as they are. With one, the
    gradient of a parameter that no rank has used is zeros, so weight decay and momentum still change it.

    Communication: when built, one broadcast per parameter and buffer; per backward(), one all-reduce per bucket.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, group=None, *, compressor=None):
        super().__init__()
        self.module = module
        new_bucket = Bucket if compressor is None else compressor.new_bucket
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [new_bucket(parameters, group) for parameters in assigned]
        self.sync = GradientSync(self.buckets)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average what is not averaged yet: gradients from no_sync(), or zeros on a rank that ran no backward().

        After a backward() outside no_sync(), nothing is left to do. If a rank may lack a batch, or may use no trained
        parameter, call this on all ranks after the last backward() of every step.
        """
        self.sync.finish()

    def no_sync(self):
        """Let gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()
