# ---
# jupyter:
#   course:
#     module: production
#     minutes: 50
# ---

# %% [markdown]
# # Lab 11 · Production
#
# **50 minutes, 10 points.** You move from your own `ZeRO3` to torch's `fully_shard`, shard within each host only, and
# compute which strategy a model needs on given GPUs.
#
# Each exercise has a check. The checks judge bytes, but never times.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import production as check
from shared.planner import clusters

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
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

# %% [markdown]
# ## Exercise 11.1 · From ZeRO3 to fully_shard (15 min, 3 points)
#
# `fully_shard(module)` shards one module in place, and replaces its parameters with `DTensor`s. Your function
# `fully_sharded(module, …)` shards a whole model in the same way as `ZeRO3(module, …)`:
#
# | `ZeRO3` | `fully_shard` |
# |---|---|
# | broadcasts parameters and buffers from rank 0 | does not; use lab 02's `broadcast_state(module)` |
# | `units`, an iterable in any order, or `default_units(module)` | one call per unit, inner units first, root last |
# | `reshard_after_forward`, for every unit but the root | an argument of the same name, with a different default |
# | `compute_dtype`, for parameters and communication | `mp_policy=MixedPrecisionPolicy(param_dtype=…)` |
# | no counterpart | `reduce_dtype`: gradients may be summed in a wider dtype |
# | shards on the device of the module's parameters | shards on the device type of its `mesh` |
#
# Without a mesh, `fully_shard` chooses a GPU on any machine that has one, even for a job on the CPU. So pass a mesh in
# every call. `mesh_of_all_ranks(module)` is given and creates the default one.
#
# It returns the module, which is now sharded. An optimizer must be built afterwards.
#
# Target: the losses and the bytes of your `ZeRO3`, and no more parameters unsharded at a time. (torch prefetches the
# next unit into a buffer, which does not count as a parameter yet.)


# %% tags=["export"]
# %%ranks
def mesh_of_all_ranks(module: nn.Module) -> DeviceMesh:
    """Create a mesh with one dimension, on the type of device that holds the module's parameters."""
    device_type = next(module.parameters()).device.type
    return init_device_mesh(device_type, (dist.get_world_size(),))


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
    ### BEGIN SOLUTION
    broadcast_state(module)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    mesh = mesh or mesh_of_all_ranks(module)
    chosen = set(default_units(module) if units is None else units)
    units_outer_first = [submodule for submodule in module.modules() if submodule in chosen]
    for unit in reversed(units_outer_first):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-fully-sharded" points=3
check.fully_sharded()

# %% [markdown]
# ## Exercise 11.2 · Hybrid sharding (10 min, 2 points)
#
# The links between hosts are slow. **Hybrid sharding** shards only within a host, and each host holds a full copy of
# the model. All-gathers and reduce-scatters then stay within a host. Between hosts, each rank all-reduces its shard of
# the gradients: Ψ elements, divided by the number of ranks per host.
#
# **Predict.** There are four hosts with eight ranks each, and a model of S bytes. How many bytes leave a host per step?
# With full sharding, all ranks form one ring, in which one rank per host sends to the next host. With hybrid sharding,
# each rank forms a ring with the three ranks that have the same local rank on the other hosts.
#
# If a mesh has two dimensions, `fully_shard` shards over the second one and replicates over the first one.
# `host_mesh(ranks_per_host)` creates this mesh for all ranks. Its device type is the one that the ranks compute on:
# "cuda" if `torch.cuda.is_initialized()`, else "cpu". The ranks of a host are consecutive.


# %% tags=["exercise", "export"] grade_id="host-mesh"
# %%ranks
def host_mesh(ranks_per_host: int) -> DeviceMesh:
    """Create a mesh of hosts × ranks per host, with the dimensions "replicate" and "shard".

    Raises:
        ValueError: If the ranks cannot be divided equally among hosts.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size()
    if world_size % ranks_per_host:
        raise ValueError(
            f"{world_size} ranks cannot be divided into hosts with {ranks_per_host} ranks each"
        )
    shape = (world_size // ranks_per_host, ranks_per_host)
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    ### END SOLUTION


# %% tags=["check"] grade_id="check-host-mesh" points=2
check.host_mesh()

# %% [markdown]
# ## Exercise 11.3 · Which strategy? (25 min, 5 points)
#
# "Use ZeRO-2 up to 10 B parameters" is a common recommendation. But which strategies fit depends on the memory of the
# GPUs, and which one is fast depends on the links between them. So compute the answer. `shared/planner/clusters.py`
# contains what you need. It is short, so read it first.
#
# - `Cluster` describes hosts, GPUs and rates. `cluster.gpus` is the number of GPUs on all hosts.
# - `step_seconds(shape, cluster, stage, shard_ranks, checkpointing, micro_batch)` estimates the time of a step.
# - `SITUATIONS` contains five models, each with a cluster.
#
# **Predict** the best strategy for each of the five: which stage, over how many ranks does each group shard, and are
# the activations recomputed selectively or fully?

# %%
for name in clusters.SITUATIONS:
    print(name)

# %% [markdown]
# `choose_strategy(shape, cluster, micro_batch=1)` returns the strategy with the shortest step among all that fit on a
# GPU.
#
# - Try stages 0 to 3, each with "selective" and with "full" checkpointing. Shard over all GPUs and, for stages above 0,
#   also over the GPUs of one host.
# - `planner.plan(shape, ranks=shard_ranks, stage=…, micro_batch=…, checkpointing=…).total_bytes` is what a strategy
#   needs. It fits if a tenth of the GPU's memory stays free.
# - If several steps take equally long, prefer the simpler strategy: first the lower stage, then selective
#   checkpointing. After that, prefer the larger group, which holds less per rank.
# - Return None if nothing fits. The model itself must then be split (chapters 13 and 15).


# %% tags=["export"]
# %%ranks
@dataclass(frozen=True)
class Choice:
    """A strategy: a ZeRO stage over groups of shard_ranks ranks, where each group holds a copy of the model."""

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


# %% tags=["exercise", "export"] grade_id="choose-strategy"
# %%ranks
def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Return the fastest strategy that fits on the cluster's GPUs, or None if none fits."""
    ### BEGIN SOLUTION
    fitting = []  # in order of preference, because min() returns the first of several minima
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-choose-strategy" points=5
check.choose_strategy()

# %% [markdown]
# Your function computes instead of following recommendations. What does it choose for the five situations?

# %%
# %%ranks
from shared.planner import clusters

if rank == 0:
    for name, (shape, cluster) in clusters.SITUATIONS.items():
        choice = choose_strategy(shape, cluster)
        result = "nothing fits"
        if choice:
            result = f"stage {choice.stage} over {choice.shard_ranks} ranks, {choice.checkpointing}"
        print(f"{name}: {result}")

# %% [markdown]
# **Compare.** Which of your predictions were wrong? In these cases, what decided: what fits, or what is fast?

# %% [markdown]
# ## Your `ZeRO3` and torch's `fully_shard`
#
# The next cells train one GPT with your `ZeRO3`, with `fully_shard`, and with hybrid sharding (two hosts of two ranks).
# The check that all ranks call the same collective is switched off, because it sends messages of its own.

# %%
# %%ranks
from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.zero3 import ZeRO3

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=128)
samples = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=32)
inputs, targets = (tensor.to(device) for tensor in samples)


def new_model():
    torch.manual_seed(rank)  # the parameters of rank 0 will be broadcast
    return TinyGPT(config).to(device)


# %%
# %%ranks
def train(model, steps=4):
    """Take some steps. Returns the last loss and ledger, and the memory of one more step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step():
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()
        optimizer.step()
        return loss.item()

    for _ in range(steps):
        with wire.ledger() as log:
            loss = step()
    with memory.peak(model, optimizer) as peak:
        step()
    return loss, log, peak


results = {
    "your ZeRO3": train(ZeRO3(new_model())),
    "fully_shard": train(fully_sharded(new_model())),
    "fully_shard, hybrid": train(fully_sharded(new_model(), mesh=host_mesh(2))),
}

# %% tags=["nbval-ignore-output"]
from shared import tables

results, rows = ranks.pull("results")[0], []
losses = [loss for loss, _, _ in results.values()]
assert max(losses) - min(losses) < 1e-3
for name, (loss, log, peak) in results.items():
    parameters_bytes = max(sample.held.parameters_bytes for sample in peak.samples)
    measured_bytes = (log.sent_bytes, parameters_bytes, peak.peak_bytes)
    rows.append([name, f"{loss:.4f}", *(f"{size / 1e6:.2f}" for size in measured_bytes)])
sent_bytes = {name: log.sent_bytes for name, (_, log, _) in results.items()}
assert 0 <= sent_bytes["fully_shard"] - sent_bytes["your ZeRO3"] < 0.001 * sent_bytes["your ZeRO3"]
header = ["", "loss", "sent, MB", "peak of parameters, MB", "peak, MB"]
tables.Table(header, rows, "rank 0, one step")

# %% [markdown]
# The losses agree. The first two also send the same bytes, except for padding: `fully_shard` splits each parameter by
# its rows, and the 94 rows of the embedding are not divisible by four. With hybrid sharding, each rank holds half of
# everything, where full sharding holds a quarter. With N ranks on H hosts, hybrid sharding sends only S(H−1)/N bytes
# less in total. What matters is *where* it sends them. Here is the answer to your prediction in 11.2: with full
# sharding, 3S · 31/32 bytes leave each of the four hosts, and with hybrid sharding 2S · 3/4.

# %%
ranks.stop()
