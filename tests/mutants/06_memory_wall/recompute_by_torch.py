"""Calls torch.utils.checkpoint, which the exercise asks to build.

caught by: Checkpointed · values
"""

from torch.utils.checkpoint import checkpoint

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return checkpoint(self.module, *inputs, use_reentrant=False)
