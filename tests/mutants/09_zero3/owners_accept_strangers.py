"""Silently ignores a unit that is not part of the module.

caught by: owned_parameters · foreign modules
"""

from solutions import units as right


def owned_parameters(module, units):
    inside = set(module.modules()) - {module}
    return right.owned_parameters(module, [each for each in units if each in inside])
