"""Does not restore the random state in backward, so dropout drops different elements.

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
