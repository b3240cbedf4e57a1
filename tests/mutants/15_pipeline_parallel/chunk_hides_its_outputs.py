"""Keeps outputs somewhere else than in `kept`.

caught by: Chunk · plain chunk
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_backward(self, micro_batch, gradient):
        self.history = [*getattr(self, "history", []), self.kept[micro_batch]]
        return super().run_backward(micro_batch, gradient)
