"""Assigns every N-th element to a rank: the shards have equal sizes but are not contiguous.

caught by: FlatParameter · layout
"""

from unittest import mock

import torch.distributed as dist

from solutions import flat as right


class _Layout(right.FlatLayout):
    def shard_of(self, flat):
        return flat.view(-1, dist.get_world_size(self.group))[:, dist.get_rank(self.group)]


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        with mock.patch.object(right, "FlatLayout", _Layout):
            super().__init__(parameters, group)
