"""Always builds the mesh on the CPU.

caught by: host_mesh · mesh
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    hosts, left = divmod(right.dist.get_world_size(), ranks_per_host)
    if left:
        raise ValueError(f"{left} ranks are left over")
    return right.init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
