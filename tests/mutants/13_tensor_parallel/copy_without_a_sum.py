"""Passes gradients on, so that a rank has only its own part of the inputs' gradient.

caught by: copy_to_ranks · plain gradient
"""

from solutions import tensor_operators as right


class CopyToRanks(right.CopyToRanks):
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_to_ranks(tensor, group=None):
    return CopyToRanks.apply(tensor, group)
