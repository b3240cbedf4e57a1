"""After loading, each shard is a slice of the whole flat tensor, whose memory it keeps.

caught by: ZeRO3 · another world size
"""

import torch

from solutions import zero3 as right
from solutions.model_state import values_in


class ZeRO3(right.ZeRO3):
    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        new_value = values_in(self.module, state_dict)
        for flat_parameter in self.flat_parameters:
            layout, shard = flat_parameter.layout, flat_parameter.shard
            flat = layout.new_flat(shard.dtype)
            for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
                view.copy_(new_value.pop(parameter))
            shard.data = layout.shard_of(flat)
        for buffer, value in new_value.items():
            buffer.copy_(value)
