"""Adds a whole extra shard of padding when none is needed.

caught by: FlatParameter · layout
"""

from unittest import mock

import torch.distributed as dist

from solutions import flat as right


class _Layout(right.FlatLayout):
    def new_flat(self, dtype=None):
        size = dist.get_world_size(self.group)
        return self.parameters[0].new_zeros((self.numel // size + 1) * size, dtype=dtype)


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        with mock.patch.object(right, "FlatLayout", _Layout):
            super().__init__(parameters, group)
