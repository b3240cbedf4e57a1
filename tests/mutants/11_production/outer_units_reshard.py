"""Reshards a unit that contains other units, even with reshard_after_forward=False.

caught by: fully_sharded · nested
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    right.broadcast_state(module)
    policy = right.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    mesh = mesh or right.mesh_of_all_ranks(module)
    chosen = set(right.default_units(module) if units is None else units)
    for unit in reversed([each for each in module.modules() if each in chosen]):
        contains_units = any(inner in chosen for inner in unit.modules() if inner is not unit)
        reshards = reshard_after_forward or contains_units
        right.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    return right.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
