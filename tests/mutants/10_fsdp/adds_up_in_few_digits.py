"""Accumulates the gradients of micro-batches in compute_dtype instead of full precision.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for flat_parameter in self.flat_parameters:
            shard, few = flat_parameter.shard, flat_parameter.flat_param.dtype
            if shard.grad is not None:
                shard.grad = shard.grad.to(few).to(shard.dtype)
