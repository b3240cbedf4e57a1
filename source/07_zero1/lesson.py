# ---
# jupyter:
#   course:
#     module: zero1
# ---

# %% [markdown]
# # 07 · ZeRO-1
#
# **40–55 minutes.** After this lesson, you will be able to:
#
# - shard the optimizer state over the ranks, and explain why assigning whole parameters to ranks cannot divide it
#   equally,
# - predict what a ZeRO-1 step sends, and check it in the ledger,
# - predict how many bytes per parameter it saves on N ranks,
# - say why ZeRO-1 can be faster than data parallelism although it sends the same bytes,
# - name the lines of a training loop that go wrong if the optimizer state is sharded,
# - recognize ZeRO-1 in torch, DeepSpeed and Megatron, and say how they differ from your version.
#
# You need reduce-scatter and all-gather (chapter 01), views of a flat tensor (chapter 03), `OverlappedDDP` (chapter 04)
# and the 16 bytes per parameter (chapter 06). As before, Ψ is the number of parameters, N is the number of ranks, and f
# = (N−1)/N.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# A model of 7.5 billion parameters takes 120 GB in mixed precision (ZeRO paper, figure 1). Train it with data
# parallelism on 64 GPUs, and each of the 64 holds the same 120 GB. Three quarters of them are optimizer state: what
# AdamW remembers for each parameter, and the fp32 master weights (chapter 06). On one GPU, all of that is needed. But
# 64 times?
#
# Let's start with a small GPT, wrapped in the `OverlappedDDP` of chapter 04. Its vocabulary is larger than its text
# needs, so the embedding is a large part of the model, as in the smallest GPT-2. That embedding will cause trouble.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks
from shared.plots import diagrams
from shared.plots import zero as zero_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %%
# %%ranks
from torch import nn
from torch.optim import SGD, AdamW

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.overlapped_ddp import OverlappedDDP

config = GPTConfig(vocab_size=2800, layers=4, width=128)
samples = CharTokens().windows(range(rank, 200, 100), length=32)
inputs, targets = (batch.to(device) for batch in samples)


def new_model():
    return TinyGPT(config).to(device)  # with the same seed, so equal on all ranks


def train(model, optimizer):
    """Train for one step. Returns the ledger, and what this rank holds afterwards."""
    with wire.ledger() as log:
        model(inputs, targets).backward()
        optimizer.step()
    print(log.ops, f"must send {log.sent_bytes / 1e6:.2f} MB")
    return log, memory.held(model, optimizer)


# %% [markdown]
# ## What is wasted
#
# What does a rank hold after one step of data parallelism with AdamW, in fp32? Compare the optimizer's part of the bar
# with the rest:

# %%
# %%ranks
ddp = OverlappedDDP(new_model())
log, held = train(ddp, AdamW(ddp.parameters()))
sizes = {name: p.numel() for name, p in ddp.module.named_parameters()}

# %% slideshow={"slide_type": "slide"}
of_ddp, sizes = ranks.pull("held")[0], ranks.pull("sizes")[0]
plots.memory_by_component({"each of four ranks": of_ddp.by_component()})

# %% tags=["claims"] jupyter={"source_hidden": true}
parameters = sum(sizes.values())
assert all(of_rank == of_ddp for of_rank in ranks.pull("held"))
assert abs(of_ddp.optimizer_bytes / of_ddp.total_bytes - 0.5) < 0.01
assert round(sizes["token_embedding.weight"] / parameters, 2) == 0.31
assert all(abs(log.sent_bytes - 6.93e6) < 5e3 for log in ranks.pull("log"))

# %% [markdown] slideshow={"slide_type": "-"}
# Half of the bar is optimizer state, and one copy of it would be enough for all four ranks. The work is redundant, too:
# each rank computes the same update of the same parameters.
#
# AdamW uses the momentum and variance of a parameter only once per step, to update that parameter. So one rank can hold
# them, update the parameter, and send the new value to the others. Storing the optimizer state in this way is called
# **ZeRO-1**, the first of three stages of the *Zero Redundancy Optimizer* (Rajbhandari et al. 2020). But which rank
# holds what? The obvious answer has a catch.

# %% [markdown]
# ## One owner per parameter
#
# Each parameter could get one rank as its **owner**, which holds its state and updates it. Go through the parameters
# from the largest to the smallest, and assign each one to the rank that owns the fewest elements so far. torch's
# `ZeroRedundancyOptimizer` does that. DDP averages the gradients, each rank runs AdamW for the parameters that it owns,
# and then every owner broadcasts them.
#
# **Predict.** Ideally, each of the four ranks would hold a quarter of the optimizer state. How many times as much does
# the rank with the largest share hold? 1 means exactly a quarter.

# %%
my_times_ideal = None

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer

ddp = OverlappedDDP(new_model())
torchs = ZeroRedundancyOptimizer(ddp.parameters(), AdamW)
log, held = train(ddp, torchs)
owned = [name for name, p in ddp.module.named_parameters() if p in torchs.optim.state]

# %%
optimizer_bytes = [of_rank.optimizer_bytes for of_rank in ranks.pull("held")]
ratio = max(optimizer_bytes) / (sum(optimizer_bytes) / 4)
print(f"{predicted(my_times_ideal)}measured {ratio:.2f} times a quarter")

# %% tags=["claims"] jupyter={"source_hidden": true}
logs = ranks.pull("log")
assert abs(ratio - 1.24) < 0.01
assert all(log.ops["broadcast"] == len(sizes) == 36 for log in logs)
assert abs(sum(log.sent_bytes for log in logs) / 4 - 1.5 * 6.93e6) < 1e4
assert sorted(name for names in ranks.pull("owned") for name in names) == sorted(sizes)

# %% [markdown]
# One parameter spoils it. No matter how many ranks there are, somebody has to own the embedding, which is 31% of this
# model, or 1.24 times a quarter. On 64 ranks, it would be 20 times the ideal share. And a model fits only if a GPU has
# room for the *largest* share.

# %% [markdown]
# The ledger shows a second problem: each parameter takes a broadcast. You know from chapter 03 what the latency of so
# many calls costs. The broadcasts also send bytes: in data parallelism, a rank sent 6.93 MB, which is 2f · 4Ψ bytes.
# Now the ranks send 10.4 MB on average, because the broadcasts add f · 4Ψ. That is the cost of this program, not of
# ZeRO-1.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## One owner per element
#
# Who says that a parameter needs one owner? AdamW treats each of its elements separately, and does not care where one
# parameter ends and the next begins. So we copy all parameters into one flat tensor, called a **flat parameter**, pad
# it to a multiple of N, and cut it into N equal shards. Rank r owns the r-th, which may begin and end in the middle of
# a parameter.
#
# In the figure, the top row is the model, from its first parameter to its last. Below it, a color is a rank, not a kind
# of memory. How far does rank 0 reach in each of the two rows?

# %% slideshow={"slide_type": "-"}
zero_plots.ownership(sizes, ranks.pull("owned"))

# %% [markdown]
# Rank 0 is no longer stuck with the whole embedding: all ranks own the same number of elements, whatever the model
# looks like. Only the last shards may contain padding, at most N − 1 elements in total. And because the shards lie side
# by side, a single all-gather replaces all the broadcasts. But it sends as many bytes as they did, on top of the
# all-reduce.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The all-reduce, cut in two
#
# Which gradients does rank r need? Only those of its own shard. After an all-reduce, it has the mean of all gradients,
# and throws three quarters of them away.
#
# You know from chapter 01 that an all-reduce is a reduce-scatter followed by an all-gather. After the first half, rank
# r already has the sum of shard r. The second half distributes all sums to all ranks, and nobody needs them. So we stop
# halfway, run the optimizer, and spend the second half on the new parameters.
#
# Read the diagram from top to bottom. Each small box is a shard, with its number, and the two wide boxes are the halves
# of the all-reduce. A color says which rank has computed the values, and four stripes are a mean over all ranks. Follow
# rank 1: how many of its four shards does it work on between the wide boxes?

# %% slideshow={"slide_type": "-"}
diagrams.zero1_step()

# %% [markdown]
# Only one, yet its last row is complete.
#
# ## The short version
#
# How does an updated shard get into the model? Through views. In chapter 03,
# each `.grad` was a view of a flat tensor. Here, `p.data` becomes a view of the flat parameter, and the shard is
# another: when AdamW updates it, the model changes. All ranks build equal models here; otherwise, rank 0 would have to
# broadcast the flat parameter first. We take the reduce-scatter from chapter 01, because gloo's own runs an all-reduce
# internally.


# %%
# %%ranks
from torch.nn.functional import pad

from shared.c10d import all_gather_single
from solutions.collectives import ring_reduce_scatter


def flatten(tensors):
    """Copy tensors into one flat tensor, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


class ShortZeRO1:
    """Updates this rank's shard of all parameters with AdamW, then all-gathers the others."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat_param = flatten(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        slices = self.flat_param[: sum(sizes)].split(sizes)
        for p, flat_slice in zip(self.parameters, slices, strict=True):
            p.data = flat_slice.view_as(p)
        self.shard = nn.Parameter(self.flat_param.chunk(world_size)[rank])
        self.inner = AdamW([self.shard])

    def step(self):
        gradients = flatten(p.grad for p in self.parameters)
        self.shard.grad = ring_reduce_scatter(gradients) / world_size
        self.inner.step()
        self.shard.grad = None
        all_gather_single(self.flat_param, self.shard.data)


# %% [markdown]
# **Predict.** How many MB does a rank send now?

# %%
my_mb = None

# %%
# %%ranks
model = new_model()
zero1 = ShortZeRO1(model.parameters())
log, held = train(model, zero1)

# %%
print(f"{predicted(my_mb, '{} MB')}measured {ranks.pull('log')[0].sent_bytes / 1e6:.2f} MB")

# %% tags=["claims"] jupyter={"source_hidden": true}
from shared import formulas

log = ranks.pull("log")[0]
log.assert_volume(sent_bytes=formulas.step_sent_bytes(parameters, ranks=4, stage=1, bytes_each=4))
assert log.ops == {"recv": 3, "send": 3, "all_gather": 1} and abs(log.sent_bytes - 6.93e6) < 5e3

# %% [markdown]
# Not one byte more than in data parallelism. The three sends and receives are the steps of the ring, and the all-gather
# brings the parameters. The optimizer states stay where they are.
#
# With fp32 gradients and bf16 parameters, ZeRO-1 even sends less: f · 4Ψ bytes for the reduce-scatter and f · 2Ψ for
# the all-gather, together f · 6Ψ. An all-reduce of the same gradients sends f · 8Ψ.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What it saves
#
# What do these bytes buy? Figure 1 of the ZeRO paper divides our 120 GB by almost four, on 64 GPUs and in mixed
# precision.
#
# **Predict.** Your four ranks use fp32. Between steps, a rank holds parameters, gradients and optimizer state. By what
# factor does ZeRO-1 divide their total? 1 means that nothing is saved.

# %%
my_times_less = None

# %% slideshow={"slide_type": "-"}
held = ranks.pull("held")[0]
print(f"{predicted(my_times_less)}measured {of_ddp.total_bytes / held.total_bytes:.2f} times")
bars = {"data parallelism": of_ddp.by_component(), "ZeRO-1": held.by_component()}
plots.memory_by_component(bars)

# %% tags=["claims"] jupyter={"source_hidden": true}
of_formula = formulas.model_state_bytes(parameters, 4, 1, formulas.FP32_ADAM)
assert 0 <= held.total_bytes - of_formula < 1000  # AdamW's step counters
in_gb = [formulas.model_state_bytes(7.5, n, 1) for n in (1, 8, 64, 10**9)]
assert [f"{gb:.3g}" for gb in in_gb] == ["120", "41.2", "31.4", "30"]

# %% [markdown] slideshow={"slide_type": "-"}
# Only the optimizer's part of the bar is shorter, because every rank still holds all parameters and gradients. On N
# ranks, a parameter takes 8 + 8/N bytes in fp32, and 4 + 12/N bytes in mixed precision. AdamW also has less to compute:
# each rank updates only Ψ/N elements.
#
# The first few ranks save the most. The 120 GB of our model become 41 GB on 8 GPUs, 31.4 GB on 64, and never less than
# 30 GB. So a factor of four is only the limit. In fp32, the limit is two.

# %% [markdown]
# ## The same bytes, and less time
#
# The bytes are equal. Is the time? `OverlappedDDP` launches its all-reduces during backward, while the short version
# communicates after it. But under data parallelism, a slow link is idle in forward, because the parameters are complete
# and there is nothing to send. ZeRO-1 has something to send: its second half of the all-reduce carries parameters, and
# the last block's are not needed before the next forward has computed all blocks in front of it.
#
# So let's launch each collective as early as possible, and wait for it as late as possible. The next cell defines a
# `ShortZeRO1` for one block. A reduce-scatter is launched as soon as backward has computed the block's gradients, and
# an all-gather as soon as the block's shard is updated. Who waits for the all-gather? The block itself, right before
# its next forward:


# %%
# %%ranks
from solutions.async_collectives import launch_all_gather, launch_reduce_scatter


class OverlappingZeRO1(ShortZeRO1):
    """ZeRO-1 for one block. The reduce-scatter overlaps backward, and the all-gather the next forward."""

    def __init__(self, block):
        super().__init__(block.parameters())
        self.inner, self.all_gather = SGD([self.shard]), None
        block.weight.register_post_accumulate_grad_hook(self.launch_reduce_scatter)
        block.register_forward_pre_hook(self.finish_all_gather)

    def launch_reduce_scatter(self, weight):
        self.reduce_scatter = launch_reduce_scatter(flatten([weight.grad]))

    def finish_reduce_scatter(self):
        self.shard.grad = self.reduce_scatter.wait() / world_size

    def step(self):
        self.inner.step()
        self.all_gather = launch_all_gather(self.flat_param, self.shard.data)

    def finish_all_gather(self, _block, _inputs):
        if self.all_gather:
            self.all_gather.wait()
            self.all_gather = None


# %% [markdown]
# The next cell compares it with `OverlappedDDP`. Each of six blocks has 4.7 MB of gradients, and sleeps for 12 ms in
# forward and 24 ms in backward, as a stand-in for a GPU. Both use SGD, whose update takes little time, and both send 42
# MB per rank and step, which takes 336 ms at 1 Gbit/s. We look at a step from one update to the next, so that the
# all-gathers and the forward that they overlap are in the same picture.
#
# **Predict.** How long does ZeRO-1's step take, as a fraction of that of data parallelism? 1 means equally long.

# %%
my_fraction = None

# %%
# %%ranks --timeout 120
from shared import measure, timeline
from shared.models import sleeping_layers
from shared.timeline.bundles import bundled

ddp, blocks = (sleeping_layers(6, 1080, forward_ms=12, backward_ms=24) for _ in range(2))
ddp = OverlappedDDP(ddp, bucket_cap_mb=5)
sgd, sharded = SGD(ddp.parameters()), [OverlappingZeRO1(block) for block in blocks]


def step_of_ddp():
    sgd.step()
    ddp.zero_grad()
    ddp(torch.zeros(1, 1080)).sum().backward()


def step_of_zero1():
    for block in sharded:
        block.step()
    blocks.zero_grad()
    blocks(torch.zeros(1, 1080)).sum().backward()
    for block in reversed(sharded):
        block.finish_reduce_scatter()


steps = {"data parallelism": step_of_ddp, "ZeRO-1": step_of_zero1}
times = measure.jobs(steps, rounds=9)


def recorded(name, module, operations, names):
    """Record a step of median length. Returns this rank's timeline, with one named bar per collective."""
    lines = measure.recorded({"": steps[name]}, lambda: timeline.record(module), rounds=7)[""]
    return bundled(lines[rank], operations, names)


up, down = range(6), range(5, -1, -1)
lines = {"data parallelism": recorded("data parallelism", ddp, 1, [f"a{n}" for n in down])}
bars = [f"g{n}" for n in up] + [f"r{n}" for n in down]  # each is three sends and three receives
lines["ZeRO-1"] = recorded("ZeRO-1", blocks, 6, bars)

# %% [markdown] slideshow={"slide_type": "slide"}
# In each timeline, compute is on top. Which bars lie below forward? Each names its block: a5 is the all-reduce of block
# 5, g5 its all-gather, and r5 its reduce-scatter. A g or r bar ends when the rank has waited for it, even if the data
# arrived earlier, so most r bars end together, when backward is over. *Exposed* is the time during which something is
# in flight and nothing is computed. The ratio above the figure comes from other steps, which were not recorded.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "-"}
times, lines = ranks.pull("times")[0], ranks.pull("lines")[0]
fraction = times.ratio("ZeRO-1", "data parallelism")
print(f"{predicted(my_fraction)}measured {fraction:.2f}, {times.where}")
plots.timeline(list(lines.values()), list(lines), hidden=False)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(fraction < 1, "ZeRO-1 takes less time than data parallelism behind a slow link")

# %% [markdown]
# Under the forward of data parallelism, there is nothing: its link is idle until the first bucket is full. ZeRO-1's g
# bars fill that gap, so its link has to be idle only while the last block computes forward and backward. By arithmetic,
# without latency, data parallelism needs at least 72 + 24 + 336 = 432 ms. ZeRO-1 needs 168 ms for the all-gathers, 12 +
# 24 ms in the last block and 168 ms for the reduce-scatters. Together, that is 372 ms, or 0.86 times as long.
#
# Why is the measured ratio larger? In both timelines, backward takes longer than six times 24 ms, because the hooks
# pack and launch in Python, on cores that the ranks share. Data parallelism loses little, because its link is busy
# until the end of the step anyway. But ZeRO-1's r0 cannot be launched before backward has ended, and has nothing left
# to hide behind.
#
# The saving is worth most where communication is the bottleneck. On a link that is fast enough to hide every all-reduce
# but the last behind backward, there is nothing left to win: data parallelism exposes that last one, a0, and ZeRO-1 its
# two halves, r0 after backward and g0 before forward.

# %% [markdown]
# There is a trap in this version: only a block's forward waits for its all-gather. Code that saves a checkpoint,
# averages the weights, or uses one block's weight in another reads the parameters without calling that forward, and
# gets values that are partly old and partly new. So in the lab's `ZeRO1(..., module=module)`, the *parameters* wait:
# whoever reads one waits for its all-gather first.

# %% [markdown]
# ## What sharding breaks
#
# Does your training loop save `optimizer.state_dict()` on rank 0? With ZeRO-1, that file holds a quarter of the state,
# in the shape of a shard, so it fits no other number of ranks. The lab's optional exercise gathers the state per
# parameter first.
#
# A ZeRO-1 optimizer wraps an **inner optimizer**, the one that updates the rank's shard. Its updates are correct, but
# lines around it assume that every rank has the mean gradients and the optimizer state of whole parameters. Which of
# these mistakes would you notice?
#
# | in the training loop | what goes wrong | remedy |
# |---|---|---|
# | gradient clipping | each rank clips by a norm of its own, without an error | one norm over all shards (lab) |
# | a learning rate scheduler | it changes only the outer optimizer's settings | copy them before each step (lab) |
# | weight decay for some parameters | a shard has only one setting | one flat parameter per param group (lab) |
# | logging `p.grad` | it is this rank's own gradient, or what a reduce-scatter left there | average what you log |
# | LAMB, Adafactor, Muon ¹ | a shard may contain only a piece of a parameter | one owner per parameter |
#
# ¹ These optimizers do not treat elements separately. LAMB needs the norm of each parameter, Adafactor the means of its
# rows and columns, and Muon the whole matrix.
#
# Suppose that `ShortZeRO1` were a `torch.optim.Optimizer`. Only torch's `Muon` would raise an error, because a flat
# shard is no matrix. With every other mistake in the table, training would go on.

# %% [markdown]
# ## The production version
#
# Which way do libraries go? torch's `ZeroRedundancyOptimizer` assigns whole parameters, as you have measured, and works
# with LAMB for that reason. For a checkpoint, its `consolidate_state_dict()` gathers the states on one rank. Training
# libraries shard by element, as the short version does. Megatron-Core calls its version the **distributed optimizer**:
#
# | | DeepSpeed, ZeRO stage 1 | Megatron-Core |
# |---|---|---|
# | turned on by | `"zero_optimization": {"stage": 1}` | `use_distributed_optimizer=True` |
# | shards | flat parameters, by element | flat tensors, by element, bucket by bucket |
# | gradients | all-reduced, unless `use_multi_rank_bucket_allreduce` is false ¹ | reduce-scattered |
# | overlap | `overlap_comm`, for gradients only | `overlap_grad_reduce` and `overlap_param_gather` |
# | bytes per parameter | 4 + 12/N, as in the ZeRO paper | 6 + 12/N with bf16 parameters and fp32 gradients ² |
#
# ¹ See `allreduce_and_scatter` in DeepSpeed's `stage_1_and_2.py`, and its issues 5758 and 7059. With the all-reduce, a
# step sends 3f instead of 2f times the size of the parameters.
#
# ² Megatron-Core documentation, "Distributed Optimizer". In fp32, it lists 8 + 8/N, as you have measured.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# The table is for Ψ parameters in fp32, AdamW and N ranks, with f = (N−1)/N.
#
# | | memory per rank, bytes | sent per rank and step ¹ | collectives | overlap |
# |---|---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | one per bucket | with backward |
# | ZeRO-1, one owner per parameter | 4Ψ + 4Ψ + 8 · largest share | 3f · 4Ψ | buckets + parameters | all-reduces only |
# | ZeRO-1, one owner per element | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | 2 per bucket | with backward and forward ² |
#
# ¹ Gradient accumulation does not change this, if data parallelism uses `no_sync()`.
#
# ² Reduce-scatters overlap backward, and all-gathers the next forward, if there is a flat parameter for each bucket.
#
# **Terms**
#
# - **ZeRO-1**: data parallelism with a sharded optimizer state. Each rank updates its shard of the parameters, and then
#   the ranks all-gather them.
# - **owner** (of a parameter or an element): the rank that holds its optimizer state and updates it.
# - **flat parameter**: a flat tensor that holds several parameters, padded to a multiple of the number of ranks. The
#   parameters are views of it.
# - **inner optimizer**: the ordinary optimizer that updates this rank's shard inside a ZeRO-1 optimizer.
# - **distributed optimizer**: ZeRO-1 in Megatron-Core.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): what changes with NCCL and many hosts.
# - Rajbhandari et al., [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054), 2020: figure 1 and §5.1 for the memory, §7 for the communication. Its
#   "2Ψ" counts elements, with f → 1.
# - Megatron-Core, [Distributed
#   Optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html): the same
#   step with fp32 gradients and bf16 parameters, drawn with 16 elements.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# After the reduce-scatter, a rank needs the mean gradient of its own shard. What does it hold?

# %%
# %%ranks
held_mb, needed_mb = held.gradients_bytes / 1e6, zero1.shard.nbytes / 1e6
print(f"gradients held {held_mb:.2f} MB, needed {needed_mb:.2f} MB")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert held.gradients_bytes == world_size * zero1.shard.nbytes

# %% [markdown] slideshow={"slide_type": "-"}
# It holds the gradients of all shards, and needs those of one. On many ranks, gradients are now about half of the model
# state, although they could be freed as soon as they have been reduced. This is ZeRO-2, chapter 08.
#
# But first, you build `ZeRO1` in the lab: a real `torch.optim.Optimizer`, without the copy of the gradients that
# `flatten` makes in each step. It clips gradients, follows a scheduler, and writes checkpoints for any number of ranks.

# %%
ranks.stop()
