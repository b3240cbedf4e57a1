"""Adds up one number per bucket, in a message of its own.

caught by: ZeRO2 · clip
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def clip_grad_norm_(self, max_norm):
        self.finish_once()
        grads = [bucket.home.shard.grad for bucket in self.buckets]
        squares = [each.double().square().sum() for each in grads]
        for square in squares:
            right.dist.all_reduce(square, group=self.buckets[0].home.group)
        norm = sum(squares).sqrt()
        for each in grads:
            each *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
