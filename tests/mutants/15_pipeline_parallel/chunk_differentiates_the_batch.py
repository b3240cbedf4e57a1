"""Computes the gradients of the batch, which nobody needs.

caught by: Chunk · first and last
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_forward(self, micro_batch, x, loss_of=None):
        x = x.detach().requires_grad_(x.is_floating_point())
        output = self(x) if loss_of is None else loss_of(self(x))
        self.kept[micro_batch] = x, output
        return output.detach()
