"""Collects all digits, and rounds then: twice the bytes.

caught by: ShardedParameters · gather
"""

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def gather(self):
        whole = self.shard.new_empty(self.flat.shape).detach()
        right.begin_all_gather(whole, self.shard.detach(), self.group).wait()
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.flat.copy_(whole)
        return right.begin_all_gather(self.flat[:0], self.shard.detach()[:0].to(self.flat.dtype), self.group)
