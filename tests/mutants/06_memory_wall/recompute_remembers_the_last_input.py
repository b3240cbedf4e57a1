"""Keeps a reference to the last inputs on the module, so they cannot be freed.

caught by: Checkpointed · nothing kept
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        self.last = inputs
        return super().forward(*inputs)
