"""Keeps the group in the class instead of ctx, so that backward uses the group of the last call.

caught by: gather_tokens · several calls
"""

from solutions import tensor_operators as right


class GatherTokens(right.GatherTokens):
    @staticmethod
    def forward(ctx, shard, group):
        GatherTokens.group = group
        return right.all_gather(shard, right.TOKENS, group)

    @staticmethod
    def backward(ctx, gradient):
        return right.reduce_scatter(gradient, right.TOKENS, GatherTokens.group), None


def gather_tokens(shard, group=None):
    return GatherTokens.apply(shard, group)
