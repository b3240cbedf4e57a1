"""Computes with strides and sets, forms the mesh from a table of ranks, and sorts candidate layouts."""

import math
from functools import reduce

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shared import formulas
from shared.models import gpt_layers
from shared.planner.layouts import memory, step_time
from shared.planner.search import USABLE, possible
from solutions import parallel_3d as right
from solutions.layouts import destinations


def _strides(sizes):
    axes = [*sizes]
    return {axis: math.prod(sizes[later] for later in axes[number + 1 :]) for number, axis in enumerate(axes)}


def coordinates(rank, sizes):
    return {axis: rank // stride % sizes[axis] for axis, stride in _strides(sizes).items()}


def ranks_along(axis, rank, sizes):
    stride = _strides(sizes)[axis]
    first = rank - coordinates(rank, sizes)[axis] * stride
    return [*range(first, first + sizes[axis] * stride, stride)]


def make_mesh(dp, pp, tp):
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int)
    if len(ranks) != dp * pp * tp:
        raise ValueError(f"{len(ranks)} ranks do not form a mesh of dp={dp}, pp={pp}, tp={tp}")
    return DeviceMesh(
        "cuda" if torch.cuda.is_initialized() else "cpu", ranks.view(dp, pp, tp), mesh_dim_names=("dp", "pp", "tp")
    )


def step_bytes(shape, sizes, sequences):
    tokens = sequences // sizes["dp"] * shape.context if sequences % sizes["dp"] == 0 else None
    tokens = sequences * shape.context / sizes["dp"] if tokens is None else tokens
    gradients_bytes = 2 * shape.parameters / sizes["pp"] / sizes["tp"]
    of_axis = {
        "tp": lambda size: formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, shape.layers / sizes["pp"], size),
        "pp": lambda _: 2.0 * shape.hidden * tokens,
        "dp": lambda size: 2 * (size - 1) / size * gradients_bytes,
    }
    return {axis: of_axis[axis](size) for axis, size in sizes.items()}


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    found = dict.fromkeys(sizes, 0.0)
    each_bytes = step_bytes(shape, sizes, sequences)
    for rank in range(ranks_per_host * host, ranks_per_host * (host + 1)):
        for axis in sizes:
            outside = [to for to in destinations(axis, rank, sizes) if to // ranks_per_host != host]
            found[axis] += len(outside) * each_bytes[axis]
    return found


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    groups = dict(zip(mesh.mesh_dim_names, mesh.get_all_groups(), strict=True))
    right.parallelize(model, groups["tp"])
    vocab_size = model.config.vocab_size

    def loss_fn(logits, targets):
        return right.token_loss(logits, targets, vocab_size=vocab_size, group=groups["tp"])

    return right.Pipeline(
        gpt_layers(model), schedule=schedule, micro_batches=micro_batches, loss_fn=loss_fn, group=groups["pp"]
    )


class Parallel3D(right.Parallel3D):
    def add_data_parallelism(self, optimizer_cls, defaults):
        if self.zero_stage:
            self.optimizer = right.ZeRO1([*self.stage.parameters()], optimizer_cls, group=self.dp_group, **defaults)
            return
        self.replica = right.OverlappedDDP(self.stage, group=self.dp_group)
        self.optimizer = optimizer_cls([*self.stage.parameters()], **defaults)

    def own_part(self, batch):
        numel, rest = divmod(len(batch), self.replicas)
        if rest:
            raise ValueError(f"{len(batch)} samples, {self.replicas} replicas")
        return batch.unflatten(0, (self.replicas, numel))[dist.get_rank(self.dp_group)]

    def copies_of(self, parameter):
        copies = next((len(stages) for tied, stages in self.pipeline.tied if tied is parameter), 1)
        copies *= self.tp_size ** (parameter not in self.sharded)
        return copies * self.replicas ** (self.zero_stage == 0)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        pairs = [*self.gradients()]
        terms = [gradient.double().norm() ** 2 / self.copies_of(parameter) for parameter, gradient in pairs]
        start = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        squared = reduce(torch.add, terms, start)
        squared = squared.clone()
        dist.all_reduce(squared)
        norm = torch.sqrt(squared)
        if norm + 1e-6 > max_norm:
            for _, gradient in pairs:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm


def bubble_s(busy_s, message_s, layout):
    slowest, shorter = max(busy_s), {"interleaved": layout.chunks, "zero_bubble": 3}
    others = [each for each in busy_s]
    others.remove(slowest)
    return (sum(others) + message_s * len(others)) / shorter.get(layout.schedule, 1)


def choose_layouts(job, cluster):
    steps = ((step_time(job, each, cluster, bubble_s).total_s, each) for each in possible(job, cluster))
    every = sorted(steps, key=lambda pair: pair[0])
    room, found, sizes = USABLE * cluster.gpu.memory_bytes, [], set()
    for seconds, layout in every:
        if layout.sizes not in sizes and memory(job, layout).total_bytes <= room:
            sizes.add(layout.sizes)
            found.append((seconds, layout))
    return [layout for seconds, layout in found if seconds <= 1.2 * found[0][0]]
