"""Does not say which numbers do not divide.

caught by: scatter_tokens · rejections
"""

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return right.reduce_scatter(partial, right.TOKENS, group)


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
