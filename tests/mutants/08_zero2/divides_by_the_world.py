"""Divides by the world size instead of the size of the group.

caught by: ZeRO2 · group
"""

from unittest import mock

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def pack(self, index):
        gradient = self.parameters[index].grad
        if gradient is not None:
            gradient *= right.dist.get_world_size(self.layout.group) / right.dist.get_world_size()
        super().pack(index)


class ZeRO2(right.ZeRO2):
    def __init__(self, *args, **options):
        with mock.patch.object(right, "ShardedBucket", Bucket):
            super().__init__(*args, **options)
