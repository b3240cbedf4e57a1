"""Coordinates by strides, one all-reduce per gradient, and norms that are added up axis by axis, on first copies."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shared import formulas
from shared.models import gpt_layers
from shared.planner.layouts import memory, step_time
from shared.planner.search import TIE, possible
from solutions.manual_ddp import broadcast_state
from solutions.parallel_3d import token_loss
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize, sharded_names
from solutions.zero1 import ZeRO1


def strides(sizes):
    axes = list(sizes)
    return {axis: math.prod(sizes[inner] for inner in axes[index + 1 :]) for index, axis in enumerate(axes)}


def coordinates(rank, sizes):
    return {axis: rank // stride % sizes[axis] for axis, stride in strides(sizes).items()}


def ranks_along(axis, rank, sizes):
    stride = strides(sizes)[axis]
    first = rank - coordinates(rank, sizes)[axis] * stride
    return list(range(first, first + stride * sizes[axis], stride))


def make_mesh(dp, pp, tp):
    ranks = dist.get_world_size()
    if ranks != dp * pp * tp:
        raise ValueError(f"{ranks} ranks are not {dp} × {pp} × {tp} = {dp * pp * tp} ranks")
    kind = "cuda" if torch.cuda.is_initialized() else "cpu"
    return DeviceMesh(kind, torch.arange(ranks).view(dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))


def step_bytes(shape, sizes, sequences):
    replica_tokens = sequences // sizes["dp"] * shape.context
    found = {}
    for axis in sizes:
        if axis == "tp":
            layers = shape.layers // sizes["pp"]
            found[axis] = 8 * layers * formulas.ring_fraction(sizes["tp"]) * 2 * replica_tokens * shape.hidden
        elif axis == "pp":
            found[axis] = 2 * replica_tokens * shape.hidden
        else:
            own_bytes = 2 * shape.parameters / sizes["pp"] / sizes["tp"]
            found[axis] = 2 * formulas.reduce_scatter_sent_bytes(own_bytes, sizes["dp"])
    return found


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    sent, leaving = step_bytes(shape, sizes, sequences), dict.fromkeys(sizes, 0)
    for axis, size in sizes.items():
        for rank in range(host * ranks_per_host, (host + 1) * ranks_per_host):
            group = ranks_along(axis, rank, sizes)
            place = group.index(rank)
            to = [place - 1, place + 1] if axis == "pp" else [(place + 1) % size]
            others = [group[each] for each in to if 0 <= each < size and each != place]
            leaving[axis] += sent[axis] * sum(each // ranks_per_host != host for each in others)
    return leaving


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    tp = mesh["tp"].get_group()
    vocab_size = model.config.vocab_size
    layers = gpt_layers(parallelize(model, tp))

    def loss_fn(logits, targets):
        return token_loss(logits, targets, vocab_size=vocab_size, group=tp)

    return Pipeline(list(layers), schedule, micro_batches, loss_fn, mesh["pp"].get_group())


class Parallel3D:
    def __init__(self, model, mesh, optimizer_cls, *, schedule="1f1b", micro_batches=8, zero_stage=0, **defaults):
        self.mesh, self.zero_stage = mesh, zero_stage
        self.pipeline = split_model(model, mesh, schedule, micro_batches)
        self.module = nn.ModuleList(self.pipeline.chunks)
        self.dp, self.tp = mesh["dp"].get_group(), mesh["tp"].get_group()
        broadcast_state(self.module, self.dp)
        shards = sharded_names(self.module)
        self.shards = {id(p) for name, p in self.module.named_parameters() if name in shards}
        self.parameters = list(self.module.parameters())
        counted = [p for p in self.parameters if self.counts(p)]
        others = [p for p in self.parameters if not self.counts(p)]
        groups = [{"params": each} for each in (counted, others) if each]
        self.counted = set(map(id, counted))
        if zero_stage:
            self.optimizer = ZeRO1(groups, optimizer_cls, self.dp, **defaults)
        else:
            self.optimizer = optimizer_cls(self.parameters, **defaults)

    def counts(self, parameter):
        """Tell whether this is the first of the ranks of a replica that have the parameter's gradient."""
        tied = [stages for each, stages in self.pipeline.tied if each is parameter]
        is_first_stage = not tied or tied[0][0] == self.pipeline.stage
        return is_first_stage and (id(parameter) in self.shards or dist.get_rank(self.tp) == 0)

    def stage_parameters(self):
        return self.pipeline.stage_parameters()

    def step(self, inputs, targets):
        replicas, index = dist.get_world_size(self.dp), dist.get_rank(self.dp)
        count, rest = divmod(len(inputs), replicas)
        if rest:
            raise ValueError(f"{len(inputs)} samples on {replicas} replicas")
        own = slice(index * count, (index + 1) * count)
        if self.zero_stage:
            loss = self.pipeline.step(inputs[own], targets[own])
        else:
            earlier = [(p, p.grad) for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            loss = self.pipeline.step(inputs[own], targets[own])
            for parameter, before in earlier:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad.div_(replicas), group=self.dp)
                    parameter.grad += 0 if before is None else before
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        if self.zero_stage:
            self.optimizer.reduce_gradients()
            flats = self.optimizer.flat_parameters
            every = [flat.shard.grad for flat in flats]
            counted = [flat.shard.grad for flat in flats if id(flat.layout.parameters[0]) in self.counted]
        else:
            every = [p.grad for p in self.parameters if p.grad is not None]
            counted = [p.grad for p in self.parameters if p.grad is not None and id(p) in self.counted]
        zero = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        square = sum((torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in counted), zero)
        for axis in ("tp", "pp", "dp") if self.zero_stage else ("tp", "pp"):
            dist.all_reduce(square, group=self.mesh[axis].get_group())
        norm = square.sqrt()
        if norm > max_norm:
            for gradient in every:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm


def bubble_s(busy_s, message_s, layout):
    waits_s = -max(busy_s)
    for stage, each in enumerate(busy_s):
        waits_s += each + (message_s if stage else 0)
    if layout.schedule == "interleaved":
        return waits_s / layout.chunks
    if layout.schedule == "zero_bubble":
        return waits_s / 3
    return waits_s


def choose_layouts(job, cluster):
    found = layouts_that_fit(job, cluster)
    if not found:
        return []
    limit = (1 + TIE) * min(seconds for seconds, _ in found)
    kept = []
    for sizes in {layout.sizes for _, layout in found}:
        fastest = min((pair for pair in found if pair[1].sizes == sizes), key=lambda pair: pair[0])
        if fastest[0] <= limit:
            kept.append(fastest)
    kept.sort(key=lambda pair: pair[0])
    return [layout for _, layout in kept]


def layouts_that_fit(job, cluster):
    return [
        (step_time(job, layout, cluster, bubble_s).total_s, layout)
        for layout in possible(job, cluster)
        if memory(job, layout).total_bytes / cluster.gpu.memory_bytes <= 0.9
    ]
