"""Stores the random state of the module's last forward only, not of each forward.

caught by: Checkpointed · order
"""

from solutions import memory_wall as right

LAST = {}


class _Recompute(right.Recompute):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        LAST[module] = right.get_rng_states()
        return right.Recompute.forward(ctx, module, count, *tensors)

    @staticmethod
    def backward(ctx, gradient):
        ctx.rng_states = LAST[ctx.module]
        return right.Recompute.backward(ctx, gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
