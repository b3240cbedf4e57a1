# Built by `make notebooks` from source/11_production/lab.py: edit that, not this.
"""Sharding in production: torch's fully_shard, hybrid sharding, and the choice of a strategy."""

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


def mesh_of_all_ranks(module: nn.Module) -> DeviceMesh:
    """Create a mesh with one dimension, on the type of device that holds the module's parameters."""
    device_type = next(module.parameters()).device.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def fully_sharded(
    module: nn.Module,
    units: Iterable[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    """Shard a module with torch's fully_shard, in the same units as ZeRO3.

    Args:
        module: The module to shard in place.
        units: The submodules to shard as units of their own. By default, default_units(module).
        compute_dtype: The dtype in which to compute and communicate. By default, that of the parameters.
        reduce_dtype: The dtype in which to sum gradients. By default, that in which they are computed.
        reshard_after_forward: Whether to reshard every unit except the root after forward.
        mesh: The ranks to shard over. By default, mesh_of_all_ranks(module). A mesh with two dimensions replicates
            over the first and shards over the second.

    Returns:
        The same module. Its parameters are now DTensors, so build the optimizer after this call.

    Communication: one broadcast per parameter and buffer.
    """
    broadcast_state(module)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    mesh = mesh or mesh_of_all_ranks(module)
    chosen = set(default_units(module) if units is None else units)
    units_outer_first = [submodule for submodule in module.modules() if submodule in chosen]
    for unit in reversed(units_outer_first):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def host_mesh(ranks_per_host: int) -> DeviceMesh:
    """Create a mesh of hosts × ranks per host, with the dimensions "replicate" and "shard".

    Raises:
        ValueError: If the ranks cannot be divided equally among hosts.
    """
    world_size = dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks cannot be divided into hosts with {ranks_per_host} ranks each")
    shape = (world_size // ranks_per_host, ranks_per_host)
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Choice:
    """A strategy: the model state is sharded over groups of shard_ranks ranks.

    Stage 0 shards nothing. There, shard_ranks is the number of all GPUs.
    """

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Return the fastest strategy that fits on the cluster's GPUs, or None if none fits."""
    fitting = []  # the simplest first, because min() returns the first of several minima
    for stage in planner.STAGES:
        group_sizes = {cluster.gpus, cluster.gpus_per_host} if stage else {cluster.gpus}
        for checkpointing in ("selective", "full"):
            options = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
            for shard_ranks in sorted(group_sizes, reverse=True):
                held_bytes = planner.plan(shape, ranks=shard_ranks, **options).total_bytes
                if held_bytes <= 0.9 * cluster.gpu_bytes:
                    step_s = step_seconds(shape, cluster, shard_ranks=shard_ranks, **options)
                    fitting.append(Choice(stage, shard_ranks, checkpointing, step_s))
    return min(fitting, key=lambda choice: choice.step_s, default=None)
