"""Concatenates gradients in one buffer in every backward, although autograd may still hold the last one.

caught by: scatter_tokens · several calls
"""

import torch

from solutions import tensor_operators as right

BUFFERS = {}


class ScatterTokens(right.ScatterTokens):
    @staticmethod
    def backward(ctx, gradient):
        whole = right.all_gather(gradient, right.TOKENS, ctx.group)
        return BUFFERS.setdefault(whole.shape, torch.empty_like(whole)).copy_(whole).detach(), None


def scatter_tokens(partial, group=None):
    return ScatterTokens.apply(partial, group)
