"""Also removes what the gradients of the weights would be computed from.

caught by: Pipeline · postponed weights
"""

from solutions import pipeline as right


class Chunk(right.Chunk):
    def run_backward(self, micro_batch, gradient):
        found = super().run_backward(micro_batch, gradient)
        self.terms.pop(micro_batch, None)
        return found


class Pipeline(right.Pipeline):
    def keep_own_layers(self, layers):
        super().keep_own_layers(layers)
        for chunk in self.chunks:
            chunk.__class__ = Chunk
