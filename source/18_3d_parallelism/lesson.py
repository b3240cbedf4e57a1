# ---
# jupyter:
#   course:
#     module: parallel_3d
# ---

# %% [markdown]
# # 18 · 3D parallelism
#
# **55–85 minutes.** After this lesson, you will be able to:
#
# - combine data, pipeline and tensor parallelism on a mesh of ranks, and show that the result is right,
# - order the axes of a mesh by the links between its ranks,
# - compute which layouts of a large model fit on a cluster, and estimate how fast they are,
# - say how far such an estimate can be trusted, and check what is said about well-known runs,
# - choose a layout in five steps, and recognize a mistake on a mesh that raises no error.
#
# You need tensor parallelism (chapter 13), pipelines (chapter 15), ZeRO-1 (chapter 07) and device meshes (chapter 11).

# %% [markdown]
# ## Where we are
#
# You have split training along three **axes**: data parallelism (dp) splits the batch, pipeline parallelism (pp) splits
# the model by depth, and tensor parallelism (tp) splits every layer. So far, you have used one axis at a time.
#
# This lesson needs a small data center. The next cell starts eight ranks on two hosts. The four ranks of a host
# communicate through this machine's memory. Between the hosts, there is a link of 10 Mbit/s, which the ranks of a host
# share. We chose a slow link because our model is small.

# %% tags=["nbval-ignore-output"]
import math

from shared import formulas, measure, plots, ranks, tables, widgets
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
from torch.nn.functional import cross_entropy

from shared import measure, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, gpt_layers
from solutions.manual_ddp import ManualDDP, mean_over_ranks_
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
# Why not choose the best of the three, and use it for all ranks? The next cells try that: they take a step with each
# axis alone, over all eight ranks. We count the parameters of a rank, and the bytes that leave a host. In a ring, a
# rank sends to the next rank of its group, and in a pipeline to its neighbors.


# %%
# %%ranks
def bytes_that_leave(log):
    """Return the bytes that this rank sent to the other host."""
    sent_bytes = 0
    for entry in log.entries:
        ring = entry.group_ranks
        to = entry.partner if entry.op == "send" else ring[(ring.index(rank) + 1) % len(ring)]
        sent_bytes += entry.sent_bytes if to // 4 != rank // 4 else 0
    return sent_bytes


def mean_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


replica = ManualDDP(TinyGPT(config))
pipeline = Pipeline(gpt_layers(config), loss_fn=mean_loss)
split = parallelize(TinyGPT(config))


def with_dp():
    replica(*[tensor[rank : rank + 1] for tensor in batch]).backward()
    replica.finish_gradient_sync()


ways = {
    "DP 8": (with_dp, replica.parameters()),
    "PP 8": (lambda: pipeline.step(*batch), pipeline.stage_parameters().values()),
    "TP 8": (lambda: split(*batch).backward(), split.parameters()),
}
costs = {}
for name, (step, own) in ways.items():
    with wire.ledger() as log:  # the models exist already, so this does not count what creates them
        step()
    costs[name] = sum(parameter.numel() for parameter in own), bytes_that_leave(log)

# %%
costs, rows, held = ranks.pull("costs"), [], {}
whole = costs[0]["DP 8"][0]
for name in costs[0]:
    most = max(of_rank[name][0] for of_rank in costs)
    leaves = sum(of_rank[name][1] for of_rank in costs[:4]) / 1e6
    held[name] = 100 * most / whole
    idle = formulas.bubble_over_total(stages=8, micro_batches=8) if name == "PP 8" else 0
    rows.append([name, f"{held[name]:.0f}%", f"{leaves:.1f}", f"{idle:.0%}"])
leaving_mb = [float(row[2]) for row in rows]
assert held["DP 8"] > 4 * held["TP 8"] and leaving_mb[2] > leaving_mb[0] > 3 * leaving_mb[1]
assert leaving_mb[0] == round(formulas.all_reduce_sent_bytes(4 * whole, 8) / 1e6, 1)
header = ["", "parameters of a rank", "MB that leave host 0 per step", "bubble, of the total time"]
tables.Table(header, rows)

# %% [markdown]
# Each axis wastes something different:
#
# - With DP, every rank keeps the whole model.
# - With TP, the most bytes leave the host, because each layer's all-reduces cross the slow link.
# - With PP, little leaves the host, but ranks are idle for 47% of the time, by chapter 15's formula, and a model has
#   only so many layers.
#
# With TP and PP, a rank holds more than an eighth: TP replicates norms and positions, and a stage has at least one
# whole layer.

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
# never leave a host. The groups of dp and pp may, in either order. We measure both below.

# %% [markdown]
# ## The short version
#
# Nothing is new on any axis. tp splits the layers (chapter 13), pp distributes them (chapter 15), and dp averages the
# gradients of replicas, which `ZeRO1` does together with the optimizer's step (chapter 07). We only have to give each
# of them the right group. `sizes` lists the axes from the outermost to the innermost.


# %%
# %%ranks
class Train3D:
    """Trains a GPT on a mesh. Every rank passes the whole model and the whole batch."""

    def __init__(self, gpt, mesh, zero_stage):
        self.dp, pp, tp = (mesh.get_group(axis) for axis in ("dp", "pp", "tp"))
        layers = gpt_layers(parallelize(gpt, tp))
        loss_of = partial(vocab_parallel_cross_entropy, group=tp)
        self.pipeline = Pipeline(layers, "1f1b", 2, loss_of, pp)  # two micro-batches
        self.parameters = list(self.pipeline.stage_parameters().values())
        self.zero_stage = zero_stage
        if zero_stage:
            self.optimizer = ZeRO1(self.parameters, AdamW, group=self.dp, lr=1e-3)
        else:
            self.optimizer = AdamW(self.parameters, lr=1e-3)

    def step(self, tokens, targets):
        """Compute the gradients of this replica's part of the batch, and average them. Returns the mean loss."""
        replicas, own = dist.get_world_size(self.dp), dist.get_rank(self.dp)
        loss = self.pipeline.step(tokens.chunk(replicas)[own], targets.chunk(replicas)[own])
        for parameter in self.parameters if self.zero_stage == 0 else ():  # ZeRO1 averages itself
            mean_over_ranks_(parameter.grad, self.dp)
        mean_over_ranks_(loss, self.dp)
        return loss


def trainer_on(sizes, gpt, zero_stage=0):
    """Return a trainer of a GPT on a mesh of these sizes, and the mesh."""
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Train3D(gpt, mesh, zero_stage), mesh


def train_step(trainer, *batch):
    trainer.optimizer.zero_grad()
    loss = trainer.step(*batch)
    trainer.optimizer.step()
    return loss.item()


AdamW = torch.optim.AdamW

# %% [markdown]
# Is it right? The next cells train the same GPT in one process and on three meshes, in float64. Compare the losses of
# four steps, and see how the bytes move from axis to axis:


# %%
# %%ranks --timeout 600
def batch_of(step, count=8):
    return text.windows(range(1000 * step, 1000 * (step + count), 1000), length=64)


def sent_along(log, mesh):
    """Return the MB that this rank sent along each axis."""
    sent = dict.fromkeys(mesh.mesh_dim_names, 0.0)
    for entry in log.entries:
        for axis in sent:
            members = dist.get_process_group_ranks(mesh.get_group(axis))
            if len(members) > 1 and list(entry.group_ranks) == members:
                sent[axis] += entry.sent_bytes / 1e6
    return sent


whole = TinyGPT(config).double()
optimizer = AdamW(whole.parameters(), lr=1e-3)
alone = [measure.train_step(whole, optimizer, *batch_of(step)) for step in range(4)]
found = {}
for dp, pp, tp, zero in ((2, 2, 2, 0), (4, 1, 2, 1), (1, 2, 4, 0)):
    trainer, mesh = trainer_on({"dp": dp, "pp": pp, "tp": tp}, TinyGPT(config).double(), zero)
    losses = [train_step(trainer, *batch_of(step)) for step in range(3)]
    with wire.ledger() as log:
        losses.append(train_step(trainer, *batch_of(3)))
    off = max(abs(ours - theirs) for ours, theirs in zip(losses, alone, strict=True))
    found[dp, pp, tp, zero] = off, sent_along(log, mesh)

# %%
found, rows = ranks.pull("found")[0], []
for (dp, pp, tp, zero), (off, sent) in found.items():
    assert off < 1e-12
    name = f"DP {dp} × PP {pp} × TP {tp}" + (", ZeRO-1" if zero else "")
    mb = [f"{sent[axis]:.2f}" for axis in ("dp", "pp", "tp")]
    rows.append([name, "less than 1e-12", *mb])
header = ["mesh", "difference of the losses", "MB along dp", "along pp", "along tp"]
tables.Table(header, rows, "MB that rank 0 sent in one step, in float64.")

# %% [markdown]
# Up to rounding, all meshes train as one process does. Along dp, the second mesh sends 2.8 times as much
# as the first: pp and tp leave a rank 1.9 times as many parameters, and over four ranks, an all-reduce sends 1.5 times
# its payload instead of once. ZeRO-1 sends as much as an all-reduce of the gradients.
#
# Why does the last mesh send three times as much along tp, 5.11 MB instead of 1.70? An all-reduce over t ranks sends
# 2(t − 1)/t times its payload, which is 1 for TP 2 and 1.5 for TP 4. And without a second replica, each rank processes
# the whole batch, so every payload is twice as large. In the row between, a rank has twice as many layers as in the
# first, but half of the sequences, so it sends the same.

# %% [markdown]
# ## A data center on a laptop
#
# So the layout does not change the result. But does the *order* of the axes matter? We train on 2 × 2 × 2 ranks with
# dp, pp or tp as the outermost axis, so that this axis has to cross the slow link. Each rank has half of three blocks
# of width 64, and its replica has four sequences of 128 tokens.
#
# **Predict.** How many times as many bytes leave a host if tp is outermost, instead of dp? 1 would mean that the order
# does not matter.

# %%
my_prediction = None

# %%
# %%ranks --timeout 600
orders = ("dp × pp × tp", "pp × dp × tp", "tp × pp × dp")
jobs, leaving = {}, {}
for order in orders:
    trainer, _ = trainer_on(dict.fromkeys(order.split(" × "), 2), TinyGPT(config))
    with wire.ledger() as log:
        train_step(trainer, *batch)
    leaving[order] = bytes_that_leave(log)
    jobs[order] = partial(train_step, trainer, *batch)
times = measure.jobs(jobs, rounds=3, warm_up_rounds=1)

# %% tags=["nbval-ignore-output"]
of_ranks, times = ranks.pull("leaving"), ranks.pull("times")[0]
leaving_mb = {order: sum(each[order] for each in of_ranks[:4]) / 1e6 for order in of_ranks[0]}
right, between, wrong = leaving_mb.values()
print(f"{predicted(my_prediction, '{} times as many bytes')}measured {wrong / right:.1f}")
assert wrong > 4 * right > 4 * between
slower = times.ratio("tp × pp × dp", "dp × pp × tp")
print(f"{slower:.1f} times as long a step, {times.where}")
measure.expect(slower > 1.2, "a step takes longer if tensor parallelism crosses hosts")
of_orders = {f"{order}\n({leaving_mb[order]:.1f} MB)": ms for order, ms in times.ms().items()}
plots.bars(of_orders, "ms per step (below the order: MB that leave host 0)")

# %% [markdown]
# If tp crosses hosts, every all-reduce of every layer waits for the slow link. In the other two orders, tp stays inside
# a host. What crosses the link is either the gradients (dp), or one layer's outputs and their gradients (pp).
#
# Here, pp sends the least. By default, Megatron-LM, DeepSpeed and torchtitan also put pp outermost. Llama 3 put dp
# outermost, because it "can tolerate longer network latency" (Grattafiori et al. 2024, §3.3.2). A pipeline's messages
# are needed in the middle of a step, but gradients only at its end, and they can hide behind backward.

# %% [markdown]
# ## Scenario A: 70B on 32 GPUs
#
# The rest of this lesson is about GPUs that we do not have: hosts of eight A100s with 80 GB each. Suppose that somebody
# proposes two layouts for four such hosts. In the first one, a 70B Llama fits one host with TP 8, so that four hosts
# train four replicas of it (DP 4).
#
# **Predict.** With mixed precision, Adam and plain data parallelism, how many GB of model state does each GPU hold?

# %%
my_gb = None

# %%
llama, cluster = SHAPES["Llama-2 70B"], a100_hosts(4)
job, rows = Job(llama, sequences=256), []
for stage, name in enumerate(("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
    plan = layouts.memory(
        job, TrainingLayout(dp=4, pp=1, tp=8, zero_stage=stage, checkpointing="full")
    )
    state_gb = (plan.parameters + plan.gradients + plan.optimizer) / 1e9
    rows.append([name, f"{state_gb:.0f}", f"{plan.total_bytes / 1e9:.0f}"])
print(f"{predicted(my_gb, '{} GB')}computed {rows[0][1]} GB")
assert [int(row[2]) <= 72 for row in rows] == [False, True, True, True]
header = ["TP 8 × DP 4", "model state, GB", "with activations, GB"]
tables.Table(header, rows, "Full checkpointing, one sequence of 4,096 tokens per micro-batch.")

# %% [markdown]
# Each GPU has 16Ψ/8 bytes of model state, which are 138 GB for this model's 69.0 billion parameters. So this layout
# does not fit as it stands: tensor parallelism over the GPUs of one host is not enough, and plain data parallelism
# divides nothing. With any ZeRO stage over the four replicas, the model fits.
#
# But that is for gradients in bf16. Megatron-LM keeps them in fp32, and with ZeRO-1 over four replicas, 6 + 12/4 bytes
# per parameter (chapter 07) are 78 GB per GPU. Then TP 8 × DP 4 does not fit with ZeRO-1, either. If somebody says
# "it fits", ask which bytes were counted.

# %% [markdown]
# ## Scenario B: a "GPT-4-scale" model on 32 GPUs
#
# The second proposal is TP 8 × PP 4 × DP 1, for a model "of GPT-4's scale" on the same cluster. That size was never
# published. But with a single replica, ZeRO has nothing to shard, so we can compute what fits. At 16 bytes per
# parameter, 32 · 80 GB hold only 160 billion parameters, even if activations needed nothing. We compute three published
# sizes:

# %%
from shared.planner.published import MODELS

rows = []
for shape in (SHAPES["GPT-3 175B"], MODELS["529.6B"], MODELS["1008B"]):
    plan = layouts.memory(Job(shape, 256), TrainingLayout(dp=1, pp=4, tp=8, checkpointing="full"))
    hosts = 16 * shape.parameters / 72e9 / 8
    least = f"{hosts:.3f}, so {math.ceil(hosts)}"
    rows.append([f"{shape.parameters / 1e9:,.1f}B", f"{plan.total_bytes / 1e9:,.0f}", least])
    assert plan.total_bytes > 80e9
tables.Table(["parameters", "GB per GPU on 4 hosts", "hosts for the model state"], rows)

# %% [markdown]
# Not even GPT-3's size fits. The last column is a lower limit: the hosts needed for the model state alone, if a tenth
# of their memory stays free.
#
# Nor would such a cluster be exascale. 32 A100 deliver at most 32 · 312 TFLOP/s = 0.01 EFLOP/s, a hundredth of that.

# %% [markdown]
# ## Searching all layouts
#
# Neither proposal works as it stands. Which layout should they have proposed? A layout has many knobs: dp, tp, pp,
# the ZeRO stage, the size of a micro-batch, checkpointing, and the schedule. For 32 GPUs, there are only 1,560
# combinations, so we can try all of them. `search` computes the memory of each one by the formulas that you know, and
# estimates the time of a step as a sum (`shared/planner/layouts.py`):
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
# many GPUs, and so twice as many micro-batches. In ZeRO-3, each micro-batch brings all parameters to every host, so
# twice as much crosses the adapters, and not all of it hides. With micro-batches of two sequences, TP 8 gathers half as
# often: that is the last row of the table, 8% behind the first.
#
# The first four layouts, of very different shapes, lie within 3%. As you will see, the planner cannot tell layouts
# apart that differ by less than 20%. So its last line calls seven of them a tie, of which the table has the fastest
# five. None of the seven recomputes activations: they spend the memory that sharding saves on not computing twice.
#
# Now we vary the number of GPUs, with eight sequences per GPU up to 64 GPUs, and 1,024 sequences on 1,024 GPUs. On
# many GPUs, the search has a favorite, ZeRO-3, which the next section puts in doubt. So the table has the best layout
# without ZeRO-2 and ZeRO-3, too:

# %%
rows = []
for hosts, sequences in ((1, 64), (2, 128), (4, 256), (8, 512), (128, 1024)):
    every, without = (
        search(Job(llama, sequences), a100_hosts(hosts), zero_stages=stages)
        for stages in ((0, 1, 2, 3), (0, 1))
    )
    row = [f"{8 * hosts:,}", f"{16 * llama.parameters / (8 * hosts) / 1e9:.0f}"]
    for found in (without, every):
        best = found.best
        row.append(f"{best.layout.sizes}, {found.mfu:.0%}" if best else "does not fit")
    rows.append(row)
assert [row[2] == "does not fit" for row in rows] == [True, True, False, False, False]
assert rows[-1][2] == "DP 128 × PP 1 × TP 8, 56%"
header = [
    "GPUs",
    "GB of state per GPU",
    "best without ZeRO-2 and 3, MFU",
    "best with any stage, MFU",
]
tables.Table(header, rows, "The state is 16Ψ / GPUs. Trust neither column before the next section.")

# %% [markdown]
# On 8 GPUs, nothing fits: 16Ψ/8 bytes are 138 GB, however they are divided. On 16 GPUs, the state alone takes 69 of the
# 72 GB that we allow, and 3 GB are too little for the activations. So you need more GPUs, or have to move the optimizer
# state to the CPU (chapter 11).

# %% [markdown]
# ## How far can we trust the planner?
#
# The planner has three fitted constants: the matmul efficiency of an A100 and of an H100, and how often activations
# cross the memory bus. Six published runs fix them. We test the planner on 42 others, from 8 to 16,384 GPUs.
# `shared/planner/published.py` lists the papers, and what each leaves open.

# %%
assert scores.table().rows[1][0] == "Megatron-2"
scores.figure()

# %%
scores.table()

# %% [markdown]
# For Megatron-2, Megatron-3 and Llama 3, errors range from −9.4% to +10.7%. Two layouts may be off in opposite
# directions, so only layouts that differ by more than about 20% can be told apart. Elsewhere, the planner is too
# optimistic:
#
# - **ZeRO-3 in 2021.** These steps took 1.3 to 4.3 times as long as predicted. With 768 and with 1,536 GPUs, they took
#   equally long, 67 s, so they waited for the network. ZeRO-3 all-gathers the bf16 parameters (349 GB) twice, and
#   reduce-scatters the gradients (349 GB) once. In 67 s, that is 16 GB/s per host. The planner assumes rings that use
#   all eight adapters of a host, which have 8 · 24 = 192 GB/s.
# - **One batch on more and more GPUs.** In MegaScale, the error grows from 2% to 14% as 768 sequences spread over 256
#   to 1,024 GPUs, and from 9% to 17% as 6,144 sequences spread over 3,072 to 12,288. The authors found stragglers.
# - **Other software and hardware.** MT-NLG used DeepSpeed's pipeline. torchtitan recomputed every second matmul, on
#   H100s with a limit of 500 W instead of 700 W. Half of its runs were not compiled.
#
# So do not take the preference for ZeRO-3 at face value, either over hundreds of GPUs or in our tie on 32.
#
# What should you take on 1,024 GPUs instead? Without ZeRO-2 and ZeRO-3, the search chose TP 8, the whole host, with
# an MFU of 56%. That is optimistic for 70B, but not absurd: Megatron-3 reports 42% for 22B, 51% for 175B and 56% for
# 1T on A100s, without fused attention. By the planner, a step with TP 8 takes an eighth longer than one with ZeRO-3.
# But TP 8 sends gradients only once per step, so a slower network matters less.
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
# The next table sets what the planner computes for four runs beside their papers, whose sections are in
# `shared/planner/named.py`. The last column has figures that you may read elsewhere, and that no source supports:

# %%
named.table()

# %% [markdown]
# For GPT-3, the last column names GPUs and a layout that its paper does not, and for LLaMA a different kind of
# parallelism. For MT-NLG, 16 × 35 × 8 = 4,480 GPUs are all 560 hosts of Selene, the machine that its paper names. But
# the paper measures only 8, 10 and 12 replicas.
#
# The planner errs, too. It promises LLaMA a quarter more tokens per second than its paper reports, and it rules out
# Llama 3's own layout, even with ZeRO-2. With ZeRO-1, which the test above assumes, it computes 406 TFLOP/s on 16,384
# GPUs, and 94 GB. So use a planner to find candidates, and measure those.

# %% [markdown]
# ## A mistake that raises no error
#
# Somebody writes `group = mesh.get_group("dp") if dp > 1 else None`, because a group of one rank has nothing to
# average. But for torch, None means *all* ranks, so tp's ranks are averaged, too. The same happens with dp = 2 if no
# group is given at all. Four ranks of one host try both:


# %%
# %%ranks --timeout 600
def losses_with(dp, averages_over_all):
    sizes = {"dp": dp, "pp": 1, "tp": world_size // dp}
    trainer, _ = trainer_on(sizes, TinyGPT(config))
    losses = []
    for step in range(24):
        trainer.optimizer.zero_grad()
        losses.append(trainer.step(*batch_of(2 * step)).item())
        for parameter in trainer.parameters if averages_over_all else ():
            mean_over_ranks_(parameter.grad, None)
        trainer.optimizer.step()
    return losses


def all_curves():
    names = {
        "right": (2, False),
        "no group, with dp = 2": (2, True),
        "None, with dp = 1": (1, True),
    }
    return {name: losses_with(*how) for name, how in names.items()}


# %% tags=["nbval-ignore-output"]
with ranks.world(4):
    curves = ranks.run(lambda: all_curves(), timeout_s=600)[0]
last = {name: sum(losses[-5:]) / 5 for name, losses in curves.items()}
print({name: round(loss, 3) for name, loss in last.items()})
assert min(last["no group, with dp = 2"], last["None, with dp = 1"]) > 1.02 * last["right"]
plots.loss_curves(curves)

# %% [markdown]
# All three curves begin with the same loss, and fall. But in both broken runs, the ranks of a tp group average
# gradients of *different* shards, so all shards get the same update. One check finds such mistakes: compare the losses
# with those of one process, with every axis alone and with all of them together.
#
# The gradient's norm hides a similar one: a parameter that all tp ranks have must count once. In ROCm's
# TransformerEngine, it counted once per rank, and for six layers of DeepSeek-V3 with TP 8, the norm was 1.36 times too
# large (pull request 715). You write the right one in the lab.

# %% [markdown]
# ## The production version
#
# torch composes the same pieces on a mesh: `parallelize_module` along tp (chapter 13), and `fully_shard` along dp
# (chapter 10). Each parameter becomes a DTensor, which knows its placement on both axes. So torch's `clip_grad_norm_`
# counts everything once. The next cell compares it with one process:

# %%
# %%ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as styles


def mlp():
    block = TinyGPT(config).blocks[0]
    return nn.Sequential(block.up, nn.GELU(), block.down, nn.GELU())


mesh = init_device_mesh(device.type, (2, 4), mesh_dim_names=("dp", "tp"))
plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
torchs, alone = styles.parallelize_module(mlp(), mesh["tp"], plan), mlp()
fully_shard(torchs, mesh=mesh["dp"])
x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
alone(x).square().mean().backward()
torchs(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
norms = [
    torch.nn.utils.clip_grad_norm_(torchs.parameters(), 1.0).full_tensor().item(),
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item(),
]
print(f"placements of the weight of up, along dp and tp: {torchs[0].weight.placements}")

# %%
norms = ranks.pull("norms")[0]
print(f"norm with torch {norms[0]:.6f}, in one process {norms[1]:.6f}")
assert math.isclose(*norms, rel_tol=1e-5)

# %% [markdown]
# The strided placement says that tp has split the rows first, and dp the rest. Here is how torchtitan and Megatron name
# what you have used:
#
# | here | torchtitan | Megatron-LM |
# |---|---|---|
# | mesh of dp × pp × tp | `ParallelDims`, which builds a `DeviceMesh` | `initialize_model_parallel` |
# | `parallelize` | `parallelize_module` | `--tensor-model-parallel-size` |
# | `Pipeline` | `torch.distributed.pipelining` | `--pipeline-model-parallel-size` |
# | `mean_over_ranks_`, `ZeRO1` | `fully_shard` over dp (ZeRO-3) | `--use-distributed-optimizer` (ZeRO-1) |
# | dp follows from the rest | `data_parallel_shard_degree = -1` | world size / (tp · pp) |
# | norm with each parameter once | DTensors, and a sum over pp | `optimizer/clip_grads.py` |

# %% [markdown]
# ## Two more axes
#
# torchtitan and Megatron-LM have two more axes. Context parallelism (cp, chapter 14) divides each sequence. Its ranks
# add up gradients with the dp ranks, so it takes a part of dp's place in the mesh. Expert parallelism (ep, chapter 16)
# needs no ranks of its own: it regroups those of dp, only for the experts. The planner counts both in this way, but
# none of the 42 runs has either of them.
#
# If sequences have 131,072 tokens instead of 4,096, dp, pp and tp alone find no layout for our four hosts. With cp:

# %%
long_job = Job(llama, sequences=4, sequence=131_072)
found = search(long_job, cluster, context_ranks=(1, 2, 4, 8))
long = found.best
of_chapter_14 = found.candidate(
    TrainingLayout(dp=1, pp=1, tp=8, cp=4, zero_stage=3, checkpointing="full")
)
for each in (long, of_chapter_14):
    print(f"{each.layout}: {each.gb:.0f} GB per GPU, {each.time.total_s:.0f} s per step")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert search(long_job, cluster).best is None and long.layout.cp == 8 and long.layout.tp == 1
assert (
    round(of_chapter_14.gb) == 79 and 1.04 < of_chapter_14.time.total_s / long.time.total_s < 1.06
)

# %% [markdown]
# Unlike chapter 14's layout, the fastest one puts cp inside the host and drops tp, because a ring's messages hide
# behind attention, and tp's all-reduces hide behind nothing. Chapter 14's TP 8 × CP 4 is estimated to take 5% longer,
# which is a tie, but needs 79 GB: the planner lets every tp rank keep the whole input of each layer. Chapter 14
# shared these inputs, too, and then it fits. The planner's ZeRO-3 is optimistic as well, so try both.

# %% [markdown]
# ## Choosing a layout
#
# You now have all the pieces. Here is our cluster once more, with one of the layouts in the tie, DP 2 × PP 4 × TP 4.
# Follow a replica from stage to stage, and see which link each axis uses:

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
# Let us walk through them once, with the 70B model and 256 sequences on our 32 GPUs. The planner computes every number:

# %%
guide(search(job, cluster))

# %% tags=["claims"] jupyter={"source_hidden": true}
steps = guide(search(job, cluster)).rows
assert [row[2] for row in steps] == [
    "yes",
    "DP up to 32",
    "TP 4",
    "a tie",
    "7 divisions of the GPUs",
]
again = search(job, cluster)
assert again.best_of(lambda layout: layout.tp < 4 and layout.checkpointing != "full") is None
small_s = again.best_of(lambda layout: layout.tp < 4).time.total_s
assert small_s > 1.25 * again.best.time.total_s

# %% [markdown]
# TP 1 and TP 2 fit only if they recompute all activations, and take at least a quarter longer. TP 4 is as much as
# needed, and TP 8 as much as a host has. Step 4 ends in a tie: with eight adapters per host, this cluster is fast
# enough for ZeRO, for a pipeline, and for all mixtures of them. So seven measurements are left, instead of 1,560.
#
# A slower network breaks the tie. We take adapters away from the hosts. What happens to ZeRO-3, and how much does the
# best layout lose?

# %%
rows, first = [], search(job, cluster).best.layout  # DP 8 × TP 4 with ZeRO-3
for adapters in (8, 4, 2, 1):
    of_network = search(job, a100_hosts(4, adapters))
    best, zero_3 = of_network.best, of_network.candidate(first)
    seconds = [f"{each.time.total_s:.1f}" for each in (best, zero_3)]
    rows.append([str(adapters), best.layout.sizes, *seconds])
header = ["adapters per host", "fastest", "s per step", "DP 8 × TP 4, ZeRO-3, s"]
tables.Table(header, rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [row[3] for row in rows] == ["77.7", "121.2", "241.9", "483.3"]
assert [row[2] for row in rows] == ["77.7", "79.1", "79.9", "80.0"]

# %% [markdown]
# By the planner, ZeRO-3 takes 121 s with half of the adapters, because its all-gathers no longer hide behind
# computation, and 483 s with one. The best layout loses 3%: all that crosses hosts is a pipeline's messages, and at
# most the gradients, once per step.
# So a tie is no coin toss: if you are unsure about your network, measure first what sends least.
#
# The model's size alone does not decide, so there is no threshold such as 100B above which a model needs 3D
# parallelism. By the planner, the same 70B model does well with PP 4 × TP 4 on 32 GPUs, and with TP 8 and no pipeline
# on 1,024. What did others choose?
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
# | tp | model state, activations (with SP) | 8f · sbh · m · L/pp elements | none, or ring steps | in a host |
# | pp | model state | up to 2sbh · m elements | next micro-batch; a bubble | between hosts |
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
