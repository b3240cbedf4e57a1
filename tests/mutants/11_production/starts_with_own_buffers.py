"""Broadcasts the parameters but not the buffers.

caught by: fully_sharded · awkward models
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    for parameter in module.parameters():
        right.dist.broadcast(parameter.detach(), src=0)
    policy = right.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    mesh = mesh or right.mesh_of_all_ranks(module)
    chosen = set(right.default_units(module) if units is None else units)
    for unit in reversed([each for each in module.modules() if each in chosen]):
        right.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return right.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
