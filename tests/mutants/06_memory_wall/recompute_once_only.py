"""Deletes its saved state in the first backward, even with retain_graph=True.

caught by: Checkpointed · order
"""

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        found = right.Recompute.backward(ctx, gradient)
        del ctx.module
        return found


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
