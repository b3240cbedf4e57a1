# ---
# jupyter:
#   course:
#     module: production
# ---

# %% [markdown]
# # 11 · Production
#
# **55–85 minutes.** After this lesson, you will be able to:
#
# - measure what torch's and DeepSpeed's wrappers hold and send, and compare that with your own,
# - read a DeepSpeed config and FSDP1 code, and write the same with `fully_shard`,
# - shard inside a host only, and predict the bytes that leave the host,
# - compute whether it pays to move the optimizer state to the CPU's memory,
# - choose a strategy by computing what fits, the largest batch, and the throughput.
#
# You need the stages of ZeRO (chapters 07 to 10) and the planner (chapter 06).

# %% [markdown]
# ## Where we are
#
# In chapter 10, you finished `ZeRO3`, and met its counterpart in torch: `fully_shard`, also called FSDP2. Both treat
# all ranks alike, but on a cluster they are not: the links between the GPUs of one host can be ten times as fast as
# those between hosts. Suppose that ranks 0 and 1 are on one host, and ranks 2 and 3 on another. How many bytes leave a
# host in one step?

# %% tags=["nbval-ignore-output"]
import subprocess
import sys
from pathlib import Path

import torch

from shared import deepspeed_engine, formulas, measure, memory, planner, plots, ranks, tables
from shared.planner import clusters
from shared.planner.shapes import SHAPES
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=256)
AdamW = torch.optim.AdamW


def new_model():
    return TinyGPT(config).to(device)


def in_fsdp2(mesh=None, **options):
    """Shard a GPT with FSDP2: each block is a unit, and so is the rest."""
    model, mesh = new_model(), mesh or init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


# %% [markdown]
# The ledger counts what a rank has to send if each collective is a ring. In a ring, a rank sends only to the next rank
# of its group. So its bytes leave the host if that rank is on the other host:


# %%
# %%ranks
def backward(model, number):
    """Compute the gradients of this rank's share of the eight samples of a step. Returns its loss."""
    samples = text.windows(range(200 * number, 200_000, 25_000), length=32)
    loss = model(*[tensor[rank::world_size].to(device) for tensor in samples])
    loss.backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    return loss.detach()


def step(model, optimizer, number):
    optimizer.zero_grad()
    loss = backward(model, number)
    optimizer.step()
    return loss


def bytes_that_leave(log):
    sent_bytes = 0
    for entry in log.entries:
        ring = entry.group_ranks
        right = ring[(ring.index(rank) + 1) % len(ring)]
        sent_bytes += entry.sent_bytes if right // 2 != rank // 2 else 0
    return sent_bytes


def sent_in_a_step(model):
    """Return this rank's bytes for the other host, all that it sends, and what it holds between steps."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, 0)
    with wire.ledger() as log:
        step(model, optimizer, 1)
    optimizer.zero_grad()
    held_bytes = memory.held(model, optimizer).total_bytes
    return bytes_that_leave(log), log.sent_bytes, held_bytes


psi = sum(parameter.numel() for parameter in new_model().parameters())
sent = {"fully sharded": sent_in_a_step(in_fsdp2())}

# %%
psi, sent = ranks.pull("psi")[0], ranks.pull("sent")
size = 4 * psi
host_bytes = sum(of_rank["fully sharded"][0] for of_rank in sent[:2])
print(f"S = 4Ψ = {size / 1e6:.1f} MB in fp32; {host_bytes / size:.2f} S leave a host in a step")
assert host_bytes > 2 * size

# %% [markdown]
# More than twice the bytes of the model leave a host in each step, although its two ranks could hold the whole model
# between them.

# %% [markdown]
# ## One model, ten wrappers
#
# The course keeps a registry of strategies (`solutions/strategies.py`), which has yours beside those of torch and
# DeepSpeed. The next cells train the same GPT with ten of them on two ranks, for 20 steps each.
#
# **Predict.** In one step with N = 2 ranks, how many bytes does a rank send at each stage, as a multiple of S = 4Ψ? 1
# means as many bytes as the parameters take.

# %%
my_prediction = {0: None, 1: None, 2: None, 3: None}


# %%
# %%ranks
from solutions.strategies import STRATEGIES, Options

names = ["overlapped_ddp", "ddp", "zero1", "zero_redundancy", "deepspeed1"]
names += ["zero2", "deepspeed2", "zero3", "fsdp2", "deepspeed3"]
options = Options(AdamW, {"lr": 1e-3}, bucket_cap_mb=2.0)


def measured(strategy):
    """Train for 20 steps. Returns the losses, a step's ledger, and what is held after a backward."""
    model, optimizer = strategy.build(new_model(), options)
    losses = [step(model, optimizer, number) for number in range(18)]
    with wire.ledger() as log:
        losses.append(step(model, optimizer, 18))
    optimizer.zero_grad()
    losses.append(backward(model, 19))
    held = memory.held(model, optimizer)
    optimizer.step()
    mean_losses = torch.stack(losses) / world_size
    dist.all_reduce(mean_losses)
    return strategy.stage, mean_losses.tolist(), log, held


def measure_all():
    found = [STRATEGIES[name] for name in names]
    return {each.title: measured(each) for each in found if not each.why_not()}


# %% tags=["nbval-ignore-output"]
with ranks.world(2):
    seen = ranks.run(lambda: measure_all(), timeout_s=300)[0]
rows = []
for title, (stage, losses, log, held) in seen.items():
    by_op = ", ".join(f"{count} {op}" for op, count in log.ops.items() if op != "recv")
    in_sizes = [f"{each / size:.2f}" for each in (held.total_bytes, log.sent_bytes)]
    rows.append([f"{stage}", title, f"{losses[-1]:.4f}", *in_sizes, by_op])
header = ["stage", "", "last loss", "held, S", "sent, S", "collectives"]
note = f"2 ranks. Held after backward. {deepspeed_engine.why_not() or ''}"
tables.Table(header, rows, note)

# %%
sent_by = {title: log.sent_bytes / size for title, (_, _, log, _) in seen.items()}
for stage, title in enumerate(("OverlappedDDP", "ZeRO1", "ZeRO2", "ZeRO3")):
    formula = formulas.step_sent_bytes(psi, 2, stage, 4) / size
    print(
        f"stage {stage}: {predicted(my_prediction[stage], '{} S')}measured {sent_by[title]:.2f} S"
    )
    assert abs(sent_by[title] - formula) < 0.03
assert abs(sent_by["ZeroRedundancyOptimizer"] - 1.5) < 0.05
assert all(abs(sent_by.get(f"DeepSpeed {stage}", 1.5) - 1.5) < 0.05 for stage in (1, 2))

# %% [markdown]
# A `send` belongs to our own collectives; `OverlappedDDP` uses torch's. “DDP, bucket view” is torch's DDP with
# `gradient_as_bucket_view=True`. All losses are the same, and the next three curves coincide.

# %% tags=["nbval-ignore-output"]
by_step = zip(*(losses for _, losses, *_ in seen.values()), strict=True)
assert max(max(losses) - min(losses) for losses in by_step) < 5e-3
plots.loss_curves({title: seen[title][1] for title in ("ZeRO3", "FSDP2", "DDP, bucket view")})

# %% [markdown]
# **What they send.** By the formulas (ZeRO paper, §7), stages 0 to 2 send 2fS, with f = (N−1)/N, and only stage 3 sends
# 3fS. Two implementations of the lower stages send 3fS as well:
#
# - torch's `ZeroRedundancyOptimizer` is used with DDP, which all-reduces the gradients (2fS). Afterwards, each rank
#   broadcasts the parameters that it has updated (fS).
# - DeepSpeed's stages 1 and 2 all-reduce a whole bucket and keep a shard of it (2fS), as long as
#   `use_multi_rank_bucket_allreduce` is on. At the end, they all-gather the parameters (fS).
#
# **What they hold.** Compare the components of the bars:

# %% tags=["nbval-ignore-output"]
if "DeepSpeed 1" in seen:
    assert seen["DeepSpeed 1"][-1].optimizer_bytes > 1.3 * seen["ZeRO1"][-1].optimizer_bytes
plots.memory_by_component({title: held.by_component() for title, (*_, held) in seen.items()})

# %% [markdown]
# DeepSpeed also keeps fp32 master weights, even if the parameters are fp32 already. What it holds in buffers of its own
# is white in the figure: at stages 1 and 2 a shard of the gradients, and at stage 3 also a bucket and the shards of
# parameters and master weights. Its stages 1 and 2 look alike only because we measure after backward. During backward,
# stage 1 holds full gradients, and stage 2 frees them bucket by bucket (chapter 08).

# %% [markdown]
# ## DeepSpeed's config, key by key
#
# DeepSpeed takes a dictionary (or a JSON file) that says what to shard and how. This is ours for stage 3:

# %%
deepspeed_engine.config(stage=3, bucket_cap_mb=2.0)

# %% [markdown]
# You have built nearly everything that its keys stand for. The defaults are those of DeepSpeed 0.19.8
# (`runtime/zero/config.py` and `runtime/constants.py`).
#
# | key | default | in your classes |
# |---|---|---|
# | `stage` | 0 | `ZeRO1`, `ZeRO2`, `ZeRO3` |
# | `reduce_bucket_size` | 500 million elements | `bucket_cap_mb` |
# | `allgather_bucket_size` | 500 million elements | none: elements per all-gather after the step, stages 1 and 2 |
# | `use_multi_rank_bucket_allreduce` | on | none: all-reduces a bucket, instead of one reduce per owner |
# | `overlap_comm` | only at stage 3 | the hooks of chapter 04 |
# | `stage3_prefetch_bucket_size` | 50 million elements | `prefetch`, which counts units |
# | `stage3_max_reuse_distance` | 1 billion elements | `reshard_after_forward` |
# | `stage3_param_persistence_threshold` | 100,000 elements | none: smaller parameters are not sharded |
# | `gradient_clipping` | 1.0 | `clip_grad_norm_(max_norm)` |
# | `bf16: {"enabled": true}` | off | `compute_dtype=torch.bfloat16` |
# | `offload_optimizer: {"device": "cpu"}` | off | `OffloadedAdamW`, below |
#
# The defaults are meant for models with billions of parameters. Our GPT would fill less than a hundredth of one bucket,
# but DeepSpeed allocates buckets in full, and its reuse distance would make stage 3 keep all parameters after forward.
# So set the sizes.
#
# One default changes the *result*. If `gradient_clipping` is missing, DeepSpeed clips the norm of the gradients at 1
# since version 0.19.3 (pull request 8068). The next cells train six steps with a value of 0, which means no clipping,
# and six with no value. How much do the losses differ?


# %%
# %%ranks
from shared import deepspeed_engine


def losses_with(gradient_clipping):
    model, optimizer = deepspeed_engine.engine(
        new_model(), 2, AdamW, bucket_cap_mb=2.0, gradient_clipping=gradient_clipping, lr=1e-3
    )
    return torch.stack([step(model, optimizer, number) for number in range(6)]).cpu()


# %% tags=["nbval-ignore-output"]
if not deepspeed_engine.why_not():
    with ranks.world(2):
        gaps = ranks.run(lambda: losses_with(0.0) - losses_with(None), timeout_s=100)[0].abs()
    print("the losses differ by", ", ".join(f"{each:.4f}" for each in gaps))
    assert max(gaps[:2]) < 1e-4 and max(gaps) > 5e-3

# %% [markdown]
# AdamW divides each gradient by a running mean of its size, so a constant factor cancels. But the clipping factor
# changes from step to step, so the losses drift apart. No error warns you. So whenever you change the wrapper, compare
# the losses.

# %% [markdown]
# ## From FSDP1 to FSDP2
#
# FSDP1 (`FullyShardedDataParallel`) is deprecated, but you will still find it in existing code. It packs the parameters
# of a unit into one flat parameter, as you did. FSDP2 shards each parameter by its rows instead, and makes it a
# `DTensor`, a tensor that knows which shard of it each rank holds.
#
# | FSDP1 | FSDP2 |
# |---|---|
# | `FSDP(model, auto_wrap_policy=…)` | one `fully_shard(block)` per unit, and `fully_shard(model)` last |
# | `FULL_SHARD` | `reshard_after_forward=True`, the default except for the root |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | `HYBRID_SHARD` | a `mesh` with two dimensions, see below |
# | `NO_SHARD` | use DDP |
# | `mixed_precision=MixedPrecision(…)` | `mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)` |
# | `cpu_offload=CPUOffload(…)` | `offload_policy=CPUOffloadPolicy()` |
# | `sync_module_states=True` | `set_model_state_dict()` with `StateDictOptions(broadcast_from_rank0=True, …)` |
# | `param_init_fn` | build on `meta`, shard, then `to_empty()` (chapter 10) |
# | `model.clip_grad_norm_()` | `torch.nn.utils.clip_grad_norm_()` |
# | `with model.no_sync():` | `model.set_requires_gradient_sync(False)` |
# | `backward_prefetch`, `forward_prefetch` | `set_modules_to_backward_prefetch()`, `…_forward_prefetch()` |
#
# Is `SHARD_GRAD_OP` the same as ZeRO-2? The next section tests it.

# %% [markdown]
# ## Tuning FSDP2
#
# `reshard_after_forward` may also be an integer k. After forward, a unit then also keeps 1/k of its parameters on each
# rank, so that the all-gather in backward involves only k ranks. DeepSpeed's ZeRO++ calls this hpZ. With k = 2, these
# are the two ranks of a host. In the table, look at what leaves a host, and at the parameters held after forward:


# %%
# %%ranks
def all_gathers_of(**options):
    """Return the group sizes of all-gathers in forward and backward, what leaves, and what is held."""
    model, held = in_fsdp2(**options), []
    shards = {"parameters": list(model.parameters())}  # FSDP2 keeps them after unsharding
    model.register_forward_hook(lambda *_: held.append(memory.held(model, extra=shards)))
    backward(model, 0)
    with wire.ledger() as log:
        backward(model, 1)
    entries = [entry for entry in log.entries if entry.op == "all_gather"]
    sizes = [[len(e.group_ranks) for e in entries if e.in_backward == late] for late in (0, 1)]
    held.append(memory.held(model, extra=shards))
    return *sizes, bytes_that_leave(log), *(each.parameters_bytes for each in held[-2:])


values = {"True": True, "2": 2, "False": False}
found = {name: all_gathers_of(reshard_after_forward=value) for name, value in values.items()}

# %%
found, rows = ranks.pull("found"), []
leaves = {name: sum(of_rank[name][2] for of_rank in found[:2]) / size for name in found[0]}
for name, (forward, late, _, *held) in found[0].items():
    sizes = [f"{len(each)} among {each[0]} ranks" if each else "none" for each in (forward, late)]
    rows.append([name, *sizes, f"{leaves[name]:.2f}", *(f"{each / size:.2f}" for each in held)])
    expected = {"True": 0.25, "2": 0.25 + 0.5, "False": 0.25 + 1}[name]
    assert abs(held[0] / size - expected) < 0.02 and abs(held[1] / size - 0.25) < 0.01
assert leaves["True"] > 1.3 * leaves["2"] and abs(leaves["2"] - leaves["False"]) < 0.05
assert set(found[0]["2"][1]) == {2}
header = ["reshard_after_forward", "all-gathers in forward", "in backward", "leaves a host, S"]
tables.Table([*header, "parameters after forward, S", "after backward, S"], rows)

# %% [markdown]
# `reshard_after_forward=2` sends no more bytes out of a host than keeping everything (1.50 S), and holds 0.76 S between
# forward and backward instead of 1.25 S. The last row is what FSDP1 calls `SHARD_GRAD_OP`. It is not ZeRO-2: while the
# optimizer steps, a rank holds a quarter of the parameters, where ZeRO-2 holds all.
#
# Three more things matter:
#
# - **Prefetch lists.** By default, FSDP2 prefetches one unit in backward. In forward, it launches each all-gather when
#   the unit is called, which is early enough if the CPU is far ahead of the GPU. If it is not,
#   `block.set_modules_to_forward_prefetch([next_block])` launches the next all-gather earlier. With a list of two
#   units, more communication overlaps, but a rank holds one more unit.
# - **Clipping.** `clip_grad_norm_` works on DTensors: it combines the norms of all shards. The norm that it returns is
#   a DTensor, too, so call its `full_tensor()` before you log it. The norm of a rank's own shards is too small:

# %%
# %%ranks
from torch.nn.utils import clip_grad_norm_, get_total_norm

model, whole = in_fsdp2(), new_model()
backward(model, 0)
own_norm = get_total_norm([parameter.grad.to_local() for parameter in model.parameters()])
norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
samples = text.windows(range(0, 200_000, 25_000), length=32)
whole(*[tensor.to(device) for tensor in samples]).backward()
expected = get_total_norm([parameter.grad for parameter in whole.parameters()])
norms = own_norm.item(), norm.full_tensor().item(), expected.item()

# %%
own, full, expected = zip(*ranks.pull("norms"), strict=True)
print("norms of each rank's own shards:", ", ".join(f"{each:.3f}" for each in own))
print(f"full_tensor(): {full[0]:.3f}, one process on the full batch: {expected[0]:.3f}")
assert abs(full[0] / expected[0] - 1) < 1e-4 and max(own) < full[0]

# %% [markdown]
# - **The dtype of sums.** If units compute in bf16, their gradients are added up in bf16 too, unless
#   `MixedPrecisionPolicy` gets a `reduce_dtype` of `torch.float32`. Why pay for twice the bytes? In a ring, the sum is
#   rounded at each rank, so the error grows with the number of ranks:

# %%
gradients = torch.randn(1024, 10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
for count in (4, 64, 1024):
    total, exact = gradients[0].clone(), gradients[:count].double().sum(0)
    for each in gradients[1:count]:
        total += each
    error = float((total - exact).norm() / exact.norm())
    print(f"random gradients of {count} ranks, added up in bf16: off by {error:.1%}")
assert error > 0.01

# %% [markdown]
# ## Sharding inside a host only
#
# **Hybrid sharding** shards the model over the ranks of one host, so each host holds a full copy. The ranks form a
# **device mesh**, an array of ranks whose dimensions have names. Here, it has one row per host. In the diagram,
# all-gathers and reduce-scatters run along a row. After the reduce-scatter, each rank all-reduces its shard of the
# gradients along its column. Only this all-reduce leaves a host. Ranks 0 and 2 hold the same shard, and so do ranks 1
# and 3.

# %%
diagrams.hybrid_mesh()

# %% [markdown]
# If a mesh has two dimensions, `fully_shard` replicates over the first and shards over the second:

# %%
# %%ranks
mesh = DeviceMesh(device.type, [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
hybrid = in_fsdp2(mesh)
with wire.ledger() as log:
    backward(hybrid, 0)
for op in log.ops if rank == 0 else ():
    entries = [entry for entry in log.entries if entry.op == op]
    mb = sum(entry.payload_bytes for entry in entries) / 1e6
    print(f"{len(entries)} {op}, {mb:.1f} MB, among ranks {entries[0].group_ranks}")

# %% [markdown]
# **Predict.** In a ring over N ranks on H hosts, only one rank of each host sends to another host. So as many bytes
# leave a host as one rank sends: 2S(N−1)/N with data parallelism, and 3S(N−1)/N with full sharding. With hybrid
# sharding, each of the k = N/H ranks of a host all-reduces S/k bytes with H−1 ranks of other hosts. How many bytes
# leave a host in total, as a multiple of S, with N = 4 and H = 2? 1 means the bytes of the whole model.

# %%
my_prediction = None

# %%
# %%ranks
sent["data parallelism"] = sent_in_a_step(STRATEGIES["ddp"].build(new_model(), options)[0])
sent["hybrid"] = sent_in_a_step(in_fsdp2(mesh))

# %%
sent, rows = ranks.pull("sent"), []
by_formula = {"data parallelism": 2 * 3 / 4, "fully sharded": 3 * 3 / 4, "hybrid": 2 * 1 / 2}
for name, formula in by_formula.items():
    leaves = sum(of_rank[name][0] for of_rank in sent[:2]) / size
    in_sizes = (leaves, formula, *(each / size for each in sent[0][name][1:]))
    rows.append([name, *(f"{each:.2f}" for each in in_sizes)])
    assert abs(leaves - formula) < 0.05
print(f"{predicted(my_prediction, '{} S')}the formula says {by_formula['hybrid']:g} S")
header = ["", "leaves a host", "formula", "a rank sends", "a rank holds between steps"]
tables.Table(header, rows, "In S = 4Ψ bytes, on 4 ranks of 2 hosts.")

# %% [markdown]
# With hybrid sharding, 2S(H−1)/H bytes leave a host, here less than half as many as with full sharding. It stays below
# 2S, however many hosts there are. The price is memory: the model is split over the k ranks of a host, not all N.
# Between steps, only DDP still holds gradients, in its buckets.

# %% [markdown]
# ## Moving the optimizer state to the CPU
#
# If even the shards do not fit, the optimizer state can move to the memory of the CPU. This is called **offload**. The
# GPU keeps bf16 parameters and gradients, and the CPU takes the optimizer step (ZeRO-Offload, Ren et al. 2021). Here is
# a minimal version:


# %%
class OffloadedAdamW:
    """AdamW whose fp32 master weights, state and step are on the CPU."""

    def __init__(self, parameters, **settings):
        self.parameters = list(parameters)
        self.masters = [p.detach().to("cpu", torch.float32, copy=True) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **settings)

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.to("cpu").float()  # 2 bytes per parameter to the CPU
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)  # and 2 bytes per parameter back
            master.grad = None


model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)]).bfloat16()
optimizer = OffloadedAdamW(model.parameters(), lr=1e-3)
model(torch.randn(4, 2048).bfloat16()).float().pow(2).mean().backward()
optimizer.step()
elements = sum(p.numel() for p in model.parameters())
held = memory.held(model, optimizer.optimizer).by_component()
for name in ("parameters", "gradients", "optimizer"):
    print(f"{name}: {held[name] / elements:.1f} bytes per parameter")
assert abs(held["optimizer"] / elements - 12) < 0.1

# %% [markdown]
# The optimizer's 12 bytes are on the CPU now, so the GPU holds 4 bytes per parameter instead of 16. What does that
# cost? Over PCIe 4.0, an A100 reaches about 25 GB/s in one direction (NVIDIA's developer forum, topic 352186). The next
# cell measures the optimizer step on this machine's CPU.
#
# **Predict.** Llama-2 7B is sharded over the eight GPUs of a host. How many seconds does each GPU need to send its
# gradient shard to the CPU?

# %%
my_prediction_s = None


# %% tags=["nbval-ignore-output"]
def new_gradients():
    for master in optimizer.masters:
        master.grad = torch.full_like(master, 1e-3)


jobs = {"AdamW": measure.Job({"": optimizer.optimizer.step}, new_gradients)}
step_s = measure.jobs(jobs, rounds=7)["AdamW"].time_s
llama = SHAPES["Llama-2 7B"]
transfer_s = 2 * llama.parameters / 8 / 25e9
lasts_s = {
    "forward and backward, 4,096 tokens": 6 * llama.parameters * llama.context / 156e12,
    "gradients to the CPU": transfer_s,
    "AdamW on the CPU, as fast as here": llama.parameters / elements * step_s,
    "AdamW on the CPU, at 200 GB/s": 28 * llama.parameters / 200e9,
    "parameters to the GPU": transfer_s,
}
rows = [[name, f"{each:.2f}"] for name, each in lasts_s.items()]
print(f"{predicted(my_prediction_s, '{} s')}computed {transfer_s:.3f} s")
print(f"AdamW on this CPU: {1e9 * step_s / elements:.1f} ns per parameter")
assert lasts_s["AdamW on the CPU, at 200 GB/s"] > 5 * transfer_s
note = "An A100 is assumed to reach 156 TFLOP/s, half of what it has on paper."
tables.Table(["Llama-2 7B on a host of 8 A100", "s per step"], rows, note)

# %% [markdown]
# The bottleneck is the CPU, not PCIe. AdamW reads four fp32 tensors and writes three, so it moves at least 28 bytes per
# parameter, and the CPU does this for all eight GPUs. The third row assumes this machine's speed, and the fourth one
# 200 GB/s, half of what 16 channels of DDR4-3200 (two sockets) have on paper. Even then, the optimizer step takes
# nearly as long as one sequence. With many micro-batches per step, it matters less.
#
# In FSDP2, `CPUOffloadPolicy` also moves the parameters, and copies them to the GPU before each all-gather. DeepSpeed
# can also use NVMe disks (ZeRO-Infinity, Rajbhandari et al. 2021).

# %% [markdown]
# ## Choosing
#
# Which strategy is best for a model on a given cluster? Compute it in three steps:
#
# 1. **Fit.** Chapter 06's planner says what a rank holds. A tenth of the GPU's memory should stay free.
# 2. **Batch size.** For each strategy, take the largest micro-batch that fits.
# 3. **Throughput.** Assume that computation and communication overlap completely, so that a step takes as long as the
#    longer of the two (`shared/planner/clusters.py`). Compare the tokens per second.
#
# To compare GPUs of different speeds, throughput is often given as **MFU** (model FLOPs utilization): 6 × parameters ×
# tokens per second and GPU, divided by the GPU's FLOP/s on paper (PaLM paper, appendix B, which also counts attention).
# In our planner, it follows from an assumption: a GPU that computes all the time has 50%, and with full recomputation
# 6/8 of that.
#
# **Predict.** You train Llama-2 13B with sequences of 4,096 tokens on one host of eight A100s with 80 GB each. Which
# stage has the highest throughput?

# %%
my_prediction = None


# %%
def held_bytes(shape, stage, shard_ranks, checkpointing, micro_batch, attention="materialized"):
    how = {"checkpointing": checkpointing, "micro_batch": micro_batch, "attention": attention}
    return planner.plan(shape, ranks=shard_ranks, stage=stage, **how).total_bytes


def throughputs(shape, cluster, strategies, attention="materialized"):
    """Return each strategy's tokens per second and GPU, for each micro-batch that fits."""
    found = {strategy: {} for strategy in strategies}
    for (stage, shard_ranks, checkpointing), throughput in found.items():
        for micro_batch in range(1, 65):
            settings = (stage, shard_ranks, checkpointing, micro_batch)
            if held_bytes(shape, *settings, attention) > 0.9 * cluster.gpu_bytes:
                break
            step_s = clusters.step_seconds(shape, cluster, *settings)
            throughput[micro_batch] = micro_batch * shape.context / step_s
    return found


# %%
def hosts_of_8_a100(hosts, between_bytes_per_s=25e9):
    return clusters.Cluster(hosts, 8, 80e9, 156e12, 200e9, between_bytes_per_s)


llama_13b, one_host = SHAPES["Llama-2 13B"], hosts_of_8_a100(1)
strategies = [(stage, 8, how) for stage in range(4) for how in ("selective", "full")]
found, rows = throughputs(llama_13b, one_host, strategies), []
for (stage, over, how), throughput in found.items():
    gb = held_bytes(llama_13b, stage, over, how, micro_batch=1) / 1e9
    most, best = max(throughput, default=0), max(throughput.values(), default=0)
    mfu = 6 * llama_13b.parameters * best / 312e12
    rows.append([f"{stage}", how, f"{gb:.0f}", f"{most}", f"{best:,.0f}", f"{mfu:.0%}"])
fastest = max(found, key=lambda strategy: max(found[strategy].values(), default=0))
print(f"{predicted(my_prediction, 'stage {}')}computed stage {fastest[0]}")
header = ["stage", "recomputed", "GB", "largest micro-batch", "tokens/s per GPU", "MFU"]
tables.Table(header, rows, "GB with a micro-batch of 1. At most 72 GB of 80 may be used.")

# %%
assert fastest == (3, 8, "selective")
for attention in planner.ATTENTION:
    found = throughputs(llama_13b, one_host, strategies, attention)
    assert not any(found[strategy] for strategy in strategies[:5]) and found[2, 8, "full"]
    assert found[fastest][1] > 1.2 * max(found[2, 8, "full"].values())

# %% [markdown]
# Here, memory decides, and the *highest* stage is the fastest. Stages 0 and 1 do not fit. Stage 2 fits only if all
# activations are recomputed, which costs a third more FLOPs. Stage 3 has room for the activations. The speeds differ
# only because of this recomputation: on the fast links of one host, all communication is hidden. With fused attention,
# the choice is the same.
#
# Now take Llama-2 7B on four such hosts, with a link of 100 Gbit/s (12.5 GB/s) between them. In the table, "over" is
# the number of ranks over which the model state is sharded: with 8, it is sharded inside each host. Stage 0 shards
# nothing; its 32 is the number of all GPUs. Compare the throughput with one sequence per GPU, and with as many as fit:

# %%
four_hosts = hosts_of_8_a100(4, between_bytes_per_s=12.5e9)
strategies = [(0, 32, "selective")]
strategies += [(stage, over, "selective") for stage in (1, 2, 3) for over in (8, 32)]
found, rows = throughputs(llama, four_hosts, strategies), []
for strategy, throughput in found.items():
    sending_s = clusters.communication_seconds(llama, four_hosts, *strategy[:2])
    single, most = throughput.get(1, 0), max(throughput, default=0)
    figures = (*strategy[:2], sending_s, single, most, max(throughput.values(), default=0))
    rows.append([f"{each:,.4g}" for each in figures])
header = ["stage", "over", "sending, s", "tokens/s with 1", "largest micro-batch", "with that"]
tables.Table(header, rows, "Tokens/s per GPU. 0: does not fit.")

# %%
for attention in planner.ATTENTION:
    found = throughputs(llama, four_hosts, strategies, attention)
    single = {strategy: throughput[1] for strategy, throughput in found.items() if throughput}
    best = {strategy: max(found[strategy].values()) for strategy in single}
    assert len(single) == 6 and min(single, key=single.get) == (3, 32, "selective")
    assert max(single.values()) > 1.5 * single[3, 32, "selective"]
    assert best[3, 32, "selective"] > 0.99 * max(best.values())
    assert best[2, 8, "selective"] > 0.99 * max(best.values()) > 1.3 * best[1, 8, "selective"]

# %% [markdown]
# With one sequence per GPU, the link decides. Stage 3 over all 32 GPUs is the slowest, and the memory that it saves is
# not used. But that memory has room for more sequences. They take longer to compute, while the communication stays the
# same. Saving memory allows a larger batch, which hides communication. For stage 3 over all 32 GPUs, chapter 09's rule
# T > f · F/B asks for 12,090 tokens, and three sequences are 12,288. Stage 1 has no room for a second sequence, so it
# stays communication-bound.
#
# If several strategies are equally fast, take the lowest stage: from stage 2 on, each further micro-batch costs another
# reduce-scatter (chapter 08). And check that your training tolerates the global batch: two sequences on each of 32 GPUs
# are 262,144 tokens per step.

# %% [markdown]
# ## A training script
#
# The script `solutions/train.py` trains with any strategy of the registry. The next cell starts it with `torchrun`, as
# in a terminal, on a GPT of 0.4 MB. It prints mean losses, the median step time, and what rank 0 sent and held,
# including activations:

# %% tags=["nbval-ignore-output"]
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
command += ["-m", "solutions.train", "--strategy", "fsdp2", "--model", "gpt", "--steps", "20"]
root = Path(planner.__file__).parents[2]
done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=True)
print(done.stdout)

# %% [markdown]
# ## On a cluster
#
# | question | here | with NCCL and many hosts |
# |---|---|---|
# | How do I make the mesh? | `DeviceMesh` with a list of ranks | `init_device_mesh("cuda", (hosts, gpus_per_host))` |
# | Which ranks share a host? | we decide | consecutive ranks, because `torchrun` counts them per host |
# | What is the bandwidth between hosts? | loopback | `all_reduce_perf` of nccl-tests, or `shared/planner/links.py` |
# | How do I see prefetching? | wire ledger | spans in a trace of `torch.profiler` that begin with `FSDP::` |
# | Where are offloaded tensors? | in the same memory | in pinned CPU memory, so that copies overlap with computing |
#
# For Llama 3 405B, FSDP sharded the optimizer state and the gradients, but the parameters stayed unsharded until
# backward, to avoid the second all-gather (Llama 3 paper, §3.3.2).

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks on H hosts, k = N/H, S = 4Ψ bytes, f = (N−1)/N; one micro-batch.
#
# | | memory per rank | sent per rank | leaves a host | overlap |
# |---|---|---|---|---|
# | DDP | 16Ψ | 2fS | 2fS | backward |
# | `ZeroRedundancyOptimizer` | 8Ψ + 8Ψ/N | 3fS | 3fS | gradients only |
# | DeepSpeed 1 and 2 | 4Ψ + 16Ψ/N | 3fS | 3fS | if `overlap_comm` |
# | FSDP2 | 16Ψ/N + unsharded units | 3fS | 3fS | forward and backward |
# | … `reshard_after_forward=False` | 16Ψ/N + 4Ψ until backward | 2fS | 2fS | the same |
# | … hybrid sharding | 16Ψ/k + unsharded units | 3S(k−1)/k + 2S(H−1)/N | 2S(H−1)/H | the same |
#
# **Terms**
#
# - **hybrid sharding**: the model is sharded over the ranks of a host, and each host holds a full copy.
# - **device mesh**: an array of ranks whose dimensions have names, such as hosts × ranks per host.
# - **offload**: keeping tensors that do not fit on a GPU, such as the optimizer state, in the CPU's memory or on disk.
# - **MFU** (model FLOPs utilization): 6 × parameters × tokens per second and GPU, divided by the GPU's FLOP/s on paper.

# %% [markdown]
# ## Further reading
#
# - [Getting Started with FSDP2](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html): the whole
#   workflow, with explicit prefetching and a migration guide for FSDP1.
# - [FSDP1 → FSDP2](https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md) in torchtitan: why each argument of
#   FSDP1 was removed or renamed.
# - Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), VLDB 2023, §3.2.2: hybrid sharding.
# - Ren et al., [ZeRO-Offload](https://arxiv.org/abs/2101.06840), 2021: which tensors to move to the CPU, and how to
#   hide the step.
# - [DeepSpeed's config](https://www.deepspeed.ai/docs/config-json/): the keys and their defaults.

# %% [markdown]
# ## What is still wasted
#
# With each of these wrappers, a rank computes *whole layers*, on samples of its own. No strategy of this chapter helps
# if one unsharded layer does not fit, or if the activations of one long sequence do not. In the lab, `choose_strategy`
# then returns None. Chapter 13 splits the layer itself.
#
# In the lab, you also move to `fully_shard`, and create the mesh for any number of hosts. Chapter 12 then saves
# checkpoints, from which a killed run can resume.

# %%
ranks.stop()
