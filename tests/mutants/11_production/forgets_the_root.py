"""Shards the units but not the rest of the module.

caught by: fully_sharded · plain
"""

from solutions import production as right


def fully_sharded(module, units=None, **options):
    right.broadcast_state(module)
    for unit in right.default_units(module) if units is None else units:
        right.fully_shard(unit, mesh=right.mesh_of_all_ranks(module))
    return module
