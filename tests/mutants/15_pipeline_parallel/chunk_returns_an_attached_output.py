"""Returns an output that refers to the graph.

caught by: Chunk · plain chunk
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        super().run_forward(micro_batch, x, loss_of)
        return self.kept[micro_batch][1]
