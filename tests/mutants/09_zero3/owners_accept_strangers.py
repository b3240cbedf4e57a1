"""A unit from elsewhere is a unit of nothing.

caught by: owned_parameters · strangers
"""

from solutions import zero3 as right


def owned_parameters(module, units):
    inside = set(module.modules()) - {module}
    return right.owned_parameters(module, [each for each in units if each in inside])
