"""Does not mark gradients accumulated inside no_sync() as pending, so nothing shows that they are not averaged.

caught by: GradientSync · disabled
"""

from solutions import overlapped_ddp as right


class GradientSync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        pending = self.pending
        super().on_gradient(bucket_index, index)
        self.pending = pending or self.enabled
