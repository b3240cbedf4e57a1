"""Builds a mesh with a single dimension, which shards over all ranks and replicates nothing.

caught by: host_mesh · mesh
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    world_size = right.dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {ranks_per_host}")
    return right.init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
