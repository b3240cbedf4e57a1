"""Uses the global rank to choose a shard, although the group has fewer ranks.

caught by: FlatParameter · layout
"""

from unittest import mock

import torch.distributed as dist

from solutions import flat as right


class _Layout(right.FlatLayout):
    def shard_of(self, flat):
        size = dist.get_world_size(self.group)
        return flat.view(size, -1)[dist.get_rank() % size]


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        with mock.patch.object(right, "FlatLayout", _Layout):
            super().__init__(parameters, group)
