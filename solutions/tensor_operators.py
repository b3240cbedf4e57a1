# Built by `make notebooks` from source/13_tensor_parallel/lab.py: edit that, not this.
"""What happens to activations and their gradients between the parallel layers of tensor parallelism.

Autograd does not record collectives, so each operator says what to send in forward and what in backward.

Shape legend: B batch, T tokens, D model width, t ranks of the group.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shared.sharded.layers import like
from solutions.async_collectives import launch_all_gather, launch_reduce_scatter


class SumOverRanks(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, partial: Tensor, group: ProcessGroup | None) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def sum_over_ranks(partial: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' partial sums. Every rank must compute the same from the result.

    Communication: one all-reduce in forward, none in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3, operator g.
    """
    return SumOverRanks.apply(partial, group)


class CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def copy_to_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Let each rank compute something different from x, which is the same on all of them.

    Communication: none in forward, one all-reduce in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3, operator f.
    """
    return CopyToRanks.apply(x, group)


def own_shard(tensor: Tensor, dim: int, group: ProcessGroup | None, what: str) -> Tensor:
    """Copy this rank's part of a tensor: the r-th of t equal parts along dim, on rank r.

    Raises:
        ValueError: if t does not divide the length of that dimension. The message calls it `what`.
    """
    length, world_size = tensor.shape[dim], dist.get_world_size(group)
    if length % world_size:
        raise ValueError(f"cannot split {what} evenly: {length} is not divisible by {world_size}, the number of ranks")
    # A copy, because a view would keep the whole tensor alive.
    shard = tensor.detach().chunk(world_size, dim)[dist.get_rank(group)]
    return like(tensor, shard.clone(memory_format=torch.contiguous_format))


@torch.no_grad()
def all_gather(shard: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Concatenate the ranks' shards along dim, in rank order.

    Communication: one all-gather.
    """
    world_size = dist.get_world_size(group)
    flat = shard.new_empty(world_size * shard.numel())
    launch_all_gather(flat, shard.contiguous().view(-1), group).wait()
    return torch.cat(flat.view(world_size, *shard.shape).unbind(), dim)


@torch.no_grad()
def reduce_scatter(partial: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """Add up partial over the ranks, and return this rank's part of the sum along dim.

    Communication: one reduce-scatter.
    """
    parts = torch.stack(partial.chunk(dist.get_world_size(group), dim))
    # A copy, because wait() returns a view of all parts.
    return launch_reduce_scatter(parts.view(-1), group).wait().view(parts.shape[1:]).clone()


class ConcatenateShards(torch.autograd.Function):
    """Forward: all-gather. Backward: keep this rank's part."""

    @staticmethod
    def forward(ctx, shard: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_gather(shard, -1, group)

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        return own_shard(gradient, -1, ctx.group, "the gradient"), None


def concatenate_shards(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the ranks' shards along the last dimension. Every rank must compute the same from the result.

    Communication: one all-gather in forward, none in backward.
    """
    return ConcatenateShards.apply(shard, group)


TOKENS = -2  # the dimension of the tokens in (B, T, D)


def check_divisible(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Check that t divides the number of tokens.

    Raises:
        ValueError: if it does not.
    """
    tokens, world_size = tensor.shape[TOKENS], dist.get_world_size(group)
    if tokens % world_size:
        raise ValueError(
            f"cannot split the tokens evenly: {tokens} is not divisible by {world_size}, the number of ranks"
        )


class ScatterTokens(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(ctx, partial: Tensor, group: ProcessGroup | None) -> Tensor:
        check_divisible(partial, group)
        ctx.group = group
        return reduce_scatter(partial, TOKENS, group)

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        return all_gather(gradient, TOKENS, ctx.group), None


def scatter_tokens(partial: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' partial sums, of which each rank keeps its own tokens.

    Raises:
        ValueError: if t does not divide the number of tokens.

    Shape: partial [..., T, D]; returns [..., T / t, D].
    Communication: one reduce-scatter in forward, one all-gather in backward.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", §4.2.2.
    """
    return ScatterTokens.apply(partial, group)


class GatherTokens(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx, shard: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_gather(shard, TOKENS, group)

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        return reduce_scatter(gradient, TOKENS, ctx.group), None


def gather_tokens(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the ranks' tokens, so that each rank can compute something different from all of them.

    Shape: shard [..., T / t, D]; returns [..., T, D].
    Communication: one all-gather in forward, one reduce-scatter in backward.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", §4.2.2.
    """
    return GatherTokens.apply(shard, group)


def copy_all_to_ranks(tensors: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Do what copy_to_ranks does for many tensors of one dtype.

    Communication: one all-reduce in backward.
    """
    flat = copy_to_ranks(torch.cat([tensor.flatten() for tensor in tensors]), group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
