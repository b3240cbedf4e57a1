"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from solutions import prefetching, zero3
from solutions.overlapped_ddp import watch_gradients
from solutions.prefetching import Prefetcher as Right
from solutions.units import UnitState, shard_into_units
from solutions.zero2 import ShardedBucket
from solutions.zero3 import ZeRO3


def plain_averages_over_two_ranks():
    """Divides gradients by two, whatever the number of ranks.

    caught by: PlainZeRO3 · world sizes
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def finish_gradient_sync(self):
            super().finish_gradient_sync()
            for shard in self.shards:
                shard.grad *= dist.get_world_size() / 2


def plain_drops_the_gradient():
    """Registers a hook that calls pre_backward() without the gradient, so backward will raise a TypeError.

    caught by: PlainZeRO3 · backward hooks
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def _watch_outputs(self, unit, output):
            call = self.calls.pop(unit)
            unit.open_calls.add(call)
            output.register_hook(lambda _gradient, _call=call: self.pre_backward(unit))


def plain_gathers_once():
    """Keeps every unit unsharded from its forward to its backward.

    caught by: PlainZeRO3 · wire
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, reshard_after_forward=False, group=group)


def plain_keeps_the_root_after_backward():
    """Leaves the root to finish_gradient_sync(), which the lab's training loop does not call.

    caught by: PlainZeRO3 · plain model
    """

    class PlainZeRO3(nn.Module):
        def __init__(self, module, units=None, group=None):
            super().__init__()
            self.module, unit_of = module, shard_into_units(module, units, group=group)
            self.units, self.root = list(unit_of.values()), unit_of[module]
            self.buckets = {unit: list(map(ShardedBucket, unit.flat_parameters)) for unit in self.units}
            self.owned = [(unit, bucket) for unit in self.units for bucket in self.buckets[unit]]
            self.shards = nn.ParameterList(bucket.flat_parameter.shard for _, bucket in self.owned)
            self.packed = Counter()
            for submodule, unit in unit_of.items():
                submodule.register_forward_pre_hook(lambda *_, unit=unit: unit.wait_for_unshard())
                submodule.register_forward_hook(partial(self.post_forward, unit))
            watch_gradients([bucket for _, bucket in self.owned], self.on_gradient)

        def forward(self, *inputs):
            return self.module(*inputs)

        def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
            return self.shards.named_parameters(prefix, recurse, remove_duplicate)

        def post_forward(self, unit, submodule, inputs, output):
            if torch.is_grad_enabled():
                output.register_hook(partial(self.pre_backward, unit))
            if unit is not self.root or not torch.is_grad_enabled():
                unit.reshard()

        def pre_backward(self, unit, gradient):
            unit.wait_for_unshard()

        def on_gradient(self, bucket_index, index):
            unit, bucket = self.owned[bucket_index]
            bucket.pack(index)
            self.packed[unit] += 1
            if self.packed[unit] == sum(len(each.parameters) for each in self.buckets[unit]):
                self.packed[unit] = 0
                self.post_backward(unit)

        def post_backward(self, unit):
            for bucket in self.buckets[unit]:
                bucket.launch()
                bucket.wait()
            if unit is not self.root:
                unit.reshard()

        def finish_gradient_sync(self):
            for unit in self.units:
                unit.reshard()


def plain_keeps_the_root_in_evaluation():
    """Keeps the root unsharded after a forward without gradients.

    caught by: PlainZeRO3 · forward memory
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def forward(self, *inputs):
            self.prefetcher.begin_forward()
            return self.module(*inputs)

        def post_forward(self, unit, submodule, inputs, output):
            if unit is not self.root or torch.is_grad_enabled():
                super().post_forward(unit, submodule, inputs, output)


def plain_never_reshards_after_forward():
    """Keeps every unit unsharded after its forward.

    caught by: PlainZeRO3 · forward memory
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def post_forward(self, unit, submodule, inputs, output):
            if torch.is_grad_enabled():
                self._watch_outputs(unit, output)
            else:
                super().post_forward(unit, submodule, inputs, output)


def plain_never_unshards_for_backward():
    """Registers no hook on the outputs, so backward reads freed memory.

    caught by: PlainZeRO3 · plain model
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def _watch_outputs(self, unit, output):
            pass


def plain_reduces_at_the_end():
    """Keeps all full gradients until the end of backward.

    caught by: PlainZeRO3 · memory
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def post_backward(self, unit, call):
            unit.open_calls.discard(call)
            unit.reshard()


def plain_registers_no_hook_for_the_root():
    """Registers pre_backward() for blocks only. But a forward without gradients may reshard the root before backward.

    caught by: PlainZeRO3 · backward hooks
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def _watch_outputs(self, unit, output):
            if unit is not self.root:
                super()._watch_outputs(unit, output)


def plain_registers_no_hooks():
    """Never registers pre_backward() on the outputs of blocks. Forward alone does not notice.

    caught by: PlainZeRO3 · backward hooks
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def _watch_outputs(self, unit, output):
            if unit is self.root:
                super()._watch_outputs(unit, output)


def plain_reshards_at_the_end():
    """Keeps all units unsharded until the end of backward.

    caught by: PlainZeRO3 · memory
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def post_backward(self, unit, call):
            unit.open_calls.discard(call)
            self.reducer.reduce(self.buckets_of[unit])


def plain_reshards_the_root():
    """Reshards the root after forward, although backward needs it first.

    caught by: PlainZeRO3 · units after forward
    """

    class PlainZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=0, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def post_forward(self, unit, submodule, inputs, output):
            super().post_forward(unit, submodule, inputs, output)
            unit.reshard()


def prefetcher_compares_one_call():
    """Compares only the current call with the previous forward, so it prefetches again after the order has changed.

    caught by: Prefetcher · changing order
    """

    class Prefetcher(Right):
        def in_forward(self, unit):
            self.called.append(unit)
            index = len(self.called) - 1
            if self.expected[index : index + 1] == [unit]:
                self._unshard(self.expected[index + 1 :])


def step_prefetches_before_it_waits():
    """Calls the prefetcher first in forward, so a unit's own all-gather queues behind that of the next unit.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class PrefetchingZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def pre_forward(self, unit, submodule, inputs, kwargs):
            if unit.state is UnitState.BACKWARD:
                return None
            if unit is not self.root:
                self.prefetcher.in_forward(unit)
            unit.wait_for_unshard()
            return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None


def step_prefetches_forward_in_backward():
    """Prefetches in forward order during backward.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class Prefetcher(prefetching.Prefetcher):
        def in_backward(self, unit, unreached=()):
            if unit in self.called:
                self._unshard(self.called[self.called.index(unit) + 1 :])

    class PrefetchingZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.prefetcher = Prefetcher(prefetch)


def step_prefetches_from_the_root():
    """Lets the root prefetch the next unit, as other units do.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class PrefetchingZeRO3(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)

        def pre_forward(self, unit, submodule, inputs, kwargs):
            if unit is self.root:
                unit.wait_for_unshard()
                self.prefetcher.in_forward(unit)
            return super().pre_forward(unit, submodule, inputs, kwargs)


def step_prefetches_in_forward_only():
    """Prefetches nothing in backward.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class Prefetcher(prefetching.Prefetcher):
        def in_backward(self, unit, unreached=()):
            pass

    class PrefetchingZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.prefetcher = Prefetcher(prefetch)


def step_prefetches_two_units():
    """Prefetches one unit more than it should.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class Prefetcher(prefetching.Prefetcher):
        def _unshard(self, following):
            for unit in following[: 2 * self.units_ahead]:
                unit.unshard()

    class PrefetchingZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.prefetcher = Prefetcher(prefetch)


def step_waits_for_what_it_prefetches():
    """Waits for a prefetched all-gather before the current unit computes.

    caught by: PrefetchingZeRO3 · prefetched order
    """

    class Prefetcher(prefetching.Prefetcher):
        def _unshard(self, following):
            for unit in following[: self.units_ahead]:
                unit.wait_for_unshard()

    class PrefetchingZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.prefetcher = Prefetcher(prefetch)


def keeps_every_block():
    """Leaves every block unsharded between its forward and its backward, so each is all-gathered only once.

    caught by: KeepsLastBlock · kept wire
    """

    class KeepsLastBlock(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, reshard_after_forward=False, prefetch=prefetch, group=group)


def keeps_nothing():
    """Behaves as PrefetchingZeRO3 does.

    caught by: KeepsLastBlock · kept wire
    """

    class KeepsLastBlock(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)


def keeps_the_first_block():
    """Leaves the first block unsharded, which saves as many bytes, but holds them during all of backward.

    caught by: KeepsLastBlock · kept order
    """

    class KeepsLastBlock(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.units[0].reshard_after_forward = False


def keeps_the_last_block_and_prefetches_none():
    """Has nothing to wait for when the last block's backward begins, and forgets to launch the next all-gather then.

    caught by: KeepsLastBlock · kept order
    """

    class KeepsLastBlock(ZeRO3):
        def __init__(self, module, units=None, prefetch=1, group=None):
            super().__init__(module, units, prefetch=prefetch, group=group)
            self.units[-2].reshard_after_forward = False

        def pre_backward(self, unit, call):
            if unit is self.units[-2]:
                self.pending, unit.state = True, UnitState.BACKWARD
            else:
                super().pre_backward(unit, call)
