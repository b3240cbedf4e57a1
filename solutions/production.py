# Built by `make notebooks` from source/11_production/lab.py: edit that, not this.
"""What a training run uses in production: torch's fully_shard, hybrid sharding, and a choice of strategy."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import planner
from shared.planner.clusters import Cluster, step_seconds
from shared.planner.shapes import ModelShape
from solutions.manual_ddp import broadcast_state
from solutions.units import default_units


def fully_sharded(
    module: nn.Module,
    units: Iterable[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Make torch's fully sharded module of what ZeRO3 would wrap, on all ranks or on a mesh.

    Comm: one broadcast per parameter and buffer.
    """
    broadcast_state(module)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    options = {"mp_policy": policy, "mesh": mesh}
    chosen = set(default_units(module) if units is None else units)
    outer_first = [each for each in module.modules() if each in chosen]
    for unit in reversed(outer_first):
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(module, reshard_after_forward=False, **options)


def host_mesh(ranks_per_host: int) -> DeviceMesh:
    """Lay all ranks out as hosts × ranks of a host, with the names "replicate" and "shard".

    Raises: ValueError where hosts would not have equally many ranks.
    """
    world_size = dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {ranks_per_host}")
    shape = (world_size // ranks_per_host, ranks_per_host)
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Choice:
    """How to train: a ZeRO stage over groups of shard_ranks ranks, each group a copy of the others."""

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Find the fastest strategy that fits on the cluster's GPUs."""
    fitting = []
    for stage in planner.STAGES:
        groups = {cluster.gpus, cluster.gpus_per_host} if stage else {cluster.gpus}
        for checkpointing in ("selective", "full"):
            for shard_ranks in sorted(groups, reverse=True):
                how = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
                held_bytes = planner.plan(shape, ranks=shard_ranks, **how).total_bytes
                if held_bytes <= 0.9 * cluster.gpu_bytes:
                    took_s = step_seconds(shape, cluster, shard_ranks=shard_ranks, **how)
                    fitting.append(Choice(stage, shard_ranks, checkpointing, took_s))
    return min(fitting, key=lambda choice: choice.step_s, default=None)
