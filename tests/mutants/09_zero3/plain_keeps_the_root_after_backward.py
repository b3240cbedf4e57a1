"""Leaves the root to finish_gradient_sync(), which the lab's training loop does not call.

caught by: PlainZeRO3 · plain model
"""

from collections import Counter
from functools import partial

import torch
from torch import nn

from solutions.overlapped_ddp import watch_gradients
from solutions.units import shard_into_units
from solutions.zero2 import ShardedBucket


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
