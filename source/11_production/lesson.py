# ---
# jupyter:
#   course:
#     module: production
#     minutes: 30
# ---

# %% [markdown]
# # 11 · Production
#
# **30 minutes.** You will be able to
#
# - say what torch's wrappers and DeepSpeed hold, send and keep from you, by measuring them beside your own,
# - choose in which types they compute and add up, and count what that costs,
# - shard inside a host only, and predict the bytes that leave it,
# - compute which strategy a model needs on given GPUs, and refute slogans.
#
# You need chapters 07 to 10 (the stages of ZeRO, and FSDP), and chapter 06's count of a rank's memory.

# %% [markdown]
# ## What is still wasted
#
# The wrappers that you have built are right, and fast. But they know nothing of hosts. Let ranks 0 and 1 be one host,
# and 2 and 3 another. How many bytes leave a host in a step?

# %% tags=["nbval-ignore-output"]
from shared import formulas, planner, plots, ranks, tables
from shared.planner import clusters
from shared.planner.shapes import SHAPES

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from shared import memory, wire
from shared.data import CharTokens
from shared.models import Block, GPTConfig, TinyGPT
from solutions.zero3 import ZeRO3

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=256)
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}


def new_model():
    return TinyGPT(config).to(device)


def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


def my_share(number):
    """→ this rank's part of the eight samples of a step"""
    batch = text.windows(range(1000 * number, 1000 * number + 800, 100), length=32)
    return [tensor[rank::world_size].to(device) for tensor in batch]


# %%
# %%ranks
def backward(model, optimizer, number):
    """Leave each shard its part of the mean gradient. → this rank's loss"""
    optimizer.zero_grad()
    loss = model(*my_share(number))
    loss.backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    return loss.detach()


def step_of(model, optimizer, number):
    loss = backward(model, optimizer, number)
    optimizer.step()
    return loss


def leave_host(log):
    """→ bytes for the other host: a message's go to its receiver, a collective's to the next rank of its ring"""
    sent_bytes = 0
    for entry in log.entries:
        ring = entry.group_ranks
        following = ring[(ring.index(rank) + 1) % len(ring)]
        receiver = following if entry.partner is None else entry.partner
        sent_bytes += entry.sent_bytes if receiver // 2 != rank // 2 else 0
    return sent_bytes


# %%
# %%ranks
ours = with_adamw(ZeRO3(new_model()))
step_of(*ours, 0)
with wire.ledger() as log:
    step_of(*ours, 1)
leave_bytes = leave_host(log)
psi = sum(parameter.numel() for parameter in new_model().parameters())
ours = None

# %%
psi, host_bytes = ranks.pull("psi")[0], sum(ranks.pull("leave_bytes")[:2])  # ranks 0 and 1
assert host_bytes > 2 * 4 * psi
print(
    f"Ψ = {psi:,} parameters in fp32; {host_bytes / (4 * psi):.2f} × 4Ψ bytes leave a host in a step of ZeRO3"
)

# %% [markdown]
# The model crosses the slow wire three times per step, although the two ranks of a host could hold it between them.
# (Over gloo, each rank of our ZeRO3 sends to every other rank directly.) Production wrappers have an answer to that.
#
# ## Twelve ways to train one model
#
# First, all of them in one table: yours, and what torch and DeepSpeed have for each stage.


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1
from solutions.zero2 import ZeRO2

cap = {"bucket_cap_mb": 2.0}


def in_ddp():
    return DistributedDataParallel(new_model(), gradient_as_bucket_view=True, **cap)


def in_fsdp1(strategy):
    """FSDP1: one wrapper object, and a policy that says which modules are units."""
    how = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
    how["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(new_model(), device_id=device, **how)


def in_fsdp2(mesh=None, **options):
    """FSDP2: a call per unit, then one for the rest. By default, it shards over all ranks."""
    model, mesh = new_model(), mesh or init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# %%
# %%ranks
def stepped_by(optimizer_cls, model):
    return model, optimizer_cls(model.parameters(), AdamW, **settings)


def in_zero2():
    both = ZeRO2(new_model(), AdamW, **cap, **settings)
    return both, both


def in_deepspeed(stage, **options):
    return deepspeed_engine.engine(new_model(), stage, AdamW, **cap, **settings, **options)


def ways():
    """→ name, which begins with the stage: a function that makes model and optimizer"""
    yield "0 · OverlappedDDP", lambda: with_adamw(OverlappedDDP(new_model(), **cap))
    yield "0 · DDP", lambda: with_adamw(in_ddp())
    yield "1 · ZeRO1", lambda: stepped_by(ZeRO1, new_model())
    yield "1 · ZeroRedundancyOptimizer", lambda: stepped_by(ZeroRedundancyOptimizer, in_ddp())
    yield "1 · DeepSpeed", lambda: in_deepspeed(1)
    yield "2 · ZeRO2", in_zero2
    yield "2 · DeepSpeed", lambda: in_deepspeed(2)
    yield "2? · FSDP1, SHARD_GRAD_OP", lambda: with_adamw(in_fsdp1("SHARD_GRAD_OP"))
    yield "3 · ZeRO3", lambda: with_adamw(ZeRO3(new_model()))
    yield "3 · FSDP1, FULL_SHARD", lambda: with_adamw(in_fsdp1("FULL_SHARD"))
    yield "3 · FSDP2", lambda: with_adamw(in_fsdp2())
    yield "3 · DeepSpeed", lambda: in_deepspeed(3)


# %% [markdown]
# On two ranks, so that each has a core, and DeepSpeed (a slow import) is not imported four times.
#
# **Predict**, for N = 2: what must each stage send per rank and step, as a multiple of 4Ψ bytes? (f = 1/2. One
# micro-batch.)

# %%
my_prediction = {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}


# %%
# %%ranks
def measured(model, optimizer):
    """→ losses of six steps, held before a step, a ledger, memory at the peak"""
    losses = [step_of(model, optimizer, number) for number in range(3)]
    losses.append(backward(model, optimizer, 3))
    held = memory.held(model, optimizer)
    optimizer.step()
    with wire.ledger() as log:
        losses.append(step_of(model, optimizer, 4))
    with memory.peak(model, optimizer) as peak:
        losses.append(step_of(model, optimizer, 5))
    mean = torch.stack(losses) / world_size
    dist.all_reduce(mean)
    return mean.tolist(), held, log, peak.held


# %%
# %%ranks
def measure_all():
    missing = deepspeed_engine.why_not()
    made = {name: make for name, make in ways() if not (missing and "DeepSpeed" in name)}
    return {name: measured(*make()) for name, make in made.items()}, missing


# %% tags=["nbval-ignore-output"]
with ranks.world(2):
    seen, missing = ranks.run(lambda: measure_all(), timeout_s=110)[0]
short = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "broadcast": "BC"}
rows = []
for name, (losses, held, log, at_peak) in seen.items():
    by_op = [f"{n} {short.get(op, op)}" for op, n in log.ops.items() if op != "recv"]
    sizes = (held.total_bytes, at_peak.total_bytes, log.sent_bytes)
    row = [name, f"{losses[-1]:.4f}", *(f"{size / (4 * psi):.2f}" for size in sizes)]
    rows.append([*row, ", ".join(by_op)])
header = ["stage · way", "loss", "held", "peak", "sent", "messages"]
note = """On 2 ranks. Held when backward has ended, at the peak, must send: in 4Ψ bytes. (1.49: the root is
gathered once; ours sends by hand over gloo; DeepSpeed gathers module by module.)
AR all-reduce, AG all-gather, RS reduce-scatter, BC broadcast"""
tables.Table(header, rows, "\n".join([note] + [missing] * bool(missing)))

# %%
of_step = [[losses[number] for losses, *_ in seen.values()] for number in range(6)]
apart = max(max(losses) - min(losses) for losses in of_step)
print(f"losses of six steps are apart by less than 1e-4: {apart < 1e-4}")
assert apart < 1e-4
sent = {name: log.sent_bytes / (4 * psi) for name, (_, _, log, _) in seen.items()}
for name in ("0 · OverlappedDDP", "1 · ZeRO1", "2 · ZeRO2", "3 · ZeRO3"):
    stage = int(name[0])
    formula = formulas.step_sent_bytes(psi, 2, stage, 4) / (4 * psi)
    print(f"stage {stage}: predicted {my_prediction[stage]:g}, formula {formula:g}", end=", ")
    print(f"measured {sent[name]:.2f}")
    assert abs(sent[name] - formula) < 0.02
others = [f"1 · {name}" for name in ("ZeroRedundancyOptimizer", "DeepSpeed")]
assert all(abs(sent.get(name, 1.5) - 1.5) < 0.02 for name in [*others, "2 · DeepSpeed"])

# %% [markdown]
# What each holds when backward has ended, by component:

# %% tags=["nbval-ignore-output"]
plots.memory_by_component({name: held.by_component() for name, (_, held, *_) in seen.items()})

# %% [markdown]
# **Who sends what, and why.** The losses are the same in every row: it is the same training. By the formulas (ZeRO,
# §7) stages 0 to 2 send 2f · 4Ψ, and only stage 3 sends 3f · 4Ψ: 1 and 1.5 here. Three rows do not keep to it. That is
# no law of stages 1 and 2, it is how these are written:
#
# - torch's `ZeroRedundancyOptimizer` steps behind DDP, which all-reduces (2f). Then every rank broadcasts what it has
#   stepped, each parameter by itself (f): hence the messages.
# - DeepSpeed's stages 1 and 2 all-reduce a bucket whole, keep their part of it (2f), and gather in the end (f).
#
# **Who holds what.** Parameters are whole up to stage 2, gradients up to stage 1, the optimizer's state at stage 0
# only. DeepSpeed keeps a master copy of its part also where parameters are fp32 (12Ψ/N for 8Ψ/N; in bf16, for which it
# is made, that is no extra), lets go of gradients at stage 1 already, and has them, buckets, and the shards of stage 3
# where no parameter or gradient shows them (*other*).
#
# How long a step lasts is not in the table: `python -m benchmarks.ladder` measures it, all ways in turns.
#
# **Who does something else.** Losses should be compared whenever a wrapper is changed. DeepSpeed 0.19 clips the norm of
# gradients to 1, unless it is told not to. Here it was told. If not:


# %%
# %%ranks
def clipped(steps=3):
    """→ how far losses of clipped gradients are from the others', step by step"""
    losses = []
    for largest_norm in (0.0, 1.0):
        model, optimizer = in_deepspeed(2, gradient_clipping=largest_norm)
        losses.append(torch.stack([step_of(model, optimizer, number) for number in range(steps)]))
    return (losses[0] - losses[1]).abs().tolist()


# %% tags=["nbval-ignore-output"]
if not missing:
    with ranks.world(2):
        apart = ranks.run(lambda: clipped())[0]
    print("losses of the first steps are apart by", *(f"{each:.4f}" for each in apart))
    assert apart[0] < 1e-6 and apart[2] > 1e-3

# %% [markdown]
# AdamW, which divides gradients by their size, hides it for a step or two. No error will tell you.
#
# ## FSDP1, as history
#
# Much code still has FSDP1, and much text its *sharding strategies*. `SHARD_GRAD_OP` is often put down as "ZeRO-2".
# Then parameters would be whole all the time. Look at them: at rest, when forward ends, at the peak, when the optimizer
# steps.
#
# **Predict** for `SHARD_GRAD_OP` on 4 ranks, as parts of Ψ: between steps, and when forward ends.

# %%
my_prediction = 0.0, 0.0


# %%
# %%ranks
def parameters_over(model, optimizer):
    """→ bytes of parameters at rest, when forward ends, at the peak, in the optimizer's step; gathers; bytes to send"""
    step_of(model, optimizer, 0)
    optimizer.zero_grad()
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        step_of(model, optimizer, 1)
    held = [(sample.phase, sample.held.parameters_bytes) for sample in peak.samples]
    of_forward = [size for phase, size in held if phase == "forward"]
    sizes = held[0][1], of_forward[-1], max(size for _, size in held), held[-1][1]
    return sizes, log.ops.get("all_gather", 0), log.sent_bytes


history = {
    "ZeRO2 (ours)": in_zero2(),
    "SHARD_GRAD_OP": with_adamw(in_fsdp1("SHARD_GRAD_OP")),
    "FULL_SHARD": with_adamw(in_fsdp1("FULL_SHARD")),
    "FSDP2": with_adamw(in_fsdp2()),
    "FSDP2, kept after forward": with_adamw(in_fsdp2(reshard_after_forward=False)),
}
history = {name: parameters_over(*made) for name, made in history.items()}

# %%
history, rows = ranks.pull("history")[0], []
for name, (sizes, gathers, sent_bytes) in history.items():
    half = formulas.all_gather_sent_bytes(4 * psi, ranks=4)
    of_psi = [f"{size / (4 * psi):.2f}" for size in sizes]
    rows.append([name, *of_psi, str(gathers), f"{sent_bytes / half:.2f}"])
at_rest, forward_ends = (size / (4 * psi) for size in history["SHARD_GRAD_OP"][0][:2])
print(f"predicted {my_prediction}, measured {at_rest:.2f} and {forward_ends:.2f} Ψ")
assert history["ZeRO2 (ours)"][0] == (4 * psi,) * 4
header = ["", "at rest", "forward ends", "peak", "step", "gathers", "sent"]
tables.Table(header, rows, "Parameters as parts of Ψ, on 4 ranks. Sent: in f · 4Ψ bytes.")

# %% [markdown]
# `SHARD_GRAD_OP` gathers each unit once, keeps it until its backward has ended, and has shards again when the optimizer
# steps. So it is *not* ZeRO-2: at rest it holds Ψ/N parameters, at the peak what ZeRO-2 has and a shard on top, and it
# gathers before forward what ZeRO-2 gathers after the step. FSDP2 has it as `reshard_after_forward=False`.
# (`FULL_SHARD` has two units at its peak: in backward it gathers one ahead. So does FSDP2, into a buffer that is no
# parameter yet.)
#
# Of the other strategies, `NO_SHARD` is deprecated: torch's own warning sends you to DDP. `HYBRID_SHARD` is FSDP2 on a
# mesh of two dimensions, below. The default of `auto_wrap_policy` is none, which makes one unit of the whole model:
# chapter 09 has measured its peak.
#
# ## In which type?
#
# Chapter 06: compute in bf16, keep and step in fp32. Wrappers differ in what travels. `torch.autocast` rounds inside
# the operators, so DDP's parameters and gradients stay fp32. FSDP2's `MixedPrecisionPolicy` has two types:
# `param_dtype`, in which a unit is gathered and computes, and `reduce_dtype`, in which gradients travel and are added
# up (by default the same). Off by: the distance of the mean gradient to that of fp32, relative to its length.


# %%
# %%ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

bf16 = torch.bfloat16


def gradient_of(model, autocast=False):
    """→ the whole mean gradient, the ledger of its backward and forward"""
    with wire.ledger() as log:
        with torch.autocast(device.type, bf16, enabled=autocast):
            loss = model(*my_share(0))
        loss.backward()
    gradients = [p.grad for p in model.parameters()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return torch.cat([each.flatten() for each in whole]), log


def in_types(param_dtype=None, reduce_dtype=None):
    return in_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))


in_each = {
    "DDP, fp32": gradient_of(in_ddp()),
    "DDP, autocast to bf16": gradient_of(in_ddp(), autocast=True),
    "FSDP2, fp32": gradient_of(in_types()),
    "FSDP2, bf16": gradient_of(in_types(bf16)),
    "FSDP2, bf16, sum in fp32": gradient_of(in_types(bf16, torch.float32)),
    "FSDP2, fp32, sum in bf16": gradient_of(in_types(None, bf16)),
}

# %% tags=["nbval-ignore-output"]
in_each, rows = ranks.pull("in_each")[0], []
exact = in_each["DDP, fp32"][0]
off = {name: float((each - exact).norm() / exact.norm()) for name, (each, _) in in_each.items()}
for name, (_, log) in in_each.items():
    types = {entry.op: entry.dtype for entry in log.entries}
    added_up = types.get("all_reduce") or types["reduce_scatter"]
    row = [name, types.get("all_gather", "–"), added_up]
    rows.append([*row, f"{log.sent_bytes / 1e6:.2f}", f"{off[name]:.1e}"])
sent_mb = {name: log.sent_bytes / 1e6 for name, (_, log) in in_each.items()}
assert sent_mb["DDP, autocast to bf16"] == sent_mb["DDP, fp32"]
assert sent_mb["FSDP2, bf16"] == sent_mb["FSDP2, fp32"] / 2
computing, adding = off["FSDP2, bf16, sum in fp32"], off["FSDP2, fp32, sum in bf16"]
assert off["FSDP2, fp32"] < 1e-6 < adding < computing
assert 0.7 < off["FSDP2, bf16"] ** 2 / (computing**2 + adding**2) < 1.3
tables.Table(["", "gathered in", "added up in", "sent, MB", "gradient off by"], rows)

# %% [markdown]
# Autocast spares DDP no byte. A policy halves the gathers, and with `reduce_dtype=torch.float32` a step sends as much
# as DDP's: 2f · 2Ψ + f · 4Ψ. The shards, and so the optimizer's work, are fp32 in all rows. (A policy computes
# *everything* of a unit in its type. Autocast has a list of operators, and leaves the sum of a block's input and output
# in fp32.)
#
# What does a sum in bf16 cost? The last row has it alone. With 4 ranks it is below what computing in bf16 costs anyway,
# and where both come together their squares add up, so that little more is seen. But a ring rounds at each rank:

# %%
import torch

gradients = torch.randn(1024, 10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
rows = []
for count in (4, 64, 1024):
    total, exact = gradients[0].clone(), gradients[:count].double().sum(0)
    for each in gradients[1:count]:  # one rank after another
        total += each
    rows.append([f"{count:,}", f"{float((total - exact).norm() / exact.norm()):.3f}"])
tables.Table(["ranks", "sum off by"], rows, "random numbers, added up in bf16")

# %% [markdown]
# With 4 it is what the row had. On many ranks, let gradients travel in fp32.

# %% [markdown]
# ## Hybrid sharding
#
# Back to the two hosts. Each could hold the model between its two ranks. So shard inside a host only, and let hosts be
# copies of each other. Ranks lie in a *mesh*, a row per host: parameters are shared out along a row, gradients are
# added up along a row (reduce-scatter), and then, each rank's part by itself, along a column (all-reduce).
# `fully_shard` does so when it is given a mesh of two dimensions, hosts first. (Here its ranks are listed;
# `init_device_mesh(device_type, shape, mesh_dim_names=…)` counts them up in rows.)

# %%
# %%ranks
from torch.distributed.device_mesh import DeviceMesh

mesh = DeviceMesh(device.type, [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
hybrid = with_adamw(in_fsdp2(mesh=mesh))
step_of(*hybrid, 0)
with wire.ledger() as log:
    step_of(*hybrid, 1)
if rank == 0:
    for op in log.ops:
        entries = [entry for entry in log.entries if entry.op == op]
        mb = sum(entry.payload_bytes for entry in entries) / 1e6
        print(f"{len(entries)} {op}, {mb:.2f} MB, among ranks {entries[0].group_ranks}")

# %% [markdown]
# Only the all-reduce meets the other host, with half of the gradients. **Predict** for N = 4 ranks on H = 2 hosts: how
# many times S = 4Ψ bytes leave a host per step? A ring goes once around all ranks, so one rank of a host sends to the
# next host.
#
# | | ring | leaves a host |
# |---|---|---|
# | data parallelism | all-reduce of S among N | 2S(N−1)/N |
# | fully sharded | two gathers and a reduce-scatter of S among N | 3S(N−1)/N |
# | hybrid | k = N/H rings at once, each an all-reduce of S/k among H | ? |

# %%
my_prediction = 0.0

# %%
# %%ranks
ways_between = {
    "data parallelism": with_adamw(in_ddp()),
    "fully sharded": with_adamw(in_fsdp2()),
    "hybrid": hybrid,
}
left = {}
for name, made in ways_between.items():
    step_of(*made, 2)
    made[1].zero_grad()
    at_rest_bytes = memory.held(*made).total_bytes
    with wire.ledger() as log:
        step_of(*made, 3)
    left[name] = leave_host(log), log.sent_bytes, at_rest_bytes

# %%
of_ranks, size, rows = ranks.pull("left"), 4 * psi, []
by_formula = {"data parallelism": 2 * 3 / 4, "fully sharded": 3 * 3 / 4, "hybrid": 2 * 1 / 2}
for name, expected in by_formula.items():
    leave = (of_ranks[0][name][0] + of_ranks[1][name][0]) / size
    _, sent_bytes, at_rest_bytes = of_ranks[0][name]
    assert abs(leave - expected) < 0.03
    row = (leave, expected, sent_bytes / size, at_rest_bytes / size)
    rows.append([name, *(f"{each:.2f}" for each in row)])
print(f"predicted {my_prediction:g}")
header = ["", "leaves a host", "formula", "a rank sends", "a rank holds at rest"]
tables.Table(header, rows, "In S = 4Ψ bytes, 4 ranks on 2 hosts. FSDP2 gathers the root once.")

# %% [markdown]
# 2S(H−1)/H: here less than half of what full sharding lets out, and less than data parallelism. It never is more than
# 2S, whatever a host's number of ranks. The price is memory: a rank shares with those of its host, not with all. (Ours
# let out 3S above, for over gloo each of its ranks sends to each other one itself.)

# %% [markdown]
# ## Choosing
#
# Which stage, then, over which ranks, and how much is recomputed? Two terms decide.
#
# - **What fits**: chapter 06's planner, with a tenth of each GPU's memory left free.
# - **What is fast**: a step takes as long as the longer of computing (6 flops per parameter and token, 8 with all
#   activations recomputed) and sending (bytes at the rate of the slowest wire), as if all of the shorter could hide
#   behind the longer. `shared/planner/clusters.py` has both.
#
# Of what fits, take the fastest, whatever its stage. Llama-3 8B, on one host of eight GPUs of 80 GB that reach 156
# TFLOP/s (half of what an A100 has on paper), one sequence of 8,192 tokens each. **Predict**: at which stage is a step
# shortest?

# %%
my_prediction = 0


# %%
def row_of(shape, cluster, stage, shard_ranks, checkpointing):
    how = {"stage": stage, "checkpointing": checkpointing}
    held_bytes = planner.plan(shape, ranks=shard_ranks, **how).total_bytes
    fits = held_bytes <= 0.9 * cluster.gpu_bytes
    sending_s = clusters.communication_seconds(shape, cluster, stage, shard_ranks)
    step_s = clusters.step_seconds(shape, cluster, shard_ranks=shard_ranks, **how)
    sizes = f"{held_bytes / 1e9:.0f}", "yes" if fits else "no"
    times = f"{sending_s:.2f}", f"{step_s:.2f}"
    return [f"{stage}", f"{shard_ranks}", checkpointing, *sizes, *times]


def hosts_of_eight(hosts, between_bytes_per_s):
    return clusters.Cluster(hosts, 8, 80e9, 156e12, 200e9, between_bytes_per_s)


header = ["stage", "over", "recomputed", "GB", "fits", "sending, s", "step, s"]
llama_8b, one_host = SHAPES["Llama-3 8B"], hosts_of_eight(1, 25e9)
recomputed = ("selective", "full")
rows = [row_of(llama_8b, one_host, stage, 8, how) for stage in range(4) for how in recomputed]
shortest = min((row for row in rows if row[4] == "yes"), key=lambda row: float(row[-1]))
print(f"predicted stage {my_prediction}, computed {shortest[0]}")
tables.Table(header, rows, "fits: at most 72 GB of a GPU's 80")

# %% [markdown]
# Here *what fits* decides, and the highest stage is the fastest. All stages have time to send. Stages 1 and 2 fit only
# if all activations are recomputed, which costs a third; stage 3 has room for them. Bytes of memory have bought time.
#
# Now Llama-2 7B on four such hosts, 100 Gbit/s (12.5 GB/s) between them.

# %%
llama_7b, four_hosts = SHAPES["Llama-2 7B"], hosts_of_eight(4, 12.5e9)
over = [(0, 32)] + [(stage, group) for stage in (1, 2, 3) for group in (32, 8)]
rows = [row_of(llama_7b, four_hosts, stage, group, "selective") for stage, group in over]
assert max(rows, key=lambda row: float(row[-1]))[:2] == ["3", "32"]
tables.Table(header, rows)

# %% [markdown]
# Everything but data parallelism fits, so *what is fast* decides, and that is the wire. Stage 3 over all 32 GPUs is
# the slowest: it saves memory that nobody needs. Stages 1 and 2 inside hosts last equally long, and then the lower one
# is better: more micro-batches per step cost it no more bytes (chapter 08).
#
# ## Slogans
#
# Numbers like these settle what circulates. On GPUs of 80 GB, "data parallelism up to 8 B parameters", "ZeRO-2 up to
# 70 B", and "a Llama of 70 B fits one node" of 8 GPUs, so that 32 GPUs hold 4 copies:

# %%
state = formulas.model_state_bytes
of_8 = 70e9 / 8  # parameters on a rank, where tensor parallelism splits layers in 8 (chapter 13)
needs = {
    "data parallelism, 8 B": state(8e9, 1, 0),
    "ZeRO-2, 70 B, 8 GPUs": state(70e9, 8, 2),
    "ZeRO-2, 70 B, 1,024 GPUs": state(70e9, 1024, 2),
    "70 B, 32 GPUs: layers split in 8, 4 copies": state(of_8, 4, 0),
    "… 4 ranks share by ZeRO-1": state(of_8, 4, 1),
    "… 4 ranks share by ZeRO-3": state(of_8, 4, 3),
}
rows = [[what, f"{each / 1e9:.1f}", "yes" if each < 80e9 else "no"] for what, each in needs.items()]
largest = formulas.largest_model_parameters(80e9)
print(f"data parallelism: at most {largest / 1e9:.1f} B; ZeRO-2, N → ∞: {80e9 / 2 / 1e9:.0f} B")
tables.Table(["", "GB", "below 80 GB"], rows, "16 bytes per parameter, no activations")

# %% [markdown]
# "Memory bound? Use ZeRO" mixes two things up: *capacity*, what fits, which ZeRO is for, and *bandwidth*, how fast
# memory is read, which it does nothing for. The table of the 7 B model is what comes of it: what fits at stage 1 takes
# longest when it is sharded over all GPUs at stage 3.
#
# ## What they do that ours do not
#
# - **Offload.** Optimizer's state and step in the host's memory (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840), or
#   everything down to NVMe (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857). FSDP2 has `CPUOffloadPolicy`.
#   The wire between GPU and host pays for it: count its bytes too.
# - **Activations in host memory**, `torch.autograd.graph.save_on_cpu`: instead of computing them again.
# - **Gathers in 8 bit**, gradients in 4, and a second copy of the shards inside each host, so that the gather of
#   backward stays there: ZeRO++ (Wang et al. 2023, arXiv 2306.10209). Chapter 19 builds the like.
#
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks on H hosts, S = 4Ψ bytes, f = (N−1)/N; one micro-batch.
#
# | | memory per rank | sent per rank | leaves a host | overlap |
# |---|---|---|---|---|
# | DDP | 16Ψ | 2fS | 2fS | backward |
# | ZeroRedundancyOptimizer | 8Ψ + 8Ψ/N | 3fS | 3fS | gradients, not the broadcasts |
# | DeepSpeed 1 and 2 | 4Ψ + 16Ψ/N | 3fS | 3fS | gradients, if `overlap_comm` |
# | FSDP2, kept after forward | 16Ψ/N + 4Ψ from forward to backward | 2fS | 2fS | gathers, reduce-scatters |
# | FSDP2 | 16Ψ/N and gathered units | 3fS | 3fS | the same |
# | … in bf16; sum in fp32 | 16Ψ/N and units of half the size | 1.5fS; 2fS | as sent | the same |
# | … on a mesh of H hosts, k = N/H | 16Ψ/k and gathered units | 3S(k−1)/k + 2S(H−1)/N | 2S(H−1)/H | the same |
#
# ## What is still wasted
#
# Whichever wrapper it is, each rank computes *whole layers*, one after another, on a batch of its own. A layer that
# does not fit when it is gathered, or the activations of one long sequence, no strategy of this chapter makes smaller:
# `choose_strategy` in the lab then says None. Chapter 13 splits the layer itself.
#
# In the lab you move from `ZeRO3` to `fully_shard`, make the mesh for any number of hosts, and compute the choice. Then
# chapter 12 makes sure that a run that is killed does not lose what it has learned.

# %%
ranks.stop()
