"""Keeps using the learning rate from construction and ignores schedulers.

caught by: ZeRO2 · state
"""

from unittest import mock

from solutions import zero2 as right


class Deaf(right.ShardedOptimizer):
    def step(self):
        rates = [group["lr"] for group in self.param_groups]
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group["lr"] = inner_group["lr"]
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedOptimizer", Deaf):
            super().__init__(*args, **options)
