"""Assigns ranks to hosts in turn, so all sharding traffic leaves its host.

caught by: host_mesh · wire
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    world_size = right.dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {ranks_per_host}")
    ranks = right.torch.arange(world_size).view(ranks_per_host, -1).t().contiguous()
    return right.DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
