"""Makes every shard trainable.

caught by: ShardedFlatParameter · start
"""

from solutions import units as right


class ShardedFlatParameter(right.ShardedFlatParameter):
    def __init__(self, parameters, group=None, compute_dtype=None):
        super().__init__(parameters, group, compute_dtype)
        self.shard.requires_grad_(True)
