"""Backward keeps the rank's own tokens of its own gradient, without those of the others.

caught by: gather_tokens · plain tokens
"""

from solutions import tensor_operators as right


class GatherTokens(right.GatherTokens):
    @staticmethod
    def backward(ctx, gradient):
        return right.own_shard(gradient, right.TOKENS, ctx.group, "the tokens"), None


def gather_tokens(tensor, group=None):
    return GatherTokens.apply(tensor, group)
