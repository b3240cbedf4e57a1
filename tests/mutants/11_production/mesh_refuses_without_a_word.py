"""Rejects a wrong argument with an assert that has no message.

caught by: host_mesh · rejection
"""

from solutions import production as right


def host_mesh(ranks_per_host):
    assert right.dist.get_world_size() % ranks_per_host == 0
    return right.host_mesh(ranks_per_host)
