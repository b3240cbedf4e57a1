"""Puts the module into eval mode, so it trains without dropout.

caught by: fully_sharded · awkward models
"""

from solutions import production as right


def fully_sharded(module, *args, **kwargs):
    return right.fully_sharded(module.eval(), *args, **kwargs)
