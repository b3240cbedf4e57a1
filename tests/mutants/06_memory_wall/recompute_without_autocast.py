"""Recomputes without the autocast state of forward: in float32 instead of bfloat16, for example.

caught by: Checkpointed · autocast
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return right.Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
