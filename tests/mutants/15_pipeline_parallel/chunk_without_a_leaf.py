"""Does not let the input require a gradient.

caught by: Chunk · plain chunk
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        output = self(x) if loss_of is None else loss_of(self(x))
        self.kept[micro_batch] = x, output
        return output.detach()
