"""Sends the shard itself, so autograd records the all-gather, and flat_param requires a gradient from then on.

caught by: ShardedFlatParameter · unshard
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        right.allow_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        return right.launch_all_gather(self.flat_param, self.shard.to(self.flat_param.dtype), self.layout.group)
