# ---
# jupyter:
#   course:
#     module: parallel_3d
#     minutes: [40, 65]
# ---

# %% [markdown]
# # 18 · 3D parallelism
#
# **40–65 minutes.** After this lesson, you will be able to:
#
# - combine data, pipeline and tensor parallelism on a mesh of ranks, and show that the result is right,
# - order the axes of a mesh by the links between its ranks,
# - compute which layouts of a large model fit on a cluster, and estimate how fast they are,
# - say how far such an estimate can be trusted, and check what is said about well-known runs,
# - choose a layout in five steps.
#
# You need tensor parallelism (chapter 13), pipelines (chapter 15), ZeRO-1 (chapter 07) and device meshes (chapter 11).

# %% [markdown]
# ## Where we are
#
# You have split training along three **axes**: data parallelism (dp) splits the batch, pipeline parallelism (pp) splits
# the model by depth, and tensor parallelism (tp) splits every layer. Chapter 17 ran one step of one block on two axes.
# Now you train a whole model on all three.
#
# This lesson needs a small data center. The next cell starts eight ranks on two hosts. The four ranks of a host
# communicate through this machine's memory, and share a link of 10 Mbit/s to the other host. We chose a slow link
# because our model is small.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables, widgets
from shared.planner import layouts, named, scores
from shared.planner.guide import guide
from shared.planner.layouts import Job, TrainingLayout, a100_hosts
from shared.planner.search import search
from shared.planner.shapes import SHAPES
from shared.plots import diagrams
from shared.predictions import predicted

measure.start_behind_link(world_size=8, rate="10mbit", ranks_per_host=4)

# %%
# %%ranks
from functools import partial

from torch.distributed.device_mesh import init_device_mesh

from shared import measure, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, gpt_layers
from solutions.manual_ddp import mean_over_ranks_
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize
from solutions.vocabulary import vocab_parallel_cross_entropy
from solutions.zero1 import ZeRO1

text = CharTokens()
config = GPTConfig(vocab_size=128, context=128, layers=6, heads=8, width=64)
batch = text.windows(range(0, 8000, 1000), length=128)

# %% [markdown]
# ## What is wasted
#
# Why not choose the best of the three axes, and use it for all ranks? Because each axis wastes something different:
#
# - With DP 8, every rank keeps the whole model.
# - With TP 8, each layer's all-reduces cross the slow link.
# - With PP 8 and eight micro-batches, little leaves a host, but ranks are idle for 47% of the time, by chapter 15's
#   formula, and a model has only so many layers.

# %% [markdown]
# ## The idea: a mesh with three axes
#
# The axes communicate at different moments: tp in every layer, pp in every micro-batch, dp once per step. So they need
# different links. In **3D parallelism**, the ranks form a mesh of dp × pp × tp. The ranks that differ in only one
# coordinate form a group along that axis. A replica (chapter 02) is no longer a single rank: pp · tp ranks hold one
# copy of the model together.

# %%
diagrams.mesh_3d()

# %% [markdown]
# Consecutive ranks share a host and differ in the innermost axis. So tp, the busiest axis, is innermost, and its groups
# never leave a host. The groups of dp and pp may. Either can be outermost, and we measure both orders below.

# %% [markdown]
# ## The short version
#
# Nothing is new on any axis. tp splits the layers (chapter 13), pp distributes them (chapter 15), and dp averages the
# gradients of replicas, which `ZeRO1` does in its `step()` (chapter 07). We only have to give each of them the right
# group. `sizes` lists the axes from the outermost to the innermost.


# %%
# %%ranks
class Train3D:
    """Trains a GPT on a mesh. Every rank passes the whole model and the whole batch."""

    def __init__(self, gpt, sizes):
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.dp, pp, tp = (mesh.get_group(axis) for axis in ("dp", "pp", "tp"))
        layers = gpt_layers(parallelize(gpt, tp))
        loss_of = partial(vocab_parallel_cross_entropy, group=tp)
        self.pipeline = Pipeline(layers, "1f1b", 2, loss_of, pp)  # two micro-batches
        own = self.pipeline.stage_parameters().values()
        self.optimizer = ZeRO1(own, torch.optim.AdamW, group=self.dp, lr=1e-3)

    def step(self, tokens, targets):
        """Train on this replica's part of the batch. Returns the mean loss of the whole batch."""
        replicas, own = dist.get_world_size(self.dp), dist.get_rank(self.dp)
        self.optimizer.zero_grad()
        loss = self.pipeline.step(tokens.chunk(replicas)[own], targets.chunk(replicas)[own])
        self.optimizer.step()  # averages the gradients over dp first
        mean_over_ranks_(loss, self.dp)
        return loss.item()


# %% [markdown]
# Is it right? The next cell trains the same GPT in one process and on three meshes, in float64, and compares the losses
# of four steps:


# %%
# %%ranks --timeout 600
def losses_of(take_step):
    starts = [range(1000 * step, 1000 * step + 8000, 1000) for step in range(4)]
    return [take_step(*text.windows(each, length=64)) for each in starts]


whole = TinyGPT(config).double()
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
alone = losses_of(partial(measure.train_step, whole, optimizer))
off = {}
for dp, pp, tp in ((2, 2, 2), (4, 1, 2), (1, 2, 4)):
    trainer = Train3D(TinyGPT(config).double(), {"dp": dp, "pp": pp, "tp": tp})
    pairs = zip(losses_of(trainer.step), alone, strict=True)
    off[dp, pp, tp] = max(abs(ours - theirs) for ours, theirs in pairs)
    print(f"DP {dp} × PP {pp} × TP {tp}: off by less than 1e-12? {off[dp, pp, tp] < 1e-12}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert all(max(of_rank.values()) < 1e-12 for of_rank in ranks.pull("off"))

# %% [markdown]
# Up to rounding, all meshes train as one process does. Keep such a comparison among your tests, because many mistakes
# on a mesh raise no error. Somebody writes `group = mesh.get_group("dp") if dp > 1 else None`, because a group of one
# rank has nothing to average. But for torch, None means *all* ranks. So the ranks of a tp group average the gradients
# of *different* shards, and the loss still falls. You make such mistakes in the lab.

# %% [markdown]
# ## A data center on a laptop
#
# So the layout does not change the result. But does the *order* of the axes matter? We train on 2 × 2 × 2 ranks with
# dp, pp or tp as the outermost axis, which then has to cross the slow link.
#
# **Predict.** How many times as many bytes leave a host if tp is outermost, instead of dp? 1 would mean that the order
# does not matter.

# %%
my_prediction = None


# %%
# %%ranks --timeout 600
def bytes_that_leave(log):
    """Return what this rank sent to the other host: to the next rank of a ring, or to a neighboring stage."""
    sent_bytes = 0
    for entry in log.entries:
        ring = entry.group_ranks
        to = entry.partner if entry.op == "send" else ring[(ring.index(rank) + 1) % len(ring)]
        sent_bytes += entry.sent_bytes if to // 4 != rank // 4 else 0
    return sent_bytes


jobs, leaving = {}, {}
for order in ("dp × pp × tp", "pp × dp × tp", "tp × pp × dp"):
    trainer = Train3D(TinyGPT(config), dict.fromkeys(order.split(" × "), 2))
    with wire.ledger() as log:
        trainer.step(*batch)
    leaving[order] = bytes_that_leave(log)
    jobs[order] = partial(trainer.step, *batch)
times = measure.jobs(jobs, rounds=3, warm_up_rounds=1)

# %% tags=["nbval-ignore-output"]
leaving, times = ranks.pull("leaving"), ranks.pull("times")[0]
host_mb = {order: sum(each[order] for each in leaving[:4]) / 1e6 for order in leaving[0]}
right, between, wrong = host_mb.values()
print(f"{predicted(my_prediction, '{} times as many bytes')}measured {wrong / right:.1f}")
of_orders = {f"{order}\n({host_mb[order]:.1f} MB)": ms for order, ms in times.ms().items()}
plots.bars(of_orders, "ms per step (below the order: MB that leave host 0)")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
assert wrong > 4 * right > 4 * between
slower = times.ratio("tp × pp × dp", "dp × pp × tp")
measure.expect(slower > 1.2, "a step takes longer if tensor parallelism crosses hosts")

# %% [markdown]
# If tp crosses hosts, every all-reduce of every layer waits for the slow link. In the other two orders, tp stays inside
# a host. What crosses the link is either what `ZeRO1` sends once per step (dp), or one layer's outputs and their
# gradients (pp). The bytes explain the times: at 10 Mbit/s, 6.8 MB alone take 5.4 s.
#
# Here, pp sends the least. By default, Megatron-LM, DeepSpeed and torchtitan also put pp outermost. Llama 3 put dp
# outermost, because it "can tolerate longer network latency" (Grattafiori et al. 2024, §3.3.2): a pipeline's messages
# are needed in the middle of a step, but gradients only at its end.

# %% [markdown]
# ## Scenario A: 70B on 32 GPUs
#
# The rest of this lesson is about GPUs that we do not have: four hosts of eight A100s with 80 GB each. Suppose that
# somebody proposes two layouts for them. The first one claims that a 70B Llama fits one host with TP 8, so that four
# hosts train four replicas (DP 4).
#
# **Predict.** With mixed precision, Adam and plain data parallelism, how many GB of model state does each GPU hold?

# %%
my_gb = None

# %%
cluster, job = a100_hosts(4), Job(SHAPES["Llama-2 70B"], sequences=256)
rows = []
for stage, name in enumerate(("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
    layout = TrainingLayout(dp=4, pp=1, tp=8, zero_stage=stage, checkpointing="full")
    plan = layouts.memory(job, layout)
    state_gb = (plan.parameters + plan.gradients + plan.optimizer) / 1e9
    rows.append([name, f"{state_gb:.0f}", f"{plan.total_bytes / 1e9:.0f}"])
print(f"{predicted(my_gb, '{} GB')}computed {rows[0][1]} GB")
header = ["TP 8 × DP 4", "model state, GB", "with activations, GB"]
tables.Table(header, rows, "Full checkpointing, one sequence of 4,096 tokens per micro-batch.")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [int(row[2]) <= 72 for row in rows] == [False, True, True, True]

# %% [markdown]
# Each GPU has 16Ψ/8 bytes of model state, which are 138 GB for this model's 69.0 billion parameters. So this layout
# does not fit as it stands: plain data parallelism divides nothing. With any ZeRO stage over the four replicas, the
# model fits.
#
# But that is for gradients in bf16. Megatron-LM keeps them in fp32, and with ZeRO-1 over four replicas, 6 + 12/4 bytes
# per parameter (chapter 07) are 78 GB per GPU. With the activations, that does not fit, either. If somebody says "it
# fits", ask which bytes were counted.

# %% [markdown]
# ## Scenario B: a "GPT-4-scale" model on 32 GPUs
#
# The second proposal is TP 8 × PP 4 × DP 1, for an "exascale" run of a model "of GPT-4's scale" on the same cluster.
# That size was never published, but how large can a model be? With a single replica, ZeRO has nothing to shard, so each
# parameter needs 16 bytes, and 32 · 80 GB hold only 160 billion of them, even if activations needed nothing. So not
# even GPT-3's 175 billion fit: with full checkpointing, each GPU would need 94 GB. For a trillion parameters, the model
# state alone takes 28 such hosts, if a tenth of their memory stays free.
#
# Nor are four hosts exascale. 32 A100 deliver at most 32 · 312 TFLOP/s = 0.01 EFLOP/s, a hundredth of that.

# %% tags=["claims"] jupyter={"source_hidden": true}
proposed = TrainingLayout(dp=1, pp=4, tp=8, checkpointing="full")
assert round(layouts.memory(Job(SHAPES["GPT-3 175B"], 256), proposed).total_bytes / 1e9) == 94
assert 27 < 16 * 1e12 / 72e9 / 8 < 28

# %% [markdown]
# ## Searching all layouts
#
# Neither proposal works as it stands. Which layout should they have proposed? A layout has many knobs: dp, tp, pp,
# the ZeRO stage, the size of a micro-batch, checkpointing, and the schedule. For 32 GPUs, that makes only 1,560
# combinations, so we can try all of them. `search` computes the memory of each one by the formulas that you know, and
# estimates the time of a step as a sum:
#
# | part | estimate |
# |---|---|
# | computing | FLOPs at a fixed fraction of the peak, and activations at the bandwidth of the GPU's memory |
# | tp | four all-reduces per layer and micro-batch, six with full checkpointing: α and β of NVLink, or of the network |
# | messages, bubble | those of the schedule |
# | dp | gradients (and with ZeRO-3 parameters), as far as they do not hide behind computation |
#
# In its tables, MFU (chapter 11) is the share of the GPUs' peak that the model's own FLOPs use, and v is the number of
# chunks per stage (chapter 15).
#
# **Predict.** Which tp does the search choose for the 70B model on our 32 GPUs, with 256 sequences per step? 1 would
# mean no tensor parallelism, and 8 the whole host.

# %%
my_tp = None

# %%
found = search(job, cluster)
print(predicted(my_tp, "TP {}", "\n") + found.why())
found.table()

# %% tags=["claims"] jupyter={"source_hidden": true}
assert found.best.fits and found.best.layout.tp < 8 and len(found.tied()) == 7
assert found.by_sizes()[3].time.total_s < 1.03 * found.best.time.total_s
assert all(each.layout.checkpointing == "none" for each in found.tied())

# %% [markdown]
# For each knob, the search also says what happens if you turn only that one: the layout no longer fits, or it gets
# slower, and where. Why do TP 8 and PP 2 need more time for *data* parallelism? With either, a replica has twice as
# many GPUs, and so twice as many micro-batches. The planner puts dp outermost, so in ZeRO-3, each micro-batch brings
# all parameters to every host. With ZeRO-2 and an interleaved schedule, PP 2 recovers: see the table's second row.
#
# The first four layouts, of very different shapes, lie within 3%. As you will see, the planner cannot tell layouts
# apart that differ by less than 20%. So the last line calls seven of them a tie, of which the table has the fastest
# five. None of the seven recomputes activations: they spend the memory that sharding saves to avoid computing twice.

# %% [markdown]
# ## How far can we trust the planner?
#
# The planner has three fitted constants: the matmul efficiency of an A100 and of an H100, and how often activations
# cross the memory bus. Six published runs fix them. We test the planner on 42 others, from 8 to 16,384 GPUs. In the
# figure, squares are the fitted runs, and dots the others. Which dots are far outside the gray band?

# %%
scores.figure()

# %% tags=["claims"] jupyter={"source_hidden": true}
of_papers = {name: [scores.error(run) for run in runs] for name, runs in scores.groups().items()}
close = [each for name in ("Megatron-2", "Megatron-3", "Llama 3") for each in of_papers[name]]
assert [f"{each(close):.1%}" for each in (min, max)] == ["-9.4%", "10.7%"]
assert sum(map(len, of_papers.values())) == 48 and len(of_papers["fitted"]) == 6

# %% [markdown]
# For Megatron-2, Megatron-3 and Llama 3, errors range from −9.4% to +10.7%. Two layouts may be off in opposite
# directions, so only layouts that differ by more than about 20% can be told apart. Elsewhere, the planner is too
# optimistic:
#
# - **ZeRO-3 in 2021.** These steps took 1.3 to 4.3 times as long as predicted. With 768 and with 1,536 GPUs, they took
#   equally long, 67 s, so they waited for the network. What ZeRO-3 sends in a step, divided by 67 s, is 16 GB/s per
#   host. The planner assumes rings that use all eight adapters of a host, which have 192 GB/s.
# - **One batch on more and more GPUs.** In MegaScale, the error grows from 2% to 14% as 768 sequences spread over 256
#   to 1,024 GPUs. The authors found stragglers.
# - **Other software and hardware.** MT-NLG used DeepSpeed's pipeline. torchtitan recomputed every second matmul, on
#   H100s with 500 W instead of 700 W, and with memory of 2.4 TB/s instead of the planner's 3.35.
#
# So do not take the preference for ZeRO-3 in our tie at face value.
#
# The next figure opens with scenario A's layout, above the fastest one. Change it to scenario B's, TP 8 × PP 4. Does
# the 70B model fit that way, and what makes a step slower?
#
# <details><summary>Answer</summary>
#
# It fits, even without checkpointing (46 GB). Recomputation costs the most: without it, a step takes 86 s instead of
# 116 s. Most of the remaining gap to the fastest layout (78 s) comes from tp. A GPU takes part in the all-reduces of
# 20 layers for 256 sequences, and in the fastest layout in those of 80 layers for 32: half as many.
#
# </details>

# %% tags=["nbval-ignore-output"]
widgets.layout_chooser("Llama-2 70B", gpus=32, tp=8, pp=1, zero_stage=1, checkpointing="full")

# %% [markdown]
# ## Four well-known runs
#
# How well do the planner, and what people say, agree with four famous papers? `shared/planner/named.py` names their
# sections. The last column has what you may read elsewhere. Which part of each has no source?

# %%
named.table()

# %% [markdown]
# For GPT-3, the last column names GPUs and a layout that its paper does not, and for LLaMA another size and another
# kind of parallelism. For MT-NLG, 16 × 35 × 8 = 4,480 GPUs are all 560 hosts of Selene, the machine that its paper
# names. But the paper measures only 8, 10 and 12 replicas.
#
# The planner errs, too. It promises LLaMA a quarter more tokens per second than its paper reports, and it rules out
# Llama 3's own layout. So use a planner to find candidates, and measure those.

# %% [markdown]
# ## The production version
#
# torch composes the same pieces on a mesh: `parallelize_module` along tp (chapter 13), and `fully_shard` along dp
# (chapter 10). Each parameter becomes a DTensor, which knows its placement on both axes:

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as styles

mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("dp", "tp"))
plan = {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
block = styles.parallelize_module(TinyGPT(config).blocks[0], mesh["tp"], plan)
fully_shard(block, mesh=mesh["dp"])
print(f"placements of the weight of up, along dp and tp: {block.up.weight.placements}")

# %% [markdown]
# The strided placement says that tp has split the rows first, and dp the rest. Here is how torchtitan and Megatron name
# what you have used:
#
# | here | torchtitan | Megatron-LM |
# |---|---|---|
# | mesh of dp × pp × tp | `ParallelDims`, which builds a `DeviceMesh` | `initialize_model_parallel` |
# | `parallelize` | `parallelize_module` | `--tensor-model-parallel-size` |
# | `Pipeline` | `torch.distributed.pipelining` | `--pipeline-model-parallel-size` |
# | `ZeRO1` | `fully_shard` over dp (ZeRO-3) | `--use-distributed-optimizer` (ZeRO-1) |

# %% [markdown]
# ## Two more axes
#
# torchtitan and Megatron-LM have two more axes. Context parallelism (cp, chapter 14) divides each sequence. Its ranks
# add up gradients with the dp ranks, so it takes a part of dp's place in the mesh. Expert parallelism (ep, chapter 16)
# needs no ranks of its own: it regroups those of dp, only for the experts.
#
# For sequences of 131,072 tokens, no layout of dp, pp and tp alone fits our four hosts. With cp, the fastest one has
# CP 8 inside the host and no tp: a ring's messages hide behind attention, and the planner hides nothing of tp's
# all-reduces.

# %% tags=["claims"] jupyter={"source_hidden": true}
long_job = Job(job.shape, sequences=4, sequence=131_072)
long = search(long_job, cluster, context_ranks=(1, 2, 4, 8)).best.layout
assert search(long_job, cluster).best is None and long.cp == 8 and long.tp == 1

# %% [markdown]
# ## Choosing a layout
#
# Here is our cluster once more, with one of the layouts in the tie, DP 2 × PP 4 × TP 4. Follow a replica from stage to
# stage, and see which link each axis uses:

# %%
diagrams.cluster_of_hosts()

# %% [markdown]
# Five steps lead to a few layouts, for this cluster or another one:
#
# 1. **Does it fit?** 16Ψ/GPUs and the activations have to fit into 90% of a GPU's memory, here 72 GB. With full
#    checkpointing, our activations take 5 to 7 GB, so allow 10. Longer sequences need more. If that does not fit, you
#    need more GPUs, or have to move state to the CPU.
# 2. **Is the batch large enough?** The global batch has at least dp · micro-batch sequences. This bounds dp from above,
#    and what is left of the GPUs goes to tp, pp or cp.
# 3. **Tensor parallelism, up to the host, and only as far as needed.** On the same GPUs, twice the tp means half the dp
#    or pp. So each GPU takes part in all-reduces for twice as many tokens or layers.
# 4. **Pipeline or ZeRO?** ZeRO-1 sends no more than plain data parallelism, so take it wherever there are replicas. If
#    that does not fit, ZeRO-2 and ZeRO-3 send something in every micro-batch: they need fast links, and few, large
#    micro-batches. A pipeline sends the least, and needs many micro-batches. For sequences that are too long, add CP.
# 5. **Measure** the fastest layout of each division of the GPUs that the planner puts within 20% of the best.
#
# Here are the five steps for the 70B model and 256 sequences on our 32 GPUs:

# %%
guide(found)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [row[2] for row in guide(found).rows] == [
    "yes",
    "DP up to 32",
    "TP 4",
    "a tie",
    "7 divisions of the GPUs",
]
assert found.best_of(lambda layout: layout.tp < 4 and layout.checkpointing != "full") is None
small_s = found.best_of(lambda layout: layout.tp < 4).time.total_s
assert small_s > 1.25 * found.best.time.total_s

# %% [markdown]
# TP 1 and TP 2 fit only if they recompute all activations, and take at least a quarter longer. TP 4 is as much as
# needed, and TP 8 as much as a host has. Step 4 ends in a tie: with eight adapters per host, this cluster is fast
# enough for ZeRO, for a pipeline, and for all mixtures of them. So seven measurements are left, instead of 1,560.
#
# A slower network breaks the tie. We take adapters away from the hosts. What happens to ZeRO-3, and how much does the
# best layout lose?

# %%
rows = []
for adapters in (8, 4, 2, 1):
    of_network = search(job, a100_hosts(4, adapters))
    best, zero_3 = of_network.best, of_network.candidate(found.best.layout)
    seconds = [f"{each.time.total_s:.1f}" for each in (best, zero_3)]
    rows.append([str(adapters), best.layout.sizes, *seconds])
header = ["adapters per host", "fastest", "s per step", "DP 8 × TP 4, ZeRO-3, s"]
tables.Table(header, rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [row[3] for row in rows] == ["77.7", "121.2", "241.9", "483.3"]
assert [row[2] for row in rows] == ["77.7", "79.1", "79.9", "80.0"]
large = search(Job(job.shape, 1024), a100_hosts(128), zero_stages=(0, 1)).best.layout
assert (large.tp, large.pp) == (8, 1)

# %% [markdown]
# With half of the adapters, ZeRO-3 takes 121 s, because its all-gathers no longer hide behind computation, and 483 s
# with one. The best layout loses 3%: all that crosses hosts is a pipeline's messages, and at most the gradients, once
# per step. So a tie is no coin toss: if you are unsure about your network, measure first what sends least.
#
# The model's size alone does not decide, so there is no threshold such as 100B above which a model needs 3D
# parallelism. By the planner, the same 70B model does well with PP 4 × TP 4 on 32 GPUs. On 1,024 GPUs, with 1,024
# sequences and at most ZeRO-1, the planner takes TP 8 and no pipeline. What did others choose?
#
# | run | GPUs | layout | result |
# |---|---|---|---|
# | MT-NLG 530B | 2,240 to 3,360 A100 | TP 8 × PP 35 × DP 8 to 12 | 60.1 to 44.4 s per step |
# | Llama 3 405B, 8,192 tokens | 16,384 H100 | TP 8 × PP 16 × DP 128 | 400 TFLOP/s per GPU |
# | the same, 131,072 tokens | 16,384 H100 | TP 8 × CP 16 × PP 16 × DP 8 | 380 TFLOP/s per GPU |
# | DeepSeek-V3 671B | 2,048 H800 | PP 16 × EP 64, ZeRO-1, no TP | 180,000 GPU hours per 10¹² tokens |
#
# MT-NLG and Llama 3 needed all that step 3 allows: TP fills the host, PP splits the rest, and DP multiplies it (Smith
# et al. 2022, §2; Grattafiori et al. 2024, table 4). For long sequences, Llama 3 took CP's ranks from DP. DeepSeek-V3
# needs no TP: experts divide most of its parameters, and its authors saved activation memory (DeepSeek-AI 2024, §1
# and §3.2).

# %% [markdown]
# ## Recap
#
# A model has L layers of ψ parameters. There are m micro-batches, each with sbh elements of activations. For an axis of
# n ranks, f = (n−1)/n.
#
# | axis | memory: divides | wire: sends per rank and step | overlap | where |
# |---|---|---|---|---|
# | tp | model state, activations (with SP) | 8f · sbh · m · L/pp elements | ring steps (chapter 13) | in a host |
# | pp | model state | up to 2sbh · m elements per chunk | next micro-batch; a bubble | between hosts |
# | dp | the batch; with ZeRO the state | 2f · Lψ/(pp · tp) elements | last backward | between hosts |
#
# **Terms**
#
# - **axis**: a dimension of a mesh. The ranks that differ only in this coordinate form a group.
# - **3D parallelism**: data, pipeline and tensor parallelism together, on a mesh with three axes.
#
# ## Further reading
#
# - Narayanan et al., [Megatron-LM](https://arxiv.org/abs/2104.04473), 2021, §3 and §5: how the axes interact, and many
#   of the runs on which we tested the planner.
# - Grattafiori et al., [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024, §3.3: a real cluster, and
#   why its axes have this order.
# - Jiang et al., [MegaScale](https://arxiv.org/abs/2402.15627), 2024, §6: what goes wrong on 12,288 GPUs.
# - [On a real cluster](../docs/cluster.md): what limits tp there, and who needs which batch.
# - torchtitan, [Composability](https://github.com/pytorch/torchtitan/blob/main/docs/composability.md): how torch
#   combines the pieces.

# %% [markdown]
# ## What is still wasted
#
# Along dp, all gradients still cross the slow link in every step. With less bandwidth than in a data center, that
# dominates a step. Chapter 19 sends fewer bits. In the lab, you build the mesh, the training on it, and a norm that is
# right on every mesh.

# %%
ranks.stop()
