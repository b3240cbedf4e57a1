"""Saves a copy of each input in addition to the input itself.

caught by: Checkpointed · memory
"""

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        output = right.Recompute.forward(ctx, module, count, *tensors)
        ctx.copies = [tensor.clone() for tensor in tensors[:count]]
        return output


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
