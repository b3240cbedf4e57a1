"""Keeps only the latest micro-batch.

caught by: Chunk · micro-batches
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        self.kept.clear()
        output = super().run_forward(micro_batch, x, loss_of)
        self.latest = self.kept[micro_batch]
        return output

    def run_backward(self, micro_batch, gradient):
        self.kept[micro_batch] = self.latest
        return super().run_backward(micro_batch, gradient)
