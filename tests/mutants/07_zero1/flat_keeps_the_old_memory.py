"""Keeps the tensors in which the parameters were: a second copy for ever.

caught by: FlatParameter · memory
"""

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        self.before = [parameter.detach() for parameter in parameters]
        super().__init__(parameters, group)
