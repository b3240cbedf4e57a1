"""Returns outputs where it should return a loss.

caught by: Chunk · first and last
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        output = super().run_forward(micro_batch, x, loss_of)
        return output if loss_of is None else self(x).detach()
