"""Keeps the original parameter tensors: a permanent second copy.

caught by: FlatParameter · memory
"""

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        self.before = [parameter.detach() for parameter in parameters]
        super().__init__(parameters, group)
