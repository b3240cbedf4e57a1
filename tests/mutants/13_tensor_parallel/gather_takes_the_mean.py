"""Averages the gradients.

caught by: gather_tokens · plain tokens
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class GatherTokens(right.GatherTokens):
    @staticmethod
    def backward(ctx, gradient):
        total, _ = right.GatherTokens.backward(ctx, gradient)
        return total / dist.get_world_size(ctx.group), None


def gather_tokens(tensor, group=None):
    return GatherTokens.apply(tensor, group)
