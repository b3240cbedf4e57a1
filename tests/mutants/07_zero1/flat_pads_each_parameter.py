"""Pads every parameter to a multiple of the world size instead of padding their total.

caught by: FlatParameter · layout
"""

from unittest import mock

import torch.distributed as dist

from solutions import flat as right


class _Layout(right.FlatLayout):
    def _sizes(self):
        size = dist.get_world_size(self.group)
        return [-(-parameter.numel() // size) * size for parameter in self.parameters]

    def new_flat(self, dtype=None):
        return self.parameters[0].new_zeros(sum(self._sizes()), dtype=dtype)

    def views(self, flat):
        pairs = zip(flat.split(self._sizes()), self.parameters, strict=True)
        return [padded[: parameter.numel()].view(parameter.shape) for padded, parameter in pairs]


class FlatParameter(right.FlatParameter):
    def __init__(self, parameters, group=None):
        with mock.patch.object(right, "FlatLayout", _Layout):
            super().__init__(parameters, group)
