# Built by `make notebooks` from source/16_expert_parallel/lab.py: edit that, not this.
"""A mixture of experts, first in one process, then with its experts on different ranks.

Shape legend: T tokens of this rank, D their width, E experts, k experts per token, N ranks of the group. Each of the
T · k choices of a token and one of its experts is called an assignment; a row is what is sent for one assignment.
"""

import copy
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shared.sharded.layers import expect_same
from shared.sharded.parts import mark_local


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token.

    Returns:
        The chosen experts (T, k), their weights (T, k), and the balancing loss.

    Source: Fedus et al. 2021, "Switch Transformers", eq. 4, with top-k shares.
    """
    tokens, experts = logits.shape
    probabilities = logits.softmax(-1)
    likeliest, chosen = probabilities.topk(top_k)
    weights = likeliest / likeliest.sum(-1, keepdim=True)
    counts = chosen.flatten().bincount(minlength=experts).to(logits.dtype)
    shares = counts / max(chosen.numel(), 1)
    means = probabilities.sum(0) / max(tokens, 1)
    return chosen, weights, experts * (shares * means).sum()


def sort_by_expert(chosen: Tensor, experts: int, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """Sort the assignments by expert.

    Args:
        chosen: The experts of each token (T, k).
        experts: E, the number of experts.
        capacity: How many assignments each expert keeps at most; None keeps all.

    Returns:
        The assignments that are kept, in blocks by expert, and the length of each block (E).
    """
    expert_of = chosen.flatten()
    order = expert_of.argsort(stable=True)
    counts = expert_of.bincount(minlength=experts)
    if capacity is None:
        return order, counts
    begins = counts.cumsum(0) - counts
    positions = torch.arange(len(order), device=order.device) - begins[expert_of[order]]
    return order[positions < capacity], counts.clamp(max=capacity)


class Expert(nn.Module):
    """The two-layer MLP of a transformer block."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def run_each(experts: Iterable[nn.Module], rows: Tensor, counts: list[int]) -> Tensor:
    """Let each expert compute its block of rows. The results have the order of the rows."""
    blocks = rows.split(counts)
    return torch.cat([expert(block) for expert, block in zip(experts, blocks, strict=True)])


class MoE(nn.Module):
    """A mixture of experts: a router chooses top_k of the experts for each token, and their outputs are added up.

    Args:
        dim: D, the width of a token.
        hidden: The width between the two layers of an expert.
        experts: E, the number of experts.
        top_k: How many experts each token gets. With 1, only aux_loss trains the router.
        capacity_factor: With a factor c, an expert keeps ⌈c · T · k / E⌉ assignments and drops the others. None keeps
            all, which is called dropless.

    Attributes:
        aux_loss: The balancing loss of the last forward. Add it to the loss with a small factor, such as 0.01.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k must be from 1 to {experts}, the number of experts, got {top_k}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor must be positive, or the experts would drop every token, got {capacity_factor}"
            )
        self.top_k, self.capacity_factor, self.aux_loss = top_k, capacity_factor, None
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:  # (…, D) → (…, D)
        tokens, experts = x.reshape(-1, x.shape[-1]), self.router.out_features
        chosen, weights, self.aux_loss = route(self.router(tokens), self.top_k)
        capacity = None
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * chosen.numel() / experts)
        order, counts = sort_by_expert(chosen, experts, capacity)
        token_of = order // self.top_k
        outputs = self.run_experts(tokens[token_of], counts)
        weighted = (outputs * weights.flatten()[order].unsqueeze(-1)).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token_of, weighted).view(x.shape)

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute each row with its expert. The rows come in blocks by expert, of these lengths."""
        return run_each(self.experts, rows, counts.tolist())

    def __getstate__(self) -> dict:
        """Leave the last forward's graph out of copies, which could not have it."""
        return {**self.__dict__, "aux_loss": None}


def exchange_counts(counts: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Tell every rank how many rows it will get for each of its experts.

    Shape: counts [E], the rows of this rank for every expert; returns [N, E/N].
    Communication: one all-to-all of E integers.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received.view(dist.get_world_size(group), -1)


class Exchange(torch.autograd.Function):
    """Forward: an all-to-all of rows. Backward: an all-to-all of their gradients, the other way."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    @once_differentiable  # collectives record no graph
    def backward(ctx, gradient: Tensor):
        returned = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return returned, None, None, None


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None = None) -> Tensor:
    """Send rows to the ranks, in rank order, and return the rows that they send here.

    Shape: rows [sum(sent), …]; returns [sum(received), …].
    Communication: one all-to-all of the rows in forward, and one of the gradients of received rows in backward.
    """
    return Exchange.apply(rows, sent, received, group)


class ExpertParallelMoE(MoE):
    """A mixture of experts with E/N of the experts on each rank. Each rank brings its own tokens.

    Backward gives an expert the gradient of the sum of all ranks' losses, and the router that of this rank's loss. All
    ranks call forward and backward equally often. If some run under no_grad, the others wait in their exchanges.

    Memory: E/N experts and the whole router.
    Communication: an all-to-all of E integers, then two all-to-alls of rows in forward and two in backward.
    """

    def __init__(self, moe: MoE, group: ProcessGroup | None = None):
        nn.Module.__init__(self)  # that of MoE would create all experts
        self.top_k, self.capacity_factor, self.aux_loss = moe.top_k, moe.capacity_factor, None
        self.group, self.router = group, copy.deepcopy(moe.router)
        per_rank = len(moe.experts) // dist.get_world_size(group)
        first = dist.get_rank(group) * per_rank
        own = range(first, first + per_rank)
        self.experts = nn.ModuleDict({str(index): copy.deepcopy(moe.experts[index]) for index in own})
        advice = "call clip_grad_norm_() of chapter 16, which adds up the experts' squares over the ranks"
        mark_local(self.experts.parameters(), group, advice)

    @classmethod
    def from_moe(cls, moe: MoE, group: ProcessGroup | None = None) -> "ExpertParallelMoE":
        """Divide the experts of a layer among the ranks of a group. The layer must be the same on every rank.

        Raises:
            ValueError: on every rank, if N does not divide the number of experts, or if their layers differ.
        """
        experts, world_size = len(moe.experts), dist.get_world_size(group)
        if experts % world_size:
            raise ValueError(
                f"cannot divide {experts} experts evenly among {world_size} ranks: "
                f"choose a multiple of {world_size} experts"
            )
        settings = {"top_k": moe.top_k, "capacity_factor": moe.capacity_factor}
        expect_same(moe.named_parameters(), group, **settings)
        return cls(moe, group)

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute each row with its expert, on whichever rank that is."""
        received = exchange_counts(counts, self.group)  # (N, E/N)
        world_size, per_rank = received.shape
        to_ranks, from_ranks = counts.view(world_size, -1).sum(1).tolist(), received.sum(1).tolist()
        arrived = exchange_rows(rows, to_ranks, from_ranks, self.group)
        # From blocks by rank to blocks by expert.
        blocks = torch.arange(per_rank, device=counts.device).repeat(world_size)
        by_expert = blocks.repeat_interleave(received.flatten()).argsort(stable=True)
        outputs = run_each(self.experts.values(), arrived[by_expert], received.sum(0).tolist())
        by_rank = outputs[by_expert.argsort()]  # the inverse of a permutation is its argsort
        return exchange_rows(by_rank, from_ranks, to_ranks, self.group)


@torch.no_grad()
def average_gradients(
    experts: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    group: ProcessGroup | None = None,
    replicas: ProcessGroup | None = None,
) -> None:
    """Turn the gradients into those of the mean of the ranks' losses, in place.

    Args:
        experts: The parameters of this rank's experts.
        others: The parameters that every rank has.
        group: All ranks, each with a loss of its own.
        replicas: The ranks that have a copy of this rank's experts; None if no other rank has one.

    Communication: all-reduces of the gradients of others over group, and of those of experts over replicas, if any.
    """
    world_size = dist.get_world_size(group)
    for parameter in experts:
        if parameter.grad is not None:
            total = parameter.grad.contiguous()
            if replicas is not None:
                dist.all_reduce(total, group=replicas)
            parameter.grad.copy_(total / world_size)
    for parameter in others:
        if parameter.grad is not None:
            mean = parameter.grad.contiguous()
            dist.all_reduce(mean, group=group)
            parameter.grad.copy_(mean / world_size)


@torch.no_grad()
def clip_grad_norm_(
    experts: Iterable[nn.Parameter],
    others: Iterable[nn.Parameter],
    max_norm: float,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients so that their norm over the whole model is at most max_norm.

    Args:
        group: ranks that together have each expert once.

    Returns:
        The norm before scaling, the same on every rank.

    Communication: one all-reduce of one element.
    """
    sharded = [parameter.grad for parameter in experts if parameter.grad is not None]
    replicated = [parameter.grad for parameter in others if parameter.grad is not None]
    device = (sharded + replicated)[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in sharded:
        total += gradient.double().square().sum()
    dist.all_reduce(total, group=group)
    for gradient in replicated:
        total += gradient.double().square().sum()
    norm = total.sqrt()
    for gradient in sharded + replicated:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
