"""Adds up the shards right after it has launched their receives, before they are complete.

caught by: launch_reduce_scatter · values
"""

import torch.distributed as dist

from solutions import async_collectives as right


class _AddedUpEarly(right.DirectReduceScatter):
    def __init__(self, shards, group):
        super().__init__(shards, group)
        for shard in self.received:
            self.own += shard

    def wait(self):
        self.in_flight.wait()
        return self.own


def launch_reduce_scatter(flat, group=None):
    return _AddedUpEarly(flat.view(dist.get_world_size(group), -1), group)
