"""Backward fills the gradients of the other ranks' tokens with zeros.

caught by: scatter_tokens · plain tokens
"""

import torch
import torch.distributed as dist

from solutions import tensor_operators as right


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.zeros_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        parts[dist.get_rank(ctx.group)] = gradient
        return torch.cat(parts, right.TOKENS), None


def scatter_tokens(tensor, group=None):
    return ScatterTokens.apply(tensor, group)
