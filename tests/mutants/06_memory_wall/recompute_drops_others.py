"""Lets dropout drop anew in backward.

caught by: Checkpointed · dropout
"""

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        ctx.rng_states = right.get_rng_states()
        return right.Recompute.backward(ctx, gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
