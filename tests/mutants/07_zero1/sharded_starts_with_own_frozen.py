"""Broadcasts only what it flattens: frozen parameters, and with them the outputs, differ between ranks.

caught by: ShardedOptimizer · same start
"""

from solutions import zero1 as right


def flatten_and_broadcast(parameters, group):
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return right.flatten_and_broadcast(trained, group)


class ShardedOptimizer(right.ShardedOptimizer):
    pass
