"""One-hot matrices and sums instead of sorting, counts by all-gather, and one exchange per local expert."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.c10d import all_gather_single
from solutions import expert_parallel as ours


def route(logits, top_k):
    probabilities = torch.softmax(logits, dim=1)
    chosen = probabilities.detach().topk(top_k, dim=1).indices
    hot = F.one_hot(chosen, logits.shape[1]).to(logits.dtype)  # (T, k, E)
    picked = torch.einsum("tke,te->tk", hot, probabilities)
    tokens = max(1, len(logits))
    shares = hot.sum((0, 1)) / (tokens * top_k)
    balancing = logits.shape[1] * torch.dot(shares, probabilities.sum(0) / tokens)
    return chosen, F.normalize(picked, p=1, dim=1), balancing


def sort_by_expert(chosen, experts, capacity=None):
    hot = F.one_hot(chosen.flatten(), experts) if chosen.numel() else chosen.new_zeros(0, experts)
    if capacity is not None:
        hot = hot * (hot.cumsum(0) <= capacity)
    return hot.T.nonzero()[:, 1], hot.sum(0)


def exchange_counts(counts, group=None):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    every = counts.new_empty(size * len(counts))
    all_gather_single(every, counts, group=group)
    return every.view(size, size, -1)[:, rank]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = lambda gradient: Exchange.apply(gradient.contiguous(), received, sent, group)
        arrived = torch.zeros((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        work = dist.all_to_all_single(
            arrived,
            rows.clone(memory_format=torch.contiguous_format),
            output_split_sizes=received,
            input_split_sizes=sent,
            group=group,
            async_op=True,
        )
        work.wait()
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None, None


def exchange_rows(rows, sent, received, group=None):
    return Exchange.apply(rows, sent, received, group)


class ExpertParallelMoE(ours.ExpertParallelMoE):
    def __init__(self, moe, group=None):
        nn.Module.__init__(self)
        self.top_k, self.capacity_factor, self.aux_loss, self.group = moe.top_k, moe.capacity_factor, None, group
        self.router = copy.deepcopy(moe.router)
        everyone = list(enumerate(copy.deepcopy(moe.experts)))
        per_rank = len(everyone) // dist.get_world_size(group)
        own = everyone[dist.get_rank(group) * per_rank :][:per_rank]
        self.experts = nn.ModuleDict([(str(index), expert) for index, expert in own])

    def run_experts(self, rows, counts):
        received = exchange_counts(counts, self.group)
        per_rank = received.shape[1]
        blocks, results = rows.split(counts.tolist()), [None] * len(counts)
        for local, expert in enumerate(self.experts.values()):
            its = range(local, len(counts), per_rank)  # the local-th expert of every rank
            sent, here = counts[local::per_rank].tolist(), received[:, local].tolist()
            outputs = expert(exchange_rows(torch.cat([blocks[index] for index in its]), sent, here, self.group))
            pieces = exchange_rows(outputs, here, sent, self.group).split(sent)
            for index, piece in zip(its, pieces, strict=True):
                results[index] = piece
        return torch.cat(results)


def average_gradients(experts, others, group=None, replicas=None):
    with torch.no_grad():
        sharded = [p.grad for p in experts if p.grad is not None]
        if replicas:
            flat = torch.cat([gradient.reshape(-1) for gradient in sharded])
            dist.all_reduce(flat, dist.ReduceOp.SUM, replicas)
            pieces = flat.split([gradient.numel() for gradient in sharded])
            torch._foreach_copy_(sharded, [piece.view_as(own) for piece, own in zip(pieces, sharded, strict=True)])
        torch._foreach_div_(sharded, dist.get_world_size(group))
        works = []
        for parameter in others:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous() / dist.get_world_size(group)
                works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        for work in works:
            work.wait()


def clip_grad_norm_(experts, others, max_norm, group=None):
    def squared(parameters):
        norms = [torch.linalg.vector_norm(p.grad.detach().double()) for p in parameters if p.grad is not None]
        return torch.stack([*norms, norms[0] * 0]).square().sum()

    shared, total = squared(others), squared(experts).clone()
    dist.all_reduce(total, group=group)
    norm = (total + shared) ** 0.5
    factor = min(1.0, max_norm / (norm.item() + 1e-6))
    for parameter in [*experts, *others]:
        if parameter.grad is not None:
            parameter.grad.detach().mul_(factor)
    return norm
