"""Gradients averaged by BucketedDDP, squares that are divided by their copies, and layouts sorted by preference."""

from collections import defaultdict
from functools import reduce
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shared import formulas
from shared.models import gpt_layers
from shared.planner.layouts import memory, step_time
from shared.planner.search import TIE, USABLE, possible
from solutions import layouts, parallel_3d
from solutions.bucketed_ddp import BucketedDDP
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize
from solutions.vocabulary import vocab_parallel_cross_entropy
from solutions.zero1 import ZeRO1


def coordinates(rank, sizes):
    """Count up from rank 0, as an odometer does."""
    place = dict.fromkeys(sizes, 0)
    for _ in range(rank):
        for axis in reversed(sizes):
            place[axis] += 1
            if place[axis] < sizes[axis]:
                break
            place[axis] = 0
    return place


def ranks_along(axis, rank, sizes):
    own = coordinates(rank, sizes)

    def rank_of(place):
        return reduce(lambda number, name: number * sizes[name] + place[name], sizes, 0)

    return [rank_of({**own, axis: index}) for index in range(sizes[axis])]


def make_mesh(dp, pp, tp):
    device_type = torch.accelerator.current_accelerator().type if torch.cuda.is_initialized() else "cpu"
    if (size := dist.get_world_size()) != dp * pp * tp:
        raise ValueError(f"expected dp · pp · tp = {size} ranks, got {dp} · {pp} · {tp} = {dp * pp * tp}")
    return init_device_mesh(device_type, [dp, pp, tp], mesh_dim_names=("dp", "pp", "tp"))


def step_bytes(shape, sizes, sequences):
    samples = sequences / sizes["dp"]
    return {
        "tp": formulas.tensor_parallel_sent_bytes(samples * shape.context, shape.hidden, shape.layers, sizes["tp"])
        / sizes["pp"],
        "dp": formulas.step_sent_bytes(shape.parameters / (sizes["pp"] * sizes["tp"]), sizes["dp"], 0),
        "pp": samples * shape.context * shape.hidden * 2,
    }


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    own = {rank for rank in range(ranks_per_host * host, ranks_per_host * host + ranks_per_host)}
    each = step_bytes(shape, sizes, sequences)
    to = {axis: [t for rank in own for t in layouts.destinations(axis, rank, sizes)] for axis in sizes}
    return {axis: each[axis] * len([t for t in to[axis] if t not in own]) for axis in sizes}


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    group, tokens = mesh.get_group("tp"), model.config.vocab_size
    model = parallelize(model, group)

    def loss_fn(logits, targets):
        own = range(dist.get_rank(group) * logits.shape[-1], (dist.get_rank(group) + 1) * logits.shape[-1])
        padding = torch.tensor([0.0 if token < tokens else -torch.inf for token in own], device=logits.device)
        return vocab_parallel_cross_entropy(logits + padding.to(logits.dtype), targets, group)

    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, mesh.get_group("pp"))


class Parallel3D(nn.Module):
    def __init__(self, model, mesh, optimizer_cls, *, schedule="1f1b", micro_batches=8, zero_stage=0, **defaults):
        super().__init__()
        self.group, self.zero_stage, self.world = mesh.get_group(0), zero_stage, mesh.size()
        self.pipeline = split_model(model, mesh, schedule, micro_batches)
        self.chunks = nn.ModuleList(self.pipeline.chunks)
        if zero_stage == 0:
            self.buckets = BucketedDDP(self.chunks, bucket_cap_mb=0.001, group=self.group)
            self.optimizer = optimizer_cls(self.parameters(), **defaults)  # some stages may train nothing
        else:
            self.optimizer = ZeRO1(self.parameters(), optimizer_cls, self.group, **defaults)
        counts = torch.tensor([dist.get_world_size(self.group), mesh.size(2)])
        self.replicas, self.shards = counts.tolist()

    def stage_parameters(self):
        return dict(self.pipeline.own)

    def step(self, inputs, targets):
        if inputs.shape[0] % self.replicas != 0:
            raise ValueError(f"{inputs.shape[0]} samples cannot be given to {self.replicas} replicas")
        index = dist.get_rank(self.group)
        x, y = (each.unflatten(0, (self.replicas, -1))[index] for each in (inputs, targets))
        loss = self.pipeline.step(x, y) / self.replicas
        if self.zero_stage == 0:
            self.buckets.finish_gradient_sync()
        dist.all_reduce(loss, group=self.group)
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Add up over the tp and pp ranks of one replica, or over all ranks if each has its own shard."""
        if self.zero_stage == 0:
            pairs = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        else:
            self.optimizer.reduce_gradients()
            pairs = [pair for flat in self.optimizer.flat_parameters for pair in parallel_3d.pieces_of(flat)]
        replicated = {id(p) for name, p in self.named_parameters() if self.is_replicated(name)}
        tied = {id(parameter): len(stages) for parameter, stages in self.pipeline.tied}
        first_replica = self.zero_stage == 1 or dist.get_rank(self.group) == 0
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        for parameter, gradient in pairs if first_replica else ():
            square = (gradient.double() ** 2).sum()
            total += square / tied.get(id(parameter), 1) / (self.shards if id(parameter) in replicated else 1)
        dist.all_reduce(total)
        norm = total.sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for _, gradient in pairs:
            gradient.mul_(scale)
        return norm

    @staticmethod
    def is_replicated(name):
        return "norm" in name or "position" in name or name.endswith(("project.bias", "down.bias"))


def bubble_s(busy_s, message_s, layout):
    ordered = sorted(busy_s)
    path = [*ordered[:-1], *[message_s] * (layout.pp - 1)]
    return sum(path) / (layout.chunks if layout.schedule == "interleaved" else 3 if "zero" in layout.schedule else 1)


def choose_layouts(job, cluster):
    def seconds(layout):
        return step_time(job, layout, cluster, bubble_s).total_s

    def fits(layout):
        return memory(job, layout).total_bytes <= USABLE * cluster.gpu.memory_bytes

    by_sizes = defaultdict(list)
    for layout in filter(fits, possible(job, cluster)):
        by_sizes[layout.dp, layout.pp, layout.tp].append(layout)
    winners = sorted((min(group, key=seconds) for group in by_sizes.values()), key=seconds)
    return list(takewhile(lambda layout: seconds(layout) <= (1 + TIE) * seconds(winners[0]), winners))
