"""Sets the same seed before each forward, so dropout drops the same elements in every step.

caught by: Checkpointed · dropout
"""

import torch

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        torch.manual_seed(0)
        return super().forward(*inputs)
