"""Rounds the number of hosts down, so ranks that do not fill a host are left out of the mesh.

caught by: host_mesh · rejection
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    hosts = max(1, right.dist.get_world_size() // ranks_per_host)
    ranks = right.torch.arange(right.dist.get_world_size())[: hosts * ranks_per_host].view(hosts, -1)
    return right.DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
