"""Returns the rank's own partial sum.

caught by: sum_over_ranks · plain sum
"""

from solutions import tensor_operators as right


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        return partial.clone()


def sum_over_ranks(tensor, group=None):
    return SumOverRanks.apply(tensor, group)
