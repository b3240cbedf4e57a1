"""Gives the optimizer a copy of the shard, so its updates never reach flat_param.

caught by: FlatParameter · views
"""

from torch import nn

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.shard = nn.Parameter(self.layout.shard_of(self.flat_param).clone())
