"""Keeps a copy of the whole model in addition to the sharded one.

caught by: fully_sharded · memory
"""

import copy

from solutions import production as right


def fully_sharded(module, units=None, **options):
    whole = copy.deepcopy(module)
    right.fully_sharded(module, units, **options)
    module.__dict__["whole"] = whole
    return module
