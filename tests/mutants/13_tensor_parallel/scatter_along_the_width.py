"""Splits the last dimension instead of the tokens.

caught by: scatter_tokens · plain tokens
"""

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return right.reduce_scatter(partial, -1, group)


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
