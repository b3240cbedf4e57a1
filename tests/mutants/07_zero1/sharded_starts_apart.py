"""Flattens the parameters but broadcasts nothing, so the ranks start from different ones.

caught by: ShardedOptimizer · same start
"""

from solutions import zero1 as right
from solutions.flat import FlatParameter


def flatten_and_broadcast(parameters, group):
    return [FlatParameter(same_kind, group) for same_kind in right.group_by_kind(parameters)]


class ShardedOptimizer(right.ShardedOptimizer):
    pass
