"""Sends the shard in its own dtype to fill a flat_param of another one, through FlatParameter's launch_all_gather().

caught by: ShardedFlatParameter · unshard
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def unshard(self):
        right.allow_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        return self.launch_all_gather()
