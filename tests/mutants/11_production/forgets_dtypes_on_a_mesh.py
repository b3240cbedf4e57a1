"""Ignores compute_dtype and reduce_dtype when a mesh is given.

caught by: fully_sharded · mesh
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    if mesh is not None:
        return right.fully_sharded(module, units, reshard_after_forward=reshard_after_forward, mesh=mesh)
    return right.fully_sharded(module, units, compute_dtype, reduce_dtype, reshard_after_forward)
