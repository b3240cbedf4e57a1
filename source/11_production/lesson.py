# ---
# jupyter:
#   course:
#     module: production
# ---

# %% [markdown]
# # 11 · Production
#
# **45–65 minutes.** After this lesson, you will be able to:
#
# - compare what torch's and DeepSpeed's wrappers send and hold with what yours do,
# - shard inside a host only, and predict the bytes that leave the host,
# - draw the roofline of a cluster, and read from it which strategy is fastest, and why,
# - find two defaults that change the result without a warning,
# - recognize these settings in DeepSpeed, Accelerate, Lightning and the Hugging Face Trainer.
#
# You need the stages of ZeRO (chapters 07 to 10) and the planner (chapter 06).

# %% [markdown]
# ## Where we are
#
# Meta trained Llama 3 405B with FSDP, but not with all of its defaults: parameters stayed unsharded from forward until
# backward (Llama 3 paper, §3.3.2). What did that save, and what did it cost? By the end of this lesson, you can compute
# both.
#
# In chapter 10, you finished `ZeRO3`, and met its counterpart in torch: `fully_shard`, also called FSDP2. Both treat
# all ranks alike, but on a cluster, ranks are not alike: the links between the GPUs of one host can be ten times as
# fast as those between hosts. Suppose that ranks 0 and 1 are on one host, and ranks 2 and 3 on another. How many bytes
# leave a host in one step?

# %% tags=["nbval-ignore-output"]
import torch

from shared import deepspeed_engine, formulas, planner, ranks, tables
from shared.planner import clusters
from shared.planner.shapes import SHAPES
from shared.plots import costs, diagrams
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
# between them. Before you cut this traffic, find out what a wrapper has to send at all.

# %% [markdown]
# ## One model, ten wrappers
#
# Do the wrappers of torch and DeepSpeed send what yours send? The course's registry (`solutions/strategies.py`) has all
# of them. The next cells train the same GPT with ten, on two ranks.
#
# **Predict.** In one step with N = 2 ranks, how many bytes does a rank send at each stage, as a multiple of S = 4Ψ? 1
# means as many bytes as the parameters take. And does any of the ten send more than it has to?

# %%
my_prediction = {0: None, 1: None, 2: None, 3: None}


# %%
# %%ranks
from solutions.strategies import STRATEGIES, Options

names = ["overlapped_ddp", "ddp", "zero1", "zero_redundancy", "deepspeed1"]
names += ["zero2", "deepspeed2", "zero3", "fsdp2", "deepspeed3"]
options = Options(AdamW, {"lr": 1e-3}, bucket_cap_mb=2.0)


def measured(strategy):
    """Train for six steps. Returns the losses, a step's ledger, and what is held after a backward."""
    model, optimizer = strategy.build(new_model(), options)
    losses = [step(model, optimizer, number) for number in range(4)]
    with wire.ledger() as log:
        losses.append(step(model, optimizer, 4))
    optimizer.zero_grad()
    losses.append(backward(model, 5))
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
by_step = zip(*(losses for _, losses, *_ in seen.values()), strict=True)
assert max(max(losses) - min(losses) for losses in by_step) < 5e-3
assert all(abs(sent_by.get(f"DeepSpeed {stage}", 1.5) - 1.5) < 0.05 for stage in (1, 2))

# %% [markdown]
# All ten losses agree. The bytes do not. By the formulas (ZeRO paper, §7), stages 0 to 2 send 2fS, with f = (N−1)/N,
# and only stage 3 sends 3fS. Your wrappers do just that. The ZeRO ones show up as `send`, because they use lab 01's
# collectives, which are built from messages. Two well-known implementations of the lower stages send 3fS as well:
#
# - torch's `ZeroRedundancyOptimizer` is used with DDP, which all-reduces the gradients (2fS). Afterwards, each rank
#   broadcasts the parameters that it has updated (fS).
# - DeepSpeed's stages 1 and 2 all-reduce a whole bucket and keep a shard of it (2fS), as long as
#   `use_multi_rank_bucket_allreduce` is on. At the end, they all-gather the parameters (fS).
#
# DeepSpeed also holds S/2 of fp32 master weights, even if the parameters are fp32 already, and at stage 3 a bucket. Its
# stage 1 makes up for that: after backward, it frees the gradients of the other rank, S/2 with N = 2. So its stages 1
# and 2 look alike here. They differ *during* backward, when stage 1 holds full gradients, and stage 2 frees them bucket
# by bucket (chapter 08).

# %% [markdown]
# ## Sharding inside a host only
#
# Why send parameters between hosts at all, if one host can hold the model? **Hybrid sharding** shards it over the ranks
# of each host, so each host holds a full copy. The ranks form a **device mesh**, an array of ranks whose dimensions
# have names. Here, it has one row per host. In the diagram, all-gathers and reduce-scatters run along a row. After the
# reduce-scatter, each rank all-reduces its shard of the gradients along its column, with the rank that holds the same
# shard. Only this all-reduce leaves a host.

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
# With hybrid sharding, 2S(H−1)/H bytes leave a host, here less than half as many as with full sharding. With many
# hosts, the saving shrinks to a third, 2S instead of 3S. The price is memory: the model is split over the k ranks of a
# host, not all N. Between steps, only DDP still holds gradients, in its buckets.

# %% [markdown]
# ## A middle way: reshard to a host
#
# Hybrid sharding pays for its few bytes with memory that is held all the time. FSDP2 has a middle way:
# `reshard_after_forward` may be an integer k. Between forward and backward, a unit then keeps 1/k of its parameters on
# each rank, so that the all-gather in backward involves only k ranks. With k = 2, these are the two ranks of a host.
# DeepSpeed's hpZ (`zero_hpz_partition_size`) does the same, but keeps these shards until the optimizer steps. In the
# table, look at what leaves a host, and at the parameters held after forward:


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
# forward and backward instead of 1.25 S. The last row is what FSDP1 called `SHARD_GRAD_OP`. It is not ZeRO-2: while
# the optimizer steps, a rank holds a quarter of the parameters, where ZeRO-2 holds all.

# %% [markdown]
# ## Choosing: the roofline
#
# Now you have a dozen strategies. Which is the fastest for your model on your cluster? It need not be the one that
# sends the least: bytes cost nothing as long as computation hides them. So compare the two times of a step:
#
# - computation: 6 FLOPs per parameter and token, or 8 if everything is recomputed. It grows with the tokens per GPU.
# - communication: the bytes above, but in bf16, so S = 2Ψ. For one micro-batch, they do not depend on the tokens.
#
# The planner assumes that the two overlap completely, so the longer one decides (`shared/planner/clusters.py`). That
# flatters stages 0 to 2, as you will see below. Drawn against the tokens per GPU, throughput rises as long as
# communication decides, and stays flat, at the *roof*, once computation does. Between the two is the knee (chapter 05).
# With stage 3, it is at T = f · F/B, as in chapter 09, with f = (N−1)/N, F FLOP/s per GPU and B bytes per second on the
# slowest link. The line turns dotted where the activations of so many tokens no longer fit into memory. This picture is
# called a **roofline**. Usually, its x axis is FLOPs per byte, which here are proportional to the tokens.


# %%
def line(shape, cluster, stage, over):
    """Return tokens per second and GPU as a function of the tokens per GPU, and the most tokens that fit."""

    def fits(sequences):
        how = {"checkpointing": "selective", "micro_batch": sequences, "attention": "materialized"}
        held_bytes = planner.plan(shape, ranks=over, stage=stage, **how).total_bytes
        return held_bytes <= 0.9 * cluster.gpu_bytes

    def throughput(tokens):
        how = (stage, over, "selective", tokens / shape.context)
        return tokens / clusters.step_seconds(shape, cluster, *how)

    sequences = 0
    while fits(sequences + 1):
        sequences += 1
    return throughput, sequences * shape.context


# %% [markdown]
# **Predict.** You train Llama-2 7B with sequences of 4,096 tokens on four hosts of eight A100s, with 100 Gbit/s (12.5
# GB/s) between the hosts. Sharded "over 8" means inside each host, "over 32" over all GPUs. Assume that an A100 reaches
# 156 TFLOP/s. How many sequences per GPU does stage 3 over 32 need until computation takes as long as communication?

# %%
my_prediction = None

# %%
llama = SHAPES["Llama-2 7B"]
four_hosts = clusters.Cluster(
    4, 8, 80e9, flops=156e12, inside_bytes_per_s=200e9, between_bytes_per_s=12.5e9
)
strategies = [(1, 8), (2, 32), (3, 32), (2, 8)]
lines = {(stage, over): line(llama, four_hosts, stage, over) for stage, over in strategies}
sequence_s = 6 * llama.parameters * llama.context / four_hosts.flops
needed = clusters.communication_seconds(llama, four_hosts, 3, 32) / sequence_s
print(f"{predicted(my_prediction, '{} sequences')}computed {needed:.2f} sequences")
title = (
    "Stage 3 sends the most, but has memory for the most tokens\n"
    "Llama-2 7B on 4 × 8 A100, 100 Gbit/s between hosts (computed)"
)
by_name = {f"stage {stage} over {over}": each for (stage, over), each in lines.items()}
costs.roofline(by_name, (1024, 32768), title)

# %% tags=["claims"]
assert min(lines, key=lambda strategy: lines[strategy][0](llama.context)) == (3, 32)
throughput_of = {strategy: [f(most), f(4096)] for strategy, (f, most) in lines.items()}
assert throughput_of[2, 8][1] / throughput_of[3, 32][1] > 1.5
assert [lines[each][1] for each in strategies] == [4096, 8192, 12288, 8192]
best = max(throughput for throughput, _ in throughput_of.values())
assert all(throughput_of[each][0] > 0.99 * best for each in strategies[1:])
assert throughput_of[1, 8][0] < 0.65 * best
token_s = 6 * llama.parameters / four_hosts.flops
link_s = [clusters.communication_seconds(llama, four_hosts, *each) for each in strategies]
assert [f"{each / token_s:.4g}" for each in link_s] == ["6695", "8060", "1.209e+04", "6695"]
assert not line(llama, four_hosts, 0, 32)[1] and line(llama, four_hosts, 3, 8)[1] == 8192


def share_of_the_roof(stage, over, tokens, last):
    """Hide the first all-gather behind forward, and the rest behind the backward of the last tokens."""
    rate = four_hosts.inside_bytes_per_s if over == 8 else four_hosts.between_bytes_per_s
    gather = (over - 1) / over * 2 * llama.parameters / rate / token_s
    late = clusters.communication_seconds(llama, four_hosts, stage, over) / token_s - gather
    exposed = max(0, gather - last / 3) + max(0, late - 2 * last / 3)
    return tokens / (tokens + exposed)


cases = [(1, 8, 8192, 4096), (2, 8, 8192, 8192), (2, 32, 8192, 8192), (3, 32, 12288, 12288)]
assert [f"{share_of_the_roof(*case):.0%}" for case in cases] == ["69%", "89%", "86%", "100%"]

# %% [markdown]
# Both stages over 8 send the same bytes, so their lines coincide, but stage 1's turns dotted first. With one sequence,
# the link decides, and the stage that saves the most memory is the slowest. But look at where the lines turn dotted,
# and compare it with the tokens at the knee. Stage 1 has room for one sequence only, but a second micro-batch adds no
# bytes, so it gets to 8,192 tokens, too:
#
# | | leaves a host, S | tokens at the knee | tokens that fit | of the roof, drawn | of the roof, strictly |
# |---|---|---|---|---|---|
# | stage 1 over 8 | 1.5 | 6,695 | 2 × 4,096 | 100% | 69% |
# | stage 2 over 8 | 1.5 | 6,695 | 8,192 | 100% | 89% |
# | stage 2 over 32 | 1.94 | 8,060 | 8,192 | 100% | 86% |
# | stage 3 over 32 | 2.91 | 12,090 | 12,288 | 100% | 100% |
#
# Stage 3 sends the most. But the memory that it saves has room for three sequences, whose computation takes three times
# as long, while its communication stays the same. **Memory buys tokens, and tokens hide communication.**
#
# The last column is stricter than the drawing. Gradients can hide only behind backward, which is two thirds of the
# computation, and with micro-batches only behind the last one. Stages 1 and 2 then expose a part of their gradients, or
# of the all-gather that hides behind the next forward (chapter 07). Stage 3 does not: it sends a third of its bytes in
# forward and two thirds in backward, just as it computes.
#
# So stage 3 is the fastest here. But a larger global batch is not free (chapter 05), and stage 2 over 8 gives up only
# 11% with two thirds of the tokens. Compute this table for your model, then measure. Fused attention, for instance,
# needs less memory, and so even stage 1 over 32 has room for a second sequence.

# %% [markdown]
# Two other ways to more tokens have their price. *Accumulation* sends nothing more at stages 0 and 1, but from stage 2
# on, each further micro-batch costs another reduce-scatter (chapter 08), and with stage 3 also its all-gathers.
# *Full recomputation* makes room for activations, but a token then costs 8 FLOPs per parameter instead of 6, so the
# roof falls to 3/4.
#
# To compare GPUs of different speeds, throughput is often given as **MFU** (model FLOPs utilization): 6 × parameters ×
# tokens per second and GPU, divided by the GPU's FLOP/s on paper (PaLM paper, appendix B, which also counts attention).
# We cannot compute it here: half of the A100's 312 TFLOP/s is what the planner *assumes*. Measure it on your cluster.

# %% [markdown]
# ## Two defaults that change the result
#
# Tuning should change the time, not the loss. Two defaults do change it, and neither warns you.
#
# **The dtype of sums.** If FSDP2's units compute in bf16, their gradients are added up in bf16, too, unless
# `MixedPrecisionPolicy` gets a `reduce_dtype` of `torch.float32`. Why pay for twice the bytes? In a ring, the sum is
# rounded at each rank, so the error grows with the number of ranks:

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
# Sixteen times the ranks make the error three to four times as large, so it grows about like √N. Llama 3 paid for the
# bytes: it reduced its gradients in fp32 (Llama 3 paper, §3.3.2).
#
# **Clipping.** Since version 0.19.3, DeepSpeed clips the norm of the gradients at 1 if its config has no
# `gradient_clipping` (pull request 8068). AdamW divides each gradient by a running mean of its size, so a constant
# factor would cancel. But the clipping factor changes from step to step, so the losses drift apart. For the ten
# wrappers, our config sets it to 0. Whenever you change the wrapper, compare the losses.

# %% [markdown]
# ## Where you will meet these settings
#
# You will rarely call these functions yourself. A framework does, and its flags name what you have built:
#
# | | FSDP2 | DeepSpeed | Accelerate | Lightning (FSDP1) |
# |---|---|---|---|---|
# | units | `fully_shard()` each | every parameter | `fsdp_transformer_layer_cls_to_wrap` | `auto_wrap_policy` |
# | reshard | an option of it | `stage3_max_reuse_distance` | `fsdp_reshard_after_forward` | `sharding_strategy` |
# | hybrid | `mesh` | hpZ, in backward | `parallelism_config` | `device_mesh` |
# | dtype | `mp_policy` | `bf16` | `mixed_precision` | `precision` |
# | clipping | `clip_grad_norm_()` | `gradient_clipping` | `clip_grad_norm_()` | only by value |
# | offload | `CPUOffloadPolicy` | `offload_optimizer` | `fsdp_offload_params` | `cpu_offload` |
#
# For FSDP2, Lightning has `ModelParallelStrategy`, in which you call `fully_shard` yourself. The Hugging Face Trainer
# passes its `fsdp_config` on to Accelerate, and clips at `max_grad_norm`, which is 1.0 unless you set it. If you ask
# for bf16, all of them add up gradients in bf16, too, unless you set another dtype. *Offload* keeps tensors such as the
# optimizer state in the CPU's memory. [Other wrappers](../docs/wrappers.md) has the details. torchtitan compiles each
# block (`torch.compile`) before `fully_shard` wraps it.
#
# Back to Llama 3 405B. It gathered parameters in bf16, but reduced gradients in fp32. So full sharding would send 8f
# bytes per parameter: 2f in each all-gather, and 4f in the reduce-scatter. Keeping the parameters until backward saved
# the second all-gather, a quarter of these bytes. The cost was small, because tensor and pipeline parallelism
# (chapters 13 and 15) had already left each GPU only 1/128 of the parameters: 6.3 GB in bf16.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks on H hosts, k = N/H, S = 4Ψ bytes, f = (N−1)/N; one micro-batch.
#
# | | memory per rank | sent per rank | leaves a host | overlap |
# |---|---|---|---|---|
# | DDP | 16Ψ | 2fS | 2fS | backward |
# | `ZeroRedundancyOptimizer` | 8Ψ + 8Ψ/N | 3fS | 3fS | gradients only |
# | DeepSpeed 1 and 2 | 4Ψ + 16Ψ/N after backward | 3fS | 3fS | if `overlap_comm` |
# | FSDP2 | 16Ψ/N + unsharded units | 3fS | 3fS | forward and backward |
# | … `reshard_after_forward=False` | 16Ψ/N + 4Ψ until backward | 2fS | 2fS | the same |
# | … hybrid sharding | 16Ψ/k + unsharded units | 3S(k−1)/k + 2S(H−1)/N | 2S(H−1)/H | the same |
#
# Three numbers worth keeping: 2S(H−1)/H bytes leave a host with hybrid sharding; with stage 3 in bf16, communication is
# hidden from T = f · F/B tokens per GPU on; full recomputation lowers the roof to 3/4.
#
# **Terms**
#
# - **roofline**: throughput against the tokens per GPU. Communication limits it left of the knee, computation right of
#   it, and where it is dotted, memory does not suffice.
# - **hybrid sharding**: the model is sharded over the ranks of a host, and each host holds a full copy.
# - **device mesh**: an array of ranks whose dimensions have names, such as hosts × ranks per host.
# - **MFU** (model FLOPs utilization): 6 × parameters × tokens per second and GPU, divided by the GPU's FLOP/s on paper.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): meshes, bandwidths and traces.
# - [FSDP1 → FSDP2](https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md) in torchtitan: why each argument of
#   FSDP1 was removed or renamed.
# - Zhao et al., [PyTorch FSDP](https://arxiv.org/abs/2304.11277), VLDB 2023, §3.2.2: hybrid sharding.
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
