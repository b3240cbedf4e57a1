# ---
# jupyter:
#   course:
#     module: units
# ---

# %% [markdown]
# # 09 · ZeRO-3
#
# **50–85 minutes.** After this lesson, you will be able to:
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
# state, but every rank still holds all parameters, and in bf16, these take 140 GB. In this lesson, you shard them, too.
# Each rank is behind a slow link of 250 Mbit/s, to show what that costs:

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables, widgets
from shared.plots import diagrams
from shared.plots import lifetimes as lifetime_plots
from shared.predictions import predicted
from shared.timeline.blocks import with_block_numbers, zero3_step

measure.start_behind_link(world_size=4, rate="250mbit", latency_ms=0.1)

# %%
# %%ranks
from torch import nn

from shared import measure, memory, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.zero2 import ZeRO2

text = CharTokens()
config = GPTConfig(vocab_size=800, layers=6, width=128)
inputs, targets = text.windows(range(rank, 400, 100), length=32)
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}


def new_model(sleep=False):
    model = TinyGPT(config)
    if sleep:
        stand_in_for_gpu(model.blocks, forward_ms=24, backward_ms=48)
    return model


def compute_gradients(model, optimizer, batch=(inputs, targets)):
    """Give each shard its mean gradient. Returns this rank's loss."""
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    return loss.item()


def step_of(model, optimizer, batch=(inputs, targets)):
    loss = compute_gradients(model, optimizer, batch)
    optimizer.step()
    return loss


# %% [markdown]
# ## What is wasted
#
# What does a rank hold between backward and the optimizer's step? The upper bar of the figure is measured. The lower
# one is what a rank would hold if it kept only its shard of the parameters:

# %%
# %%ranks
zero2 = ZeRO2(new_model(), AdamW, bucket_cap_mb=0.5, **settings)
step_of(zero2, zero2)  # creates the optimizer's state
compute_gradients(zero2, zero2)
held = memory.held(zero2)
numels = {name: p.numel() for name, p in zero2.module.named_parameters()}

# %% slideshow={"slide_type": "slide"}
numels, held = ranks.pull("numels")[0], ranks.pull("held")
psi = sum(numels.values())
block = sum(numels[name] for name in numels if name.startswith("blocks.0."))
root = psi - 6 * block  # the parameters that are in no block
share = held[0].parameters_bytes / held[0].total_bytes
print(f"Ψ = {psi:,}, and each block has {block / psi:.0%} of it. Parameters: {share:.0%}")
assert share > 0.5 and all(of_rank == held[0] for of_rank in held)
with_zero2 = held[0].by_component()
sharded = with_zero2 | {"parameters": with_zero2["parameters"] // 4}
plots.memory_by_component({"ZeRO-2": with_zero2, "parameters sharded": sharded}, decimals=2)

# %% [markdown] slideshow={"slide_type": "-"}
# Most of what a rank holds is parameters, and all four ranks hold the same ones. When does a rank need them? The next
# cell records forward and backward of the model alone. As in chapter 04, its blocks sleep as a stand-in for a GPU. In
# the figure, look for block 3:

# %%
# %%ranks
alone = new_model(sleep=True)
step = measure.training_step(alone, inputs, targets)
lines = measure.recorded({"": step}, lambda: timeline.record(alone), rounds=3)[""]

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
line = with_block_numbers(ranks.pull("lines")[0][0])
used_s = sum(span.ended_s - span.began_s for span in line.spans if span.name == "3")
print(f"Block 3 computes for {used_s / (line.ended_s - line.began_s):.0%} of the time.")
idle = used_s < 0.5 * (line.ended_s - line.began_s)
measure.expect(idle, "its parameters are unused for most of the step")
plots.timeline([line], exposed=False)

# %% [markdown] slideshow={"slide_type": "-"}
# A block needs its parameters only briefly, once in forward and once in backward. For the rest of the step, each rank
# could keep a quarter of them, and get the rest from the other ranks when the block needs them. This is **ZeRO-3**:
# parameters are sharded, like gradients and optimizer state.

# %% [markdown]
# ## Freeing a parameter's memory and restoring it
#
# The memory of a tensor and of all its views belongs to one object, their **storage**. You can resize a storage to zero
# bytes, and later back to its full size. The tensors stay valid, including those that autograd has saved for backward:

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
# In the upper half of the diagram, follow the parameters of a unit from top to bottom. They are copied side by side
# into a flat parameter, which is padded so that all shards have the same length. In the lower half, look at the four
# hooks, and at when the flat parameter has memory:

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
# Two classes are enough to train a plain GPT. The first holds the parameters of one unit. `unshard()` only launches the
# all-gather, and `wait_for_unshard()` waits for it. In between, the unit's state is `"UNSHARDING"`.


# %%
# %%ranks
from functools import partial

from torch.nn.functional import pad

from solutions.async_collectives import launch_all_gather, launch_reduce_scatter


def flatten(tensors):
    """Concatenate copies of tensors, padded with zeros to a multiple of the number of ranks."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(flat, (0, -flat.numel() % world_size))


# %%
# %%ranks
class ShardedFlat:
    """The parameters of one unit. This rank keeps one shard of them."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat_param = flatten(self.parameters)
        sizes = [p.numel() for p in self.parameters]
        slices = self.flat_param[: sum(sizes)].split(sizes)
        for p, flat_slice in zip(self.parameters, slices, strict=True):
            p.data = flat_slice.view_as(p)
        self.shard = nn.Parameter(self.flat_param.chunk(world_size)[rank].clone())
        self.reshard()

    def unshard(self):
        if self.state == "SHARDED":
            self.state = "UNSHARDING"
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            self.handle = launch_all_gather(self.flat_param, self.shard.detach())

    def wait_for_unshard(self):
        self.unshard()
        if self.state == "UNSHARDING":
            self.handle.wait()
            self.state = "UNSHARDED"

    def reshard(self):
        self.flat_param.untyped_storage().resize_(0)
        self.state = "SHARDED"

    def reduce_gradients(self):
        """Add the rank's shard of the mean gradient to shard.grad, and free the full gradients."""
        gradient = flatten(p.grad for p in self.parameters)
        mean = launch_reduce_scatter(gradient).wait() / world_size
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        for p in self.parameters:
            p.grad = None


# %% [markdown]
# The second class wraps the model and registers the four hooks. The root stays unsharded for the whole step, because
# our GPT needs it both first and last: the token embedding is *tied*, which means that its weight is also the weight of
# the output layer.


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
        if all(p.grad is not None for p in self.units[index].parameters):  # the last
            self.units[index].reduce_gradients()
            self.units[index].reshard()

    def finish_gradient_sync(self):
        self.root.reduce_gradients()
        self.root.reshard()


# %% [markdown]
# Does it train? The next cell trains a small GPT twice in float64, from the same initial weights: in one process on the
# full batch of eight samples, and in shards, with two samples per rank.


# %%
# %%ranks --timeout 180
small = GPTConfig(vocab_size=text.vocab_size, layers=3)


def losses_of(model, parameters, share, steps=100):
    """Train on a share of each batch. Returns the loss of each step."""
    optimizer, losses = AdamW(parameters, **settings), []
    for step in range(steps):
        seeded = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text.tokens) - 33, (8,), generator=seeded)
        losses.append(step_of(model, optimizer, text.windows(starts[share], length=32)))
    return losses


alone, gpt = TinyGPT(small).double(), TinyGPT(small).double()
alone_losses = losses_of(alone, alone.parameters(), slice(None))
in_shards = Sharded(gpt, gpt.blocks)
losses = losses_of(in_shards, in_shards.shards, slice(rank, None, world_size))

# %% tags=["nbval-ignore-output"]
alone_losses = ranks.pull("alone_losses")[0]
mean_losses = [sum(of_step) / 4 for of_step in zip(*ranks.pull("losses"), strict=True)]
difference = max(abs(x - y) for x, y in zip(alone_losses, mean_losses, strict=True))
print(f"largest difference of the losses: {difference:.0e}")
assert difference < 1e-6 and max(mean_losses[-10:]) < 0.8 * mean_losses[0]

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
from shared.memory import lifetimes


def followed(model, optimizer):
    """Run a step. Returns the parameters' peak, when each unit had memory, and the bytes sent."""
    flats = {f"block {index}": flat for index, flat in enumerate(model.units)}
    flats["root"] = model.root
    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        with lifetimes.follow(lifetimes.states_of(flats)) as life:
            step_of(model, optimizer)
    return max(sample.held.parameters_bytes for sample in peak.samples), life, log.sent_bytes


def wrapped(kind=Sharded, with_units=True, **options):
    module = new_model(sleep=True)
    model = kind(module, module.blocks if with_units else (), **options)
    return model, AdamW(model.shards, **settings)


by_unit, adamw = wrapped()
no_units = wrapped(with_units=False)
followed_steps = {"a unit per block": followed(by_unit, adamw), "no units": followed(*no_units)}

# %% [markdown]
# In the upper half of the figure, the dashed line is a formula: the shards, plus everything unsharded at the same time.
# In the lower half, each row is a unit, and a bar means that its parameters have memory.

# %% slideshow={"slide_type": "slide"}
steps = ranks.pull("followed_steps")[0]
unsharded = {"a unit per block": root + block, "no units": psi}
expected_bytes = {name: 4 * (psi / 4 + numel) for name, numel in unsharded.items()}
for name, (peak_bytes, _, _) in steps.items():
    print(f"{name}: {predicted(my_peaks[name])}measured {peak_bytes / (4 * psi):.2f}")
    assert peak_bytes == expected_bytes[name]
lives = {name: life for name, (_, life, _) in steps.items()}
lifetime_plots.lifetimes(lives, psi, expected_bytes)

# %% [markdown] slideshow={"slide_type": "-"}
# The formula is right to the byte. On the left, forward unshards the blocks from first to last, and backward from last
# to first. Two blocks are never unsharded at once, so the peak is
#
# $$\frac{\Psi}{N} + \text{root} + \text{one block}.$$
#
# The FSDP paper's formula has no term for the root (Zhao et al. 2023, §3.2.1).
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
# %%ranks
def sent_bytes(micro_batches):
    adamw.zero_grad()
    with wire.ledger() as log:
        for _ in range(micro_batches):
            by_unit(inputs, targets).backward()
            by_unit.finish_gradient_sync()
    return log.sent_bytes


sent = {g: sent_bytes(g) for g in (1, 2, 4)}

# %%
sent, counts = ranks.pull("sent")[0], (1, 2, 4)
half = formulas.all_gather_sent_bytes(4 * psi, ranks=4)  # f · 4Ψ
print(f"{predicted(my_prediction)}measured {sent[1] / (2 * half):.2f} times data parallelism")
rows = [["measured here", *(f"{sent[g] / half:.2f}" for g in counts)]]
for stage in (3, 2, 1, 0):
    by_formula = [formulas.step_sent_bytes(psi, 4, stage, 4, micro_batches=g) for g in counts]
    rows.append([f"formula, stage {stage}", *(f"{each / half:g}" for each in by_formula)])
assert all(sent[g] == g * (3 - root / psi) * half for g in counts)
tables.Table(["in f · 4Ψ", *(f"g = {g}" for g in counts)], rows, "sent per rank and step")

# %% [markdown]
# A unit is all-gathered for forward and for backward, and its gradients are reduce-scattered: 3f · 4Ψ bytes, 1.5 times
# what data parallelism sends (Rajbhandari et al. 2020, §7). Our version sends a little less, because it all-gathers the
# root only once.
#
# With g micro-batches per step, ZeRO-3 sends 3g · f · 4Ψ. Each micro-batch has to unshard the parameters again. It also
# has to reduce-scatter its gradients, or each rank would need memory for full ones. In the table, stages 0 and 1 use
# `no_sync()`.

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
# How much time does that save? A step has twelve all-gathers of blocks: six in forward and six in backward. The next
# cell computes how long one takes at 32 ns per byte. Each block sleeps for 24 ms in forward and for 48 ms in backward.

# %%
all_gather_ms = 1e3 * 32e-9 * formulas.all_gather_sent_bytes(4 * block, ranks=4)
print(f"The all-gather of a block takes about {all_gather_ms:.1f} ms.")
assert all_gather_ms < 24

# %% [markdown]
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
sample = inputs[:1, :16], targets[:1, :16]
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
print(f"The bytes of ten all-gathers take {10 * all_gather_ms:.0f} ms.")
measure.expect(times.ratio("no prefetching", "prefetching") > 1.05, "prefetching saves time")
plots.bars(times.ms(), "ms per step, without the optimizer (median of 8 rounds)")

# %% [markdown] slideshow={"slide_type": "slide"}
# Ten of the twelve all-gathers can be hidden. The first one in forward cannot, because no earlier block launches it.
# What about the first one in backward? Expect the measured saving to differ from the bytes' time by some tens of
# milliseconds, because four ranks share two cores.
#
# The next figure shows a single step without prefetching, and one with it, so they may be longer or shorter than the
# medians in the bars. The numbers are those of the blocks. Collectives without a number belong to the root. In
# backward, prefetched all-gathers have long bars, because a bar ends only when the rank has waited for it. Compare the
# waits in both steps, and find a block that is all-gathered twice in a row:

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "-"}
without, ahead = ranks.pull("lines")[0]
lines = [zero3_step(without, blocks=6, ranks=4), zero3_step(ahead, 6, 4, prefetched=True)]
plots.timeline(lines, ["no prefetching", "prefetching"], hidden=False)

# %% [markdown]
# Most of what stays exposed is reduce-scatters, because our `reduce_gradients()` waits for each at once. Lab 10 and
# FSDP2 wait one unit later, as chapter 08 did.
#
# Block 5 is all-gathered twice in a row: it is resharded after its forward, and backward begins with it. This
# all-gather can be removed: do not reshard the last unit after forward. The parameters' peak stays the same, because no
# other block has memory between the two. The peak of the whole step may rise, because the logits are alive then, too.
# torchtitan leaves its last unit unsharded by default (`reshard_after_forward_policy`).
#
# When is an all-gather hidden? In forward, a block of ψ parameters computes for 2ψT/F seconds, with T tokens per rank
# and F FLOP/s. Its all-gather in bf16 takes 2fψ/B seconds, at B bytes per second. It is hidden if
#
# $$T > f \cdot F / B.$$
#
# The size of the block cancels out. An A100 that reaches 156 TFLOP/s needs about 6,000 tokens if its host has a single
# link of 25 GB/s, and about 800 if each of its eight GPUs has one, because the collective can use all eight. With fewer
# tokens, take faster links (chapter 11) or larger micro-batches.
#
# Backward computes twice as long and sends twice as much, an all-gather and a reduce-scatter, so the rule is the same.
# If gradients are reduced in fp32 (chapter 11), backward sends three times as much, and needs 1.5 times as many tokens.
# Full recomputation makes up for that, because backward then computes three times as long.

# %% [markdown]
# ## What prefetching costs
#
# While a block computes, the next one has memory as well, so the peak is one block higher. The third bar in the chart
# of step times is another option: with **`reshard_after_forward=False`**, parameters stay unsharded from forward until
# backward has used them. In the figure, compare the three peaks.

# %% slideshow={"slide_type": "slide"}
steps = ranks.pull("followed_steps")[0]
unsharded = dict(zip(steps, (root + block, root + 2 * block, psi), strict=True))
expected_bytes = {name: 4 * (psi / 4 + numel) for name, numel in unsharded.items()}
for name, (peak_bytes, _, step_bytes) in steps.items():
    print(f"{name}: peak {peak_bytes / (4 * psi):.2f} · 4Ψ, sent {step_bytes / half:.2f} f · 4Ψ")
    assert peak_bytes == expected_bytes[name]
assert steps["prefetching, kept after forward"][2] == 2 * half
lives = {name: life for name, (_, life, _) in steps.items()}
widgets.lifetime_stepper(lives, psi, expected_bytes, of="prefetching")

# %% [markdown] slideshow={"slide_type": "-"}
# With `reshard_after_forward=False`, you send no more than data parallelism. In time, you gain less than from
# prefetching (compare the three bars), because prefetching had already hidden five of the six all-gathers that you
# save. The sixth is block 5's, and six fewer collectives also leave the two cores more time to compute. In exchange,
# the peak is that of a model without units, 1.25 · 4Ψ: the parameters are sharded only between steps.

# %% [markdown]
# ## The production version
#
# torch's own ZeRO-3 is FSDP2, the `fully_shard` of chapter 08. By default, it reshards its units after forward. You
# call it once for each unit and once for the whole model, with a mesh of the ranks.


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import ZeRO1


def in_fsdp2(model, units):
    mesh = init_device_mesh(device.type, (world_size,))
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_adamw(model):
    return model, AdamW(model.parameters(), **settings)


# %% [markdown]
# The next cells train the same GPT for three steps with all stages of ZeRO: the solutions of the labs so far,
# `Prefetching`, and FSDP2.

# %%
# %%ranks --timeout 120
for_zero1, zero2, for_fsdp2 = new_model(), ZeRO2(new_model(), AdamW, 0.5, **settings), new_model()
stages = {
    "0: data parallelism": with_adamw(OverlappedDDP(new_model(), bucket_cap_mb=0.5)),
    "1: ZeRO-1": (for_zero1, ZeRO1(for_zero1.parameters(), AdamW, **settings)),
    "2: ZeRO-2": (zero2, zero2),
    "3: ZeRO-3": wrapped(Prefetching),
    "3: FSDP2": with_adamw(in_fsdp2(for_fsdp2, for_fsdp2.blocks)),
    "3: FSDP2, no units": with_adamw(in_fsdp2(new_model(), [])),
}


def measured(model, optimizer):
    """Return the bytes held before a step, at its peak, and sent; and the last loss."""
    step_of(model, optimizer)  # creates the optimizer's state
    compute_gradients(model, optimizer)
    held = memory.held(model, optimizer)
    optimizer.step()
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        loss = step_of(model, optimizer)
    return held.total_bytes, peak.peak_bytes, log.sent_bytes, loss


by_stage = {name: measured(*each) for name, each in stages.items()}

# %% tags=["nbval-ignore-output"]
by_stage, rows = ranks.pull("by_stage")[0], []
losses = [loss for *_, loss in by_stage.values()]
assert max(losses) - min(losses) < 1e-3
assert by_stage["3: ZeRO-3"][2] == by_stage["3: FSDP2"][2]  # the bytes sent
for name, (held_bytes, peak_bytes, of_step_bytes, _) in by_stage.items():
    formula_bytes = formulas.model_state_bytes(psi, 4, int(name[0]), formulas.FP32_ADAM)
    assert 0 <= held_bytes - formula_bytes < 10_000  # AdamW's step counters, and padding
    in_mb = [f"{size / 1e6:.2f}" for size in (held_bytes, formula_bytes, peak_bytes)]
    rows.append([name, *in_mb, f"{of_step_bytes / half:.2f}"])
tables.Table(["", "held, MB", "formula, MB", "peak, MB", "sent, in f · 4Ψ"], rows, "rank 0")

# %% [markdown]
# *Held* is measured between backward and the optimizer's step. *Peak* also includes the activations, which no stage
# makes smaller. ZeRO-3 reaches it in backward, with the root and two blocks unsharded (2 MB), so the peak falls by less
# than *held*. FSDP2's peak is lower, because it reshards a block before it reduces the gradients. Without `fully_shard`
# for each block, you get the last row.
#
# FSDP2 (`_fsdp_param_group.py`) uses the same names as our version, but differs in four points:
#
# | | here | FSDP2 |
# |---|---|---|
# | Shards | of a flat parameter | of each parameter, along its first dimension¹ |
# | The next unit | from a list | in backward, from the order of the forward; in forward: see below |
# | `post_backward` runs | after the unit's last gradient | after the gradients of the unit's inputs (see chapter 10) |
# | Reduce-scatters | waited for immediately | waited for later |
#
# ¹ So parameters keep their names and shapes. But if a parameter has fewer rows than there are ranks, some ranks hold
# no part of it. FSDP1, torch's older wrapper, shards flat parameters, as we do.
#
# On a GPU, forward only queues operations, and FSDP2 queues all-gathers on a separate stream. While the GPU is still
# computing block 2, the program has already launched the all-gather of block 3. torch's documentation calls this
# *implicit prefetching*. Implicit prefetching fails if the program is not ahead of the GPU, for example because the
# blocks are too small.

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
# - *FSDP Notes* in PyTorch's documentation (docs.pytorch.org/docs/stable/notes/fsdp.html): implicit and explicit
#   prefetching.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# The reduce-scatters are still exposed. And our wrapper works only for plain models:
#
# - It counts gradients. If a parameter is unused, its unit is not reduce-scattered.
# - It takes the order of its units from a list.
# - Every rank creates the whole model first, so the model must fit on one rank after all.
# - The model cannot be saved, because no rank holds all of it.
#
# In the lab, you build this wrapper from better parts, and it remembers the order itself. Chapter 10 makes it usable
# for other models.

# %%
ranks.stop()
