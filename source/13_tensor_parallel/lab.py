# ---
# jupyter:
#   course:
#     module: tensor_parallel
#     minutes: 95
# ---

# %% [markdown]
# # Lab 13 · Tensor parallelism
#
# **95 minutes, 17 points**, and another 10 minutes and 1 point for a stretch exercise. In this lab, you split the
# layers of a GPT over t ranks. Every rank sees the same batch, and computes with its own part of every matrix. Two of
# the layers are not in the lesson: a gated MLP, and attention with fewer heads of keys and values than ranks, as in
# Llama. At the end, `parallelize(model)` turns the course's `TinyGPT` into one that trains exactly as before, with a
# quarter of the matrices on each of four ranks.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 13.1 | `sum_over_ranks` and `copy_to_ranks`: two conjugate operators | 6 | 2 |
# | 13.2 | `ColumnParallelLinear` | 7 | 2 |
# | 13.3 | `RowParallelLinear` | 7 | 2 |
# | 13.4 | `ParallelGatedMLP`: two matrices in one | 12 | 2 |
# | 13.5 | `ParallelGroupedAttention`: fewer kv heads than ranks | 18 | 3 |
# | 13.6 | `VocabParallelEmbedding` | 11 | 2 |
# | 13.7 | `vocab_parallel_cross_entropy`: a loss that never gathers the logits | 13 | 2 |
# | 13.8 | `parallelize`: the whole model | 14 | 2 |
# | 13.9 | stretch: `clip_grad_norm_`, not in the 95 minutes and 17 points | 10 | 1 |
# | | Break it: four mistakes that raise no error | 7 | |
#
# Each exercise has a check. Its first line tries the plain case on two ranks, in float64. The other lines try one to
# four ranks, groups of ranks and several steps of training. They compare every gradient with that of one process, and
# count the collectives and the bytes that a rank sends and holds.
#
# A class may continue in the next cell: `class Name(Name):` adds methods to the class of that name. If you change the
# first cell, run the second one again, too.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import tensor_parallel as check

ranks.start(world_size=4)

# %% tags=["export"] module="tensor_operators"
# %%ranks
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

# %% [markdown]
# ## Exercise 13.1 · Two conjugate operators (6 min, 2 points)
#
# Autograd does not record collectives, so you write an `autograd.Function` that tells it what to do. For the first
# operator, each rank has one term of a sum, and needs the total. Every rank then computes the same from the total, so
# in backward, every rank has the whole gradient of the total. The gradient of its own term is the same.
#
# - `forward` returns the sum of `partial` over the ranks of `group`. It must not change `partial`.
# - `backward` returns one gradient for `partial` and one for `group`, which is `None`. It sends nothing.
#
# The checks of this exercise are called 13.1a and 13.1b. The first line of each is about two ranks. The others count
# what is sent, and try groups and several calls.
#
# <details><summary>Hint</summary>
#
# `dist.all_reduce(tensor, group=group)` overwrites its argument. Which tensor may it overwrite here?
#
# </details>


# %% tags=["exercise", "export"] grade_id="sum-over-ranks" module="tensor_operators"
# %%ranks
class SumOverRanks(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, partial: Tensor, group: ProcessGroup | None) -> Tensor:
        ### BEGIN SOLUTION
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ### BEGIN SOLUTION
        return gradient, None
        ### END SOLUTION


# %% tags=["export"] module="tensor_operators"
# %%ranks
def sum_over_ranks(partial: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' partial sums. Every rank must compute the same from the result.

    Communication: one all-reduce in forward, none in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3, operator g.
    """
    return SumOverRanks.apply(partial, group)


# %% tags=["check"] grade_id="check-sum-over-ranks" points=1
check.sum_over_ranks()

# %% [markdown]
# Now the other direction. Every rank has the same tensor `x`, and computes something different from it. So each rank
# has only a term of x's gradient.
#
# - `forward` returns `x`, or a view of it.
# - `backward` returns the sum of `gradient` over the ranks of the group. It must not change `gradient`, which may be
#   used elsewhere.
#
# <details><summary>Hint</summary>
#
# `backward` does not get `group`. Where can `forward` leave it?
#
# </details>


# %% tags=["exercise", "export"] grade_id="copy-to-ranks" module="tensor_operators"
# %%ranks
class CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ### BEGIN SOLUTION
        ctx.group = group
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        ### BEGIN SOLUTION
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
        ### END SOLUTION


# %% tags=["export"] module="tensor_operators"
# %%ranks
def copy_to_ranks(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Let each rank compute something different from x, which is the same on all of them.

    Communication: none in forward, one all-reduce in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3, operator f.
    """
    return CopyToRanks.apply(x, group)


# %% tags=["check"] grade_id="check-copy-to-ranks" points=1
check.copy_to_ranks()

# %% [markdown]
# ## Exercise 13.2 · Columns (7 min, 2 points)
#
# A linear layer computes `y = x Wᵀ + b`. torch stores one *row* of `W` per output, so the *rows* of `weight` are
# divided here. (They are the columns of `Wᵀ`, which give the layer its name.) Rank r computes the r-th of t equal parts
# of the outputs. For that, it needs all inputs, and nothing from the other ranks.
#
# The next three cells are given. You do not need to read them, but you should know what their functions do:
#
# - `own_shard(tensor, dim, group, what)` copies this rank's part of a tensor along `dim`. If t does not divide that
#   dimension, it raises a `ValueError` that names both numbers. Its message calls the dimension `what`, for example
#   `"the bias"`.
# - `all_gather(tensor, dim, group)` and `reduce_scatter(tensor, dim, group)` use your collectives from lab 01 along any
#   dimension. Autograd does not record them.
# - `concatenate_shards(shard, group)` is an operator, like yours: it all-gathers along the last dimension in forward,
#   and in backward, each rank keeps its own part of the gradient.


# %% tags=["export"] module="tensor_operators"
# %%ranks
def own_shard(tensor: Tensor, dim: int, group: ProcessGroup | None, what: str) -> Tensor:
    """Copy this rank's part of a tensor: the r-th of t equal parts along dim, on rank r.

    Raises:
        ValueError: if t does not divide the length of that dimension. The message calls it `what`.
    """
    length, world_size = tensor.shape[dim], dist.get_world_size(group)
    if length % world_size:
        raise ValueError(
            f"cannot split {what} evenly: {length} is not divisible by {world_size}, the number of ranks"
        )
    # A copy, because a view would keep the whole tensor alive.
    shard = tensor.detach().chunk(world_size, dim)[dist.get_rank(group)]
    return like(tensor, shard.clone(memory_format=torch.contiguous_format))


# %% tags=["export"] module="tensor_operators"
# %%ranks
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


# %% tags=["export"] module="tensor_operators"
# %%ranks
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


# %% [markdown]
# The constructor of `ColumnParallelLinear` is given, too. It takes the rank's shards and `enter`, the operator that the
# inputs pass through. Write the rest:
#
# - `from_linear(linear, group, gather_output)` builds the layer from a whole `nn.Linear`, which is the same on every
#   rank. Compute `weight` and `bias`, this rank's parts of `linear.weight` and `linear.bias`. The bias may be None.
# - `forward(x)` passes x, which every rank has, through `self.enter(x, self.group)` and computes this rank's outputs.
#   With `gather_output`, it returns the outputs of all ranks, concatenated.
#
# The check's first line compares outputs and gradients with those of the whole layer. The others try `gather_output`,
# groups and sizes that do not divide, and measure what a rank holds.
#
# <details><summary>Hint</summary>
#
# `F.linear(x, weight, bias)` accepts `None` as bias. Along which dimension is a bias split?
#
# </details>


# %% tags=["export"]
# %%ranks
"""Tensor parallelism: every rank of a group sees the same batch and computes with its shard of every matrix.

Shape legend: B batch, T tokens, D model width, H heads, V vocabulary, t ranks of the group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.func import functional_call

from shared.models import Attention, GatedMLP, TinyGPT
from shared.sharded.layers import (
    as_parameter,
    as_shard,
    expect_own_shards,
    expect_plain,
    expect_plain_gpt,
    like,
)


# %% tags=["export"]
# %%ranks
class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes an equal part of the outputs.

    Args:
        weight: this rank's rows of the weight, [outputs / t, inputs].
        bias: the same part of the bias, or None.
        gather_output: whether forward returns the outputs of all ranks.
        enter: the operator that lets each rank compute something different from the inputs.

    Shape: inputs [..., inputs]; returns [..., outputs / t], or [..., outputs] with gather_output.
    Communication: one all-reduce of the inputs' size in backward. With gather_output, one all-gather in forward.
    """

    # The parameters that are split. All others are the same on every rank.
    sharded = ("weight", "bias")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        group: ProcessGroup | None = None,
        *,
        gather_output: bool = False,
        enter: Callable = copy_to_ranks,
    ):
        super().__init__()
        self.group, self.gather_output, self.enter = group, gather_output, enter
        self.weight = as_shard(weight, group)
        self.bias = None if bias is None else as_shard(bias, group)
        expect_own_shards(self, "weight", "bias")


# %% tags=["exercise", "export"] grade_id="column-parallel-linear"
# %%ranks
class ColumnParallelLinear(ColumnParallelLinear):
    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        gather_output: bool = False,
        *,
        enter: Callable = copy_to_ranks,
    ) -> "ColumnParallelLinear":
        """Keep this rank's part of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of outputs.
        """
        expect_plain(linear, nn.Linear, group)
        ### BEGIN SOLUTION
        weight = own_shard(linear.weight, 0, group, "the outputs of a linear layer")
        bias = None if linear.bias is None else own_shard(linear.bias, 0, group, "the bias")
        ### END SOLUTION
        return cls(weight, bias, group, gather_output=gather_output, enter=enter)

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's part of the outputs, or all of them with gather_output."""
        ### BEGIN SOLUTION
        shard = F.linear(self.enter(x, self.group), self.weight, self.bias)
        return concatenate_shards(shard, self.group) if self.gather_output else shard
        ### END SOLUTION


# %% tags=["check"] grade_id="check-column-parallel-linear" points=2
check.ColumnParallelLinear()

# %% [markdown]
# ## Exercise 13.3 · Rows (7 min, 2 points)
#
# The next layer takes inputs that are already divided: rank r has the r-th part of them. It needs the weights that
# belong to these inputs, which are *columns* of torch's `weight`. Its result is only a partial sum of the outputs, so
# the ranks add up their results.
#
# - `from_linear(linear, group)` keeps this rank's part of `weight`, and the whole `bias`. Every rank has the same bias.
# - `forward(x)` computes a partial sum from this rank's part of the inputs, adds up the ranks' partial sums with
#   `self.leave(partial, self.group)`, and adds the bias.
#
# A column-parallel layer followed by a row-parallel one needs a single all-reduce in forward, because the activations
# between them stay divided.
#
# <details><summary>Hint</summary>
#
# How many times would the output contain the bias if each rank added it before the sum?
#
# </details>


# %% tags=["export"]
# %%ranks
class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has an equal part of the inputs, and a partial sum of all outputs.

    Args:
        weight: this rank's columns of the weight, [outputs, inputs / t].
        bias: the whole bias, or None. It is the same on every rank.
        leave: the operator that adds up the partial sums.

    Shape: inputs [..., inputs / t]; returns [..., outputs].
    Communication: one all-reduce of the outputs' size in forward.
    """

    sharded = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ):
        super().__init__()
        self.group, self.leave = group, leave
        self.weight = as_shard(weight, group)
        self.bias = None if bias is None else as_parameter(bias)
        expect_own_shards(self, "weight")


# %% tags=["exercise", "export"] grade_id="row-parallel-linear"
# %%ranks
class RowParallelLinear(RowParallelLinear):
    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ) -> "RowParallelLinear":
        """Keep this rank's part of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of inputs.
        """
        expect_plain(linear, nn.Linear, group)
        ### BEGIN SOLUTION
        weight = own_shard(linear.weight, 1, group, "the inputs of a linear layer")
        bias = None if linear.bias is None else like(linear.bias, linear.bias.detach().clone())
        return cls(weight, bias, group, leave)
        ### END SOLUTION

    def forward(self, x: Tensor) -> Tensor:
        """Compute all outputs, together with the other ranks, from this rank's part of the inputs."""
        ### BEGIN SOLUTION
        total = self.leave(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
        ### END SOLUTION


# %% tags=["check"] grade_id="check-row-parallel-linear" points=2
check.RowParallelLinear()

# %% [markdown]
# Two of your layers form an MLP. The next cell compares its output with that of the whole MLP, and counts the
# collectives. The difference should be less than 1e-6, and there should be one all-reduce:

# %%
# %%ranks
from shared import wire
from shared.wire import mismatch

mismatch.ignore()  # it would add a small all-reduce to each collective
torch.manual_seed(0)
up, down = nn.Linear(16, 64).to(device), nn.Linear(64, 16).to(device)
x = torch.randn(8, 16, device=device)
own_up, own_down = ColumnParallelLinear.from_linear(up), RowParallelLinear.from_linear(down)
with wire.ledger() as log, torch.no_grad():
    found = own_down(F.gelu(own_up(x)))
    difference = (found - down(F.gelu(up(x)))).abs().max().item()
assert difference < 1e-6 and log.messages == 1
print(f"{difference < 1e-6 = }, {log.messages} all-reduce, {log.sent_bytes:,.0f} bytes sent")

# %% [markdown]
# ## Given: attention
#
# `ParallelAttention` is the lesson's: each rank has the columns of its own heads of `query_key_value`, and the rows of
# `project` that read their results. `own_rows` splits a weight or a bias by head, in two calls. You need this idea in
# the next two exercises. (`like` keeps a frozen parameter frozen. The checks do not ask for it.)


# %% tags=["export"]
# %%ranks
class ParallelAttention(nn.Module):
    """Causal self-attention of which each rank computes an equal part of the heads.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward.
    """

    def __init__(
        self, query_key_value: ColumnParallelLinear, project: RowParallelLinear, own_heads: int
    ):
        super().__init__()
        self.query_key_value, self.project, self.own_heads = query_key_value, project, own_heads

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        own = self.query_key_value(x).unflatten(-1, (3, self.own_heads, -1))
        query, key, value = own.permute(2, 0, 3, 1, 4)  # each (B, H/t, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))  # (B, T, D)


# %% tags=["export"]
# %%ranks
class ParallelAttention(ParallelAttention):
    @classmethod
    def from_attention(
        cls,
        attention: Attention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelAttention":
        """Keep this rank's heads of an attention that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of heads.
        """

        # The rows of this rank's heads, of a weight or a bias.
        def own_rows(rows: Tensor) -> Tensor:
            by_head = rows.unflatten(0, (3, attention.heads, -1))
            return like(rows, own_shard(by_head, 1, group, "the heads of attention").flatten(0, 2))

        whole = attention.query_key_value
        bias = None if whole.bias is None else own_rows(whole.bias)
        return cls(
            ColumnParallelLinear(own_rows(whole.weight), bias, group, enter=enter),
            RowParallelLinear.from_linear(attention.project, group, leave),
            own_heads=attention.heads // dist.get_world_size(group),
        )


# %% [markdown]
# ## Exercise 13.4 · A gated MLP (12 min, 2 points)
#
# The MLP of Llama has three matrices. It multiplies the inner elements by a gate: `down(silu(gate(x)) · up(x))`. Gate
# and up read the same inputs, so `GatedMLP` (`shared/models.py`) fuses them into one matrix, and one matmul computes
# both. `gate_up.weight` is [2 · M, D]. Its first M rows compute the gate, and the others what it is multiplied by.
#
# A rank has M/t inner elements. For them it needs rows of both halves. `gate_up.weight.chunk(t, 0)` has the right
# shape, and raises no error. But on two ranks, rank 0 would then have all of the gate, and nothing to multiply it by.
#
# `forward` is given. Write `from_mlp(mlp, group, enter, leave)`, which returns a `ParallelGatedMLP`:
#
# - `gate_up` is a `ColumnParallelLinear` that gets `enter`. Rank r keeps the r-th part of the gate's rows, then the
#   r-th part of the other half's rows, as a copy. No layer has a bias.
# - `down` is a `RowParallelLinear` that gets `leave`.
# - If t does not divide M, raise a `ValueError` that names M and t. `own_shard` does that.
#
# The check's first line compares outputs and gradients with those of one process, on two ranks. The others train on
# one to four ranks, count collectives, pass other operators, and measure the memory.
#
# <details><summary>Hint</summary>
#
# Give the rows two indices, as in `own_rows` of `ParallelAttention`: which half, and which inner element. Along which
# of the two do you split?
#
# </details>


# %% tags=["export"]
# %%ranks
class ParallelGatedMLP(nn.Module):
    """A gated MLP of which each rank has an equal part of the inner elements.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward.
    """

    def __init__(self, gate_up: ColumnParallelLinear, down: RowParallelLinear):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # each (B, T, M/t)
        return self.down(F.silu(gate) * up)


# %% tags=["exercise", "export"] grade_id="parallel-gated-mlp"
# %%ranks
class ParallelGatedMLP(ParallelGatedMLP):
    @classmethod
    def from_mlp(
        cls,
        mlp: GatedMLP,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelGatedMLP":
        """Keep this rank's inner elements of a gated MLP that is the same on every rank.

        Raises:
            ValueError: if t does not divide the number of inner elements.
        """
        ### BEGIN SOLUTION
        by_half = mlp.gate_up.weight.unflatten(0, (2, -1))
        own_rows = own_shard(by_half, 1, group, "the inner elements of a gated MLP").flatten(0, 1)
        gate_up = ColumnParallelLinear(own_rows, None, group, enter=enter)
        return cls(gate_up, RowParallelLinear.from_linear(mlp.down, group, leave))
        ### END SOLUTION


# %% [markdown]
# Try it. The difference to the whole MLP should be less than 1e-6, and there should be one all-reduce:

# %%
# %%ranks
torch.manual_seed(0)
mlp = GatedMLP(width=16, inner=48).to(device)
own_mlp = ParallelGatedMLP.from_mlp(mlp)
with wire.ledger() as log, torch.no_grad():
    difference = (own_mlp(x) - mlp(x)).abs().max().item()
print(f"{difference < 1e-6 = }, {log.messages} all-reduce, {list(own_mlp.gate_up.weight.shape) = }")

# %% tags=["check"] grade_id="check-parallel-gated-mlp" points=2
check.ParallelGatedMLP()

# %% [markdown]
# ## Exercise 13.5 · Fewer kv heads than ranks (18 min, 3 points)
#
# In **grouped-query attention**, several heads of queries share one head of keys and values, a kv head. Llama-2 70B has
# 64 heads of queries and 8 kv heads. With t = 8, each rank has one kv head. For 16 ranks, there are not enough, so each
# pair of ranks keeps the same one. With 2 kv heads (K = 2) on four ranks (t = 4):
#
# | | rank 0 | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|---|
# | heads of queries, of H = 8 | 0, 1 | 2, 3 | 4, 5 | 6, 7 |
# | kv head | 0 | 0 | 1 | 1 |
#
# Ranks 0 and 1 start with the same rows, but their queries differ, so each has only a term of these rows' gradient.
# Without a sum over the two ranks, their copies drift apart, and nothing raises an error.
#
# `GroupedAttention` (`shared/models.py`) has `query.weight` [D, D], ordered by head, and `key_value.weight`
# [2 · K · D/H, D]: all heads of keys, then all heads of values. `forward` and the constructor are given. Write:
#
# - `from_attention(attention, group, enter, leave)`: pass the rank's rows of `query.weight` and `key_value.weight` to
#   the constructor, as copies, its keys before its values. `project` is a `RowParallelLinear` that gets `leave`.
# - Rank r keeps the r-th part of the query heads. If t divides K, it keeps the r-th part of the kv heads. If K divides
#   t, it keeps the kv head r // (t/K), and no other.
# - Raise a `ValueError` if t does not divide H, or if neither of K and t divides the other. The error names the two
#   numbers.
# - `shared_key_value()` returns the weight `self.key_value` so that backward adds up its gradient over the ranks that
#   keep the same rows. `self.sharing` is their process group. Send nothing in forward, and one all-reduce of the rank's
#   own rows in backward, at most.
#
# The check's first line has one kv head on two ranks. The others have 1, 2 and 12 kv heads on one to four ranks. They
# train, pass other operators, try groups, count bytes, and measure what a rank holds.
#
# <details><summary>Hint 1</summary>
#
# Which of your operators adds up gradients in backward, and over which group?
#
# </details>
# <details><summary>Hint 2</summary>
#
# If each kv head stood t/K times in a row, there would be t of them. `repeat_interleave` does that, and `own_shard`
# knows the rest.
#
# </details>


# %% tags=["export"] module="grouped_attention"
# %%ranks
"""Grouped-query attention, split over the ranks, which may be more than its heads of keys and values.

Shape legend: B batch, T tokens, D model width, H heads, t ranks of the group.
"""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shared.models import GroupedAttention
from shared.sharded.layers import as_shard, expect_own_shards


# %% tags=["export"] module="grouped_attention"
# %%ranks
def sharing_group(kv_heads: int, group: ProcessGroup | None) -> ProcessGroup:
    """Return the group of the ranks that keep the same kv heads as this rank."""
    copies = max(1, dist.get_world_size(group) // kv_heads)
    first = dist.get_rank(group) // copies * copies
    members = dist.get_process_group_ranks(group or dist.group.WORLD)[first : first + copies]
    return dist.new_group(members, use_local_synchronization=True)


# %% tags=["export"] module="grouped_attention"
# %%ranks
class ParallelGroupedAttention(nn.Module):
    """Grouped-query attention of which each rank computes an equal part of the query heads.

    Args:
        query: this rank's rows of the queries' weight.
        key_value: its rows of the weight of keys and values. Other ranks may have the same ones.
        project: the rank's part of the projection.
        attention: the whole layer, for its sizes.
        enter: the operator that lets each rank compute something different from the inputs.

    Shape: inputs and outputs [B, T, D].
    Communication: one all-reduce of the inputs' size in forward and one in backward, and one of the gradient of
        key_value among the ranks that share it.
    """

    def __init__(
        self,
        query: Tensor,
        key_value: Tensor,
        project: RowParallelLinear,
        attention: GroupedAttention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
    ):
        super().__init__()
        self.query, self.key_value = as_shard(query, group), as_shard(key_value, group)
        self.project, self.group, self.enter = project, group, enter
        self.head_width = attention.project.in_features // attention.heads
        self.sharing = sharing_group(attention.kv_heads, group)
        expect_own_shards(self, "query", "key_value")

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        x = self.enter(x, self.group)
        query = F.linear(x, self.query).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        key_value = F.linear(x, self.shared_key_value()).unflatten(-1, (2, -1, self.head_width))
        key, value = key_value.permute(2, 0, 3, 1, 4)  # each (B, own kv heads, T, D/H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))  # (B, T, D)


# %% tags=["exercise", "export"] grade_id="parallel-grouped-attention" module="grouped_attention"
# %%ranks
class ParallelGroupedAttention(ParallelGroupedAttention):
    @classmethod
    def from_attention(
        cls,
        attention: GroupedAttention,
        group: ProcessGroup | None = None,
        enter: Callable = copy_to_ranks,
        leave: Callable = sum_over_ranks,
    ) -> "ParallelGroupedAttention":
        """Keep this rank's query heads, and the kv heads that they read, of a layer that is the same on every rank.

        Raises:
            ValueError: if t does not divide the query heads, or if neither of t and the kv heads divides the other.
        """
        ### BEGIN SOLUTION
        by_head = attention.query.weight.unflatten(0, (attention.heads, -1))
        query = own_shard(by_head, 0, group, "the heads of queries").flatten(0, 1)

        by_head = attention.key_value.weight.unflatten(0, (2, attention.kv_heads, -1))
        copies = max(1, dist.get_world_size(group) // attention.kv_heads)
        by_head = by_head.repeat_interleave(copies, dim=1)
        key_value = own_shard(by_head, 1, group, "the kv heads").flatten(0, 2)

        project = RowParallelLinear.from_linear(attention.project, group, leave)
        return cls(query, key_value, project, attention, group, enter)
        ### END SOLUTION

    def shared_key_value(self) -> Tensor:
        """Return the weight of keys and values. Its gradient is the sum over the ranks that share it."""
        ### BEGIN SOLUTION
        return copy_to_ranks(self.key_value, self.sharing)
        ### END SOLUTION


# %% [markdown]
# Try it with two kv heads. Ranks 0 and 1 should print the same gradient, and so should ranks 2 and 3:

# %%
# %%ranks
torch.manual_seed(0)
attention = GroupedAttention(width=16, heads=8, kv_heads=2).to(device)
own_attention = ParallelGroupedAttention.from_attention(attention)
own_attention(x[None]).square().sum().backward()
print(f"{own_attention.key_value.grad[0, 0].item():.6f}")

# %% tags=["check"] grade_id="check-parallel-grouped-attention" points=3
check.ParallelGroupedAttention()

# %% [markdown]
# ## Exercise 13.6 · The vocabulary (11 min, 2 points)
#
# The embedding is a large matrix, too: one row per token of the vocabulary. Rank r has the r-th part of the rows. It
# looks up the tokens that it has, and returns zeros for the others. As each token is on exactly one rank, the *sum*
# over the ranks is the embedding.
#
# The size of a vocabulary is rarely a multiple of t, so `vocabulary_shard`, which is given, pads it with rows of zeros.
# They belong to no token, so they stay zero in training.
#
# - `from_embedding(embedding, group)` is given. It keeps `rows` rows. On rank r, the first of them belongs to token r ·
#   rows.
# - Write `forward(tokens)`. It returns the rows of the tokens, added up with `self.leave`. A token of another rank must
#   not add a gradient to the row that you look up in its place.
# - Pass `self.padding_idx` to `F.embedding`, so that the row of `nn.Embedding`'s padding token, if there is one, gets
#   no gradient. (It has nothing to do with the rows of zeros.)
#
# <details><summary>Hint</summary>
#
# `F.embedding` needs an index that exists for every token. For a token of another rank, look up any row, such as row 0,
# and replace the result with zeros. `masked_fill` does this in forward and in backward.
#
# </details>


# %% tags=["export"] module="vocabulary"
# %%ranks
"""The vocabulary, split over the ranks: the embedding at the beginning of a model, and the loss at its end.

Shape legend: D model width, V vocabulary, t ranks of the group.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shared.sharded.layers import (
    IGNORED,
    as_shard,
    expect_in_vocabulary,
    expect_own_shards,
    expect_plain_embedding,
    like,
    mean_without,
    own_padding_idx,
)


# %% tags=["export"] module="vocabulary"
# %%ranks
def vocabulary_shard(rows: Tensor, group: ProcessGroup | None) -> Tensor:
    """Copy this rank's rows of a weight or bias that has one row per token, padded with zeros to a multiple of t.

    Shape: rows [V, ...]; returns [ceil(V / t), ...].
    """
    padding = -len(rows) % dist.get_world_size(group)
    padded = torch.cat([rows.detach(), rows.new_zeros(padding, *rows.shape[1:])])
    return like(rows, own_shard(padded, 0, group, "the vocabulary"))


# %% tags=["export"] module="vocabulary"
# %%ranks
class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank has an equal part of the vocabulary.

    Args:
        weight: this rank's rows of the embedding.
        leave: the operator that adds up the ranks' rows.

    Shape: tokens [...]; returns [..., D].
    Communication: one all-reduce of the outputs' size in forward.
    """

    sharded = ("weight",)

    def __init__(
        self,
        weight: Tensor,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ):
        super().__init__()
        self.group, self.leave, self.weight = group, leave, as_shard(weight, group)
        self.vocabulary = len(self.weight) * dist.get_world_size(group)
        self.padding_idx: int | None = None  # among this rank's rows
        expect_own_shards(self, "weight")


# %% tags=["exercise", "export"] grade_id="vocab-parallel-embedding" module="vocabulary"
# %%ranks
class VocabParallelEmbedding(VocabParallelEmbedding):
    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: ProcessGroup | None = None,
        leave: Callable = sum_over_ranks,
    ) -> "VocabParallelEmbedding":
        """Keep this rank's part of an embedding that is the same on every rank.

        Raises:
            ValueError: for max_norm, scale_grad_by_freq and sparse, which are not supported.
        """
        expect_plain_embedding(embedding, group)
        own = cls(vocabulary_shard(embedding.weight, group), group, leave)
        own.vocabulary = embedding.num_embeddings
        own.padding_idx = own_padding_idx(embedding, len(own.weight), group)
        return own

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens."""
        expect_in_vocabulary(tokens, self.vocabulary)
        ### BEGIN SOLUTION
        own_rows = len(self.weight)
        index = tokens - dist.get_rank(self.group) * own_rows
        elsewhere = (index < 0) | (index >= own_rows)
        found = F.embedding(index.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        return self.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-vocab-parallel-embedding" points=2
check.VocabParallelEmbedding()

# %% [markdown]
# ## Exercise 13.7 · The loss (13 min, 2 points)
#
# With a vocabulary of 128,000 tokens, the logits of a single sequence of 8,192 tokens take 4 GB in fp32. The output
# layer is column-parallel, so each rank has 1/t of them. The loss can be computed without ever gathering them.
#
# For one token with logits z and target y, the loss is `log Σ exp(zᵢ) − z_y`. Subtracting the largest logit m from all
# of them changes nothing, but avoids overflow:
#
# $$\text{loss} = \log \sum_i e^{z_i - m} - (z_y - m)$$
#
# For each token, the ranks exchange three elements: the maximum m, the sum, and the target's logit, which only one rank
# has. The beginning and the end of `vocab_parallel_cross_entropy(logits_shard, targets, group)` are given. `own_sum`
# and `own_target_logit`, both of the shape [...] of the targets, are this rank's terms. Compute them from `logits`:
#
# - Rank r has the r-th part of the logits, so its first column belongs to token r · columns.
# - m is a constant: no gradient flows through it. Use `dist.all_reduce(…, op=dist.ReduceOp.MAX, group=group)`. Then
#   subtract m from the logits, but not in place, because `logits` may be the caller's tensor. A logit may be −∞ (that
#   of padding, see 13.8).
# - The given call of `sum_over_ranks` adds up the terms of all ranks, with the right gradients. For a target of another
#   rank, `own_target_logit` must not change that sum.
#
# In forward, the all-reduces may have at most three elements per token in total. In backward, send nothing.
#
# <details><summary>Hint 1</summary>
#
# Which number should a rank contribute for a target that is on another rank, so that the sum is right?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)` picks one logit per token. As in 13.6, the index must exist on
# every rank.
#
# </details>


# %% tags=["exercise", "export"] grade_id="vocab-parallel-cross-entropy" module="vocabulary"
# %%ranks
def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORED,
) -> Tensor:
    """Return the mean cross-entropy of logits that are split over the ranks along the vocabulary.

    As in F.cross_entropy, targets of ignore_index do not count.

    Shape: logits_shard [..., V / t]; targets [...]; returns a scalar.
    Communication: two all-reduces in forward, of one and two numbers per target; none in backward.
    Source: Shoeybi et al. 2019, "Megatron-LM", §3.
    """
    # In float32 at least, as torch's own cross_entropy computes inside.
    logits = logits_shard.to(torch.promote_types(logits_shard.dtype, torch.float32))
    expect_in_vocabulary(targets, logits.shape[-1] * dist.get_world_size(group), ignore_index)
    ### BEGIN SOLUTION
    maximum = logits.detach().amax(-1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - maximum.unsqueeze(-1)

    columns = logits.shape[-1]
    index = targets - dist.get_rank(group) * columns
    elsewhere = (index < 0) | (index >= columns)
    picked = shifted.gather(-1, index.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    own_sum, own_target_logit = shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0)
    ### END SOLUTION
    total, target_logit = sum_over_ranks(torch.stack([own_sum, own_target_logit]), group)
    return mean_without(total.log() - target_logit, targets == ignore_index)


# %% tags=["check"] grade_id="check-vocab-parallel-cross-entropy" points=2
check.vocab_parallel_cross_entropy()

# %% [markdown]
# ## Given: sequence parallelism
#
# `scatter_tokens` and `gather_tokens` are the lesson's two operators of **sequence parallelism**, for tokens that are
# the second-to-last dimension, [B, T, D]. They replace `sum_over_ranks` and `copy_to_ranks` as `leave` and `enter`:
#
# | operator | forward | backward |
# |---|---|---|
# | `scatter_tokens(partial, group)` | adds up, and keeps this rank's tokens | concatenates all tokens |
# | `gather_tokens(shard, group)` | concatenates all tokens | adds up, and keeps this rank's tokens |


# %% tags=["export"] module="tensor_operators"
# %%ranks
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


# %% tags=["export"] module="tensor_operators"
# %%ranks
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


# %% tags=["export"] module="tensor_operators"
# %%ranks
def scatter_tokens(partial: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up the ranks' partial sums, of which each rank keeps its own tokens.

    Raises:
        ValueError: if t does not divide the number of tokens.

    Shape: partial [..., T, D]; returns [..., T / t, D].
    Communication: one reduce-scatter in forward, one all-gather in backward.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", §4.2.2.
    """
    return ScatterTokens.apply(partial, group)


# %% tags=["export"] module="tensor_operators"
# %%ranks
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


# %% tags=["export"] module="tensor_operators"
# %%ranks
def gather_tokens(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the ranks' tokens, so that each rank can compute something different from all of them.

    Shape: shard [..., T / t, D]; returns [..., T, D].
    Communication: one all-gather in forward, one reduce-scatter in backward.
    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", §4.2.2.
    """
    return GatherTokens.apply(shard, group)


# %% [markdown]
# ## Exercise 13.8 · The whole model (14 min, 2 points)
#
# `parallelize(model, group, sequence_parallel)` splits a `TinyGPT` in place. Most of the model's code stays as it is,
# because your layers take the places of the old ones:
#
# | layer of `TinyGPT` | becomes |
# |---|---|
# | `block.attention` | `ParallelAttention` |
# | `block.up`, `block.down` | `ColumnParallelLinear`, `RowParallelLinear` |
# | `token_embedding` | `VocabParallelEmbedding` |
# | `output` | `ColumnParallelLinear`, with the `vocabulary_shard` of weight and bias |
# | `position_embedding`, `norm_1`, `norm_2`, `norm` | stay as they are, the same on every rank |
#
# Only the model's own `forward` changes. It is given, in the class `ParallelGPT`. `parallelize` changes the class of
# `model` to `ParallelGPT`, as FSDP2's `fully_shard` does. Before you use it, look at three things in it:
#
# - `used`: the logits of padding are set to −∞, so that they do not take part in the loss.
# - `has_copies`: with sequence parallelism, a norm sees this rank's tokens only. So the gradients of all **replicated
#   parameters**, those that every rank has, are only terms of a sum. Therefore, these parameters pass through
#   `copy_all_to_ranks`, which uses your `copy_to_ranks`. Backward then adds up their gradients in a single all-reduce.
# - `targets is None`: without targets, `forward` returns whole logits. With targets, it never gathers them.


# %% tags=["export"] module="tensor_operators"
# %%ranks
def copy_all_to_ranks(tensors: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Do what copy_to_ranks does for many tensors of one dtype.

    Communication: one all-reduce in backward.
    """
    flat = copy_to_ranks(torch.cat([tensor.flatten() for tensor in tensors]), group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


# %% tags=["export"]
# %%ranks
def sharded_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of which each rank has its own shard."""
    return {
        f"{path}.{name}"
        for path, layer in model.named_modules()
        for name in getattr(layer, "sharded", ())
    }


# %% tags=["export"]
# %%ranks
class ParallelGPT(TinyGPT):
    """A TinyGPT of which each rank has its shard of every matrix. parallelize() builds it.

    With `sequence_parallel`, everything between two parallel layers is computed on this rank's tokens only. torch's
    layers that mix tokens are refused, but a layer or hook of your own that does cannot be seen, and would be wrong.
    Without it, all ranks must draw the same dropout masks there: the first forward that draws one compares their seeds.

    Memory: 1/t of the matrices, and all of the position embedding and the norms.
    Communication: per layer, two all-reduces of B · T · D elements in forward and two in backward; with
        sequence_parallel, four all-gathers and four reduce-scatters, and one all-reduce of the replicated parameters'
        gradients. The embedding adds one collective, the output layer one, and the loss three numbers per target.
    """

    group: ProcessGroup | None
    sequence_parallel: bool

    def forward(self, tokens: Tensor, targets: Tensor | None = None, has_copies: bool = False):
        """Return whole logits (B, T, V), or the mean loss if targets are given."""
        if self.sequence_parallel and not has_copies:
            # Call forward again, with copies in place of the replicated parameters.
            return functional_call(self, self.replicated_copies(), (tokens, targets, True))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.sequence_parallel:
            positions = own_shard(positions, 0, self.group, "the tokens")
        # (B, T, D), or with sequence parallelism (B, T/t, D)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.output(self.norm(x))  # (B, T, V/t)
        if targets is None:
            return concatenate_shards(logits, self.group)[..., : self.config.vocab_size]
        columns = logits.shape[-1]
        used = self.config.vocab_size - dist.get_rank(self.group) * columns
        if used < columns:
            logits[..., max(used, 0) :] = -torch.inf
        return vocab_parallel_cross_entropy(logits, targets, self.group)


# %% tags=["export"]
# %%ranks
class ParallelGPT(ParallelGPT):
    def replicated_copies(self) -> dict[str, Tensor]:
        """Return the replicated parameters by name, as tensors whose gradients are added up over the ranks."""
        sharded = sharded_names(self)
        replicated = {n: p for n, p in self.named_parameters() if n not in sharded}
        copies = copy_all_to_ranks(list(replicated.values()), self.group)
        return dict(zip(replicated, copies, strict=True))


# %% [markdown]
# Write `parallelize`:
#
# - Replace the layers. Pass `enter` and `leave` to those that take them. The beginning and the end are given.
# - In `TinyGPT` (`shared/models.py`), `output.weight` *is* `token_embedding.weight`. If the two were tied before, they
#   must be tied afterwards. (In some models, they are different parameters.) Each constructor makes a new parameter
#   from the weight that it gets, so you have to tie them again.
# - Set `model.group` and `model.sequence_parallel`, change `model.__class__`, and return the model.
#
# The first check, `plain model`, trains a small GPT on two ranks. The other checks try sequence parallelism, one to
# four ranks, vocabularies that need padding, separate output weights, biases, gradients that accumulate, bf16, AdamW,
# and numbers of heads that t does not divide. They also count collectives, and measure the memory, activations
# included.
#
# <details><summary>Hint</summary>
#
# Which two layers share a weight, and is it still shared after you have replaced both?
#
# </details>


# %% tags=["exercise", "export"] grade_id="parallelize"
# %%ranks
def parallelize(
    model: TinyGPT, group: ProcessGroup | None = None, sequence_parallel: bool = False
) -> ParallelGPT:
    """Split a TinyGPT in place. It must be the same on every rank. Frozen parameters stay frozen.

    Raises:
        ValueError: if t does not divide the number of heads, or if the ranks have different models.
    """
    expect_plain_gpt(model, group)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    enter, leave = (
        (gather_tokens, scatter_tokens) if sequence_parallel else (copy_to_ranks, sum_over_ranks)
    )
    embedding, output = model.token_embedding, model.output
    output_bias = None if output.bias is None else vocabulary_shard(output.bias, group)
    ### BEGIN SOLUTION
    for block in model.blocks:
        block.attention = ParallelAttention.from_attention(block.attention, group, enter, leave)
        block.up = ColumnParallelLinear.from_linear(block.up, group, enter=enter)
        block.down = RowParallelLinear.from_linear(block.down, group, leave)
    model.token_embedding = VocabParallelEmbedding.from_embedding(embedding, group, leave)
    output_weight = vocabulary_shard(output.weight, group)
    model.output = ColumnParallelLinear(output_weight, output_bias, group, enter=enter)
    if output.weight is embedding.weight:
        model.output.weight = model.token_embedding.weight
    ### END SOLUTION
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.group, model.sequence_parallel = group, sequence_parallel
    model.__class__ = ParallelGPT
    return model


# %% tags=["check"] grade_id="check-parallelize" points=2
check.parallelize()

# %% [markdown]
# ## Exercise 13.9 · Stretch: clipping (10 min, 1 point)
#
# Add `clip_grad_norm_(max_norm)` to the class. It scales the gradients so that their norm, over the *whole* model, is
# at most `max_norm`, and returns the norm before scaling, as torch's function of the same name does.
#
# - The square of the norm is the sum of the squares of all elements. Each rank has its own shards, so their squares are
#   added up over the ranks, with one all-reduce of one element. As in lab 07, scale by `max_norm / (norm + 1e-6)`.
# - Every rank has the same replicated parameters. Count them once.
# - Add up in float64. A parameter's gradient may be None. All-reduce over `self.group`. If the norm is at most
#   `max_norm`, the gradients stay as they are.
#
# <details><summary>Hint</summary>
#
# `sharded_names(self)` tells shards from replicated parameters. Should the squares of the latter be added before or
# after the all-reduce?
#
# </details>


# %% tags=["exercise", "export"] grade_id="clip-grad-norm"
# %%ranks
class ParallelGPT(ParallelGPT):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element.
        """
        ### BEGIN SOLUTION
        sharded = sharded_names(self)
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        squares = {name: gradient.double().square().sum() for name, gradient in gradients.items()}
        zero = torch.zeros((), dtype=torch.float64, device=self.norm.weight.device)
        total = sum((square for name, square in squares.items() if name in sharded), zero)
        dist.all_reduce(total, group=self.group)
        norm = sum(
            (square for name, square in squares.items() if name not in sharded), total
        ).sqrt()
        for gradient in gradients.values():
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
        ### END SOLUTION


# %% tags=["check"] grade_id="check-clip-grad-norm" points=1
check.clip_grad_norm_()

# %% [markdown]
# ## Break it: four mistakes that raise no error (7 min)
#
# Each function below makes one mistake. None of them raises an error, and the shapes are right. The next cells train
# your model and the four broken ones on text, for 60 steps on four ranks:
#
# - `forgets_the_copies` leaves out `copy_all_to_ranks` with sequence parallelism. (The other models train without
#   sequence parallelism.)
# - `adds_the_bias_everywhere` adds the bias of a row-parallel layer before the sum. (`TinyGPT` has no biases, so all
#   models get one here.)
# - `counts_replicas` counts replicated parameters on every rank when it clips. (The cells have their own `clip`, so you
#   do not need exercise 13.9.)
# - `forgets_a_sum` leaves out the all-reduce in backward before each attention.


# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, context=32, layers=2, heads=4, width=32)


def new_model():
    model = TinyGPT(config).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for block in model.blocks:
            block.down = nn.Linear(128, 32).double()
            nn.init.normal_(block.down.bias, std=0.5)
    return model.to(device)


# %%
# %%ranks
def forgets_the_copies(model):
    model.replicated_copies = lambda: {}  # so forward computes with the parameters themselves


def adds_the_bias_everywhere(model):
    def forward(layer, x):
        return layer.leave(F.linear(x, layer.weight, layer.bias), layer.group)

    for block in model.blocks:
        block.down.forward = forward.__get__(block.down)


def counts_replicas(model):
    model.copies = 1


def forgets_a_sum(model):
    for block in model.blocks:
        block.attention.query_key_value.enter = lambda x, group: x


# %% [markdown]
# **Predict.** Which of them show a wrong loss in the very first step? And which have a right first loss, but a wrong
# norm of the gradients? Write tuples of names, such as `("forgets_a_sum",)`.

# %%
my_wrong_first_loss = None
my_wrong_norm_only = None

# %%
# %%ranks --timeout 240
STEPS = 60


def clip(model, max_norm):
    """Clip the gradients. Each of the copies of a replicated gradient counts as a part of one."""
    own, sharded = torch.zeros((), dtype=torch.float64, device=device), sharded_names(model)
    for name, parameter in model.named_parameters():
        own += parameter.grad.square().sum() / (1 if name in sharded else model.copies)
    dist.all_reduce(own)
    for parameter in model.parameters():
        parameter.grad *= (max_norm / own.sqrt()).clamp(max=1)
    return own.sqrt()


def history(breaks=None):
    """Train. Returns the loss and the norm of the gradients of each step."""
    by_tokens = breaks is forgets_the_copies
    model, found = parallelize(new_model(), sequence_parallel=by_tokens), []
    model.copies = world_size  # on how many ranks clip() finds each replicated gradient
    if breaks:
        breaks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens, targets = text.windows(range(1000 * step, 1000 * step + 1000, 125), length=32)
        optimizer.zero_grad()
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        norm = clip(model, 0.2)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


mistakes = (forgets_the_copies, adds_the_bias_everywhere, counts_replicas, forgets_a_sum)
histories = {"right": history(), **{each.__name__: history(each) for each in mistakes}}

# %%
from shared import plots, tables
from shared.predictions import predicted

histories = ranks.pull("histories")[0]
rows = [
    [name, *(f"{its[step][0]:.4f}" for step in (0, 1, 59)), f"{its[0][1]:.4f}"]
    for name, its in histories.items()
]
tables.Table(["", "loss, step 1", "step 2", "step 60", "norm, step 1"], rows)

# %%
right = histories["right"]
wrong = {name: its for name, its in histories.items() if name != "right"}
wrong_loss, wrong_norm = (
    {name for name, its in wrong.items() if abs(its[0][index] - right[0][index]) > 1e-9}
    for index in (0, 1)
)
for what, prediction, names in (
    ("wrong first loss", my_wrong_first_loss, wrong_loss),
    ("only the norm", my_wrong_norm_only, wrong_norm - wrong_loss),
):
    guess = None if prediction is None else ", ".join(prediction)
    print(f"{what}: {predicted(guess)}measured {', '.join(sorted(names))}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert wrong_loss == {"adds_the_bias_everywhere"} and len(wrong_norm - wrong_loss) == 3
assert all(abs(its[59][0] - right[59][0]) > 1e-6 for its in wrong.values())

# %% [markdown]
# Only the bias changes the output itself. In the other three runs, the first loss is right, because forward is. Only
# the gradient norms give them away. After that, the losses drift apart, but so slowly that you could take the
# difference for noise. In `forgets_the_copies` and `forgets_a_sum`, each rank even updates its norm layers with a
# gradient of its own, so the ranks no longer have the same model. (A wrong run may even end with a lower loss than the
# right one, so do not judge by that.) The checks of this lab compare every output and gradient, and in 13.9 the norm,
# with those of one process. So they find all four in the first step.
#
# The training script has this model as two strategies: `torchrun --nproc_per_node=2 -m solutions.train --model gpt
# --strategy tp`, and `tp+sp` with sequence parallelism. `python -m shared.dryrun --strategy tp+sp --model llama-70b
# --world-size 8` counts what each of 8 ranks would hold and send for a model of 70 billion parameters.

# %% [markdown]
# ## Your own run
#
# The figure shows your runs: the loss of each broken model, divided by that of yours.

# %% tags=["nbval-ignore-output"]
losses = {name: [loss for loss, _ in its] for name, its in histories.items()}
right_losses = losses.pop("right")
plots.loss_ratio(losses, right_losses, steps=10)

# %%
ranks.stop()
