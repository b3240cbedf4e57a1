"""Shards units by depth, builds the mesh from a tensor, and sorts all choices in one list."""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import planner
from shared.planner.clusters import step_seconds
from solutions.units import default_units


def fully_sharded(module, units=None, compute_dtype=None, reduce_dtype=None, reshard_after_forward=True, mesh=None):
    state = {id(t): t.detach() for t in [*module.parameters(), *module.buffers()]}
    for number in sorted(range(len(state)), reverse=True):
        dist.broadcast(list(state.values())[number], src=0)
    chosen = list(default_units(module)) if units is None else list(units)
    depths = {each: name.count(".") for name, each in module.named_modules()}
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype)
    if mesh is None:
        mesh = DeviceMesh(next(iter(state.values())).device.type, torch.arange(dist.get_world_size()))
    for each in sorted(chosen, key=lambda unit: -depths[unit]):
        fully_shard(each, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return module


def host_mesh(ranks_per_host):
    everyone = torch.arange(dist.get_world_size())
    if len(everyone) % ranks_per_host != 0:
        raise ValueError(f"expected a divisor of {len(everyone)}, got {ranks_per_host}")
    kind = "cuda" if torch.cuda.is_initialized() else "cpu"
    return DeviceMesh(kind, everyone.unflatten(0, (-1, ranks_per_host)), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Choice:
    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


def choose_strategy(shape, cluster, micro_batch=1):
    def order(choice):
        return choice.step_s, choice.stage, ("selective", "full").index(choice.checkpointing), -choice.shard_ranks

    found = []
    for how, ranks, stage in itertools.product(("full", "selective"), (cluster.gpus_per_host, cluster.gpus), range(4)):
        if stage == 0 and ranks != cluster.gpus:
            continue
        held = planner.plan(shape, ranks=ranks, stage=stage, micro_batch=micro_batch, checkpointing=how)
        if held.total_bytes + 0.1 * cluster.gpu_bytes <= cluster.gpu_bytes:
            found.append(Choice(stage, ranks, how, step_seconds(shape, cluster, stage, ranks, how, micro_batch)))
    found.sort(key=order)
    return found[0] if found else None
