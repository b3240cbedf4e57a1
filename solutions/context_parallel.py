# Built by `make notebooks` from source/14_context_parallel/lab.py: edit that, not this.
"""Context parallelism: each rank has some tokens of every sequence, and attention fetches what it needs of the others.

Shape legend: B batch, H heads, T tokens of a rank, D width of a head, N ranks of the group.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shared import guards
from shared.models import RotaryGPT
from shared.sharded.layers import IGNORED, expect_methods_of, expect_same
from shared.sharded.sequences import (
    expect_attention_shards,
    expect_divisible,
    expect_equal_shards,
    expect_same_first_batch,
    without_autocast,
)
from solutions.async_collectives import InFlight
from solutions.attention_kernels import at_least_float32, attend, attend_backward, merge
from solutions.tensor_operators import all_gather, sum_over_ranks


def own_chunks(index: int, size: int, balanced: bool) -> tuple[int, ...]:
    """Return the numbers of a rank's chunks: of 2N chunks in zigzag order if balanced, else of N."""
    return (index, 2 * size - 1 - index) if balanced else (index,)


def shard_sequence(tensor: Tensor, dim: int, group: ProcessGroup | None = None, balanced: bool = True) -> Tensor:
    """Return this rank's part of a sequence that every rank has.

    Raises:
        ValueError: if the sequence cannot be cut into equal chunks.
    """
    size = dist.get_world_size(group)
    chunks = 2 * size if balanced else size
    expect_divisible(tensor.shape[dim], chunks, "the sequence")
    pieces = tensor.chunk(chunks, dim)
    return torch.cat([pieces[i] for i in own_chunks(dist.get_rank(group), size, balanced)], dim)


def unshard_sequence(tensor: Tensor, dim: int, group: ProcessGroup | None = None, balanced: bool = True) -> Tensor:
    """Return the whole sequence, of which each rank has its part. Autograd does not record it.

    Raises:
        ValueError: on every rank, if the ranks' shards have different shapes, or cannot be two chunks each.
    Communication: one all-gather.
    """
    expect_equal_shards({"the shard": tensor}, group, dim, 2 if balanced else 1)
    whole = all_gather(tensor, dim, group)
    if not balanced:
        return whole
    pieces = whole.chunk(2 * dist.get_world_size(group), dim)
    return torch.cat([*pieces[0::2], *reversed(pieces[1::2])], dim)


def visible_pairs(index: int, source: int, size: int, causal: bool, balanced: bool) -> list[tuple[int, int, bool]]:
    """List what rank `index` computes with the keys of rank `source`: (query chunk, key chunk, masked)."""
    pairs = []
    for query_chunk, query_number in enumerate(own_chunks(index, size, balanced)):
        for key_chunk, key_number in enumerate(own_chunks(source, size, balanced)):
            if not causal or key_number <= query_number:
                pairs.append((query_chunk, key_chunk, causal and key_number == query_number))
    return pairs


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None, causal: bool, balanced: bool
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of all ranks, which pass them around a ring.

    Returns:
        The output, and the log-sum-exp of the scores, both in float32 at least.

    Shape: all inputs [B, H, T, D]; returns [B, H, T, D] and [B, H, T, 1].
    Communication: N − 1 transfers to the right neighbor, of this size of keys and values each.
    """
    index, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (index + 1) % size, (index - 1) % size
    parts = len(own_chunks(index, size, balanced))
    queries = q.chunk(parts, 2)
    keys_values = torch.stack([k, v])  # (2, B, H, T, D)
    partial_results: list[tuple[Tensor, Tensor] | None] = [None] * parts
    for step in range(size):
        source, is_last = (index - step) % size, step == size - 1
        if not is_last:
            following = torch.empty_like(keys_values)
            in_flight = InFlight([(keys_values, right)], [(following, left)], group)
        blocks = keys_values.chunk(parts, 3)
        for query_chunk, key_chunk, masked in visible_pairs(index, source, size, causal, balanced):
            result = attend(queries[query_chunk], *blocks[key_chunk], masked)
            earlier = partial_results[query_chunk]
            partial_results[query_chunk] = merge(*earlier, *result) if earlier else result
        if not is_last:
            in_flight.wait()
            keys_values = following
    outputs, log_sums = zip(*partial_results, strict=True)
    return torch.cat(outputs, 2), torch.cat(log_sums, 2)


def add_terms(
    pairs: list[tuple[int, int, bool]],
    by_query: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    keys_values: Tensor,
    query_gradients: list[Tensor],
    term: Tensor,
) -> None:
    """Add what some pairs of chunks contribute to the gradients of queries, and to those of the keys and values.

    Args:
        by_query: for each chunk of queries: the queries, the gradient of their output, their log-sum-exp, and delta.
    """
    blocks, terms = keys_values.chunk(len(by_query), 3), term.chunk(len(by_query), 3)
    for query_chunk, key_chunk, masked in pairs:
        query, *others = by_query[query_chunk]
        gradients = attend_backward(query, *blocks[key_chunk], *others, masked)
        query_gradients[query_chunk] += gradients[0]
        terms[key_chunk][0].add_(gradients[1])
        terms[key_chunk][1].add_(gradients[2])


def ring_backward(
    gradient: Tensor, saved: tuple, group: ProcessGroup | None, causal: bool, balanced: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values, in float32 at least.

    Communication: N − 1 transfers of keys and values, and N of their gradients.
    """
    q, k, v, output, log_sum = saved
    index, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (index + 1) % size, (index - 1) % size
    gradient = at_least_float32(gradient)
    delta = (gradient * output).sum(-1, keepdim=True)
    parts = len(own_chunks(index, size, balanced))
    by_query = list(zip(*(t.chunk(parts, 2) for t in (q, gradient, log_sum, delta)), strict=True))
    query_gradients = list(torch.zeros_like(gradient).chunk(parts, 2))
    keys_values, arriving, home = torch.stack([k, v]), None, None
    for step in range(size):
        term = torch.zeros_like(keys_values, dtype=gradient.dtype)
        source, is_last = (index - step) % size, step == size - 1
        if not is_last:
            following = torch.empty_like(keys_values)
            in_flight = InFlight([(keys_values, right)], [(following, left)], group)
        pairs = visible_pairs(index, source, size, causal, balanced)
        add_terms(pairs, by_query, keys_values, query_gradients, term)
        if arriving is not None:
            arriving.wait()
            term += home
        home, sent = torch.empty_like(term), term  # sent stays alive until it has arrived
        if size > 1:
            arriving = InFlight([(sent, right)], [(home, left)], group)
        if not is_last:
            in_flight.wait()
            keys_values = following
    if size > 1:
        arriving.wait()
    # After the loop, home is complete as soon as its last transfer is.
    return torch.cat(query_gradients, 2), *(home if size > 1 else term)


class RingAttention(torch.autograd.Function):
    """Forward: queries meet all keys in a ring. Backward: the same, and the gradients of the keys travel along."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *how) -> Tensor:
        with without_autocast(q.device):  # it would merge in 16 bits
            output, log_sum = ring_forward(q, k, v, *how)
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, log_sum)
        ctx.how = how  # the group, causal and balanced
        return output

    @staticmethod
    @once_differentiable  # transfers record no graph
    def backward(ctx, gradient: Tensor):
        gradients = ring_backward(gradient, ctx.saved_tensors, *ctx.how)
        return *(each.to(gradient.dtype) for each in gradients), None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None, causal=True, balanced=True
) -> Tensor:
    """Attend to the whole sequence, of which each rank has a shard, in zigzag order if balanced.

    Shape: all [B, H, T, D], the same on every rank; returns [B, H, T, D].
    Memory: besides its own, the keys and values of two ranks at a time.
    Communication: N − 1 transfers of keys and values in forward. In backward, the same and N of their gradients, which
        are in float32 at least.
    Raises:
        ValueError: on every rank, if the shards or the options differ, or a shard is not two equal chunks.
    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers", §3.
    """
    expect_attention_shards(q, k, v, group, 2 if balanced else 1, causal=causal, balanced=balanced)
    return RingAttention.apply(q, k, v, group, causal, balanced)


def swap(tensor: Tensor, split_dim: int, join_dim: int, group: ProcessGroup | None) -> Tensor:
    """Exchange parts of one dimension for those of another: [.., s, .., j, ..] → [.., s/N, .., j·N, ..].

    Communication: one all-to-all.
    """
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join_dim)


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, split_dim: int, join_dim: int, group: ProcessGroup | None) -> Tensor:
        ctx.how = split_dim, join_dim, group
        return swap(tensor, split_dim, join_dim, group)

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        split_dim, join_dim, group = ctx.how
        return swap(gradient, join_dim, split_dim, group), None, None, None


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup | None = None, causal: bool = True
) -> Tensor:
    """Attend to the whole sequence, of which rank r has the r-th part. Inside, each rank has all tokens of some heads.

    Shape: all [B, H, T, D], the same on every rank; returns [B, H, T, D].
    Communication: four all-to-alls of a rank's queries, keys, values and outputs, and as many in backward.
    Raises:
        ValueError: on every rank, if N does not divide H, or the shards or the options differ.
    Source: Jacobs et al. 2023, "DeepSpeed Ulysses", §3.
    """
    expect_attention_shards(q, k, v, group, heads_divide=True, causal=causal)
    query, key, value = (Swap.apply(tensor, 1, 2, group) for tensor in (q, k, v))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return Swap.apply(mixed, 2, 1, group)


@guards.guarded(guards.Joint)
class ContextParallelGPT(nn.Module):
    """A GPT that computes a part of every sequence on each rank. All ranks have all parameters, and the same batch.

    All ranks call forward and backward, also to evaluate. Their gradients are added up, so a penalty on parameters in
    the loss would count N times: use the optimizer's weight_decay. Everything except attention gets this rank's tokens.
    So torch's layers that mix tokens, such as Conv1d or BatchNorm1d, are refused. A layer or hook of your own that
    mixes tokens cannot be seen, and would be wrong.

    Memory: 1/N of the activations.
    Communication: per layer, that of ring_attention. After backward, one all-reduce of all gradients.
    Raises:
        ValueError: on every rank, if their GPTs or their first batches differ, or a layer mixes tokens.
    """

    def __init__(self, gpt: RotaryGPT, group: ProcessGroup | None = None, balanced: bool = True):
        super().__init__()
        expect_methods_of(gpt, RotaryGPT)
        expect_same(gpt.named_parameters(), group)
        expect_same_first_batch(self, group)
        self.gpt, self.group, self.balanced = gpt, group, balanced
        self.attend = partial(ring_attention, group=group, balanced=balanced)

    @torch.no_grad()
    def finish_gradient_sync(self) -> None:
        """Add up the ranks' gradients, each of which comes from the rank's own tokens."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(total, group=self.group)
        for gradient, summed in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all targets that are not IGNORED."""
        everywhere = torch.arange(tokens.shape[1], device=tokens.device)
        positions = shard_sequence(everywhere, 0, self.group, self.balanced)
        own_tokens = shard_sequence(tokens, 1, self.group, self.balanced)
        own_targets = shard_sequence(targets, 1, self.group, self.balanced)
        logits = self.gpt(own_tokens, positions=positions, attend=self.attend)
        total = F.cross_entropy(logits.flatten(0, 1), own_targets.flatten(), reduction="sum", ignore_index=IGNORED)
        return sum_over_ranks(total / (targets != IGNORED).sum(), self.group)
