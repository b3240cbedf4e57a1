"""Collectives that autograd records, from torch.distributed.nn, sorting by a key, and classes of its own."""

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.nn import functional as recorded

from shared.sharded.layers import expect_same


def route(logits, top_k):
    log_probabilities = F.log_softmax(logits, -1)
    best = torch.topk(log_probabilities, top_k, dim=-1, sorted=True)
    weights = (best.values - torch.logsumexp(best.values, -1, keepdim=True)).exp()
    counts = logits.new_zeros(logits.shape[-1]).index_add(
        0, best.indices.reshape(-1), logits.new_ones(best.indices.numel())
    )
    if not len(logits):
        return best.indices, weights, logits.sum()
    probability = log_probabilities.exp().mean(0)
    return best.indices, weights, logits.shape[-1] * (counts / counts.sum()) @ probability


def sort_by_expert(chosen, experts, capacity=None):
    numbered = chosen.reshape(-1) * (chosen.numel() + 1) + torch.arange(chosen.numel(), device=chosen.device)
    order = numbered.sort().values % (chosen.numel() + 1)
    counts = torch.zeros(experts, dtype=torch.long, device=chosen.device)
    counts.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1)))
    if capacity is not None:
        blocks = order.split(counts.tolist())
        order = torch.cat([block[:capacity] for block in blocks])
        counts = torch.minimum(counts, torch.full_like(counts, capacity))
    return order, counts


def exchange_counts(counts, group=None):
    sent = counts.reshape(dist.get_world_size(group), -1).contiguous()
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def exchange_rows(rows, sent, received, group=None):
    arrived = rows.new_zeros(sum(received), *rows.shape[1:])
    group = dist.group.WORLD if group is None else group
    output = recorded.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    # Its backward sends the gradient as it comes, so let it come contiguous.
    return _Contiguous.apply(output)


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


class MoE(nn.Module):
    def __init__(self, dim, hidden, experts, top_k, capacity_factor=None):
        super().__init__()
        self.top_k, self.capacity_factor, self.aux_loss, self.count = top_k, capacity_factor, None, experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(_Expert(dim, hidden) for _ in range(experts))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights, self.aux_loss = route(self.router(tokens), self.top_k)
        limit = self.capacity_factor
        capacity = None if limit is None else math.ceil(limit * chosen.numel() / self.count)
        order, counts = sort_by_expert(chosen, self.count, capacity)
        outputs = self.run_experts(tokens.repeat_interleave(self.top_k, 0)[order], counts)
        placed = outputs.new_zeros(chosen.numel(), x.shape[-1]).index_copy(0, order, outputs)
        return torch.einsum("tk,tkd->td", weights, placed.view(*chosen.shape, x.shape[-1])).view(x.shape)


class _Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class ExpertParallelMoE(MoE):
    @classmethod
    def from_moe(cls, moe, group=None):
        experts, size = len(moe.experts), dist.get_world_size(group)
        if experts % size:
            raise ValueError(f"{experts} experts cannot be divided by {size} ranks")
        settings = {"top_k": moe.top_k, "capacity_factor": moe.capacity_factor}
        expect_same(moe.named_parameters(), group, **settings)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.top_k, layer.capacity_factor, layer.aux_loss, layer.count = moe.top_k, moe.capacity_factor, None, experts
        layer.group, layer.router = group, copy.deepcopy(moe.router)
        own = range(experts // size * dist.get_rank(group), experts // size * (dist.get_rank(group) + 1))
        layer.experts = nn.ModuleDict({f"{index}": copy.deepcopy(moe.experts[index]) for index in own})
        return layer

    def run_experts(self, rows, counts):
        sizes = exchange_counts(counts, self.group)
        sent, received = counts.view(len(sizes), -1).sum(1).tolist(), sizes.sum(1).tolist()
        arrived = exchange_rows(rows, sent, received, self.group)
        expert_of = torch.cat(
            [torch.arange(sizes.shape[1], device=rows.device).repeat_interleave(its) for its in sizes]
        )
        results = torch.zeros_like(arrived)
        for index, expert in enumerate(self.experts.values()):
            its = (expert_of == index).nonzero().squeeze(-1)
            results = results.index_add(0, its, expert(arrived[its]))
        return exchange_rows(results, received, sent, self.group)


def average_gradients(experts, others, group=None, replicas=None):
    size = dist.get_world_size(group)
    for parameter in [*others]:
        if parameter.grad is not None:
            mean = parameter.grad.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(mean, group=group)
            parameter.grad.data.copy_(mean).div_(size)
    for gradient in filter(lambda gradient: gradient is not None, (parameter.grad for parameter in experts)):
        if replicas is not None and dist.get_world_size(replicas) > 1:
            summed = gradient.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(summed, group=replicas)
            gradient.data.copy_(summed)
        gradient.data.mul_(1 / size)


def clip_grad_norm_(experts, others, max_norm, group=None):
    own = [parameter.grad.double().flatten() for parameter in experts if parameter.grad is not None]
    if dist.get_rank(group) == 0:  # one rank counts what every rank has
        own += [parameter.grad.double().flatten() for parameter in others if parameter.grad is not None]
    total = torch.cat(own).pow(2).sum().reshape(1)
    dist.all_reduce(total, group=group)
    norm = total.sqrt()[0]
    with torch.no_grad():
        for parameter in (*experts, *others):
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
