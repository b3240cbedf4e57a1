"""Leaves the generators where forward found them plus one forward: the next step drops what this one did.

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
