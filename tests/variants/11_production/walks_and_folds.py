"""Shards units while walking through the module tree, and keeps the best choice found so far."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import planner
from shared.planner import clusters
from solutions.manual_ddp import broadcast_state
from solutions.units import default_units


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    broadcast_state(module)
    chosen = [*(default_units(module) if units is None else units)]
    mesh = mesh or init_device_mesh("cuda" if torch.cuda.is_initialized() else "cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)

    def descend(each):
        for child in each.children():
            descend(child)
        if each is not module and each in chosen:
            chosen.remove(each)
            fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    descend(module)
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def host_mesh(ranks_per_host):
    hosts, left = divmod(dist.get_world_size(), ranks_per_host)
    if left:
        raise ValueError(f"with {ranks_per_host} ranks per host, {left} of {dist.get_world_size()} ranks are left over")
    flat = init_device_mesh("cuda" if torch.cuda.is_initialized() else "cpu", (hosts, ranks_per_host))
    return type(flat)(flat.device_type, flat.mesh, mesh_dim_names=("replicate", "shard"))


def choose_strategy(shape, cluster, micro_batch=1):
    best = None
    for stage in (3, 2, 1, 0):
        for checkpointing in ("full", "selective"):
            for ranks in dict.fromkeys((cluster.gpus_per_host, cluster.gpus)):
                if not stage and ranks < cluster.gpus:
                    continue
                how = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
                fits = planner.plan(shape, ranks=ranks, **how).total_bytes / cluster.gpu_bytes <= 0.9
                step_s = clusters.step_seconds(shape, cluster, shard_ranks=ranks, **how)
                if fits and (best is None or step_s <= best.step_s):
                    best = SimpleNamespace(stage=stage, shard_ranks=ranks, checkpointing=checkpointing, step_s=step_s)
    return best
