"""Treats empty units, even an empty iterator, like None.

caught by: fully_sharded · wire
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    right.broadcast_state(module)
    policy = right.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    options = {"mp_policy": policy, "mesh": mesh}
    chosen = set(list(units or ()) or right.default_units(module))
    for unit in reversed([each for each in module.modules() if each in chosen]):
        right.fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    return right.fully_shard(module, reshard_after_forward=False, **options)
