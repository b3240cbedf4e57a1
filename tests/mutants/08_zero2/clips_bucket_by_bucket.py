"""Uses one all-reduce per bucket to compute the norm.

caught by: ZeRO2 · clipping
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def clip_grad_norm_(self, max_norm):
        self._finish_unless_synced()
        gradients = [bucket.flat_parameter.shard.grad for bucket in self.buckets]
        squares = [gradient.double().square().sum() for gradient in gradients]
        for square in squares:
            right.dist.all_reduce(square, group=self.buckets[0].layout.group)
        norm = sum(squares).sqrt()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
