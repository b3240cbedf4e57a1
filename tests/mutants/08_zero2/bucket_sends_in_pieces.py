"""Launches a separate reduce-scatter for every five elements of a shard.

caught by: ShardedBucket · wire
"""

import torch

from solutions import zero2 as right


class _Pieces:
    def __init__(self, handles):
        self.handles = handles

    def wait(self):
        return torch.cat([handle.wait() for handle in self.handles])


class ShardedBucket(right.ShardedBucket):
    def launch(self):
        if self.previous is not None:
            self.previous.wait()
        columns = self.flat.view(right.dist.get_world_size(self.layout.group), -1).split(5, dim=1)
        self.in_flight = _Pieces([right.launch_reduce_scatter(each.flatten(), self.layout.group) for each in columns])
