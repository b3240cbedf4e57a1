"""Reduces in float32 whenever compute_dtype is set, without being asked: twice the bytes.

caught by: fully_sharded · dtypes
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    if compute_dtype is not None and reduce_dtype is None:
        reduce_dtype = right.torch.float32
    return right.fully_sharded(module, units, compute_dtype, reduce_dtype, reshard_after_forward, mesh)
