# ---
# jupyter:
#   course:
#     module: production
#     minutes: 50
#     gpu_per_rank: true
# ---

# %% [markdown]
# # Lab 11 · Production
#
# **50 minutes, 10 points.** You move from your own `ZeRO3` to torch's `fully_shard`, shard inside hosts only, and
# compute which strategy a model needs on given GPUs.
#
# Each exercise has a check. Times are never judged; bytes are.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import production as check
from shared.planner import clusters

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
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

# %% [markdown]
# ## Exercise 11.1 · From ZeRO3 to fully_shard (15 min, 3 points)
#
# `fully_shard(module)` shards one module in place, and swaps its parameters for `DTensor`s. `fully_sharded(module, …)`
# is to make of a whole model what `ZeRO3(module, …)` makes:
#
# | `ZeRO3` | `fully_shard` |
# |---|---|
# | broadcasts parameters and buffers from rank 0 | does not: lab 02's `broadcast_state(module)` does |
# | `units`, an iterable in any order, or `default_units(module)` | a call per unit, inner ones first, the whole last |
# | `reshard_after_forward`, of every unit but the root | an argument of the same name, with a default of its own |
# | `compute_dtype`, for parameters and what is sent | `mp_policy=MixedPrecisionPolicy(param_dtype=…)` |
# | none | `reduce_dtype`: gradients may be added up in a wider type |
#
# → the module, which is now sharded; an optimizer must be built after it.
#
# Target: losses and bytes as those of your `ZeRO3`, and no more parameters at once. (torch gathers the next unit into a
# buffer that is no parameter yet.)


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
    chosen = set(default_units(module) if units is None else units)
    outer_first = [each for each in module.modules() if each in chosen]
    for unit in reversed(outer_first):
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    return fully_shard(module, reshard_after_forward=False, **options)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-fully-sharded" points=3
check.fully_sharded()

# %% [markdown]
# ## Exercise 11.2 · Hybrid sharding (10 min, 2 points)
#
# Between hosts the wire is slow. Hybrid sharding shards inside a host only, and keeps one copy of everything per host:
# all-gathers and reduce-scatters stay inside; between hosts, each rank all-reduces its part of the gradients, Ψ over
# the host's ranks.
#
# **Predict.** Four hosts of eight ranks, a model of S bytes. How many bytes leave a host per step? Fully sharded, all
# are one ring, in which one rank per host sends to the next host. Hybrid, each rank has a ring of four with the ranks
# of its place on the other hosts.
#
# `fully_shard` shards over the second dimension of a mesh of two, and replicates over its first.
# `host_mesh(ranks_per_host)` makes that mesh, of all ranks, on the device type they compute on: "cuda" where
# `torch.cuda.is_initialized()`, else "cpu". Ranks of a host follow each other.


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
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    ### END SOLUTION


# %% tags=["check"] grade_id="check-host-mesh" points=2
check.host_mesh()

# %% [markdown]
# ## Exercise 11.3 · Which strategy? (25 min, 5 points)
#
# "Use ZeRO-2 up to 10 B", says a slogan. But what fits follows from the GPUs, and what is fast from the wire. So
# compute it. `shared/planner/clusters.py` has both sides of the question, ready made: read it, it is short.
#
# - `Cluster`: hosts, GPUs, rates; `cluster.gpus` is all of them.
# - `step_seconds(shape, cluster, stage, shard_ranks, checkpointing, micro_batch)` estimates a step.
# - `SITUATIONS`: five models with clusters.
#
# **Predict** the five: which stage, over how many ranks each group shards, with how much recomputed?

# %%
for name in clusters.SITUATIONS:
    print(name)

# %% [markdown]
# `choose_strategy(shape, cluster, micro_batch=1)`: of all that fit on a GPU, the one whose step is the shortest.
#
# - To try: stages 0 to 3, each with "selective" and with "full" checkpointing; sharded over all GPUs, and, for stages
#   above 0, over the GPUs of one host.
# - What fits: `planner.plan(shape, ranks=shard_ranks, stage=…, micro_batch=…, checkpointing=…).total_bytes`, and a
#   tenth of the GPU's memory is left free.
# - Where steps are equally long, the simpler one: the lower stage, then selective. Then the larger group, which holds
#   less.
# - None where nothing fits: then the model itself must be split (chapters 13 and 15).


# %% tags=["export"]
# %%ranks
@dataclass(frozen=True)
class Choice:
    """How to train: a ZeRO stage over groups of shard_ranks ranks, each group a copy of the others."""

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


# %% tags=["exercise", "export"] grade_id="choose-strategy"
# %%ranks
def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Find the fastest strategy that fits on the cluster's GPUs."""
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-choose-strategy" points=5
check.choose_strategy()

# %% [markdown]
# Your function knows nothing of slogans. What does it say of the five?

# %%
# %%ranks
from shared.planner import clusters

if rank == 0:
    for name, (shape, cluster) in clusters.SITUATIONS.items():
        choice = choose_strategy(shape, cluster)
        how = choice and f"stage {choice.stage} over {choice.shard_ranks}, {choice.checkpointing}"
        print(f"{name}: {how or 'nothing fits'}")

# %% [markdown]
# **Compare.** Where was your prediction off, and which of the two decided: what fits, or what is fast?

# %% [markdown]
# ## Yours beside torch's
#
# One GPT under your `ZeRO3`, under `fully_shard`, and hybrid, on two hosts of two ranks. Ranks compare notes no more:
# that costs messages.

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
    torch.manual_seed(rank)  # rank 0's parameters are broadcast
    return TinyGPT(config).to(device)


# %%
# %%ranks
def steps_of(model, steps=4):
    """→ last loss, ledger of the last step, memory over one more"""
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
    "your ZeRO3": steps_of(ZeRO3(new_model())),
    "fully_shard": steps_of(fully_sharded(new_model())),
    "fully_shard, hybrid": steps_of(fully_sharded(new_model(), mesh=host_mesh(2))),
}

# %% tags=["nbval-ignore-output"]
from shared import tables

results, rows = ranks.pull("results")[0], []
losses = [loss for loss, _, _ in results.values()]
assert max(losses) - min(losses) < 1e-3
for name, (loss, log, peak) in results.items():
    parameters_bytes = max(sample.held.parameters_bytes for sample in peak.samples)
    numbers = (log.sent_bytes, parameters_bytes, peak.peak_bytes)
    rows.append([name, f"{loss:.4f}", *(f"{number / 1e6:.2f}" for number in numbers)])
sent_bytes = {name: log.sent_bytes for name, (_, log, _) in results.items()}
assert 0 <= sent_bytes["fully_shard"] - sent_bytes["your ZeRO3"] < 0.001 * sent_bytes["your ZeRO3"]
header = ["", "loss", "must send, MB", "parameters' peak, MB", "peak, MB"]
tables.Table(header, rows, "rank 0, one step")

# %% [markdown]
# The same losses, and between the first two the same bytes but for filling: `fully_shard` splits each parameter by its
# rows, and the embedding's 94 do not divide by four. Hybrid holds half of everything where full sharding holds a
# quarter. With N ranks on H hosts it sends S(H−1)/N less in all; but *where* is the point. Your prediction in 11.2:
# fully sharded, 3S · 31/32 leave each of the four hosts; hybrid, 2S · 3/4.

# %%
ranks.stop()
