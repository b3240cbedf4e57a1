"""Copies the parameters into flat_param, but the model still computes with the old tensors.

caught by: FlatParameter · views
"""

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def _alias_parameters(self):
        pass
