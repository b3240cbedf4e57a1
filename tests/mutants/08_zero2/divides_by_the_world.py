"""Divides by the number of all ranks, not of its group's.

caught by: ZeRO2 · group
"""

from solutions import zero2 as right


class Bucket(right.ShardedBucket):
    def pack(self, place):
        gradient, group = self.parameters[place].grad, self.home.group
        if gradient is not None:
            gradient *= right.dist.get_world_size(group) / right.dist.get_world_size()
        super().pack(place)


class ZeRO2(right.ZeRO2):
    bucket_type = Bucket
