"""Computes again in whatever autocast there is by then: in float32 what was in bfloat16.

caught by: Checkpointed · autocast
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return right.Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
