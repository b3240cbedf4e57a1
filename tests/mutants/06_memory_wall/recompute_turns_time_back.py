"""Leaves the random state in backward as it was in forward, so the next step drops the same elements.

caught by: Checkpointed · dropout
"""

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        found = right.Recompute.backward(ctx, gradient)
        right.set_rng_states(ctx.rng_states)
        return found


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
