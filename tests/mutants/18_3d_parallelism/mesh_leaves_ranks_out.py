"""Does not compare the size of the mesh with the number of ranks.

caught by: make_mesh · rejections
"""

import torch
from torch.distributed.device_mesh import init_device_mesh


def make_mesh(dp, pp, tp):
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
