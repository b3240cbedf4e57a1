# ---
# jupyter:
#   course:
#     module: production
#     minutes: 75
# ---

# %% [markdown]
# # Lab 09 · Production
#
# **75 minutes, 15 points.** You move from your own `ZeRO3` to torch's `fully_shard`, shard inside hosts only, write
# checkpoints that a crash cannot spoil, and compute which strategy a model needs on given cards.
#
# Each exercise has a check. Times are never judged; bytes are.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import production as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""What a training run uses in earnest: torch's fully_shard, hybrid sharding, checkpoints, a choice of strategy."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared import formulas, planner
from shared.model_shapes import ModelShape
from solutions.manual_ddp import broadcast_state
from solutions.zero3 import default_units

# %% [markdown]
# ## Exercise 9.1 · From ZeRO3 to fully_shard (15 min, 3 points)
#
# `fully_shard(module)` shards one module in place, and swaps its parameters for `DTensor`s. `fully_sharded(module, …)`
# is to make of a whole model what `ZeRO3(module, …)` makes:
#
# | `ZeRO3` | `fully_shard` |
# |---|---|
# | broadcasts parameters and buffers from rank 0 | does not: lab 02's `broadcast_state(module)` does |
# | `units`, by default `default_units(module)` | a call per unit, inner ones first, then one for the whole |
# | `reshard_after_forward`, of every unit but the root | an argument of the same name |
# | `compute_dtype`, for parameters and what is sent | `mp_policy=MixedPrecisionPolicy(param_dtype=…)` |
# | none | `reduce_dtype`: gradients may be added up in a wider type |
#
# → the module, which is now sharded; an optimizer must be built after it.
#
# Target: losses, bytes and parameters' peak as those of your `ZeRO3`.


# %% tags=["exercise", "export"] grade_id="fully-sharded"
# %%ranks
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
    ### BEGIN SOLUTION
    broadcast_state(module)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    options = {"mp_policy": policy, "mesh": mesh}
    for unit in default_units(module) if units is None else units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(module, reshard_after_forward=False, **options)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-fully-sharded" points=3
check.fully_sharded()

# %% [markdown]
# ## Exercise 9.2 · Hybrid sharding (10 min, 2 points)
#
# Between hosts the wire is slow. Hybrid sharding shards inside a host only, and keeps one copy of everything per host:
# all-gathers and reduce-scatters stay inside; between hosts, each rank all-reduces its part of the gradients, Ψ over
# the host's ranks.
#
# **Predict.** Two hosts of two ranks. How many bytes of a model of Ψ parameters in fp32 does a rank send to the other
# host per step, fully sharded over all four, and hybrid?
#
# `fully_shard` shards over the second dimension of a mesh of two, and replicates over its first.
# `host_mesh(ranks_per_host)` makes that mesh, of all ranks, on the device type of the group's backend: "cuda" for NCCL,
# else "cpu". Ranks of a host follow each other.


# %% tags=["exercise", "export"] grade_id="host-mesh"
# %%ranks
def host_mesh(ranks_per_host: int) -> DeviceMesh:
    """Lay all ranks out as hosts × ranks of a host, with the names "replicate" and "shard".

    Raises: ValueError where hosts would not have equally many ranks.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(f"{world_size} ranks do not fill hosts of {ranks_per_host}")
    shape = (world_size // ranks_per_host, ranks_per_host)
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    ### END SOLUTION


# %% tags=["check"] grade_id="check-host-mesh" points=2
check.host_mesh()

# %% [markdown]
# ## Exercise 9.3 · A checkpoint or none (25 min, 5 points)
#
# A run that saves every hour is killed while it saves, sooner or later. What then stands in the folder must not be
# taken for a checkpoint, and the one before must still be there.
#
# - `save_checkpoint(folder, step, model, optimizer)`: `torch.distributed.checkpoint.save` lets each rank write its part
#   of `{"model": …, "optimizer": …, "step": step}`, into `folder / f"step_{step}.half"`. Once all ranks are done, one
#   of them renames that to `folder / f"step_{step}"`: on one file system a rename happens or does not. All ranks come
#   back after it. What an earlier try has left under either name goes first. `get_state_dict(model, optimizer)` gives
#   the two states, with `DTensor`s in them.
# - `newest_checkpoint(folder)` → the whole checkpoint with the largest step, or None.
# - `load_checkpoint(path, model, optimizer)` → its step. `torch.distributed.checkpoint.load` fills a state of the same
#   form in place; `set_state_dict` hands it to model and optimizer. On any number of ranks, and also where nothing is
#   sharded.


# %% tags=["exercise", "export"] grade_id="checkpoints"
# %%ranks
def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint of which nobody ever sees a part. To be called by all ranks."""
    ### BEGIN SOLUTION
    whole, half = folder / f"step_{step}", folder / f"step_{step}.half"
    if dist.get_rank() == 0:
        for left in (whole, half):
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=half)
    if dist.get_rank() == 0:
        half.rename(whole)
    dist.barrier()
    ### END SOLUTION


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the whole checkpoint with the largest step."""
    ### BEGIN SOLUTION
    whole = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)
    ### END SOLUTION


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from a checkpoint that any number of ranks may have written. → its step"""
    ### BEGIN SOLUTION
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-checkpoints" points=5
check.save_checkpoint()

# %% [markdown]
# ## Exercise 9.4 · Which strategy? (25 min, 5 points)
#
# "Use ZeRO-2 up to 10 B", says a slogan. But what fits follows from the cards, and what is fast from the wire. So
# compute it. Given: what a cluster is, and what a choice is.


# %% tags=["export"]
# %%ranks
@dataclass(frozen=True)
class Cluster:
    """Hosts with equal cards. Rates are what is reached in practice, not what is printed on the box."""

    hosts: int
    cards_per_host: int
    card_bytes: float
    flops: float  # per card and second
    inside_bytes_per_s: float  # from a card to the next one, inside a host
    between_bytes_per_s: float  # from a host to the next one, shared by its cards


@dataclass(frozen=True)
class Choice:
    """How to train: a ZeRO stage over groups of shard_ranks ranks, each group a copy of the others."""

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


# %% [markdown]
# What a step costs, simplified but with every term that decides:
#
# - Computing: 6 flops per parameter and token, 8 with full checkpointing (its second forward); micro_batch · context
#   tokens per card.
# - Sending: the bytes that the formulas say, in 16 bit, at the rate of the slowest wire of the ring. A ring over
#   several hosts leaves each host once, so it has the whole of that wire. When each host is a copy, all its cards share
#   it, each with an all-reduce over the hosts of its own part of the gradients.
# - Messages are hidden behind computing as far as they can be: a step takes the longer of the two.
#
# `step_seconds(...)` is given.


# %% tags=["export"]
# %%ranks
def step_seconds(
    shape: ModelShape,
    cluster: Cluster,
    stage: int,
    shard_ranks: int,
    checkpointing: str,
    micro_batch: int,
) -> float:
    """Estimate a step of one micro-batch per card; messages hide behind computing where they are shorter."""
    flops = (8 if checkpointing == "full" else 6) * shape.parameters * micro_batch * shape.context
    leaves_host = shard_ranks > cluster.cards_per_host
    slowest = cluster.between_bytes_per_s if leaves_host else cluster.inside_bytes_per_s
    sending_s = formulas.step_sent_bytes(shape.parameters, shard_ranks, stage) / slowest
    copies = cluster.hosts * cluster.cards_per_host // shard_ranks
    if copies > 1:  # each rank's part of the gradients, in 16 bit; a host's cards share the wire
        part_bytes = 2 * shape.parameters / shard_ranks
        shared = cluster.between_bytes_per_s / cluster.cards_per_host
        sending_s += formulas.all_reduce_sent_bytes(part_bytes, copies) / shared
    return max(flops / cluster.flops, sending_s)


# %% [markdown]
# `choose_strategy(shape, cluster, micro_batch=1)`: of all that fit on a card, the one whose step is the shortest.
#
# - To try: stages 0 to 3, each without and with full checkpointing; sharded over all cards, and, for stages above 0,
#   over the cards of one host, where there are several hosts.
# - What fits: `planner.plan(shape, ranks=shard_ranks, stage=…, micro_batch=…, checkpointing=…).total_bytes`, and a
#   tenth of the card is left free.
# - Where steps are equally long, the one that takes less apart: the lower stage, then no checkpointing, then the larger
#   group.
# - None where nothing fits: then the model itself must be split (chapters 10 and 11).


# %% tags=["exercise", "export"] grade_id="choose-strategy"
# %%ranks
def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Find the fastest strategy that fits on the cluster's cards."""
    ### BEGIN SOLUTION
    all_cards = cluster.hosts * cluster.cards_per_host
    fitting = []
    for stage in planner.STAGES:
        groups = {all_cards, cluster.cards_per_host} if stage else {all_cards}
        for checkpointing in ("none", "full"):
            for shard_ranks in sorted(groups, reverse=True):
                how = {"stage": stage, "checkpointing": checkpointing, "micro_batch": micro_batch}
                held_bytes = planner.plan(shape, ranks=shard_ranks, **how).total_bytes
                if held_bytes <= 0.9 * cluster.card_bytes:
                    took_s = step_seconds(shape, cluster, shard_ranks=shard_ranks, **how)
                    fitting.append(Choice(stage, shard_ranks, checkpointing, took_s))
    return min(fitting, key=lambda choice: choice.step_s, default=None)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-choose-strategy" points=5
check.choose_strategy()
