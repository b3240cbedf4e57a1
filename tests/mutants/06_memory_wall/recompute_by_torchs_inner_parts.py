"""Cheats by importing the internals of torch.utils.checkpoint before they are blocked.

caught by: Checkpointed · values
"""

from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        around = _checkpoint_without_reentrant_generator(
            self.module, True, noop_context_fn, "default", False, True, *inputs
        )
        next(around)
        output = self.module(*inputs)
        next(around, None)
        return output
