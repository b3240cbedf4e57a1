"""Returns a gradient for the first input and None for all others.

caught by: Checkpointed · values
"""

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        found = right.Recompute.backward(ctx, gradient)
        others = 2 + ctx.num_inputs
        return *found[:3], *[None] * (others - 3), *found[others:]


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
