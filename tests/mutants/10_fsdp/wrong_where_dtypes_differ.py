"""Divides gradients a second time if compute_dtype differs from the shards' dtype.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for flat_parameter in self.flat_parameters:
            shard = flat_parameter.shard
            if shard.grad is not None and shard.dtype != flat_parameter.flat_param.dtype:
                shard.grad /= len(self.flat_parameters)
