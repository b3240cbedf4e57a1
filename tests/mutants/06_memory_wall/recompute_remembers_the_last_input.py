"""Keeps the last inputs on the module too, for whoever may ask.

caught by: Checkpointed · let go
"""

from solutions import memory_wall as right


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        self.last = inputs
        return super().forward(*inputs)
