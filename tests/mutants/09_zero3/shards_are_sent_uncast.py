"""Gives the all-gather a shard in another dtype than flat_param, which our exchange on gloo casts, but NCCL rejects.

caught by: ShardedFlatParameter · unshard
"""

from solutions import units as right
from solutions.async_collectives import launch_all_gather


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        right.allow_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        return launch_all_gather(self.flat_param, self.shard.detach(), self.layout.group)
