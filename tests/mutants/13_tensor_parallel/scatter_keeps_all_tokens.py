"""Returns a view of a tensor that holds all tokens.

caught by: scatter_tokens · memory
"""

import torch
import torch.distributed as dist

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def forward(ctx, partial, group):
        right.check_divisible(partial, group)
        ctx.group = group
        parts = torch.stack(partial.chunk(dist.get_world_size(group), right.TOKENS))
        return right.launch_reduce_scatter(parts.view(-1), group).wait().view(parts.shape[1:])


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
