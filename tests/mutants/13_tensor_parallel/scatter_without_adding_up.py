"""Keeps the rank's tokens of its own partial sum.

caught by: scatter_tokens · plain tokens
"""

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return right.own_shard(partial, right.TOKENS, group, "the tokens")


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
