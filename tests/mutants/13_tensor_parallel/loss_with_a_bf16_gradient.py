"""Computes an exact loss, but in backward the softmax in the dtype of the logits.

caught by: vocab_parallel_cross_entropy · bf16
"""

import torch
import torch.distributed as dist

from solutions import tensor_parallel as right


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_shard, targets, group):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        index = targets - dist.get_rank(group) * logits.shape[-1]
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        is_target = index.unsqueeze(-1) == tokens
        own = torch.stack([shifted.exp().sum(-1), torch.where(is_target, shifted, 0).sum(-1)])
        total, target_logit = right.sum_over_ranks(own, group)
        log_total = (maximum + total.log()).to(logits_shard.dtype)
        ctx.save_for_backward(logits_shard, log_total, is_target)
        return (total.log() - target_logit).mean()

    @staticmethod
    def backward(ctx, gradient):
        logits_shard, log_total, is_target = ctx.saved_tensors
        softmax = (logits_shard - log_total.unsqueeze(-1)).exp()
        return (softmax - is_target.to(softmax.dtype)) * (gradient / log_total.numel()), None, None


def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
    return Loss.apply(logits_shard, targets, group)
