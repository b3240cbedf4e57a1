# ---
# jupyter:
#   course:
#     module: units
# ---

# %% [markdown]
# # 09 · ZeRO-3
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - unshard parameters only while a part of the model computes with them, and train a GPT that way,
# - predict the peak memory of the parameters to the byte, and explain why the model must be divided into units,
# - predict how much more a step sends than a step of data parallelism,
# - predict how much time prefetching saves, and what it costs.
#
# You need reduce-scatter and all-gather (chapter 01), flat parameters (chapter 07), and gradients that are
# reduce-scattered during backward (chapter 08). Ψ is the number of parameters, N the number of ranks, and f = (N−1)/N.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# No number of 80 GB GPUs trains a 70B model with the ZeRO-2 of chapter 08. It shards the gradients and the optimizer
# state, but every rank still holds all parameters, and in bf16, these take 140 GB.
#
# When does a rank need them? A block needs its parameters only briefly, once in forward and once in backward. For the
# rest of the step, each of four ranks could keep a quarter of them, and get the rest from the other ranks when the
# block needs them. This is **ZeRO-3**: parameters are sharded, like gradients and optimizer state.
#
# The price is communication, so each rank is behind a slow link of 250 Mbit/s. As in chapter 04, the blocks of our GPT
# sleep as a stand-in for a GPU.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables, widgets
from shared.plots import diagrams
from shared.plots import lifetimes as lifetime_plots
from shared.predictions import predicted
from shared.timeline.blocks import zero3_step

measure.start_behind_link(world_size=4, rate="250mbit", latency_ms=0.1)

# %%
# %%ranks
from functools import partial

from torch import nn

from shared import measure, timeline, wire
from shared.data import CharTokens
from shared.memory import lifetimes
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.async_collectives import launch_reduce_scatter
from solutions.flat import FlatParameter
from solutions.overlapped_ddp import OverlappedDDP

config = GPTConfig(vocab_size=800, layers=6, width=128)
batch = CharTokens().windows(range(rank, 400, 100), length=32)
AdamW = partial(torch.optim.AdamW, lr=1e-3)


def new_model():
    model = TinyGPT(config)
    stand_in_for_gpu(model.blocks, forward_ms=24, backward_ms=48)
    return model


# %% [markdown]
# ## Freeing a parameter's memory and restoring it
#
# After its forward, a block's weights have to go, but autograd has saved them for backward. How do we free them all the
# same? The memory of a tensor and of all its views belongs to one object, their **storage**. You can resize a storage
# to zero bytes, and later back to its full size. The tensors stay valid, including those that autograd has saved:

# %%
# %%ranks 0
weight, x = nn.Parameter(torch.zeros(3)), torch.ones(3, requires_grad=True)
flat = torch.tensor([2.0, 4.0, 6.0])
weight.data = flat  # weight now uses flat's memory, as in chapter 07
y = (weight * x).sum()  # backward will need weight
storage = flat.untyped_storage()
storage.resize_(0)
print(f"weight: shape {list(weight.shape)}, {storage.nbytes()} bytes")
storage.resize_(flat.nbytes)
flat.copy_(torch.tensor([2.0, 4.0, 6.0]))
y.backward()
print("gradient of x:", x.grad.tolist())

# %% [markdown]
# Autograd did not notice that the memory was gone. It would not notice wrong values either: restoring the right ones is
# our job.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Unsharding one unit at a time
#
# A **unit** is a part of the model whose parameters are unsharded and resharded together. Here, each block is a unit.
# To **unshard** a unit means to give its parameters memory, and to all-gather the shards of all ranks into it. To
# **reshard** it means to free that memory, so that only the rank's own shard remains. Parameters that are in no unit
# belong to the **root unit**, or *root* for short. Here, these are the embeddings and the last norm.
#
# In the upper half of the diagram, follow the parameters of a unit into a flat parameter and its shards. In the lower
# half, look at the four hooks, and at when the flat parameter has memory:

# %% slideshow={"slide_type": "-"}
diagrams.unit()

# %% [markdown]
# - `pre_forward` unshards the unit before its forward, and `post_forward` reshards it afterwards.
# - `pre_backward` runs when the gradient of the unit's output is complete. Backward reaches the unit next, so
#   `pre_backward` unshards it again.
# - `post_backward` runs when the gradients of all the unit's parameters are complete. It reduce-scatters them and
#   reshards the unit.

# %% [markdown]
# ## The short version
#
# Two classes are enough to train our GPT. The first is chapter 07's `FlatParameter`, but its shard has memory of
# its own, so that the rest can be freed. `unshard()` only launches the all-gather, and `wait_for_unshard()` waits for
# it. In between, the unit's state is `"UNSHARDING"`.


# %%
# %%ranks
class ShardedFlat(FlatParameter):
    """The parameters of one unit. This rank keeps one shard of them."""

    def __init__(self, parameters):
        super().__init__(list(parameters))
        self.shard = nn.Parameter(self.shard.detach().clone())
        self.reshard()

    def unshard(self):
        if self.state == "SHARDED":
            self.state = "UNSHARDING"
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            self.all_gather = self.launch_all_gather()  # from every rank's shard

    def wait_for_unshard(self):
        self.unshard()
        if self.state == "UNSHARDING":
            self.all_gather.wait()
            self.state = "UNSHARDED"

    def reshard(self):
        self.flat_param.untyped_storage().resize_(0)
        self.state = "SHARDED"

    def reduce_gradients(self):
        """Add the rank's shard of the mean gradient to shard.grad, and free the full gradients."""
        flat = self.layout.new_flat()
        for p, view in zip(self.layout.parameters, self.layout.views(flat), strict=True):
            view.copy_(p.grad)
            p.grad = None
        mean = launch_reduce_scatter(flat).wait() / world_size
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean


# %% [markdown]
# The second class wraps the model and registers the four hooks. Autograd calls `post_backward` after each gradient, so
# it acts only after the unit's last one. The root stays unsharded for the whole step, because our GPT needs it both
# first and last: the token embedding is *tied*, which means that its weight is also the weight of the output layer.


# %%
# %%ranks
class Sharded(nn.Module):
    """Trains a model of which each rank keeps a shard. Parameters in no unit belong to the root."""

    def __init__(self, module, units=(), reshard_after_forward=True):
        super().__init__()
        self.module, self.reshard_after_forward = module, reshard_after_forward
        inside = {p for unit in units for p in unit.parameters()}
        self.root = ShardedFlat(p for p in module.parameters() if p not in inside)
        self.units = [ShardedFlat(unit.parameters()) for unit in units]
        self.shards = nn.ParameterList(flat.shard for flat in (self.root, *self.units))
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self.pre_forward, index))
            unit.register_forward_hook(partial(self.post_forward, index))
            for p in unit.parameters():
                p.register_post_accumulate_grad_hook(partial(self.post_backward, index))

    def forward(self, *inputs):
        self.root.wait_for_unshard()
        return self.module(*inputs)

    def pre_forward(self, index, _unit, _inputs):
        self.units[index].wait_for_unshard()

    def post_forward(self, index, _unit, _inputs, output):
        if self.reshard_after_forward:
            self.units[index].reshard()
        output.register_hook(partial(self.pre_backward, index))

    def pre_backward(self, index, _gradient):
        self.units[index].wait_for_unshard()

    def post_backward(self, index, _parameter):
        if all(p.grad is not None for p in self.units[index].layout.parameters):  # the last
            self.units[index].reduce_gradients()
            self.units[index].reshard()

    def finish_gradient_sync(self):
        self.root.reduce_gradients()
        self.root.reshard()


# %% [markdown]
# Does it train? We compare its losses with those of data parallelism, with the same weights and the same batches:


# %% tags=["nbval-ignore-output"]
# %%ranks --timeout 120
def wrapped(kind=Sharded, with_units=True, **options):
    module = new_model()
    model = kind(module, module.blocks if with_units else (), **options)
    return model, AdamW(model.shards)


ddp = OverlappedDDP(new_model())
pairs = (ddp, AdamW(ddp.parameters())), wrapped()
losses = [[measure.train_step(*pair, *batch) for _ in range(8)] for pair in pairs]
most = max(abs(one - other) for one, other in zip(*losses, strict=True))
if rank == 0:
    print(f"losses: {losses[1][0]:.2f} to {losses[1][-1]:.2f}, largest difference {most:.0e}")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert most < 1e-3 and losses[1][-1] < losses[1][0]

# %% [markdown]
# This is the same training, although no rank holds the whole model between steps.

# %% [markdown]
# ## The peak
#
# Between steps, each rank holds a quarter of the parameters. But a GPU must have room for the *peak*. How high is it
# with a unit per block? And how high would it be without units, with all parameters in the root?
#
# **Predict.** Write both peaks as multiples of a full copy of the parameters. 1 would mean as much as with ZeRO-2. Each
# of the six blocks has 15% of Ψ, and the root has the rest.

# %%
my_peaks = {"a unit per block": None, "no units": None}


# %%
# %%ranks
def followed(model, optimizer):
    """Run a step. Returns when each unit had memory, and the bytes sent."""
    flats = {f"block {index}": flat for index, flat in enumerate(model.units)}
    flats["root"] = model.root
    with wire.ledger() as log, lifetimes.follow(lifetimes.states_of(flats)) as life:
        measure.train_step(model, optimizer, *batch)
    return life, log.sent_bytes


by_block, no_units = followed(*wrapped()), followed(*wrapped(with_units=False))
gpt = TinyGPT(config)
numels = [sum(p.numel() for p in part.parameters()) for part in (gpt, gpt.blocks[0])]

# %% [markdown]
# In the upper half of the figure, the dashed line is a formula: the shards, plus everything unsharded at the same time.
# A full copy takes 5.17 MB. In the lower half, each row is a unit, and a bar means that its parameters have memory. The
# x axis counts operators, not time.

# %% slideshow={"slide_type": "slide"}
(psi, block), (by_block, sent_bytes) = ranks.pull("numels")[0], ranks.pull("by_block")[0]
root = psi - 6 * block
lives = {"a unit per block": by_block, "no units": ranks.pull("no_units")[0][0]}
expected_bytes = {"a unit per block": psi + 4 * (root + block), "no units": psi + 4 * psi}
for name, life in lives.items():
    peak_bytes = psi + life.peak_bytes  # the shards are psi / 4 elements of 4 bytes
    print(f"{name}: {predicted(my_peaks[name])}measured {peak_bytes / (4 * psi):.2f}")
lifetime_plots.lifetimes(lives, psi, expected_bytes)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert all(psi + life.peak_bytes == expected_bytes[name] for name, life in lives.items())

# %% [markdown] slideshow={"slide_type": "-"}
# The formula is right to the byte. On the left, forward unshards the blocks from first to last, and backward from last
# to first. Two blocks are never unsharded at once, so the peak is
#
# $$\frac{\Psi}{N} + \text{root} + \text{one block}.$$
#
# On the right, the root is the only unit, and the peak is *higher* than with ZeRO-2: the rank holds its shard and, on
# top of it, all parameters. You get the same result if you wrap a model in FSDP without naming its units. The losses
# are right, so nothing warns you. With the 80 blocks of Llama 2 70B as units, bf16 parameters would peak at about 5 GB
# on each of 64 GPUs. Without units, they would peak at 140 GB, and we are back at the beginning of this lesson.
#
# Smaller units lower the peak: with n equal units, its last term is (Ψ − root)/n. But a step then has 3n + 2
# collectives, each with its latency α (chapter 03). Halving our blocks would save half a block of memory, and take 38
# collectives instead of 20.

# %% [markdown]
# ## What a step sends
#
# An all-gather of Ψ elements in fp32 sends f · 4Ψ bytes per rank, and so does a reduce-scatter. Data parallelism sends
# 2f · 4Ψ.
#
# **Predict.** How many times as many bytes as data parallelism does one step send here? 1 would mean the same number.

# %%
my_prediction = None

# %%
half = formulas.all_gather_sent_bytes(4 * psi, ranks=4)  # f · 4Ψ
print(f"{predicted(my_prediction)}measured {sent_bytes / (2 * half):.2f} times")
assert sent_bytes == (3 - root / psi) * half

# %% [markdown]
# A unit is all-gathered for forward and for backward, and its gradients are reduce-scattered: 3f · 4Ψ bytes, 1.5 times
# what data parallelism sends (Rajbhandari et al. 2020, §7). Our version sends a little less, because it all-gathers the
# root only once.
#
# With g micro-batches per step, ZeRO-3 sends 3g · f · 4Ψ, where ZeRO-2 sends (g + 1)f · 4Ψ and ZeRO-1 2f · 4Ψ. Each
# micro-batch has to unshard the parameters again. It also has to reduce-scatter its gradients, or each rank would need
# memory for full ones.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Prefetching the next unit
#
# So far, each block waits for its own all-gather before it computes. As in chapter 04, the remedy is to launch earlier
# and wait later. While block 2 computes in forward, the all-gather of block 3 is in flight. This is called
# **prefetching**. In backward, the next unit is the one *before* the current one. In the diagram, follow unit 1: it is
# already unsharding while unit 0 computes in forward, and again while unit 2 computes in backward. The diagram also
# overlaps the reduce-scatters, which our code does not do. All collectives share one link, so the last all-gather
# queues behind a reduce-scatter.

# %% slideshow={"slide_type": "-"}
diagrams.unit_states()

# %% [markdown]
# `unshard()` already launches without waiting, so only two hooks have to change:


# %%
# %%ranks
class Prefetching(Sharded):
    """Launches the all-gather of the next unit before the current one computes."""

    def pre_forward(self, index, *_):
        self.units[index].wait_for_unshard()
        if index + 1 < len(self.units):
            self.units[index + 1].unshard()

    def pre_backward(self, index, _gradient):
        self.units[index].wait_for_unshard()
        if index > 0:
            self.units[index - 1].unshard()


# %% [markdown]
# How much time does that save? A step has twelve all-gathers of blocks: six in forward and six in backward. At 32 ns
# per byte, one takes about 18.9 ms. Each block sleeps for 24 ms in forward and for 48 ms in backward.
#
# **Predict.** How many milliseconds shorter is a step with prefetching? 0 would mean that no all-gather is hidden.

# %%
my_prediction_ms = None

# %%
# %%ranks --timeout 120
models = {
    "no prefetching": wrapped(),
    "prefetching": wrapped(Prefetching),
    "prefetching, kept after forward": wrapped(Prefetching, reshard_after_forward=False),
}
followed_steps = {name: followed(*each) for name, each in models.items()}
sample = [tokens[:1, :16] for tokens in batch]
steps = {name: measure.training_step(model, *sample) for name, (model, _) in models.items()}
times = measure.jobs(steps, rounds=8)
lines = []
for name in ("no prefetching", "prefetching"):
    record = partial(timeline.record, models[name][0])
    lines += measure.recorded({"": steps[name]}, record, rounds=3)[""][:1]

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
saved_ms = times["no prefetching"].time_ms - times["prefetching"].time_ms
print(f"{predicted(my_prediction_ms, '{} ms')}measured {saved_ms:.0f} ms")
measure.expect(times.ratio("no prefetching", "prefetching") > 1.05, "prefetching saves time")
times

# %% tags=["claims"] jupyter={"source_hidden": true}
all_gather_ms = 1e3 * 32e-9 * formulas.all_gather_sent_bytes(4 * block, ranks=4)
assert f"{all_gather_ms:.1f}" == "18.9" and f"{10 * all_gather_ms:.0f}" == "189"

# %% [markdown] slideshow={"slide_type": "slide"}
# Ten of the twelve all-gathers can be hidden, and their bytes take 189 ms. The first one in forward cannot, because no
# earlier block launches it. What about the first one in backward? Your saving may differ by some tens of milliseconds,
# because the four ranks share your machine's cores. The third row of the table is for the next section.
#
# The next figure shows a single step without prefetching, and one with it. The numbers are those of the blocks.
# Collectives without a number belong to the root. In backward, prefetched all-gathers have long bars, because a bar
# ends only when the rank has waited for it. Compare the waits in both steps, and find a block that is all-gathered
# twice in a row:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "-"}
without, ahead = ranks.pull("lines")[0]
lines = [zero3_step(without, blocks=6, ranks=4), zero3_step(ahead, 6, 4, prefetched=True)]
plots.timeline(lines, ["no prefetching", "prefetching"], hidden=False)

# %% [markdown]
# Most of what stays exposed is reduce-scatters, because our `reduce_gradients()` waits for each at once. Lab 10 and
# FSDP2 wait one unit later, as chapter 08 did.
#
# Block 5 is all-gathered twice in a row: it is resharded after its forward, and backward begins with it. The second
# all-gather can be removed: do not reshard the last unit after forward. Does that raise the peak? You find out in the
# lab. torchtitan leaves its last unit unsharded by default (`reshard_after_forward_policy`).
#
# When is an all-gather hidden? In forward, a block of ψ parameters computes for 2ψT/F seconds, with T tokens per rank
# and F FLOP/s. Its all-gather in bf16 takes 2fψ/B seconds, at B bytes per second. It is hidden if
#
# $$T > f \cdot F / B.$$
#
# The size of the block cancels out. An A100 that reaches 156 TFLOP/s, half of its peak, needs about 6,000 tokens if its
# host has a single link of 25 GB/s, and about 800 if each of the host's eight GPUs has one, because the collective can
# use all eight. With fewer tokens, take faster links (chapter 11) or larger micro-batches. Backward computes twice as
# long and sends twice as much, an all-gather and a reduce-scatter, so the rule is the same, as long as gradients are
# sent in bf16, too.

# %% [markdown]
# ## What prefetching costs
#
# While a block computes, the next one has memory as well, so the peak is one block higher. The third row in the table
# of step times is another option: with **`reshard_after_forward=False`**, parameters stay unsharded from forward until
# backward has used them. In the figure, compare the three peaks.

# %% slideshow={"slide_type": "slide"}
lives, sent = {}, {}
for name, (lives[name], sent[name]) in ranks.pull("followed_steps")[0].items():
    peak = (psi + lives[name].peak_bytes) / (4 * psi)
    print(f"{name}: peak {peak:.2f} · 4Ψ, sent {sent[name] / half:.2f} f · 4Ψ")
unsharded = dict(zip(lives, (root + block, root + 2 * block, psi), strict=True))
expected_bytes = {name: psi + 4 * numel for name, numel in unsharded.items()}
widgets.lifetime_stepper(lives, psi, expected_bytes, of="prefetching")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert all(psi + life.peak_bytes == expected_bytes[name] for name, life in lives.items())
assert sent["prefetching, kept after forward"] == 2 * half

# %% [markdown] slideshow={"slide_type": "-"}
# With `reshard_after_forward=False`, you send no more than data parallelism. In time, you gain less than from
# prefetching, because prefetching had already hidden five of the six all-gathers that you save. In exchange, the peak
# is that of a model without units, 1.25 · 4Ψ: the parameters are sharded only between steps.

# %% [markdown]
# ## The production version
#
# torch's own ZeRO-3 is FSDP2, the `fully_shard` of chapter 08. By default, it reshards its units after forward. You
# call it once for each unit and once for the whole model, with a mesh of the ranks:

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model, mesh = TinyGPT(config), init_device_mesh(device.type, (world_size,))
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
pairs = {"ours": wrapped(Prefetching), "FSDP2": (model, AdamW(model.parameters()))}
costs = {name: measure.costs(*pair, *batch) for name, pair in pairs.items()}

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
costs, rows = ranks.pull("costs")[0], []
for name, each in costs.items():
    formula_bytes = formulas.model_state_bytes(psi, 4, 3, formulas.FP32_ADAM)
    assert 0 <= each.held.total_bytes - formula_bytes < 10_000  # AdamW's step counters, and padding
    in_mb = [f"{size / 1e6:.2f}" for size in (each.held.total_bytes, each.peak.peak_bytes)]
    rows.append([name, *in_mb, f"{each.log.sent_bytes / half:.2f}"])
assert costs["ours"].log.sent_bytes == costs["FSDP2"].log.sent_bytes
tables.Table(["", "held between steps, MB", "peak, MB", "sent, in f · 4Ψ"], rows, "rank 0")

# %% [markdown]
# Both hold 16Ψ/N bytes between steps, including the last gradients, and both send the same. Their peaks also include
# activations, which no stage of ZeRO shards. FSDP2 uses the same names for its hooks (`_fsdp_param_group.py`), but it
# shards each parameter by itself. Chapter 10 takes it apart.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# Parameters are in fp32, the optimizer is AdamW, and a step has g micro-batches.
#
# | | memory per rank | wire: sent per rank and step | overlap |
# |---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | in backward |
# | ZeRO-1 | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | both halves, if it knows the module |
# | ZeRO-2 | 4Ψ + 12Ψ/N, plus buckets | (g+1)f · 4Ψ | both halves, in lab 08 |
# | ZeRO-3, no units | 16Ψ/N + 4Ψ † | 2gf · 4Ψ | none |
# | ZeRO-3 | 16Ψ/N + root + one block † | 3gf · 4Ψ ‡ | none |
# | … with prefetching | one block more | 3gf · 4Ψ ‡ | all-gathers, in forward and backward |
# | … kept after forward | 16Ψ/N + 4Ψ † | 2gf · 4Ψ | all-gathers, in forward |
#
# † Plus full gradients of the units that are in backward, until they are reduce-scattered. ‡ Minus one all-gather of
# the root per micro-batch.
#
# **Terms**
#
# - **ZeRO-3**: a rank keeps only its shard of the parameters, the gradients and the optimizer state.
# - **storage**: the object that owns the memory of a tensor and of its views.
# - **unit**: a part of a model whose parameters are unsharded and resharded together, such as a transformer block.
# - **root unit**: the unit of all parameters that are in no other unit.
# - **unshard**: to give a unit's parameters memory, and to all-gather the shards of all ranks into it.
# - **reshard**: to free the memory of a unit's parameters, so that only the rank's own shard remains.
# - **prefetching**: launching the all-gather of the next unit while the current one computes.
# - **`reshard_after_forward`**: an option that, when false, keeps parameters unsharded from forward until backward.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): what changes with NCCL and many hosts.
# - Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020 (arXiv 1910.02054):
#   §5.3 on sharded parameters, and §7 on what each stage sends.
# - Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023 (arXiv 2304.11277): §3 on
#   units, flat parameters and prefetching.
# - *Getting Started with Fully Sharded Data Parallel (FSDP2)*, PyTorch tutorials: `fully_shard` and its prefetching.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# The reduce-scatters are still exposed. And our wrapper works only for plain models:
#
# - It counts gradients. If a parameter is unused, its unit is not reduce-scattered.
# - It takes the order of its units from a list.
# - It cannot evaluate: without gradients, `register_hook` raises an error.
# - Every rank creates the whole model first, so the model must fit on one rank after all.
# - The model cannot be saved, because no rank holds all of it.
#
# In the lab, you build this wrapper from better parts, and it remembers the order itself. Chapter 10 makes it usable
# for other models.

# %%
ranks.stop()
