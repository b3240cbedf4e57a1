"""Shifts the shard indices by one: each rank gets a neighbor's shard of the sum.

caught by: launch_reduce_scatter · values
"""

from solutions import async_collectives as right


def launch_reduce_scatter(flat, group=None):
    shards = flat.view(right.dist.get_world_size(group), -1)
    return right.launch_reduce_scatter(shards.roll(1, 0).flatten(), group)
