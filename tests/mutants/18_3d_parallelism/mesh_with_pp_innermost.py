"""Makes pp the innermost axis.

caught by: make_mesh · mesh
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def make_mesh(dp, pp, tp):
    if dp * pp * tp != dist.get_world_size():
        raise ValueError(f"a mesh of {dp} × {pp} × {tp} does not fit {dist.get_world_size()} ranks")
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    ranks = torch.arange(dp * pp * tp).view(dp, tp, pp).transpose(1, 2)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "pp", "tp"))
