"""Copies parameters into flat_param, and lets the model compute with the old ones.

caught by: FlatParameter · views
"""

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def _alias_parameters(self):
        pass
