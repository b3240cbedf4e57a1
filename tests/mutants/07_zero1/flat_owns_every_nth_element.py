"""Rank r owns every N-th element from r on: each has equally many, but no shard is contiguous.

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
