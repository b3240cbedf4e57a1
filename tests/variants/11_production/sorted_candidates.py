"""Sorts units by their depth, arranges ranks in a table, and sorts all candidates by what is preferred."""

from collections import namedtuple
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import planner
from shared.planner.clusters import step_seconds
from solutions.units import default_units

Choice = namedtuple("Choice", "stage shard_ranks checkpointing step_s")


def _device_type(module=None):
    if module is not None:
        return next(module.parameters()).device.type
    return "cuda" if torch.cuda.is_initialized() else "cpu"


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.data, src=0)
    mesh = init_device_mesh(_device_type(module), (dist.get_world_size(),)) if mesh is None else mesh
    options = {"mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype)}
    depth = {submodule: name.count(".") + bool(name) for name, submodule in module.named_modules()}
    chosen = dict.fromkeys(default_units(module) if units is None else units)
    for unit in sorted(chosen, key=depth.get, reverse=True):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)
    return module


def host_mesh(ranks_per_host):
    ranks = torch.arange(dist.get_world_size(), dtype=torch.int)
    if len(ranks) % ranks_per_host != 0:
        raise ValueError(f"{len(ranks)} ranks are not a multiple of {ranks_per_host}")
    return DeviceMesh(_device_type(), ranks.reshape(-1, ranks_per_host), mesh_dim_names=("replicate", "shard"))


def choose_strategy(shape, cluster, micro_batch=1):
    def candidates():
        for stage, checkpointing, ranks in product(
            planner.STAGES, ("selective", "full"), {cluster.gpus, cluster.gpus_per_host}
        ):
            how = dict(stage=stage, checkpointing=checkpointing, micro_batch=micro_batch)
            if (stage or ranks == cluster.gpus) and planner.plan(shape, ranks=ranks, **how).total_bytes <= (
                0.9 * cluster.gpu_bytes
            ):
                yield Choice(stage, ranks, checkpointing, step_seconds(shape, cluster, shard_ranks=ranks, **how))

    order = sorted(candidates(), key=lambda c: (c.step_s, c.stage, c.checkpointing == "full", -c.shard_ranks))
    return next(iter(order), None)
