"""All-reduces and keeps its own tokens: twice the bytes.

caught by: scatter_tokens · wire
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return right.own_shard(total, right.TOKENS, group, "the tokens")


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
