"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import contextlib
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from solutions import overlapped_ddp


def sync_collects_until_the_end():
    """Collects the gradients of a backward and queues them when it ends, so nothing overlaps.

    caught by: GradientSync · backward
    """

    class GradientSync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            super().__init__(buckets)
            self.complete = []

        def on_gradient(self, bucket_index, index):
            self.pending = True
            if self.enabled:
                overlapped_ddp.at_end_of_backward(self.synchronize)
                self.complete.append((bucket_index, index))

        def synchronize(self):
            for each in self.complete:
                self.queue.add(*each)
            self.complete = []
            super().synchronize()


def sync_finishes_only_what_is_pending():
    """Does not finish the queue on a rank without a backward, while the other ranks wait for its buckets.

    caught by: GradientSync · no backward
    """

    class GradientSync(overlapped_ddp.GradientSync):
        def finish(self):
            if self.pending:
                super().finish()


def all_at_the_end():
    """Launches every bucket when backward ends, so nothing overlaps.

    caught by: OverlappedDDP · overlap
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            self.pending = True
            if self.enabled:
                overlapped_ddp.at_end_of_backward(self.synchronize)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def asks_until_done():
    """Polls in the hook until the bucket is complete, which is a wait in disguise.

    caught by: OverlappedDDP · no waiting in hooks
    """

    class _Bucket(overlapped_ddp.Bucket):
        def launch(self):
            super().launch()
            while not self.handle.is_completed():
                time.sleep(1e-4)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def averages_what_it_is_handed():
    """Averages the argument of the post-accumulate hook, which is the parameter, not its gradient.

    caught by: OverlappedDDP · values
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            parameter = self.queue.buckets[bucket_index].parameters[index]
            parameter.data /= dist.get_world_size()
            dist.all_reduce(parameter.data)

        def finish(self):
            pass

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def create_graph_accepted():
    """Silently detaches a gradient that is part of a graph: its value is right, but its derivatives are wrong.

    caught by: OverlappedDDP · rejections
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            parameter = self.queue.buckets[bucket_index].parameters[index]
            parameter.grad = parameter.grad.detach()
            super().on_gradient(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def divides_each_micro_batch():
    """Divides in every backward, so earlier micro-batches are divided several times.

    caught by: OverlappedDDP · accumulation
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            if not self.enabled:
                self.queue.buckets[bucket_index].parameters[index].grad /= dist.get_world_size()
            super().on_gradient(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def drops_silent_gradients():
    """Clears the gradients at the end of no_sync(), so they are never averaged.

    caught by: OverlappedDDP · accumulation
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            with super().no_sync():
                yield
            if self.sync.enabled:
                self.zero_grad()


def everybodys_hooks_end():
    """Removes all hooks of the parameters, including those registered by others.

    caught by: OverlappedDDP · several wrappers
    """

    def watch_gradients(buckets, on_gradient):
        overlapped_ddp.watch_gradients(buckets, on_gradient)
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        weakref.finalize(on_gradient.__self__, lambda: [p._post_accumulate_grad_hooks.clear() for p in parameters])

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            self.queue, self.enabled = overlapped_ddp.LaunchQueue(buckets), True
            self.pending = self.done = False
            watch_gradients(buckets, self.on_gradient)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def finish_does_not_wait():
    """Returns without waiting for the buckets: the optimizer may step with incomplete gradients.

    caught by: OverlappedDDP · no waiting in hooks
    """

    class _Bucket(overlapped_ddp.Bucket):
        def wait(self):
            pass

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def first_bucket_like_the_others():
    """Fills the first bucket up to `bucket_cap_mb` instead of the smaller first cap.

    caught by: OverlappedDDP · wire
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            assigned = overlapped_ddp.assign_buckets(module.parameters(), bucket_cap_mb, bucket_cap_mb)
            self.buckets = [overlapped_ddp.Bucket(parameters, group) for parameters in assigned]
            self.sync = overlapped_ddp.GradientSync(self.buckets)


def forgets_the_last_bucket():
    """Leaves out the last bucket, so its gradients are never averaged.

    caught by: OverlappedDDP · wire
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = overlapped_ddp.GradientSync(self.buckets[:-1])


def forgets_to_launch():
    """Packs every gradient but launches no bucket: each rank keeps its own gradients, divided by world_size.

    caught by: OverlappedDDP · plain model
    """

    class _Bucket(overlapped_ddp.Bucket):
        def launch(self):
            pass

        def wait(self):
            pass

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def full_first():
    """Launches buckets in the order in which they fill up on this rank, which may differ between ranks.

    caught by: OverlappedDDP · launch order
    """

    class _Queue(overlapped_ddp.LaunchQueue):
        def add(self, bucket_index, index):
            self.buckets[bucket_index].pack(index)
            self.missing[bucket_index].remove(index)
            if not self.missing[bucket_index]:
                self.buckets[bucket_index].launch()

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync.queue = _Queue(self.buckets)


def hooks_lost_in_a_copy():
    """Registers no hooks on a deep copy: the values are right, but nothing overlaps.

    caught by: OverlappedDDP · several wrappers
    """

    class _Sync(overlapped_ddp.GradientSync):
        def __setstate__(self, state):
            self.__dict__.update(state)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def hooks_never_end():
    """Never removes its hooks, so they call into a wrapper that no longer exists.

    caught by: OverlappedDDP · several wrappers
    """

    def watch_gradients(buckets, on_gradient):
        method = weakref.WeakMethod(on_gradient)
        for bucket_index, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(lambda _, b=bucket_index, i=index: method()(b, i))

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            self.queue, self.enabled = overlapped_ddp.LaunchQueue(buckets), True
            self.pending = self.done = False
            watch_gradients(buckets, self.on_gradient)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def hooks_outlive_the_wrapper():
    """Registers hooks that keep the wrapper alive: after it is deleted, its module's backward still communicates.

    caught by: OverlappedDDP · several wrappers
    """

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            super().__init__(buckets)
            for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hold_me)

        def _hold_me(self, parameter):
            pass

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def ignores_the_cap():
    """Ignores `bucket_cap_mb`: with a single large bucket, nothing can be sent before the end of backward.

    caught by: OverlappedDDP · wire
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, 25.0, group)


def message_per_parameter():
    """Uses one bucket per parameter: it overlaps, but pays the latency for every parameter.

    caught by: OverlappedDDP · wire
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, 0.0, group)


def nothing_is_pending_after_an_exception():
    """Restores also `pending` after an exception in no_sync(), although the block has accumulated gradients.

    caught by: OverlappedDDP · exceptions
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            pending = self.sync.pending
            with super().no_sync():
                try:
                    yield
                except BaseException:
                    self.sync.pending = pending
                    raise


def nothing_is_pending_after_no_sync():
    """Sets pending to False when no_sync() ends, although the gradients are not averaged yet.

    caught by: OverlappedDDP · pending afterwards
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            with super().no_sync():
                try:
                    yield
                finally:
                    self.sync.pending = False


def nothing_to_finish_without_backward():
    """Skips finish() on a rank without gradients, while the other ranks wait for it.

    caught by: OverlappedDDP · steps
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def finish_gradient_sync(self):
            if any(parameter.grad is not None for parameter in self.module.parameters()):
                super().finish_gradient_sync()


def one_bucket_late():
    """Launches a full bucket only when the next gradient is ready, one gradient too late.

    caught by: OverlappedDDP · overlap
    """

    class _Sync(overlapped_ddp.GradientSync):
        late = ()

        def on_gradient(self, bucket_index, index):
            for before in self.late:
                super().on_gradient(*before)
            self.late = ((bucket_index, index),)

        def finish(self):
            self.late = ()
            super().finish()

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def only_the_last_hook_ends():
    """Keeps, and later removes, only the last hook.

    caught by: OverlappedDDP · several wrappers
    """

    def watch_gradients(buckets, on_gradient):
        method = weakref.WeakMethod(on_gradient)
        for bucket_index, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                hook = parameter.register_post_accumulate_grad_hook(lambda _, b=bucket_index, i=index: method()(b, i))
        weakref.finalize(on_gradient.__self__, hook.remove)

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            self.queue, self.enabled = overlapped_ddp.LaunchQueue(buckets), True
            self.pending = self.done = False
            watch_gradients(buckets, self.on_gradient)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def remembers_own_gradients():
    """Keeps a copy of each backward's gradients, in addition to .grad and the bucket.

    caught by: OverlappedDDP · memory
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            gradient = self.queue.buckets[bucket_index].parameters[index].grad
            self.__dict__.setdefault("own", {})[bucket_index, index] = gradient.clone()
            super().on_gradient(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def runs_a_warm_up_forward():
    """Runs an extra forward without gradients before the first step, which BatchNorm counts as a batch.

    caught by: OverlappedDDP · values
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        is_first = True

        def forward(self, *inputs, **kwargs):
            if self.is_first:
                self.is_first = False
                with torch.no_grad():
                    self.module(*inputs, **kwargs)
            return super().forward(*inputs, **kwargs)


def sends_the_last_micro_batch():
    """Sends the gradient from a tensor hook: that is only the last micro-batch's gradient, not the accumulated sum.

    caught by: OverlappedDDP · accumulation
    """

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            super().__init__(buckets)
            self.seen = {}
            for parameter in (parameter for bucket in buckets for parameter in bucket.parameters):
                parameter.register_hook(lambda gradient, parameter=parameter: self.seen.update({parameter: gradient}))

        def on_gradient(self, bucket_index, index):
            parameter = self.queue.buckets[bucket_index].parameters[index]
            if self.enabled:
                parameter.grad = self.seen[parameter]
            super().on_gradient(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def silences_every_wrapper():
    """Stores the no_sync() state in the class, so one wrapper's no_sync() affects all wrappers.

    caught by: OverlappedDDP · no communication
    """

    class _Sync(overlapped_ddp.GradientSync):
        silent = 0

        @property
        def enabled(self):
            return not _Sync.silent

        @enabled.setter
        def enabled(self, _):
            pass

        @contextlib.contextmanager
        def no_sync(self):
            _Sync.silent += 1
            try:
                yield
            finally:
                _Sync.silent -= 1

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def skips_buckets_that_are_not_full():
    """Does not launch a bucket with an unused parameter on this rank, so the other ranks wait for it.

    caught by: OverlappedDDP · launch order
    """

    class _Queue(overlapped_ddp.LaunchQueue):
        def finish(self):
            for bucket in self.buckets[: self.launched]:
                bucket.wait()
            self._begin()

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync.queue = _Queue(self.buckets)


def starts_apart():
    """Does not broadcast the module's initial state, so the ranks start from different parameters.

    caught by: OverlappedDDP · same start
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(nn.Linear(1, 1), bucket_cap_mb, group)
            self.module = module
            assigned = overlapped_ddp.assign_buckets(module.parameters(), bucket_cap_mb)
            self.buckets = [overlapped_ddp.Bucket(parameters, group) for parameters in assigned]
            self.sync = overlapped_ddp.GradientSync(self.buckets)


def summed():
    """Multiplies by the group size again: the sum instead of the mean.

    caught by: OverlappedDDP · values
    """

    class _Bucket(overlapped_ddp.Bucket):
        def wait(self):
            super().wait()
            self.flat *= dist.get_world_size(self.group)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def tied_once():
    """Makes .grad a view of the bucket only at construction: after zero_grad(), the bucket is never updated.

    caught by: OverlappedDDP · values
    """

    class _Bucket(overlapped_ddp.Bucket):
        def pack(self, index):
            if self.parameters[index].grad is self.slices[index]:
                super().pack(index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket
                for parameter, piece in zip(bucket.parameters, bucket.slices, strict=True):
                    parameter.grad = piece


def told_before_it_is_added():
    """Registers a tensor hook, which runs before the new gradient is added to .grad.

    caught by: OverlappedDDP · values
    """

    def watch_gradients(buckets, on_gradient):
        method = weakref.WeakMethod(on_gradient)
        for bucket_index, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_hook(lambda _, b=bucket_index, i=index: method()(b, i))

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            self.queue, self.enabled = overlapped_ddp.LaunchQueue(buckets), True
            self.pending = self.done = False
            watch_gradients(buckets, self.on_gradient)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def told_of_the_gradient():
    """Looks up the gradient instead of the parameter in the hook.

    caught by: OverlappedDDP · values
    """

    def watch_gradients(buckets, on_gradient):
        method = weakref.WeakMethod(on_gradient)
        index_of = {id(p): (b, i) for b, bucket in enumerate(buckets) for i, p in enumerate(bucket.parameters)}
        for parameter in (p for bucket in buckets for p in bucket.parameters):
            parameter.register_post_accumulate_grad_hook(lambda ready: method()(*index_of[id(ready.grad)]))

    class _Sync(overlapped_ddp.GradientSync):
        def __init__(self, buckets):
            self.queue, self.enabled = overlapped_ddp.LaunchQueue(buckets), True
            self.pending = self.done = False
            watch_gradients(buckets, self.on_gradient)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def torch_inside():
    """Cheats by deriving from torch's DistributedDataParallel.

    caught by: OverlappedDDP · same start
    """

    class OverlappedDDP(DistributedDataParallel):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, process_group=group, bucket_cap_mb=bucket_cap_mb)

        def finish_gradient_sync(self):
            pass


def two_copies():
    """Keeps the .grad that backward allocated and copies the result back into it, so gradients are held twice.

    caught by: OverlappedDDP · memory
    """

    class _Bucket(overlapped_ddp.Bucket):
        def pack(self, index):
            before = self.parameters[index].grad
            super().pack(index)
            if before is not None:
                self.parameters[index].grad = before

        def wait(self):
            super().wait()
            for parameter, piece in zip(self.parameters, self.slices, strict=True):
                if parameter.grad is not piece:
                    parameter.grad.copy_(piece)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def waits_in_the_hook():
    """Blocks in the hook until the bucket is complete, as async_op=False does.

    caught by: OverlappedDDP · overlap
    """

    class _Bucket(overlapped_ddp.Bucket):
        def launch(self):
            dist.all_reduce(self.flat, group=self.group)

        def wait(self):
            pass

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            for bucket in self.buckets:
                bucket.__class__ = _Bucket


def inner_no_sync_ends_the_outer():
    """Enables communication at the end of an inner no_sync(), although the outer one is still active.

    caught by: OverlappedDDP · no communication
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            self.sync.enabled = False
            try:
                yield
            finally:
                self.sync.enabled = True


def stays_silent_after_an_exception():
    """Omits try and finally in no_sync(): after an exception, gradients are never averaged again.

    caught by: OverlappedDDP · exceptions
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            enabled, self.sync.enabled = self.sync.enabled, False
            yield
            self.sync.enabled = enabled


def stays_silent_after_an_interrupt():
    """Catches only Exception in no_sync(): after a KeyboardInterrupt, gradients are never averaged again.

    caught by: OverlappedDDP · exceptions
    """

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        @contextlib.contextmanager
        def no_sync(self):
            enabled, self.sync.enabled = self.sync.enabled, False
            try:
                yield
            except Exception:
                self.sync.enabled = enabled
                raise
            self.sync.enabled = enabled


def zeros_for_all_that_did_not_come():
    """Contributes zeros for parameters unused in the last micro-batch: drops the gradients of earlier micro-batches.

    caught by: OverlappedDDP · accumulation
    """

    class _Queue(overlapped_ddp.LaunchQueue):
        def finish(self):
            for bucket, indices in zip(self.buckets, self.missing, strict=True):
                for index in indices:
                    bucket.parameters[index].grad = None
            super().finish()

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync.queue = _Queue(self.buckets)


def waits_until_it_is_told_to():
    """Launches buckets in hooks, but leaves the rest to finish_gradient_sync(), which somebody may forget.

    caught by: OverlappedDDP · without finishing
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            self.pending = True
            if self.enabled and index in self.queue.missing[bucket_index]:
                self.queue.add(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)


def averages_once_between_two_calls():
    """Ignores gradients after the first backward until finish_gradient_sync() is called.

    caught by: OverlappedDDP · without finishing
    """

    class _Sync(overlapped_ddp.GradientSync):
        def on_gradient(self, bucket_index, index):
            if not self.done:
                super().on_gradient(bucket_index, index)

    class OverlappedDDP(overlapped_ddp.OverlappedDDP):
        def __init__(self, module, bucket_cap_mb=25.0, group=None):
            super().__init__(module, bucket_cap_mb, group)
            self.sync = _Sync(self.buckets)
