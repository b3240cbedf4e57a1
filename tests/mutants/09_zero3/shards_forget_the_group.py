"""All-gathers from all ranks instead of those of the group.

caught by: ShardedFlatParameter · unshard
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        right.allow_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        return right.launch_all_gather(self.flat_param, self.shard.detach().to(self.flat_param.dtype))
