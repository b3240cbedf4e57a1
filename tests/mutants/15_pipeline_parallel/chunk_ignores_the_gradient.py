"""Starts backward from ones.

caught by: Chunk · plain chunk
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_backward(self, micro_batch, gradient):
        return super().run_backward(micro_batch, None if gradient is None else right.torch.ones_like(gradient))
