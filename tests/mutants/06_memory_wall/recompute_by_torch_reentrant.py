"""Leaves the work to torch.utils.checkpoint, the older way.

caught by: Checkpointed · values
"""

from torch.utils.checkpoint import checkpoint

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return checkpoint(self.module, *inputs, use_reentrant=True)
