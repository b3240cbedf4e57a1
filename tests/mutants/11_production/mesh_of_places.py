"""Swaps the sizes of the two dimensions, so it shards across hosts.

caught by: host_mesh · mesh
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    world_size = right.dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {ranks_per_host}")
    shape = (ranks_per_host, world_size // ranks_per_host)
    return right.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
