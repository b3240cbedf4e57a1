"""Runs backward from outputs that require no gradient.

caught by: Chunk · frozen
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_backward(self, micro_batch, gradient):
        x, output = self.kept.pop(micro_batch)
        output.backward(gradient)
        return x.grad
