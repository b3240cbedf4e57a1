"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from solutions import overlapped_ddp, zero2
from solutions.overlapped_ddp import OverlappedDDP


def bucket_adds_its_mean_twice():
    """Adds the mean again when wait() is called a second time.

    caught by: ShardedBucket · plain model
    """

    class ShardedBucket(zero2.ShardedBucket):
        mean = None

        def wait(self):
            if self.in_flight is None and self.mean is not None:
                self.flat_parameter.shard.grad += self.mean
            super().wait()
            self.mean = self.flat_parameter.shard.grad.clone()


def bucket_allocates_at_the_start():
    """Allocates its flat tensor at construction, so all buckets hold memory before backward starts.

    caught by: ShardedBucket · memory
    """

    class ShardedBucket(zero2.ShardedBucket):
        def __init__(self, flat_parameter):
            super().__init__(flat_parameter)
            self._allocate()

        def _allocate(self):
            self.flat = self.layout.new_flat()
            self.views = self.layout.views(self.flat)

        def wait(self):
            super().wait()
            self._allocate()


def bucket_keeps_a_view():
    """Makes shard.grad a view of the flat tensor, which keeps all of that memory alive.

    caught by: ShardedBucket · memory
    """

    class ShardedBucket(zero2.ShardedBucket):
        def wait(self):
            if self.in_flight is None or self.flat_parameter.shard.grad is not None:
                return super().wait()
            own = self.layout.shard_of(self.flat)
            super().wait()
            self.flat_parameter.shard.grad = own.copy_(self.flat_parameter.shard.grad)


def bucket_keeps_gradients():
    """Copies the gradient into the bucket but does not free the original.

    caught by: ShardedBucket · plain model
    """

    class ShardedBucket(zero2.ShardedBucket):
        def pack(self, index):
            gradient = self.parameters[index].grad
            super().pack(index)
            self.parameters[index].grad = gradient


def bucket_keeps_its_flat_tensor():
    """Does not free the flat tensor after wait().

    caught by: ShardedBucket · memory
    """

    class ShardedBucket(zero2.ShardedBucket):
        def wait(self):
            kept = self.flat
            super().wait()
            self.kept = kept


def bucket_launches_in_wait():
    """Launches the reduce-scatter in wait() instead of launch().

    caught by: ShardedBucket · wire
    """

    class _Later:
        def __init__(self, flat, group):
            self.flat, self.group = flat, group

        def wait(self):
            return zero2.launch_reduce_scatter(self.flat, self.group).wait()

    class ShardedBucket(zero2.ShardedBucket):
        def launch(self):
            if self.previous is not None:
                self.previous.wait()
            self.in_flight = _Later(self.flat, self.layout.group)


def bucket_sends_in_pieces():
    """Launches a separate reduce-scatter for every five elements of a shard.

    caught by: ShardedBucket · wire
    """

    class _Pieces:
        def __init__(self, handles):
            self.handles = handles

        def wait(self):
            return torch.cat([handle.wait() for handle in self.handles])

    class ShardedBucket(zero2.ShardedBucket):
        def launch(self):
            if self.previous is not None:
                self.previous.wait()
            columns = self.flat.view(zero2.dist.get_world_size(self.layout.group), -1).split(5, dim=1)
            self.in_flight = _Pieces(
                [zero2.launch_reduce_scatter(each.flatten(), self.layout.group) for each in columns]
            )


def bucket_skips_none():
    """Reuses its flat tensor, in which a missing gradient leaves the previous one.

    caught by: ShardedBucket · awkward models
    """

    class ShardedBucket(zero2.ShardedBucket):
        kept = None

        def pack(self, index):
            if self.flat is None and self.kept is not None:
                self.flat, self.views = self.kept
            if self.flat is None or self.parameters[index].grad is not None:
                super().pack(index)
            self.kept = self.flat, self.views


def bucket_waits_in_launch():
    """Waits in launch() for the collective that it has just launched.

    caught by: ShardedBucket · at once
    """

    class _Complete:
        def __init__(self, shard):
            self.shard = shard

        def wait(self):
            return self.shard

    class ShardedBucket(zero2.ShardedBucket):
        def launch(self):
            super().launch()
            self.in_flight = _Complete(self.in_flight.wait())


def bucket_without_gradients_has_no_flat_tensor():
    """Allocates its flat tensor for the first gradient that is not None: without one, there is nothing to launch.

    caught by: ShardedBucket · awkward models
    """

    class ShardedBucket(zero2.ShardedBucket):
        def pack(self, index):
            if self.parameters[index].grad is not None:
                super().pack(index)


def all_at_the_end():
    """Launches no bucket during backward; all of them are launched in step().

    caught by: ZeRO2 · overlap
    """

    class Sync(zero2.GradientSync):
        def on_gradient(self, bucket_index, index):
            self.pending = True

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "GradientSync", Sync):
                super().__init__(*args, **options)


def all_reduces_and_slices():
    """All-reduces a bucket and keeps the rank's shard, as in published code: twice the bytes.

    caught by: ZeRO2 · wire
    """

    class AllReduce:
        def __init__(self, flat, layout):
            self.own = layout.shard_of(flat)
            self.work = zero2.dist.all_reduce(flat, group=layout.group, async_op=True)

        def wait(self):
            self.work.wait()
            return self.own

    class Bucket(zero2.ShardedBucket):
        def launch(self):
            if self.previous is not None:
                self.previous.wait()
            self.in_flight = AllReduce(self.flat, self.layout)

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)


def clips_when_it_steps():
    """Stores the scale and applies it in the next step, to whatever gradients there are by then.

    caught by: ZeRO2 · loops
    """

    class ZeRO2(zero2.ZeRO2):
        scale = 1.0

        def clip_grad_norm_(self, max_norm):
            self._finish_unless_synced()
            norm = self.optimizer.clip_grad_norm_(float("inf"))
            self.scale = (max_norm / (norm + 1e-6)).clamp(max=1)
            return norm

        def step(self):
            self._finish_unless_synced()
            for bucket in self.buckets:
                bucket.flat_parameter.shard.grad *= self.scale
            self.scale = 1.0
            super().step()


def deaf_to_schedulers():
    """Keeps using the learning rate from construction and ignores schedulers.

    caught by: ZeRO2 · state
    """

    class Deaf(zero2.ShardedOptimizer):
        def step(self):
            rates = [group["lr"] for group in self.param_groups]
            for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
                group["lr"] = inner_group["lr"]
            super().step()
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedOptimizer", Deaf):
                super().__init__(*args, **options)


def divides_by_the_world():
    """Divides by the world size instead of the size of the group.

    caught by: ZeRO2 · group
    """

    class Bucket(zero2.ShardedBucket):
        def pack(self, index):
            gradient = self.parameters[index].grad
            if gradient is not None:
                gradient *= zero2.dist.get_world_size(self.layout.group) / zero2.dist.get_world_size()
            super().pack(index)

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)


def drops_what_no_sync_accumulated():
    """Drops the gradients accumulated inside no_sync(), so only the last micro-batch counts.

    caught by: ZeRO2 · accumulation
    """

    class ZeRO2(zero2.ZeRO2):
        @contextlib.contextmanager
        def no_sync(self):
            with super().no_sync():
                yield
            for parameter in self.module.parameters():
                parameter.grad = None


def each_micro_batch_overwrites():
    """Replaces the accumulated gradients in every finish_gradient_sync().

    caught by: ZeRO2 · accumulation
    """

    class Bucket(zero2.ShardedBucket):
        def wait(self):
            if self.in_flight is not None:
                self.flat_parameter.shard.grad = None
            super().wait()

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)


def forwards_one_input():
    """Accepts only a single positional input in forward.

    caught by: ZeRO2 · wrapping
    """

    class ZeRO2(zero2.ZeRO2):
        def forward(self, x):
            return self.module(x)


def gathers_nothing():
    """Updates the rank's own shards but does not all-gather the other ranks' updates.

    caught by: ZeRO2 · values
    """

    class Alone(zero2.ShardedOptimizer):
        def update_parameters(self):
            self.inner.step()

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedOptimizer", Alone):
                super().__init__(*args, **options)


def hooks_lost_in_a_copy():
    """Registers no hooks on a deep copy.

    caught by: ZeRO2 · copies
    """

    class Sync(zero2.GradientSync):
        def __setstate__(self, state):
            self.__dict__.update(state)

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "GradientSync", Sync):
                super().__init__(*args, **options)


def keeps_a_copy_of_the_parameters():
    """Keeps a float32 copy of all parameters in a closure, where no attribute shows it.

    caught by: ZeRO2 · memory
    """

    def _remember(tensors):
        return lambda: tensors

    class ZeRO2(zero2.ZeRO2):
        def step(self):
            self.undo = _remember([bucket.flat_parameter.flat_param.float().clone() for bucket in self.buckets])
            super().step()


def keeps_what_was_clipped():
    """Ignores zero_grad() after clip_grad_norm_() unless there was a step in between.

    caught by: ZeRO2 · loops
    """

    class ZeRO2(zero2.ZeRO2):
        was_clipped = False

        def clip_grad_norm_(self, max_norm):
            norm = super().clip_grad_norm_(max_norm)
            self.was_clipped = True
            return norm

        def step(self):
            super().step()
            self.was_clipped = False

        def zero_grad(self, set_to_none=True):
            if self.was_clipped:
                self.synced = self.was_clipped = False
            else:
                super().zero_grad()


def keeps_whole_gradients():
    """Keeps the full gradients that backward computed until zero_grad().

    caught by: ZeRO2 · peak
    """

    class Bucket(zero2.ShardedBucket):
        def __init__(self, flat_parameter):
            super().__init__(flat_parameter)
            self.kept = {}

        def pack(self, index):
            self.kept[index] = self.parameters[index].grad
            super().pack(index)

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)

        def zero_grad(self, set_to_none=True):
            super().zero_grad()
            for bucket in self.buckets:
                bucket.kept.clear()


def launches_out_of_order():
    """Launches a bucket as soon as it is full, even if it is not the next in order.

    caught by: ZeRO2 · launch order
    """

    class Queue(overlapped_ddp.LaunchQueue):
        def add(self, bucket_index, index):
            self.buckets[bucket_index].pack(index)
            self.missing[bucket_index].remove(index)
            if not self.missing[bucket_index]:
                self.buckets[bucket_index].launch()

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.sync.queue = Queue(self.buckets)


def one_bucket_late():
    """Launches a full bucket only when the next one is full.

    caught by: ZeRO2 · overlap
    """

    class Bucket(zero2.ShardedBucket):
        full = False

        def launch(self):
            if self.previous is not None and self.previous.full:
                self.previous.go()
            self.full = True

        def go(self):
            super().launch()
            self.full = False

        def wait(self):
            if self.full:
                self.go()
            super().wait()

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)


def optimizer_begins_anew():
    """Saves the optimizer state but does not load it.

    caught by: ZeRO2 · state
    """

    class Anew(zero2.ShardedOptimizer):
        def load_state_dict(self, state_dict):
            pass

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedOptimizer", Anew):
                super().__init__(*args, **options)


def optimizes_everything():
    """Shards only the gradients: every rank's optimizer has state for all parameters.

    caught by: ZeRO2 · memory
    """

    class Everything(zero2.ShardedOptimizer):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            full = [each.flat_param.clone().requires_grad_() for each in self.flat_parameters]
            self.idle = type(self.inner)(full, **self.defaults)
            for each in full:
                each.grad = zero2.torch.zeros_like(each)
            self.idle.step()
            for each in full:
                each.grad = None

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedOptimizer", Everything):
                super().__init__(*args, **options)


def runs_forward_twice():
    """Runs forward a second time without gradients: BatchNorm updates its running statistics twice per step.

    caught by: ZeRO2 · awkward models
    """

    class ZeRO2(zero2.ZeRO2):
        def forward(self, *inputs, **kwargs):
            with torch.no_grad():
                super().forward(*inputs, **kwargs)
            return super().forward(*inputs, **kwargs)


def shards_nothing():
    """Cheats by using overlapped data parallelism with the whole optimizer on every rank.

    caught by: ZeRO2 · memory
    """

    class ZeRO2(OverlappedDDP):
        def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
            super().__init__(module, bucket_cap_mb, group)
            self.optimizer = optimizer_cls(module.parameters(), **defaults)

        def step(self):
            self.optimizer.step()

        def clip_grad_norm_(self, max_norm):
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


def torch_inside():
    """Cheats by using torch's DistributedDataParallel and ZeroRedundancyOptimizer.

    caught by: ZeRO2 · values
    """

    class ZeRO2(nn.Module):
        def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
            super().__init__()
            self.module, self.hidden = module, [DistributedDataParallel(module, process_group=group)]
            self.optimizer = ZeroRedundancyOptimizer(
                module.parameters(), optimizer_cls, process_group=group, **defaults
            )

        def forward(self, *args, **kwargs):
            return self.hidden[0](*args, **kwargs)

        def finish_gradient_sync(self):
            pass

        def step(self):
            self.optimizer.step()


def waits_in_the_hook():
    """Waits for each bucket in the hook that launches it.

    caught by: ZeRO2 · backward continues
    """

    class Bucket(zero2.ShardedBucket):
        def launch(self):
            super().launch()
            self.wait()

    class ZeRO2(zero2.ZeRO2):
        def __init__(self, *args, **options):
            with mock.patch.object(zero2, "ShardedBucket", Bucket):
                super().__init__(*args, **options)


def hooks_ignore_no_sync():
    """Ignores no_sync(): buckets are launched inside it too.

    caught by: ZeRO2 · micro-batches
    """

    class ZeRO2(zero2.ZeRO2):
        @contextlib.contextmanager
        def no_sync(self):
            yield
            self.finish_gradient_sync()
