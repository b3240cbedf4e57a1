"""Lists the axes from the innermost to the outermost.

caught by: make_mesh · mesh
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def make_mesh(dp, pp, tp):
    if dp * pp * tp != dist.get_world_size():
        raise ValueError(f"a mesh of {dp} × {pp} × {tp} does not fit {dist.get_world_size()} ranks")
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, (tp, pp, dp), mesh_dim_names=("tp", "pp", "dp"))
