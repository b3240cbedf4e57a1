"""All-reduces the gradient and keeps its own tokens: twice the bytes.

caught by: gather_tokens · wire
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class GatherTokens(right.GatherTokens):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return right.own_shard(total, right.TOKENS, ctx.group, "the tokens"), None


def gather_tokens(tensor, group=None):
    return GatherTokens.apply(tensor, group)
