"""Rejects only a mesh that is larger than the number of ranks.

caught by: make_mesh · rejections
"""

import torch.distributed as dist

from solutions import parallel_3d as right


def make_mesh(dp, pp, tp):
    if dp * pp * tp < dist.get_world_size():
        return right.init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    return right.make_mesh(dp, pp, tp)
