"""Gathers into one buffer in every call, which overwrites activations that backward still needs.

caught by: gather_tokens · several calls
"""

import torch

from solutions import tensor_operators as right

BUFFERS = {}


class GatherTokens(right.GatherTokens):
    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        whole = right.all_gather(shard, right.TOKENS, group)
        buffer = BUFFERS.setdefault(whole.shape, torch.empty_like(whole))
        buffer.copy_(whole)
        return buffer.detach()


def gather_tokens(shard, group=None):
    return GatherTokens.apply(shard, group)
