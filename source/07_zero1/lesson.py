# ---
# jupyter:
#   course:
#     module: zero1
# ---

# %% [markdown]
# # 07 · ZeRO-1
#
# **50–85 minutes.** After this lesson, you will be able to:
#
# - shard the optimizer state over the ranks, and explain why assigning whole parameters to ranks cannot divide it
#   equally,
# - predict what a ZeRO-1 step sends, and check it in the ledger,
# - predict how many bytes per parameter it saves on N ranks,
# - name the lines of a training loop that assume that every rank holds the full optimizer state,
# - say why ZeRO-1 can be faster than data parallelism although it sends the same bytes,
# - recognize ZeRO-1 in torch, DeepSpeed and Megatron, and say how they differ from your version.
#
# You need reduce-scatter and all-gather (chapter 01), views of a flat tensor (chapter 03), `OverlappedDDP` (chapter 04)
# and the 16 bytes per parameter (chapter 06). As before, Ψ is the number of parameters, N is the number of ranks, and f
# = (N−1)/N.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# Chapter 06 counted what a rank holds between steps. Half of it is the optimizer state: what AdamW remembers for each
# parameter, its momentum and variance. In mixed precision, it is three quarters.
#
# On one GPU, all of that is needed. But in data parallelism, there are N ranks, and each of them holds the same state.
# Let's look at a small GPT, wrapped in the `OverlappedDDP` of chapter 04. Its vocabulary is larger than its text needs,
# so that the embedding is a large part of the model, as in the smallest GPT-2.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables
from shared.plots import diagrams
from shared.plots import zero as zero_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %%
# %%ranks
from functools import partial

from torch import nn

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
config = GPTConfig(vocab_size=2800, layers=4, width=128)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 200, 100), length=32))


def new_model():
    return TinyGPT(config).to(device)  # with the same seed, so equal on all ranks


def backward(model):
    """Compute this rank's gradients. Returns its loss."""
    model.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    return loss.item()


# %% [markdown]
# ## What is wasted
#
# The next cells run one step of data parallelism with AdamW, and measure what each rank holds after it. In the figure,
# compare the optimizer's share with the rest.

# %%
# %%ranks
AdamW, settings, logs = torch.optim.AdamW, {"lr": 1e-3}, {}
ddp = OverlappedDDP(new_model())
adamw = AdamW(ddp.parameters(), **settings)

with wire.ledger() as logs["data parallelism"]:
    backward(ddp)
    adamw.step()
print(logs["data parallelism"].summary())
held = memory.held(ddp.module, adamw)
sizes = {name: p.numel() for name, p in ddp.module.named_parameters()}

# %% slideshow={"slide_type": "slide"}
held, sizes = ranks.pull("held"), ranks.pull("sizes")[0]
parameters = sum(sizes.values())
print(f"Ψ = {parameters:,}; embedding {sizes['token_embedding.weight'] / parameters:.0%} of it")
assert all(of_rank == held[0] for of_rank in held)
assert abs(held[0].optimizer_bytes / held[0].total_bytes - 0.5) < 0.01
optimizer_mb = held[0].optimizer_bytes / 1e6
redundant_mb = formulas.redundant_copies(4) * optimizer_mb
print(f"optimizer {optimizer_mb:.2f} MB on each rank, {redundant_mb:.2f} MB redundant")
plots.memory_by_component({"each of four ranks": held[0].by_component()})

# %% [markdown] slideshow={"slide_type": "-"}
# Half of what a rank holds is optimizer state, and one copy of it would be enough for all four ranks. The work is
# redundant, too: each rank computes the same update of the same parameters.
#
# AdamW uses the momentum and variance of a parameter only once per step, to update that parameter. So only one rank has
# to hold them. This rank updates the parameter and sends the new value to the others. Storing the optimizer state in
# this way is called **ZeRO-1**, the first of three stages of the *Zero Redundancy Optimizer* (Rajbhandari et al. 2020).
# One question remains: which rank holds what?

# %% [markdown]
# ## One owner per parameter
#
# The rank that holds the state of a parameter and updates it is its **owner**. A simple way to choose owners is to go
# through the parameters from the largest to the smallest, and to assign each one to the rank that owns the fewest
# elements so far:


# %%
# %%ranks
def by_parameter(sizes, world_size):
    """Assign each parameter, the largest first, to the rank that owns least. Returns owners by name."""
    owned, owner = [0] * world_size, {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        owner[name] = owned.index(min(owned))
        owned[owner[name]] += sizes[name]
    return owner


owners = {n: by_parameter(sizes, n) for n in (2, 4, 8, 64)}
owner = owners[world_size]

# %% [markdown]
# Each rank creates an AdamW for the parameters that it owns. Gradients are averaged as in data parallelism. After the
# step, every owner broadcasts its parameters:

# %%
# %%ranks
owned_ddp = OverlappedDDP(new_model())
named = dict(owned_ddp.module.named_parameters())
own_adamw = AdamW([p for name, p in named.items() if owner[name] == rank], **settings)

with wire.ledger() as logs["one owner per parameter"]:
    backward(owned_ddp)
    own_adamw.step()
    for name, p in named.items():
        dist.broadcast(p.data, src=owner[name])
print(logs["one owner per parameter"].ops)
held = memory.held(owned_ddp, own_adamw)

# %% [markdown]
# **Predict.** Ideally, each of the four ranks would hold a quarter of the optimizer state. How many times as much does
# the rank with the largest share hold? 1 means exactly a quarter.

# %%
my_times_ideal = None

# %%
held_bytes = [of_rank.optimizer_bytes for of_rank in ranks.pull("held")]
print("optimizer state, MB:", [f"{each / 1e6:.2f}" for each in held_bytes])
measured = max(held_bytes) / (sum(held_bytes) / 4)
print(f"{predicted(my_times_ideal)}measured {measured:.2f} times a quarter")
owners, largest = ranks.pull("owners")[0], {}
for n, owner in owners.items():
    owned = [sum(sizes[name] for name in sizes if owner[name] == rank) for rank in range(n)]
    largest[n] = max(owned) / (parameters / n)
assert abs(measured - largest[4]) < 0.01 and largest[4] < largest[8] < largest[64]
row = ["largest share / ideal share", *(f"{ratio:.2f}" for ratio in largest.values())]
tables.Table(["ranks", *map(str, largest)], [row])

# %% [markdown]
# The owner of the embedding holds at least the embedding's state, no matter how many ranks there are. So the balance
# gets worse as N grows. A model fits only if a GPU has room for the *largest* share. (Large models suffer less: in
# Llama-2 7B, the embedding is 2% of the parameters, and the largest share on 64 ranks is 1.24 times the ideal.)
#
# There is a second problem: this takes one broadcast per parameter. You know from chapter 03 what the latency of so
# many calls costs.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## One owner per element
#
# AdamW treats each element of a parameter separately. To AdamW, it makes no difference where one parameter ends and the
# next begins. So we copy all parameters into one flat tensor, called a **flat parameter**, pad it to a multiple of N,
# and cut it into N equal shards. Rank r owns the r-th shard, which may begin and end in the middle of a parameter.
#
# In the figure, compare the two ways. The top row is the model, from its first parameter to its last:

# %% slideshow={"slide_type": "-"}
modules = {}
for name, size in sizes.items():
    label = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
    modules[label] = modules.get(label, 0) + size
ways = {
    "one owner per parameter": [(size, owners[4][name]) for name, size in sizes.items()],
    "one owner per element": [(-(-parameters // 4), rank) for rank in range(4)],
}
zero_plots.ownership(modules, ways)

# %% [markdown]
# Now all ranks own the same number of elements, whatever the model looks like. Only the last shards may contain
# padding, at most N − 1 elements in total. There is a second advantage: the shards lie side by side in the flat
# parameter, so a single all-gather replaces all the broadcasts.

# %% [markdown]
# ## The short version
#
# In chapter 03, you made each `.grad` a view of a flat tensor. Here, we do the same to the parameters: `p.data` becomes
# a view of the flat parameter. The shard is another view. So when AdamW updates the shard, it changes the model. All
# ranks build equal models here; otherwise, rank 0 would have to broadcast the flat parameter first.


# %%
# %%ranks
from torch.nn.functional import pad

from shared.c10d import all_gather_single


def flatten(tensors):
    """Copy tensors into one flat tensor, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


class ShortZeRO1:
    """Updates this rank's shard of all parameters with AdamW, then all-gathers the others.

    mean_of_shard takes this rank's flat gradients, and returns its shard of them, averaged over all ranks.
    """

    def __init__(self, parameters, mean_of_shard, **settings):
        self.parameters, self.mean_of_shard = list(parameters), mean_of_shard
        self.flat_param = flatten(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        slices = self.flat_param[: sum(sizes)].split(sizes)
        for p, flat_slice in zip(self.parameters, slices, strict=True):
            p.data = flat_slice.view_as(p)
        self.shard = nn.Parameter(self.flat_param.chunk(world_size)[rank])
        self.inner = AdamW([self.shard], **settings)

    def step(self):
        self.shard.grad = self.mean_of_shard(flatten(p.grad for p in self.parameters))
        self.inner.step()
        self.shard.grad = None
        all_gather_single(self.flat_param, self.shard.data)


# %% [markdown]
# How does a rank get the mean gradient of its shard? The first answer is to all-reduce all gradients, and then to keep
# only the shard:


# %%
# %%ranks
def by_all_reduce(gradients):
    dist.all_reduce(gradients)
    return gradients.chunk(world_size)[rank] / world_size


# %% [markdown]
# **Predict.** In a step of data parallelism, a rank sent 6.93 MB, which is 2f · 4Ψ bytes. How many MB does a rank send
# with this version?

# %%
my_all_reduce_mb = None

# %%
# %%ranks
model = new_model()
zero1 = ShortZeRO1(model.parameters(), by_all_reduce, **settings)
with wire.ledger() as logs["one owner per element, all-reduce"]:
    backward(model)
    zero1.step()
print(logs["one owner per element, all-reduce"].summary())

# %%
log = ranks.pull("logs")[0]["one owner per element, all-reduce"]
parameters_bytes = 4 * parameters
all_reduce_bytes = formulas.all_reduce_sent_bytes(parameters_bytes, ranks=4)
all_gather_bytes = formulas.all_gather_sent_bytes(parameters_bytes, ranks=4)
log.assert_volume(sent_bytes=all_reduce_bytes + all_gather_bytes)
print(f"{predicted(my_all_reduce_mb, '{} MB')}measured {log.sent_bytes / 1e6:.2f} MB, ", end="")
print(f"{log.sent_bytes / all_reduce_bytes:.2f} times data parallelism")

# %% [markdown]
# The all-reduce of the gradients sends 2f · 4Ψ bytes, and the all-gather of the parameters f · 4Ψ. Together, that is 3f
# · 4Ψ, one and a half times as much as in data parallelism. That is not what ZeRO-1 costs. It is what this program
# costs.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The all-reduce, cut in two
#
# Which gradients does rank r need? Only those of its own shard. After the all-reduce, it has the mean of all gradients,
# and throws three quarters of them away.
#
# You know from chapter 01 that an all-reduce is a reduce-scatter followed by an all-gather. After the first half, rank
# r already has the sum of shard r. The second half distributes all sums to all ranks, and nobody needs them. So we stop
# after the first half, run the optimizer, and use the second half for the new parameters instead.
#
# Read the diagram from top to bottom. Each small box is a shard, and its number says which one. The two wide boxes are
# the two halves of the all-reduce. Look at what each rank does between them:

# %% slideshow={"slide_type": "-"}
diagrams.zero1_step()

# %% [markdown]
# In code, only `mean_of_shard` changes. We take the ring from chapter 01, because gloo's own reduce-scatter runs an
# all-reduce internally.


# %%
# %%ranks
from solutions.collectives import ring_reduce_scatter


def by_reduce_scatter(gradients):
    return ring_reduce_scatter(gradients) / world_size


# %% [markdown]
# **Predict.** How many MB does a rank send now?

# %%
my_reduce_scatter_mb = None

# %%
# %%ranks
model = new_model()
zero1 = ShortZeRO1(model.parameters(), by_reduce_scatter, **settings)
with wire.ledger() as logs["one owner per element, reduce-scatter"]:
    backward(model)
    zero1.step()

# %%
log = ranks.pull("logs")[0]["one owner per element, reduce-scatter"]
log.assert_volume(sent_bytes=formulas.step_sent_bytes(parameters, ranks=4, stage=1, bytes_each=4))
assert log.sent_bytes == all_reduce_bytes
assert log.entries[-1].op == "all_gather" and log.entries[-1].payload_bytes == parameters_bytes
print(f"{predicted(my_reduce_scatter_mb, '{} MB')}measured {log.sent_bytes / 1e6:.2f} MB")
log.table(times=False)

# %% [markdown]
# The three sends and receives are the steps of the ring. With the all-gather at the end, a rank sends exactly as many
# bytes as in data parallelism, and holds a quarter of the optimizer state.

# %% [markdown]
# ## Four versions, in bytes
#
# The next cell adds up what each of our four versions has to send, as a multiple of f · 4Ψ. Each send of our ring
# counts as a call, so the reduce-scatter has three:


# %%
def in_units(sent_bytes):
    return f"{sent_bytes / all_gather_bytes:.2f}", f"{sent_bytes / 1e6:.2f}"


logs, rows = ranks.pull("logs"), []
for name in logs[0]:
    sent_bytes = sum(of_rank[name].sent_bytes for of_rank in logs) / 4  # the mean of the ranks
    calls = sum(entry.op != "recv" for entry in logs[0][name].entries)
    rows.append([name, f"{calls}", *in_units(sent_bytes)])
assert [row[2] for row in rows] == ["2.00", "3.00", "3.00", "2.00"]
tables.Table(["", "calls", "in f · 4Ψ", "sent per rank, MB"], rows, "Bytes that a ring must send.")

# %% [markdown]
# With one micro-batch per step, ZeRO-1 sends exactly what data parallelism sends; only ZeRO-3 has to send more.
# Chapters 08 and 09 count the other cases.
#
# With fp32 gradients and bf16 parameters, ZeRO-1 even sends less. The reduce-scatter sends f · 4Ψ bytes and the
# all-gather f · 2Ψ, together f · 6Ψ. An all-reduce of the same gradients sends f · 8Ψ.
#
# ZeRO-1 gathers *parameters*, after the step. The states of a rank stay where they are, and are needed elsewhere only
# for a checkpoint.
#
# Equal bytes do not mean equal time. `OverlappedDDP` launches its all-reduces during backward, while the short version
# communicates after it.

# %% [markdown]
# ## The same bytes, and less time
#
# Under data parallelism, a slow link is busy in backward and idle in forward: there is nothing to send then, because
# the parameters are complete. ZeRO-1 has something to send. It has cut the all-reduce in two, and the second half
# carries parameters. The last block's parameters are not needed before the next forward has computed all blocks in
# front of it.
#
# So let's launch each collective as early as possible, and wait for it as late as possible. The next cell defines a
# `ShortZeRO1` for one block. A reduce-scatter is launched as soon as backward has computed the block's gradients, and
# an all-gather as soon as the block's shard is updated. Who waits for the all-gather? The block itself, right before
# its next forward:


# %%
# %%ranks
from torch.optim import SGD

from solutions.async_collectives import launch_all_gather, launch_reduce_scatter


class OverlappingZeRO1(ShortZeRO1):
    """ZeRO-1 for one block. The reduce-scatter overlaps backward, and the all-gather the next forward."""

    def __init__(self, block):
        super().__init__(block.parameters(), None)
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


def from_update_to_update(model, optimizers, finish):
    for optimizer in optimizers:  # from the first block to the last
        optimizer.step()
    model.zero_grad()
    model(torch.zeros(1, 1080)).sum().backward()
    for finish_gradients in finish:
        finish_gradients()


ddp_of_blocks, blocks = (sleeping_layers(6, 1080, forward_ms=12, backward_ms=24) for _ in range(2))
ddp_of_blocks = OverlappedDDP(ddp_of_blocks, bucket_cap_mb=5)
sharded = [OverlappingZeRO1(block) for block in blocks]
versions_of_step = {
    "data parallelism": (ddp_of_blocks, [SGD(ddp_of_blocks.parameters())], []),
    "ZeRO-1": (blocks, sharded, [each.finish_reduce_scatter for each in reversed(sharded)]),
}
jobs = {name: partial(from_update_to_update, *pair) for name, pair in versions_of_step.items()}
times, lines = measure.jobs(jobs, rounds=9), {}
bars = {"data parallelism": [f"a{block}" for block in reversed(range(6))]}
bars["ZeRO-1"] = [f"g{block}" for block in range(6)] + [f"r{block}" for block in reversed(range(6))]
for name, operations in (("data parallelism", 1), ("ZeRO-1", 6)):  # 3 sends and 3 receives
    record = partial(timeline.record, versions_of_step[name][0])
    recorded = measure.recorded({"": jobs[name]}, record, rounds=7)[""]
    lines[name] = bundled(recorded[rank], operations, bars[name])

# %% [markdown]
# Each bar names its block: a5 is the all-reduce of block 5, g5 its all-gather, and r5 its reduce-scatter. A bar ends
# when the rank has waited for the collective, even if the data arrived earlier. So most of the r bars end together,
# when backward is over and the rank begins to wait. *Exposed* is the time during which something is in flight and
# nothing is computed. Look at what is in flight during forward:

# %% tags=["nbval-ignore-output"]
times, lines = ranks.pull("times")[0], ranks.pull("lines")[0]
fraction = times.ratio("ZeRO-1", "data parallelism")
print(f"{predicted(my_fraction)}measured {fraction:.2f}, {times.where}")
measure.expect(fraction < 1, "ZeRO-1 takes less time than data parallelism behind a slow link")
plots.timeline(list(lines.values()), list(lines), hidden=False)

# %% [markdown]
# Data parallelism leaves the link idle during the whole forward and until the first bucket is full. ZeRO-1 uses it from
# the update on, and has to leave it idle only while the last block computes forward and backward. By arithmetic,
# without latency, data parallelism needs at least 72 + 24 + 336 = 432 ms, and ZeRO-1 168 + 12 + 24 + 168 = 372 ms, or
# 0.86 times as long.
#
# The measured ratio is larger. Where is the rest? Backward takes longer in the lower timeline: its hooks pack each
# gradient and launch six transfers in Python, on the same cores. So the reduce-scatters are launched later, too. The
# last one, r0, cannot be launched before backward has ended, and has no computation left to hide behind.
#
# The saving is worth most where communication is the bottleneck. On a link that is fast enough to hide every all-reduce
# but the last behind backward, there is nothing left to win. Data parallelism exposes that last one, a0. ZeRO-1 exposes
# its two halves: r0 after backward, and g0 before forward.
#
# One thing in this version is fragile: only a block's forward waits for its all-gather. Code that saves a checkpoint,
# averages the weights, or uses one block's weight in another reads the parameters without calling that forward, and
# gets values that are partly old and partly new. So in the lab's `ZeRO1(..., module=module)`, the *parameters* wait:
# whoever reads one waits for it first.

# %% [markdown]
# ## What it saves
#
# For ZeRO-1, figure 1 of the ZeRO paper shows almost four times less memory, on 64 GPUs and in mixed precision.
#
# **Predict.** Your four ranks use fp32. Between steps, a rank holds parameters, gradients and optimizer state. By what
# factor does ZeRO-1 divide their total? 1 means that nothing is saved.

# %%
my_times_less = None


# %%
# %%ranks
def held_by_stage():
    """Return what this rank holds after a step without and with ZeRO-1, on the current number of ranks."""
    plain, sharded = new_model(), new_model()
    full_adamw = AdamW(plain.parameters())
    zero1 = ShortZeRO1(sharded.parameters(), by_reduce_scatter)
    for model, optimizer in ((plain, full_adamw), (sharded, zero1)):
        backward(model)
        optimizer.step()
    return memory.held(plain, full_adamw), memory.held(sharded, zero1)


# %% slideshow={"slide_type": "slide"}
by_ranks = {}
for n in (1, 2, 4):
    with ranks.world(n):
        by_ranks[n] = ranks.run(lambda: held_by_stage())[0]
    for stage, held in enumerate(by_ranks[n]):
        formula_bytes = formulas.model_state_bytes(parameters, n, stage, formulas.FP32_ADAM)
        assert 0 <= held.total_bytes - formula_bytes < 1000  # AdamW's step counters
plain, _ = by_ranks[4]
times_less = plain.total_bytes / by_ranks[4][1].total_bytes
print(f"{predicted(my_times_less)}measured {times_less:.2f} times")
bars = {"data parallelism": plain.by_component()}
bars |= {f"ZeRO-1, {n} ranks": by_ranks[n][1].by_component() for n in (2, 4)}
plots.memory_by_component(bars)

# %% [markdown] slideshow={"slide_type": "-"}
# Only the optimizer state gets smaller, because every rank still holds all parameters and gradients. On N ranks, a
# parameter takes 8 + 8/N bytes in fp32, and 4 + 12/N bytes in mixed precision, where the optimizer state includes the
# fp32 master weights (chapter 06). AdamW also has less to compute: each rank updates only Ψ/N elements.
#
# The first few ranks save the most. The table shows that for the model in figure 1 of the ZeRO paper, which has 7.5
# billion parameters:

# %%
rows, counts = [], (1, 2, 4, 8, 64, 10**9)
kinds = {"fp32": formulas.FP32_ADAM, "mixed": formulas.MIXED_ADAM}
for name, each in kinds.items():
    in_gb = [formulas.model_state_bytes(7.5, n, 1, bytes_per_parameter=each) for n in counts]
    rows.append([f"{name}, GB", *(f"{gb:.4g}" for gb in in_gb)])
    rows.append(["times less", *(f"{in_gb[0] / gb:.2f}" for gb in in_gb)])
assert rows[2][5] == "31.41"  # 31.4 GB in the paper
tables.Table(["ranks", "1", "2", "4", "8", "64", "→ ∞"], rows)

# %% [markdown]
# So four times is only the limit for mixed precision on infinitely many ranks. On 8 ranks it is 2.9 times. In fp32 it
# is never more than twice.

# %% [markdown]
# ## What sharding breaks
#
# A ZeRO-1 optimizer wraps an **inner optimizer**, the one that updates the rank's shard. Training itself is correct,
# but some lines around it assume that every rank holds the full optimizer state. The most common one saves
# `optimizer.state_dict()` on rank 0. With ZeRO-1, that file holds a quarter of the state. The shape of the momentum is
# that of a shard, not of any parameter, so the file fits no other number of ranks. For a checkpoint, the full state
# of each parameter has to be gathered. Other lines fail in a similar way:
#
# | in the training loop | what goes wrong | remedy |
# |---|---|---|
# | a checkpoint on rank 0 | it has 1/N of the state, and fits only N ranks | gather the state, per parameter (lab) |
# | gradient clipping | each rank clips by a norm of its own, without an error | one norm over all shards (lab) |
# | a learning rate scheduler | it changes only the outer optimizer's settings | copy them before each step (lab) |
# | weight decay for some parameters | a shard has only one setting | one flat parameter per param group (lab) |
# | logging `p.grad` | it is this rank's own gradient, or what a reduce-scatter left there | average what you log |
# | LAMB, Adafactor, Muon ¹ | a shard may contain only a piece of a parameter | one owner per parameter |
# | owners of whole parameters | a rank that owns none skips the broadcasts, and others wait | call them on all ranks |
#
# ¹ These optimizers do not treat elements separately. LAMB needs the norm of each parameter, Adafactor the means of its
# rows and columns, and Muon the whole matrix.

# %% [markdown]
# ## The production version
#
# You have seen ZeRO-1 for 3f · 4Ψ bytes, and for 2f · 4Ψ. Which of the two does torch ship? Its version is called
# `ZeroRedundancyOptimizer`, and is meant to be used with DDP. The next cells train the GPT for four steps with plain
# AdamW, with torch's optimizer, and with the short version.

# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def in_ddp(new_optimizer):
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    return model, new_optimizer(model.parameters())


def torchs(parameters):
    return ZeroRedundancyOptimizer(parameters, AdamW, **settings)


def train_4_steps(model, optimizer):
    """Return the loss and the ledger of the last step, and what this rank holds after it."""
    for _ in range(4):
        with wire.ledger() as log:
            loss = backward(model)
            optimizer.step()
    return loss, log, memory.held(model, optimizer)


model = new_model()
short = model, ShortZeRO1(model.parameters(), by_reduce_scatter, **settings)
versions = {
    "AdamW": in_ddp(lambda ps: AdamW(ps, **settings)),
    "torch's ZeRO-1": in_ddp(torchs),
    "the short version": short,
}
results = {name: train_4_steps(*pair) for name, pair in versions.items()}

# %% [markdown]
# Compare the last two columns:

# %% tags=["nbval-ignore-output"]
results, rows = ranks.pull("results"), []
for name in results[0]:
    losses, logs, held = zip(*(of_rank[name] for of_rank in results), strict=True)
    assert abs(losses[0] - results[0]["AdamW"][0]) < 1e-3
    calls = sum(entry.op != "recv" for entry in logs[0].entries)
    sent_mb = sum(log.sent_bytes for log in logs) / 4e6
    most_mb = max(of_rank.optimizer_bytes for of_rank in held) / 1e6
    rows.append([name, f"{losses[0]:.4f}", f"{calls}", f"{sent_mb:.2f}", f"{most_mb:.2f}"])
plain, torchs, short = ([float(cell) for cell in row[1:]] for row in rows)
assert torchs[2] > 1.4 * plain[2] and short[2] < 1.1 * plain[2]
assert short[3] < torchs[3] < plain[3]
header = ["", "loss", "calls", "sent per rank, MB", "optimizer state, MB"]
tables.Table(header, rows, "Loss of rank 0; mean of the bytes; largest optimizer state of a rank.")

# %% [markdown]
# All of them train the same model. torch's optimizer works like our first version: it assigns whole parameters, the
# largest first, and broadcasts them after the step. So the owner of the embedding holds the most, and a step sends 3f ·
# 4Ψ bytes, of which DDP can hide the all-reduces behind backward. Owning whole parameters also has an advantage: it
# works with optimizers such as LAMB. For a checkpoint, `consolidate_state_dict()` gathers the states on one rank.
#
# Training libraries shard by element, as the short version does. Megatron-Core calls its version the **distributed
# optimizer**:
#
# | | DeepSpeed, ZeRO stage 1 | Megatron-Core |
# |---|---|---|
# | turned on by | `"zero_optimization": {"stage": 1}` | `use_distributed_optimizer=True` |
# | shards | flat parameters, by element | flat tensors, by element, bucket by bucket |
# | gradients | all-reduced by default ¹ | reduce-scattered |
# | overlap | `overlap_comm` | `overlap_grad_reduce` and `overlap_param_gather` |
# | bytes per parameter | 4 + 12/N, as in the ZeRO paper | 6 + 12/N with bf16 parameters and fp32 gradients ² |
#
# ¹ DeepSpeed all-reduces a bucket of gradients, and each rank keeps its shard: see `allreduce_and_scatter` in
# `stage_1_and_2.py`, and issues 5758 and 7059. Set `use_multi_rank_bucket_allreduce` to false, or measure, before you
# rely on 2f.
#
# ² Megatron-Core documentation, "Distributed Optimizer". In fp32, it lists 8 + 8/N, which you have just measured.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# The table is for Ψ parameters in fp32, AdamW and N ranks, with f = (N−1)/N.
#
# | | memory per rank, bytes | sent per rank and step ¹ | collectives ² | overlap |
# |---|---|---|---|---|
# | data parallelism | 4Ψ + 4Ψ + 8Ψ | 2f · 4Ψ | one per bucket | with backward |
# | one owner per parameter | 4Ψ + 4Ψ + 8 · largest share | 3f · 4Ψ | buckets + parameters | all-reduces only |
# | one owner per element, all-reduce | 4Ψ + 4Ψ + 8Ψ/N | 3f · 4Ψ | 2 | none here |
# | one owner per element, reduce-scatter | 4Ψ + 4Ψ + 8Ψ/N | 2f · 4Ψ | 2 per bucket | with backward and forward ³ |
#
# ¹ Gradient accumulation does not change this, if data parallelism uses `no_sync()`.
#
# ² The three sends of our ring, each a call in the tables above, count as one collective.
#
# ³ Reduce-scatters overlap backward, and all-gathers the next forward, if there is a flat parameter for each bucket.
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
# - PyTorch, [Distributed Optimizers](https://docs.pytorch.org/docs/stable/distributed.optim.html):
#   `ZeroRedundancyOptimizer` and its options, in particular the restrictions of `overlap_with_ddp`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# After the reduce-scatter, a rank needs the mean gradient of its own shard. What does it hold?

# %%
# %%ranks
model, zero1 = versions["the short version"]
gradients_bytes = memory.held(model, zero1).gradients_bytes
needed_bytes = zero1.shard.nbytes
print(f"gradients held {gradients_bytes / 1e6:.2f} MB, needed {needed_bytes / 1e6:.2f} MB")
assert gradients_bytes == world_size * needed_bytes

# %% [markdown] slideshow={"slide_type": "-"}
# It holds the gradients of all shards, and needs those of one. On many ranks, gradients are now about half of the model
# state. They could be freed as soon as they have been reduced. This is ZeRO-2, chapter 08.
#
# But first, you build `ZeRO1` in the lab: a real `torch.optim.Optimizer`, without the copy of the gradients that
# `flatten` makes in each step. It clips gradients, follows a scheduler, and writes checkpoints for any number of ranks.

# %%
ranks.stop()
