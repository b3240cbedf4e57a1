"""Loops over tokens and experts, point-to-point messages instead of all-to-alls, and contexts that are set up apart."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from solutions import expert_parallel as ours


def route(logits, top_k):
    order = logits.argsort(dim=-1, descending=True, stable=True)
    chosen = order[:, :top_k]
    weights = logits.gather(1, chosen).softmax(-1)  # over the chosen ones alone: the others cancel
    probabilities, experts = logits.softmax(-1), logits.shape[1]
    balancing = (logits * 0).sum()
    for expert in range(experts if len(logits) else 0):
        share = int((chosen == expert).sum()) / chosen.numel()
        balancing = balancing + experts * share * probabilities[:, expert].mean()
    return chosen, weights, balancing


def sort_by_expert(chosen, experts, capacity=None):
    blocks = [[] for _ in range(experts)]
    for assignment, expert in enumerate(chosen.flatten().tolist()):
        if capacity is None or len(blocks[expert]) < capacity:
            blocks[expert].append(assignment)
    order = torch.tensor([each for block in blocks for each in block], dtype=torch.long, device=chosen.device)
    return order, torch.tensor([len(block) for block in blocks], device=chosen.device)


def swapped(pieces, lengths, group, like):
    """Send pieces[r] to rank r, and return what the ranks send, of these lengths."""
    rank, operations = dist.get_rank(group), []
    arrived = [like.new_zeros(length, *like.shape[1:]) for length in lengths]
    arrived[rank].copy_(pieces[rank])
    for peer, (piece, place) in enumerate(zip(pieces, arrived, strict=True)):
        if peer != rank and len(place):
            operations.append(dist.P2POp(dist.irecv, place, group=group, group_peer=peer))
        if peer != rank and len(piece):
            operations.append(dist.P2POp(dist.isend, piece.contiguous(), group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return arrived


def exchange_counts(counts, group=None):
    size = dist.get_world_size(group)
    pieces = list(counts.view(size, -1))
    return torch.stack(swapped(pieces, [len(pieces[0])] * size, group, counts))


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(rows, sent, received, group):
        return torch.cat(swapped(rows.split(sent), received, group, rows))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *ctx.arguments = inputs

    @staticmethod
    def backward(ctx, gradient):
        sent, received, group = ctx.arguments
        return torch.cat(swapped(gradient.split(received), sent, group, gradient)), None, None, None


def exchange_rows(rows, sent, received, group=None):
    return Exchange.apply(rows, sent, received, group)


class ExpertParallelMoE(ours.ExpertParallelMoE):
    def __init__(self, moe, group=None):
        nn.Module.__init__(self)
        self.top_k, self.capacity_factor, self.aux_loss = moe.top_k, moe.capacity_factor, None
        self.group, self.router, self.experts = group, copy.deepcopy(moe.router), nn.ModuleDict()
        for index, expert in enumerate(moe.experts):
            if index * dist.get_world_size(group) // len(moe.experts) == dist.get_rank(group):
                self.experts[str(index)] = copy.deepcopy(expert)

    def run_experts(self, rows, counts):
        received = exchange_counts(counts, self.group).tolist()
        to_ranks = [sum(its) for its in counts.view(len(received), -1).tolist()]
        from_ranks = [sum(its) for its in received]
        arrived = exchange_rows(rows, to_ranks, from_ranks, self.group)
        # Cut into a block per rank and expert, and let each expert compute its blocks one by one.
        blocks = iter(arrived.split([count for its in received for count in its]))
        results = [expert(next(blocks)) for _ in received for expert in self.experts.values()]
        return exchange_rows(torch.cat(results), from_ranks, to_ranks, self.group)


@torch.no_grad()
def average_gradients(experts, others, group=None, replicas=None):
    size = dist.get_world_size(group)
    gradients = [parameter.grad for parameter in others if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    pieces = flat.div(size).split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
    for parameter in experts:
        if parameter.grad is None:
            continue
        parameter.grad = parameter.grad.contiguous() / size
        if replicas is not None:
            dist.all_reduce(parameter.grad, group=replicas)


@torch.no_grad()
def clip_grad_norm_(experts, others, max_norm, group=None):
    # Every rank adds a part of the squares of what all have, so that the sum has them once.
    size, total = dist.get_world_size(group), 0.0
    for parameters, divisor in ((experts, 1), (others, size)):
        for parameter in parameters:
            if parameter.grad is not None:
                total = total + torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2 / divisor
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    if norm > max_norm:
        for parameter in [*experts, *others]:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / norm)
    return norm
