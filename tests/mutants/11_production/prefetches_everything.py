"""Makes each unit prefetch all the units after it.

caught by: fully_sharded · memory
"""

from solutions import production as right


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    right.fully_sharded(module, units, compute_dtype, reduce_dtype, reshard_after_forward, mesh)
    sharded = [each for each in module.modules() if hasattr(each, "set_modules_to_forward_prefetch")][1:]
    for index, unit in enumerate(sharded):
        unit.set_modules_to_forward_prefetch(sharded[index + 1 :])
    return module
