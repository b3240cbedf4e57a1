# ---
# jupyter:
#   course:
#     module: production
#     minutes: 60
# ---

# %% [markdown]
# # Lab 11 · Production
#
# **60 minutes, 10 points.** In this lab, you move from your own `ZeRO3` to torch's `fully_shard`, shard inside each
# host only, and compute which strategy a model needs on a given cluster. At the end, you compare the losses, the bytes
# sent and the memory of three ways to train one GPT.
#
# The three exercises do not build on each other. Each has a check, which uses new random models, samples and clusters
# every time. The checks look at values, bytes and memory, but never at times.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import production as check
from shared.planner import clusters
from shared.predictions import predicted

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
# ## Exercise 11.1 · From ZeRO3 to fully_shard (20 min, 3 points)
#
# `fully_shard(module)` shards one module in place, and replaces its parameters with `DTensor`s. Write a function
# `fully_sharded(module, …)` that shards a whole model in the same units as `ZeRO3(module, …)`.
#
# Start with these four steps, which are enough for a plain model:
#
# 1. Give all ranks the values of rank 0: `broadcast_state(module)` of lab 02 does that, and `fully_shard` does not.
# 2. Choose the units: `units`, or `default_units(module)` if `units` is None.
# 3. Call `fully_shard` once per unit.
# 4. Call it for the module itself, which becomes the root, and return the module.
#
# Then add the rest:
#
# - **Nested units.** `units` is an iterable in any order. It does not contain the module itself, but a unit may lie
#   inside another one. Shard inner units first: a call takes all parameters of its module that no earlier call has
#   taken.
# - **`reshard_after_forward`.** Pass it in the call for each unit, but not in the call for the root. The root always
#   stays unsharded until backward, as in `ZeRO3`.
# - **Dtypes.** Pass `mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)` in every call. Here,
#   `compute_dtype` is the dtype of the unsharded parameters and their all-gathers. `reduce_dtype` is the dtype of the
#   reduce-scatters; `ZeRO3` has no such argument.
# - **The mesh.** Pass a mesh in every call. Without one, `fully_shard` picks the machine's GPU even if your ranks
#   compute on the CPU. `mesh_of_all_ranks(module)`, which is given, creates the default.
#
# Build the optimizer after calling `fully_sharded`. Otherwise, it would update parameters that the model no longer has.
#
# The target is the same losses and bytes as with your `ZeRO3`, with no more parameters unsharded at a time.
#
# <details><summary>Hint 1</summary>Why must the values be broadcast before the first call of <code>fully_shard</code>?
# What would a broadcast of a DTensor send?</details>
# <details><summary>Hint 2</summary><code>module.modules()</code> yields a module before the modules inside it. In which
# order do you need them? (The order of <code>units</code> tells you nothing.)</details>


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


# %% [markdown]
# In the check, look at the line `plain` first: it trains a plain model on two ranks, for which the four steps are
# enough. The other lines try buffers, frozen parameters, nested units, dtypes and meshes.

# %% tags=["check"] grade_id="check-fully-sharded" points=3
check.fully_sharded()

# %% [markdown]
# ## Exercise 11.2 · Hybrid sharding (10 min, 2 points)
#
# In the lesson, the ranks of a mesh were listed by hand. Now write `host_mesh(ranks_per_host)`, which creates the mesh
# for hybrid sharding with any number of ranks:
#
# - The first dimension is called "replicate" and has one entry per host. The second is called "shard" and has
#   `ranks_per_host` entries.
# - The ranks of a host are consecutive. With 2 ranks per host, ranks 0 and 1 share a host, and so do ranks 2 and 3.
# - The device type is the one that the ranks compute on: "cuda" if `torch.cuda.is_initialized()`, else "cpu".
#   (`torch.cuda.is_available()` is also true for a job on the CPU of a machine with a GPU.)
# - If the ranks cannot be divided equally among hosts, raise a `ValueError` with a message that says why. (You can
#   assume that `ranks_per_host` is at least 1.)
#
# <details><summary>Hint</summary><code>init_device_mesh(device_type, shape, mesh_dim_names=…)</code> counts the ranks
# row by row. Which shape has one row per host?</details>
#
# **Predict.** A cluster has 16 hosts with eight ranks each, and a model has S bytes. How many bytes leave a host in one
# step, as a multiple of S, with full sharding over all ranks and with hybrid sharding?

# %%
my_full, my_hybrid = None, None


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
# With full sharding, all 128 ranks form one ring, which leaves each host once. With hybrid sharding, each rank forms a
# ring with the ranks that have the same local rank on the 15 other hosts:

# %%
print(f"full sharding: {predicted(my_full, '{} S')}formula 3S(N−1)/N = {3 * 127 / 128:.2f} S")
print(f"hybrid sharding: {predicted(my_hybrid, '{} S')}formula 2S(H−1)/H = {2 * 15 / 16:.2f} S")

# %% [markdown]
# ## Exercise 11.3 · Which strategy? (20 min, 5 points)
#
# Up to how many parameters is stage 2 the right choice? No number can answer that: which strategies fit depends on the
# memory of the GPUs, and which one is fast depends on the links between them. So compute the answer.
#
# `shared/planner/clusters.py` contains what you need. It is short, so read it first:
#
# - `Cluster` describes hosts, GPUs and rates. `cluster.gpus` is the number of GPUs on all hosts, and
#   `cluster.gpus_per_host` that on one of them. `cluster.gpu_bytes` is the memory of a GPU.
# - `step_seconds(shape, cluster, stage, shard_ranks, checkpointing, micro_batch)` estimates the time of a step.
# - `SITUATIONS` contains five pairs of a model and a cluster.

# %%
for name in clusters.SITUATIONS:
    print(name)

# %% [markdown]
# **Predict.** What is the best strategy for each of the five, in this order? Write the stage, the number of ranks over
# which the model state is sharded, and "selective" or "full" checkpointing; or None if you think that nothing fits.
# Stage 0 shards nothing, so write the number of all GPUs. Each GPU takes one sequence per step. Without sharding, the
# model state takes 16 bytes per parameter.

# %%
my_choices = None  # such as [(0, 8, "selective"), None, ...]

# %% [markdown]
# Now write `choose_strategy(shape, cluster, micro_batch=1)`. Among all strategies that fit on a GPU, it returns the one
# with the shortest step:
#
# ```python
# for each stage, checkpointing and group size:
#     if the strategy fits:
#         remember it, with the time of its step
# return the fastest, or None if nothing fits
# ```
#
# - Try stages 0 to 3, each with "selective" and with "full" checkpointing. At stages above 0, shard over all GPUs, and
#   also over the GPUs of one host. At stage 0, `shard_ranks` is always the number of all GPUs.
# - `planner.plan(shape, ranks=shard_ranks, stage=…, micro_batch=…, checkpointing=…).total_bytes` is the memory that a
#   strategy needs. It fits if at least a tenth of the GPU's memory stays free.
# - If several strategies are equally fast, any of them will do. The check treats steps that differ by less than 0.1% as
#   equal, because no planner is that precise.
# - Return None if nothing fits. The model itself must then be split (chapters 13 and 15).
#
# <details><summary>Hint 1</summary>How many group sizes are there on one host, and how many at stage 0?</details>
# <details><summary>Hint 2</summary>What does <code>min()</code> do with an empty list, and which of its arguments
# changes that?</details>


# %% tags=["export"]
# %%ranks
@dataclass(frozen=True)
class Choice:
    """A strategy: the model state is sharded over groups of shard_ranks ranks.

    Stage 0 shards nothing. There, shard_ranks is the number of all GPUs.
    """

    stage: int
    shard_ranks: int
    checkpointing: str
    step_s: float


# %% tags=["exercise", "export"] grade_id="choose-strategy"
# %%ranks
def choose_strategy(shape: ModelShape, cluster: Cluster, micro_batch: int = 1) -> Choice | None:
    """Return the fastest strategy that fits on the cluster's GPUs, or None if none fits."""
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-choose-strategy" points=5
check.choose_strategy()

# %% [markdown]
# What does your function choose for the five situations? The table gives the share of a GPU's memory that each strategy
# needs, and the time of its step:

# %%
# %%ranks
from shared.planner import clusters

found = [choose_strategy(*situation) for situation in clusters.SITUATIONS.values()]
found = [choice and (choice.stage, choice.shard_ranks, choice.checkpointing) for choice in found]


# %%
from shared import planner, tables


def describe(situation, choice):
    """Describe a strategy, the share of a GPU's memory that it needs, and the time of its step."""
    if choice == ():
        return "–"
    if choice is None:
        return "nothing fits"
    (shape, cluster), (stage, over, how) = situation, choice
    held_bytes = planner.plan(shape, ranks=over, stage=stage, checkpointing=how).total_bytes
    step_s = clusters.step_seconds(shape, cluster, stage, over, how)
    share = held_bytes / cluster.gpu_bytes
    return f"stage {stage} over {over}, {how}: {share:.0%}, {step_s:.2f} s"


rows = [
    [name, describe(situation, guess), describe(situation, chosen)]
    for (name, situation), guess, chosen in zip(
        clusters.SITUATIONS.items(), my_choices or [()] * 5, ranks.pull("found")[0], strict=True
    )
]
tables.Table(["", "predicted", "computed"], rows)

# %% [markdown]
# Where your prediction was wrong, was memory the reason, or speed? A strategy may use at most 90% of the memory. Like
# the lesson's drawing, `step_seconds` hides all communication that it can, so it flatters stages 0 to 2.
#
# <details><summary>Why these five?</summary>
#
# - **1.5B.** Everything fits, and even stage 3 hides its 0.04 s of communication behind 0.06 s of computation. So all
#   four stages tie.
# - **7B.** Stage 2 fits only if everything is recomputed, which takes a third longer. Stage 3 fits without that, in 89%
#   of the memory: the *highest* stage is the fastest.
# - **13B.** The slow link decides: over 64, stage 3 takes 6.15 s, and stage 2, which also fits, 4.10 s. Stage 3 over 8
#   sends parameters inside the hosts only, and takes 3.99 s. Recomputation costs nothing here, because the GPUs wait
#   for the link anyway.
# - **70B on one host.** 16Ψ/8 bytes are 138 GB per GPU, so nothing fits.
# - **70B on 8 hosts.** Only stage 3 over 64 fits, with everything recomputed. Its communication takes 4.1 s, and hides
#   behind 14.5 s of computation.
#
# </details>

# %% [markdown]
# ## Your `ZeRO3` and torch's `fully_shard` (10 min)
#
# The next cells train the same GPT with your `ZeRO3`, with `fully_shard`, and with hybrid sharding (two hosts of two
# ranks). Mismatch detection is switched off, because it adds collectives of its own.

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
def bytes_that_leave(log):
    """Add up what this rank sends to the other host. In a ring, it sends to the next rank."""
    sent_bytes = 0
    for entry in log.entries:
        ring = entry.group_ranks
        right = ring[(ring.index(rank) + 1) % len(ring)]
        sent_bytes += entry.sent_bytes if right // 2 != rank // 2 else 0
    return sent_bytes


def train(model, steps=4):
    """Take some steps. Returns the last loss, what is sent, and the memory of one more step."""
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
    return loss, log.sent_bytes, bytes_that_leave(log), peak


results = {
    "your ZeRO3": train(ZeRO3(new_model())),
    "fully_shard": train(fully_sharded(new_model())),
    "fully_shard, hybrid": train(fully_sharded(new_model(), mesh=host_mesh(2))),
}

# %% tags=["nbval-ignore-output"]
of_rank, rows, leaves = ranks.pull("results"), [], {}
losses = [loss for loss, *_ in of_rank[0].values()]
assert max(losses) - min(losses) < 1e-3
for name, (loss, sent_bytes, _, peak) in of_rank[0].items():
    leaves[name] = sum(results[name][2] for results in of_rank[:2])  # ranks 0 and 1 share a host
    parameters_bytes = max(sample.held.parameters_bytes for sample in peak.samples)
    measured_bytes = (sent_bytes, leaves[name], parameters_bytes, peak.peak_bytes)
    rows.append([name, f"{loss:.4f}", *(f"{size / 1e6:.3f}" for size in measured_bytes)])
sent = {name: sent_bytes for name, (_, sent_bytes, *_) in of_rank[0].items()}
assert 0 <= sent["fully_shard"] - sent["your ZeRO3"] < 0.001 * sent["your ZeRO3"]
assert leaves["fully_shard, hybrid"] < 0.5 * leaves["fully_shard"]
header = ["", "loss", "sent, MB", "leaves the host, MB", "peak of parameters, MB", "peak, MB"]
tables.Table(header, rows, "Rank 0, one step. Its host has ranks 0 and 1.")

# %% [markdown]
# The losses agree. The first two also send the same bytes, except for padding: `fully_shard` splits each parameter by
# its rows, and the 94 rows of the embedding are not divisible by four. Your `ZeRO3` holds more parameters at the peak,
# because the unit that it prefetches counts as parameters, while torch prefetches into a buffer.
#
# With hybrid sharding, each rank holds half of the model between steps instead of a quarter. With N ranks on H hosts, a
# rank sends only S(H−1)/N fewer bytes than with full sharding. What matters is *where* it sends them: less than half as
# many bytes leave the host.

# %%
ranks.stop()
