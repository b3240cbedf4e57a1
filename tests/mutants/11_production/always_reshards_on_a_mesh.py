"""Always reshards after forward when a mesh is given, even with reshard_after_forward=False.

caught by: fully_sharded · mesh
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    reshard_after_forward = reshard_after_forward or mesh is not None
    return right.fully_sharded(module, units, compute_dtype, reduce_dtype, reshard_after_forward, mesh)
