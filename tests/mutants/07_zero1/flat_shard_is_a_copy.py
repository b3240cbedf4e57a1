"""Gives the optimizer a shard of its own memory: what it writes never comes to flat.

caught by: FlatParameters · views
"""

from torch import nn

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.shard = nn.Parameter(self.own(self.flat).clone())
