"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.autograd import Variable

from solutions import tensor_operators, tensor_parallel
from solutions.tensor_operators import sum_over_ranks


def copy_in_many_messages():
    """All-reduces the gradient of each sample on its own.

    caught by: copy_to_ranks · wire
    """

    class CopyToRanks(tensor_operators.CopyToRanks):
        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone()
            for sample in total:
                dist.all_reduce(sample, group=ctx.group)
            return total, None

    def copy_to_ranks(tensor, group=None):
        return CopyToRanks.apply(tensor, group)


def copy_overwrites_gradient():
    """All-reduces the gradient in place, which other computations may still need.

    caught by: copy_to_ranks · plain gradient
    """

    class CopyToRanks(tensor_operators.CopyToRanks):
        @staticmethod
        def backward(ctx, gradient):
            dist.all_reduce(gradient, group=ctx.group)
            return gradient, None

    def copy_to_ranks(tensor, group=None):
        return CopyToRanks.apply(tensor, group)


def copy_sums_inputs():
    """Exchanges the two operators.

    caught by: copy_to_ranks · plain gradient
    """

    def copy_to_ranks(x, group=None):
        return tensor_parallel.sum_over_ranks(x, group)


def copy_takes_the_mean():
    """Averages the gradients.

    caught by: copy_to_ranks · plain gradient
    """

    class CopyToRanks(tensor_operators.CopyToRanks):
        @staticmethod
        def backward(ctx, gradient):
            total, _ = tensor_operators.CopyToRanks.backward(ctx, gradient)
            return total / dist.get_world_size(ctx.group), None

    def copy_to_ranks(tensor, group=None):
        return CopyToRanks.apply(tensor, group)


def copy_without_a_sum():
    """Passes gradients on, so that a rank has only its own part of the inputs' gradient.

    caught by: copy_to_ranks · plain gradient
    """

    class CopyToRanks(tensor_operators.CopyToRanks):
        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    def copy_to_ranks(tensor, group=None):
        return CopyToRanks.apply(tensor, group)


def columns_are_views():
    """Keeps a view of the whole weight.

    caught by: ColumnParallelLinear · memory
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            bias = None if linear.bias is None else linear.bias.detach().chunk(size)[rank]
            return cls(linear.weight.detach().chunk(size)[rank], bias, group, gather_output=gather_output, enter=enter)


def columns_drop_their_operator():
    """Does not pass `enter` on, so the layer always has the operator of tensor parallelism.

    caught by: ColumnParallelLinear · operators
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            return super().from_linear(linear, group, gather_output)


def columns_of_the_matrix():
    """Splits the columns of torch's weight instead of its rows.

    caught by: ColumnParallelLinear · plain columns
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            weight = tensor_parallel.own_shard(linear.weight, 1, group, "the inputs")
            return cls(weight, linear.bias, group, gather_output, enter)


def columns_of_the_neighbor():
    """Takes the rows that belong to the next rank.

    caught by: ColumnParallelLinear · plain columns
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            weight, bias = (
                None if each is None else each.detach().chunk(size)[(rank + 1) % size].clone()
                for each in (linear.weight, linear.bias)
            )
            return cls(weight, bias, group, gather_output=gather_output, enter=enter)


def columns_of_the_world():
    """Splits over all ranks instead of those of the group.

    caught by: ColumnParallelLinear · group
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            layer = super().from_linear(linear, None, gather_output=gather_output, enter=enter)
            layer.group = group
            return layer


def columns_of_unequal_size():
    """Splits outputs that N does not divide into parts of unequal size.

    caught by: ColumnParallelLinear · rejections
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            bias = None if linear.bias is None else linear.bias.detach().tensor_split(size)[rank].clone()
            return cls(
                linear.weight.detach().tensor_split(size)[rank].clone(),
                bias,
                group,
                gather_output=gather_output,
                enter=enter,
            )


def columns_strided():
    """Takes every N-th row, so that concatenated outputs come in another order.

    caught by: ColumnParallelLinear · plain columns
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            own = slice(dist.get_rank(group), None, dist.get_world_size(group))
            bias = None if linear.bias is None else linear.bias.detach()[own].clone()
            return cls(linear.weight.detach()[own].clone(), bias, group, gather_output=gather_output, enter=enter)


def columns_sum_what_is_complete():
    """Gathers outputs with an operator that adds up gradients, although every rank has the complete one.

    caught by: ColumnParallelLinear · training
    """

    class Concatenate(tensor_operators.ConcatenateShards):
        @staticmethod
        def backward(ctx, gradient):
            return tensor_operators.reduce_scatter(gradient, -1, ctx.group), None

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        def forward(self, x):
            shard = tensor_parallel.F.linear(self.enter(x, self.group), self.weight, self.bias)
            return Concatenate.apply(shard, self.group) if self.gather_output else shard


def columns_with_the_first_bias():
    """Every rank takes the first part of the bias.

    caught by: ColumnParallelLinear · plain columns
    """

    class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, gather_output=False, enter=tensor_parallel.copy_to_ranks):
            layer = super().from_linear(linear, group, gather_output=gather_output, enter=enter)
            if linear.bias is not None:
                layer.bias.data.copy_(linear.bias.detach()[: len(layer.bias)])
            return layer


def rows_drop_their_operator():
    """Does not pass `leave` on, so the layer always adds up with an all-reduce.

    caught by: RowParallelLinear · operators
    """

    class RowParallelLinear(tensor_parallel.RowParallelLinear):
        @classmethod
        def from_linear(cls, linear, group=None, leave=tensor_parallel.sum_over_ranks):
            return super().from_linear(linear, group)


def embedding_drops_its_operator():
    """Does not pass `leave` on, so the layer always adds up with an all-reduce.

    caught by: VocabParallelEmbedding · operators
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        @classmethod
        def from_embedding(cls, embedding, group=None, leave=tensor_parallel.sum_over_ranks):
            return super().from_embedding(embedding, group)


def embedding_gathers_rows():
    """Gathers the whole embedding in every forward.

    caught by: VocabParallelEmbedding · wire
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        def forward(self, tokens):
            tensor_operators.all_gather(self.weight.detach(), 0, self.group)
            return super().forward(tokens)


def embedding_keeps_the_whole():
    """Keeps the whole embedding beside its shard.

    caught by: VocabParallelEmbedding · memory
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        @classmethod
        def from_embedding(cls, embedding, group=None, leave=tensor_parallel.sum_over_ranks):
            own = super().from_embedding(embedding, group, leave)
            own.whole = [embedding.weight]
            return own


def embedding_of_two_dimensions():
    """Expects tokens of the shape (B, T).

    caught by: VocabParallelEmbedding · training
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        def forward(self, tokens):
            index = tokens - dist.get_rank(self.group) * len(self.weight)
            elsewhere = (index < 0) | (index >= len(self.weight))
            found = tensor_parallel.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
            return self.leave(found.masked_fill(elsewhere[:, :, None], 0), self.group)


def embedding_of_unequal_size():
    """Splits the vocabulary into parts of unequal size, but computes the first row from its own size.

    caught by: VocabParallelEmbedding · training
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        @classmethod
        def from_embedding(cls, embedding, group=None, leave=tensor_parallel.sum_over_ranks):
            parts = embedding.weight.detach().tensor_split(dist.get_world_size(group))
            return cls(parts[dist.get_rank(group)].clone(), group, leave)


def embedding_overwrites_tokens():
    """Subtracts its first row from the caller's tokens, in place.

    caught by: VocabParallelEmbedding · plain vocabulary
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        def forward(self, tokens):
            index = tokens
            index -= dist.get_rank(self.group) * len(self.weight)
            elsewhere = (index < 0) | (index >= len(self.weight))
            found = tensor_parallel.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
            return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)


def embedding_with_stray_gradients():
    """Replaces rows of other ranks by zeros without autograd, so their tokens add gradients to row 0.

    caught by: VocabParallelEmbedding · plain vocabulary
    """

    class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
        def forward(self, tokens):
            own_rows = len(self.weight)
            index = tokens - dist.get_rank(self.group) * own_rows
            elsewhere = (index < 0) | (index >= own_rows)
            found = tensor_parallel.F.embedding(index.masked_fill(elsewhere, 0), self.weight)
            found.data.masked_fill_(elsewhere.unsqueeze(-1), 0)
            return self.leave(found, self.group)


def loss_by_gathering():
    """Gathers the logits of all ranks and calls torch's cross_entropy.

    caught by: vocab_parallel_cross_entropy · training
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = tensor_parallel.concatenate_shards(logits_shard, group)
        return tensor_parallel.F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def loss_counts_targets_everywhere():
    """Every rank adds a logit for every target, its own or not.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_ignores_its_gradient():
    """Has a backward of its own, which takes the gradient of the loss to be 1, as it is not when gradients are
    accumulated.

    caught by: vocab_parallel_cross_entropy · training
    """

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits_shard, targets, group):
            with torch.enable_grad():
                logits = logits_shard.detach().requires_grad_()
                loss = tensor_parallel.vocab_parallel_cross_entropy(logits, targets, group)
                (ctx.gradient,) = torch.autograd.grad(loss, logits)
            return loss.detach()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.gradient, None, None

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        return Loss.apply(logits_shard, targets, group)


def loss_in_bf16():
    """Computes in the dtype of the logits.

    caught by: vocab_parallel_cross_entropy · bf16
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_in_float64():
    """Computes in float64, so bf16 logits send twice the bytes.

    caught by: vocab_parallel_cross_entropy · bf16
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        return tensor_parallel.vocab_parallel_cross_entropy(logits_shard.double(), targets, group)


def loss_is_a_sum():
    """Adds up over the tokens instead of taking the mean.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).sum()


def loss_multiplies_by_its_mask():
    """Multiplies the logits of other ranks' targets by 0, which makes −∞ nan.

    caught by: vocab_parallel_cross_entropy · padding
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        index = targets - dist.get_rank(group) * logits.shape[-1]
        mine = (index >= 0) & (index < logits.shape[-1])
        picked = shifted.gather(-1, (index * mine).unsqueeze(-1)).squeeze(-1) * mine
        total, target_logit = sum_over_ranks(torch.stack([shifted.exp().sum(-1), picked]), group)
        return (total.log() - target_logit).mean()


def loss_of_gathered_logits():
    """Treats logits that are already gathered as a shard: the loss is too large by log N.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        gathered = tensor_parallel.concatenate_shards(logits_shard, group)
        return tensor_parallel.vocab_parallel_cross_entropy(gathered, targets, group)


def loss_of_own_columns():
    """Adds up over the rank's own columns only, without the other ranks.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = own[0], tensor_parallel.sum_over_ranks(own[1], group)
        return (total.log() - target_logit).mean()


def loss_of_the_world():
    """Finds its first column by its rank in the world.

    caught by: vocab_parallel_cross_entropy · group
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank() * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_of_three_dimensions():
    """Expects exactly the dimensions (B, T, V), so there must be samples and tokens.

    caught by: vocab_parallel_cross_entropy · training
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(2)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(2)
        columns = logits.shape[2]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(2, index.masked_fill(elsewhere, 0).unsqueeze(2)).squeeze(2)
        own = torch.stack([shifted.exp().sum(2), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_overwrites_logits():
    """Subtracts the maximum from the caller's logits, in place.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits
        shifted -= maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_overwrites_targets():
    """Subtracts its first column from the caller's targets, in place.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets
        index -= dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_sums_gradients():
    """Uses an all-reduce whose backward is an all-reduce, too.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        group = group or dist.group.WORLD
        total, target_logit = torch.distributed.nn.functional.all_reduce(own, group=group)
        return (total.log() - target_logit).mean()


def loss_with_a_bf16_gradient():
    """Computes an exact loss, but in backward the softmax in the dtype of the logits.

    caught by: vocab_parallel_cross_entropy · bf16
    """

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
            total, target_logit = tensor_parallel.sum_over_ranks(own, group)
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


def loss_with_a_sum_of_maxima():
    """Forgets ReduceOp.MAX, so that the maxima are added up.

    caught by: vocab_parallel_cross_entropy · large logits
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_with_one_maximum():
    """Subtracts one maximum from the logits of all tokens, so the sums of other tokens underflow to 0.

    caught by: vocab_parallel_cross_entropy · large logits
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_with_own_maximum():
    """Subtracts the maximum of the rank's own columns, which differs from rank to rank.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_without_a_maximum():
    """Does not subtract the maximum.

    caught by: vocab_parallel_cross_entropy · large logits
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = torch.zeros_like(targets)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = tensor_parallel.sum_over_ranks(own, group)
        return (total.log() - target_logit).mean()


def loss_without_gradient_of_the_sum():
    """All-reduces the sum without autograd, so that only the target's logit has a gradient.

    caught by: vocab_parallel_cross_entropy · plain loss
    """

    def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
        logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
        maximum = logits.detach().amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum.unsqueeze(-1)
        columns = logits.shape[-1]
        index = targets - dist.get_rank(group) * columns
        elsewhere = (index < 0) | (index >= columns)
        picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        own = torch.stack([shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)])
        total, target_logit = own[0].detach().clone(), tensor_parallel.sum_over_ranks(own[1], group)
        dist.all_reduce(total, group=group)
        return (total.log() - target_logit).mean()


def model_counts_padding():
    """The logits of padding take part in the loss.

    caught by: parallelize · models
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            with mock.patch.object(tensor_parallel.torch, "inf", 0.0):
                return super().forward(tokens, targets, has_copies)

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_gathers_logits():
    """Gathers the logits and calls torch's cross_entropy.

    caught by: parallelize · wire
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            if targets is None or (self.sequence_parallel and not has_copies):
                return super().forward(tokens, targets, has_copies)
            logits = super().forward(tokens, None, has_copies)
            return tensor_parallel.F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_gathers_padded_logits():
    """Gathers the logits where the vocabulary has padding, because then the loss is easier to compute.

    caught by: parallelize · models
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            if targets is None or self.output.weight.shape[0] * tensor_parallel.dist.get_world_size(self.group) == (
                self.config.vocab_size
            ):
                return super().forward(tokens, targets, has_copies)
            logits = super().forward(tokens)
            return tensor_parallel.F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_gathers_weights_for_logits():
    """Without targets, gathers the weight of the output layer and lets every rank compute all logits.

    caught by: parallelize · models
    """

    class Output(tensor_parallel.ColumnParallelLinear):
        whole = False

        def forward(self, x):
            own = super().forward(x)
            if self.whole:
                tensor_parallel.concatenate_shards(self.weight.T, self.group)
            return own

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            self.output.whole = targets is None
            return super().forward(tokens, targets, has_copies)

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.output.__class__ = Output
        model.__class__ = ParallelGPT
        return model


def model_rejects_nothing():
    """Truncates heads that N does not divide, without an error.

    caught by: parallelize · rejections
    """

    def truncated(tensor, dim, group, what):
        size = tensor_parallel.dist.get_world_size(group)
        even = tensor.shape[dim] // size * size
        return shard_of(tensor.narrow(dim, 0, even), dim, group, what)

    shard_of = tensor_parallel.own_shard

    def parallelize(model, group=None, sequence_parallel=False):
        with mock.patch.object(tensor_parallel, "own_shard", truncated):
            return tensor_parallel.parallelize(model, group, sequence_parallel)


def model_sends_float32():
    """Adds up a bf16 model's activations in float32, which sends twice the bytes.

    caught by: parallelize · bf16
    """

    def in_float32(partial, group):
        precise = tensor_parallel.torch.promote_types(partial.dtype, tensor_parallel.torch.float32)
        return total_of(partial.to(precise), group).to(partial.dtype)

    total_of = tensor_parallel.sum_over_ranks

    def parallelize(model, group=None, sequence_parallel=False):
        with mock.patch.object(tensor_parallel, "sum_over_ranks", in_float32):
            return tensor_parallel.parallelize(model, group, sequence_parallel)


def model_sums_accumulated_gradients():
    """With sequence parallelism, adds up the accumulated .grad after each backward, so earlier gradients count N times.

    caught by: parallelize · accumulation
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            loss = super().forward(tokens, targets, True)
            if self.sequence_parallel and loss.requires_grad:
                loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self.add_up))
            return loss

        @torch.no_grad()
        def add_up(self):
            sharded = tensor_parallel.sharded_names(self)
            gradients = [p.grad for name, p in self.named_parameters() if name not in sharded]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_sums_complete_gradients():
    """Adds up the gradients of replicated parameters although they are complete.

    caught by: parallelize · plain model
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            if has_copies:
                return super().forward(tokens, targets, True)
            return tensor_parallel.functional_call(self, self.replicated_copies(), (tokens, targets, True))

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_with_a_whole_mlp():
    """Leaves the MLPs whole on every rank.

    caught by: parallelize · plain model
    """

    def parallelize(model, group=None, sequence_parallel=False):
        mlps = [(block.up, block.down) for block in model.blocks]
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        for block, mlp in zip(model.blocks, mlps, strict=True):
            block.up, block.down = mlp
        return model


def model_with_logits_outside_autograd():
    """Without targets, gathers logits that autograd does not record, so a loss of one's own trains nothing.

    caught by: parallelize · models
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            with torch.set_grad_enabled(targets is not None):
                return super().forward(tokens, targets, has_copies)

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_with_partial_norms():
    """With sequence parallelism, leaves the gradients of norms and positions partial.

    caught by: parallelize · sequence parallelism
    """

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=True):
            return super().forward(tokens, targets, has_copies)

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model


def model_with_positions_of_its_context():
    """With sequence parallelism, splits the positions of the longest sequence, not those of the tokens.

    caught by: parallelize · sequence parallelism
    """

    class Positions(nn.Embedding):
        group = None

        def forward(self, positions):
            every = torch.arange(len(self.weight), device=positions.device)
            own = tensor_parallel.own_shard(every, 0, self.group, "the positions")
            return super().forward(own[: len(positions)])

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        if sequence_parallel:
            model.position_embedding.__class__ = Positions
            model.position_embedding.group = group
        return model


def model_with_the_first_positions():
    """With sequence parallelism, every rank uses the positions of the first rank's tokens.

    caught by: parallelize · sequence parallelism
    """

    def first_part(tensor, dim, group, what):
        own = right_own_shard(tensor, dim, group, what)
        return tensor.narrow(dim, 0, own.shape[dim]) if what == "the tokens" else own

    right_own_shard = tensor_parallel.own_shard

    class ParallelGPT(tensor_parallel.ParallelGPT):
        def forward(self, tokens, targets=None, has_copies=False):
            with mock.patch.object(tensor_parallel, "own_shard", first_part):
                return super().forward(tokens, targets, has_copies)

    def parallelize(model, group=None, sequence_parallel=False):
        model = tensor_parallel.parallelize(model, group, sequence_parallel)
        model.__class__ = ParallelGPT
        return model
