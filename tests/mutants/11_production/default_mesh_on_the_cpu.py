"""Always builds the default mesh on the CPU.

caught by: fully_sharded · device
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    right.broadcast_state(module)
    policy = right.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    mesh = mesh or right.init_device_mesh("cpu", (right.dist.get_world_size(),))
    chosen = set(right.default_units(module) if units is None else units)
    for unit in reversed([each for each in module.modules() if each in chosen]):
        right.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return right.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
