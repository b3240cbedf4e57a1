"""Rejects a mesh of the wrong size without saying which numbers do not agree.

caught by: make_mesh · rejections
"""

import torch.distributed as dist

from solutions import parallel_3d as right


def make_mesh(dp, pp, tp):
    if dp * pp * tp != dist.get_world_size():
        raise ValueError("the mesh does not have the right size")
    return right.make_mesh(dp, pp, tp)
