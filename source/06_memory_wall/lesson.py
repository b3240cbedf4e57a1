# ---
# jupyter:
#   course:
#     module: memory_wall
# ---

# %% [markdown]
# # 06 · The memory wall
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - say what a rank holds at each moment of a training step, and how many bytes per parameter the model state takes,
# - train in mixed precision by hand, and say what it saves and what it does not,
# - derive how many bytes a transformer block keeps for backward, and what fused attention changes,
# - save memory by recomputing activations, and say what that costs,
# - tell which models fit on a GPU, and why data parallelism on more GPUs does not change that.
#
# You need `ManualDDP` from chapter 02. Ψ is the number of parameters, N the number of ranks.

# %% [markdown]
# ## Where we are
#
# The parameters of a 7B model take 28 GB in fp32, and your GPUs have 80. You rent a hundred, wrap the model in DDP, and
# every one of them runs out of memory in its first step. Where did the bytes go? Let's count them in a small GPT with
# AdamW, using `shared.memory`.

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, widgets
from shared.plots import memory_plan as planner_plots
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from functools import partial

from torch import nn

from shared import measure, memory
from shared.data import CharTokens
from shared.models import Block, GPTConfig, TinyGPT
from solutions.manual_ddp import ManualDDP

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=8, width=128)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 800, 100), length=64))
model = ManualDDP(TinyGPT(config).to(device))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
parameters = sum(p.numel() for p in model.parameters())
print(f"Ψ = {parameters:,} parameters, {4 * parameters / 1e6:.1f} MB")

# %% [markdown]
# ## What is wasted
#
# What does a rank hold besides its parameters? After a step, it also holds their gradients and the **optimizer state**:
# what the optimizer remembers for each parameter. All three together are called the **model state**.
#
# **Predict.** In fp32, each element takes 4 bytes. How many bytes *per parameter* does the model state take, with
# AdamW? 4 means that only the parameters count.

# %%
my_prediction = None


# %%
# %%ranks
def per_parameter(module, optimizer):
    """Return the bytes per parameter of the parameters, the gradients and the optimizer state."""
    held = memory.held(module, optimizer)
    kinds = (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)
    return " + ".join(f"{kind / parameters:.0f}" for kind in kinds)


peak = measure.costs(model, adamw, inputs, targets).peak  # of the second of two steps
state = per_parameter(model, adamw)

# %% tags=["nbval-ignore-output"]
peak, state = ranks.pull("peak")[0], ranks.pull("state")[0]
print(f"{predicted(my_prediction)}measured {state} bytes per parameter")
print(f"all memory at the peak, in {peak.phase}: {peak.peak_bytes / 1e6:.1f} MB")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert state == "4 + 4 + 8" and peak.phase in ("forward", "backward")
assert peak.peak_bytes > 2 * 16 * ranks.pull("parameters")[0]
assert 0.6 < peak.held.activations_bytes / peak.peak_bytes < 0.67
assert formulas.model_state_bytes(7e9, ranks=100, stage=0) == 112e9

# %% [markdown]
# The model state takes 4 + 4 + 8 = 16 bytes per parameter. AdamW's 8 bytes are two averages, the momentum and the
# variance.
#
# Yet at its peak, the step held more than twice as much, with hardly any gradients. Nearly two thirds of it were
# **activations**: tensors that forward keeps because backward will need them. Read your step from left to right: which
# bands change height? *Other* means temporary tensors.

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(peak.samples)

# %% [markdown]
# The two lowest bands stay flat. On top of them, forward piles up the activations of one layer after another, and
# backward frees them in reverse order while it creates gradients, so the peak lies where the two meet. More or longer
# samples would raise the peak, but not the model state. More ranks do not shrink that state: N ranks hold N copies.
#
# So each of your hundred GPUs needs 16 · 7 = 112 GB, and has 80. This is the memory wall: with data parallelism, more
# ranks do not make room for a larger model. From chapter 07 on, the ranks shard the model state. But a rank can do two
# things alone: store elements in fewer bytes, and keep fewer activations.

# %% [markdown]
# ## Fewer bytes per element
#
# Half of 112 GB would fit. A bfloat16 takes 2 bytes instead of 4, so let's store *everything* in bfloat16:

# %%
# %%ranks
all_low = TinyGPT(config).to(device, torch.bfloat16)
before = nn.utils.parameters_to_vector(all_low.parameters()).detach().clone()
adamw_low = torch.optim.AdamW(all_low.parameters(), lr=1e-5)
measure.train_step(all_low, adamw_low, inputs, targets)
print(per_parameter(all_low, adamw_low), "bytes per parameter")

# %% [markdown]
# The bytes are halved. But does the model learn? A bfloat16 has only 8 significant bits: near a weight w, the next one
# is w/256 to w/128 away. So an update smaller than w/512 always rounds back to w, and one larger than w/256 never does.
#
# **Predict.** AdamW's first step changes each weight by about the learning rate, here 1e−5. The weights were drawn from
# a normal distribution with a standard deviation of 0.02. What share of them has changed? 1 means all.

# %%
my_share = None

# %%
# %%ranks
changed = before != nn.utils.parameters_to_vector(all_low.parameters())
share = changed.float().mean().item()

# %% tags=["nbval-ignore-output"]
print(f"{predicted(my_share, '{:.0%}')}measured {ranks.pull('share')[0]:.0%}")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
ratios = before.float().abs() / 1e-5  # weight / update
of_small, of_large = (changed[some].float().mean().item() for some in (ratios < 256, ratios > 512))
assert of_large < 0.01 < share < 0.5 < 0.99 < of_small
assert per_parameter(all_low, adamw_low) == "2 + 2 + 4"

# %% [markdown]
# Most weights have not moved, and nothing raised an error. An update of 1e−5 survives only where |w| is less than 256
# to 512 times as large, so below 0.0026 to 0.0051: 10 to 20% of the weights. The others will not change while the
# updates stay this small.

# %% [markdown]
# How can we save such updates? We *compute* in bfloat16 and *update* in fp32, which is called **mixed precision**
# (Micikevicius et al. 2018, §3.1). Each parameter gets a **master weight**: an fp32 copy that the optimizer updates.
# The parameter is that copy, rounded.

# %% [markdown]
# ## The short version
#
# A dozen lines are enough for a plain model. How many fp32 tensors do they keep for each parameter?


# %%
# %%ranks
class WithMasters:
    """AdamW on fp32 master weights of low-precision parameters."""

    def __init__(self, params, lr):
        self.weights = list(params)
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=lr)

    @torch.no_grad()
    def step(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
        self.adamw.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)  # rounds


# %% [markdown]
# **Predict.** The parameters and gradients are in bfloat16, the master weights and AdamW's state in fp32. Assume that
# the fp32 copies of the gradients are freed after the step (`WithMasters` does not do that). How many bytes per
# parameter does the model state take then?

# %%
my_prediction = None

# %%
# %%ranks
low = TinyGPT(config).to(device, torch.bfloat16)
with_masters = WithMasters(low.parameters(), lr=1e-5)
low(inputs, targets).backward()
with_masters.step()
for master in with_masters.masters:
    master.grad = None
state = per_parameter(low, with_masters)

# %%
state = ranks.pull("state")[0]
print(f"{predicted(my_prediction)}measured {state} bytes per parameter")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert state == "2 + 2 + 12"

# %% [markdown]
# The saving is gone. The total is 16 again: 2 + 2 + 12, where the 12 are the master weight, the momentum and the
# variance (ZeRO paper, §3.1). With fp32 gradients kept as well, it is 20. Mixed precision does *not* make the model
# state smaller than it is in fp32.

# %% [markdown]
# Are master weights worth these bytes? The next cell trains the digits MLP in three ways, with a small learning rate.
# Which curve does *mixed* follow?


# %%
# %%ranks
from torch.nn.functional import cross_entropy

from shared.data import digits
from shared.models import MLP

batches = list(zip(*(tensor.to(device).split(128) for tensor in digits()), strict=True))


def train(dtype, optimizer_cls):
    """Train for 20 epochs of 15 batches. Returns the loss of each step."""
    mlp, losses = MLP().to(device, dtype), []
    optimizer = optimizer_cls(mlp.parameters(), lr=1e-4)
    for images, labels in 20 * batches:
        mlp.zero_grad()
        loss = cross_entropy(mlp(images.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


curves = {"fp32": train(torch.float32, torch.optim.AdamW)}
curves["all bf16"] = train(torch.bfloat16, torch.optim.AdamW)
curves["mixed"] = train(torch.bfloat16, WithMasters)

# %% tags=["nbval-ignore-output"]
plots.loss_curves(ranks.pull("curves")[0])

# %% tags=["claims"] jupyter={"source_hidden": true}
curves = ranks.pull("curves")[0]
fell = {name: losses[0] - sum(losses[-15:]) / 15 for name, losses in curves.items()}
assert fell["all bf16"] < 0.2 * fell["fp32"]
assert abs(fell["mixed"] - fell["fp32"]) < 0.05 * fell["fp32"]

# %% [markdown]
# It lies on top of fp32. Without master weights, the loss hardly falls, because most updates are rounded away.
#
# Then what is mixed precision for? Speed, above all: GPUs multiply 16-bit matrices several times faster. It also halves
# the gradient traffic and the activations, our next target.

# %% [markdown]
# ## What forward keeps
#
# Nearly two thirds of our fp32 step's peak were activations. Could a rank keep *fewer*? Which tensors are they?
#
# Take one block of our GPT. It has four linear layers: `query_key_value` and `project` around attention, `up` and
# `down` around GELU. What does backward need? A linear layer needs its input, to compute the gradient of its weight. A
# norm and GELU need theirs, too, but an addition needs nothing. We count in units of *s·b·h* elements (sequence length
# × batch size × hidden width):
#
# | layers | tensors kept for backward | elements / sbh |
# |---|---|---|
# | two norms | their inputs (the first norm's is the block's input) | 2 |
# | `query_key_value`, `project`, `up` | their inputs | 3 |
# | attention | query, key and value | 3 |
# | GELU | its input, which has width 4h | 4 |
# | `down` | its input, which has width 4h | 4 |
#
# That makes 16 sbh elements: 64 sbh bytes in fp32, and 32 sbh in bfloat16. Does a real block agree?


# %%
# %%ranks
def kept(block, dtype, sequence=64, batch=8):
    """Return the bytes that a block keeps for backward, over sbh."""
    x = torch.randn(batch, sequence, config.width, device=device, dtype=dtype, requires_grad=True)
    return memory.kept_for_backward(block.to(device, dtype), x) / x.numel()


print(f"fp32: {kept(Block(config), torch.float32):.2f} bytes per sbh element")
print(f"bf16: {kept(Block(config), torch.bfloat16):.2f} bytes per sbh element")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert 64 < kept(Block(config), torch.float32) < 65
assert 32 < kept(Block(config), torch.bfloat16) < 33

# %% [markdown]
# Almost. Of the 0.25 extra bytes in fp32, half are the mean and the inverse standard deviation of each norm. The other
# half belongs to attention: one element per token and head, the log-sum-exp of a row of scores, which is fp32 even in a
# bf16 block.
#
# Why a log-sum-exp? Our block uses **fused attention**, as in FlashAttention: one kernel that never stores the scores.
# Backward computes them again, piece by piece. To turn a score back into its softmax weight, exp(score − log-sum-exp),
# it only needs the log-sum-exp of the row. So forward keeps one element per row instead of s. What would a block keep
# that *materializes* the scores?


# %%
# %%ranks
def materialized(query, key, value):
    tokens, width = query.shape[-2:]
    scores = query @ key.mT / width**0.5 + query.new_full((tokens, tokens), float("-inf")).triu(1)
    return scores.softmax(-1) @ value


blocks = {"fused": Block(config), "materialized": Block(config)}
blocks["materialized"].forward = partial(blocks["materialized"].forward, attend=materialized)
per_token = {
    name: {s: config.width * kept(block, torch.bfloat16, s, 1) for s in (64, 128, 256, 512)}
    for name, block in blocks.items()
}

# %% [markdown]
# Lines are formulas, markers measured. Look at how the bytes *per token* grow with the sequence length:

# %% tags=["nbval-ignore-output"]
per_token = ranks.pull("per_token")[0]
of_formula = {
    "fused": {s: 32 * 128 for s in range(1, 513)},
    "materialized": {s: 32 * 128 + 2 * 4 * s for s in range(1, 513)},
}
planner_plots.activation_growth(of_formula, per_token)

# %% tags=["claims"] jupyter={"source_hidden": true}
for name, of_lengths in per_token.items():
    assert all(1 <= nbytes / of_formula[name][s] < 1.05 for s, nbytes in of_lengths.items())
    in_tokens = formulas.activation_bytes(512, 1, 128, 4, attention=name, dropout=False)
    assert in_tokens == 512 * of_formula[name][512]

# %% [markdown]
# With fused attention, a token costs the same in every sequence. With materialized attention, its bytes grow with s, so
# those of a whole sequence grow with s². In 16 bits, our block then keeps sbh (32 + 2as/h) bytes, with *a* heads. The
# well-known formula is
#
# $$sbh\,(34 + 5\,as/h)$$
#
# because it also counts dropout: two masks of 1 byte per element, and for each score another mask and the result
# (Korthikanti et al. 2022, §4).

# %% [markdown]
# ## Recomputing activations
#
# Activations belong to a rank's own samples, so sharding the *model state* does not shrink them. Could a rank forget
# most of them, and still run backward? With **activation checkpointing**, a block keeps only its input, and backward
# runs the block's forward again to recompute the rest (Chen et al. 2016). In torch, this is `checkpoint`:

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

plain, saving = TinyGPT(config).to(device), TinyGPT(config).to(device)
for block in saving.blocks:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)

# %% [markdown]
# **Predict.** There are eight blocks. If all are checkpointed, each keeps only its input, which is 1 of its 16 parts.
# But while one block is recomputed, its other 15 parts are in memory, too. What share of the blocks' activations is
# left at the peak? 1 means that nothing is saved.

# %%
my_share = None


# %%
# %%ranks
def watched(model):
    with memory.peak(model) as peak:
        model(inputs, targets).backward()
    return peak.samples, max(sample.held.activations_bytes for sample in peak.samples)


(plain_samples, plain_bytes), (samples, saving_bytes) = watched(plain), watched(saving)
left = saving_bytes / plain_bytes
plain_peak_bytes = max(sample.held.total_bytes for sample in plain_samples)

# %% [markdown]
# Here are forward and backward with checkpointing. There is no optimizer, so one band is missing. Count the spikes in
# backward:

# %% tags=["nbval-ignore-output"]
derived, left = (8 * 1 + 15) / (8 * 16), ranks.pull("left")[0]
print(f"left: {predicted(my_share, '{:.0%}')}derived {derived:.0%}, measured {left:.0%}")
plots.memory_over_step(
    ranks.pull("samples")[0], ("peak without checkpointing", ranks.pull("plain_peak_bytes")[0])
)

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
pairs = zip(plain.parameters(), saving.parameters(), strict=True)
assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)
assert 0.9 * 23 / 128 < left < 23 / 128

# %% [markdown] tags=["open"]
# Each spike is a block: recomputed, used and freed before the next one begins. The activations peak at the first spike,
# while the inputs of all eight blocks are still held. All memory together peaks at the last one, when nearly all
# gradients exist. Without checkpointing, the activations alone are about twice as large as this whole peak. But
# checkpointing costs time.
#
# **Predict.** Assume that backward takes twice as long as forward. How much longer do forward and backward take
# together if all blocks are checkpointed? 0.5 means 50% longer.

# %%
my_extra = None

# %%
# %%ranks
both = {"plain": plain, "checkpointed": saving}
steps = {name: measure.training_step(gpt, inputs, targets) for name, gpt in both.items()}
times = measure.jobs(steps, rounds=10)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
plain_ms, saving_ms = (sum(times.parts_ms()[name].values()) for name in ("plain", "checkpointed"))
extra = saving_ms / plain_ms - 1
print(f"{predicted(my_extra, '{:.0%}')}measured {extra:.0%} longer")
for name, parts_ms in times.parts_ms().items():
    print(f"{name}: forward {parts_ms['forward']:.0f} ms, backward {parts_ms['backward']:.0f} ms")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
from shared import measure

plain_ms, saving_ms = (times.parts_ms()[name]["backward"] for name in ("plain", "checkpointed"))
measure.expect(extra > 0.05, "the checkpointed step takes longer")
measure.expect(saving_ms > 1.1 * plain_ms, "backward takes longer")

# %% [markdown]
# Most of the extra time is in backward, which now also runs the forward of the blocks. If backward takes twice as long
# as forward, one more forward adds a third. If both take equally long, it adds half.
#
# Did you measure less? `checkpoint` stops as soon as it has recomputed what backward needs, so it skips `down`, which
# does a third of the work of the four linear layers. Did you measure more? `checkpoint` also runs Python for each
# tensor that a block saves. In our small blocks, that shows. In the large ones of a real model, it vanishes, and less
# than a third remains.

# %% [markdown]
# Must we recompute everything? **Selective checkpointing** (`create_selective_checkpoint_contexts`) recomputes only
# what is large and cheap to compute, such as materialized scores.

# %% [markdown]
# ## How large a model fits?
#
# Back to your hundred GPUs. Mixed precision makes them faster, and checkpointing frees activations. Neither makes the
# model fit: its state still needs 112 GB. For models with published shapes, a planner adds up the model state and the
# activations. Each bar is a strategy, data parallelism first; vertical lines are GPU sizes.
#
# **Predict.** You train Llama-2 7B in mixed precision with data parallelism on eight GPUs, with sequences of 4,096
# tokens, fused attention and all layers checkpointed. The model has 6.74 billion parameters. How many GB does each GPU
# need?

# %%
my_prediction = None

# %% tags=["nbval-ignore-output"]
print(predicted(my_prediction, "{} GB", then="\n"), end="")
widgets.memory_planner("Llama-2 7B", ranks=8)

# %% tags=["claims"] jupyter={"source_hidden": true}
from shared import planner
from shared.planner.shapes import SHAPES

shape, totals_gb = SHAPES["Llama-2 7B"], []
for attention, gigabytes in (("materialized", 105), ("fused", 19)):
    plan = planner.plan(shape, ranks=8, stage=3, attention=attention)
    assert round(plan.activations / 1e9) == gigabytes
for stage in range(4):
    plan = planner.plan(shape, ranks=8, stage=stage, checkpointing="full", attention="fused")
    totals_gb.append(sum(plan.by_component().values()) / 1e9)
assert 107 < totals_gb[0] < 112 and totals_gb[2] > 24 > totals_gb[3]

# %% [markdown]
# The model state alone takes 16 · 6.74 = 108 GB, on each of eight GPUs or of a thousand. In the other bars, chapters 07
# to 09 shard more and more of it. All three fit on your GPUs, and the last stays below 24 GB. In it, *gathered* stands
# for the parameters that a rank holds in full while it needs them.

# %% [markdown]
# The wall also stands where data parallelism is only a part of the plan. Take 70B parameters on 4 hosts of 8 GPUs with
# 80 GB. Each layer is split over the 8 GPUs of a host (tensor parallelism), and the hosts use plain data parallelism.
# The GPUs have 2,560 GB together, and a copy takes 16 · 70 = 1,120 GB. But each host holds a copy of its own, so each
# of its GPUs needs 1,120 / 8 = 140 GB.
#
# And activations? Without checkpointing, Llama-2 7B keeps 19 GB for 4,096 tokens with fused attention, and 105 GB with
# materialized attention: more than your GPU. The formula of a block leaves out the *logits*, the outputs of the last
# layer: with Llama 3 8B and 8,192 tokens, they take 8,192 · 128,256 · 4 bytes, or 4.2 GB per copy, and a plain loss
# makes two or three.
#
# The planner counts the logits, but not fragmentation, communication buffers or the temporary tensors of kernels, so
# leave a tenth of a GPU's memory free. It also counts every layer as a GPT layer with dropout and GELU, but Llama-2 has
# neither.

# %% [markdown]
# ## The production version
#
# Do you have to write this yourself? Rarely. Under **autocast**, parameters stay in fp32, so they are their own master
# weights. torch casts them to 16 bits for each operator that gains from it:

# %%
# %%ranks
automatic = TinyGPT(config).to(device)
adamw_automatic = torch.optim.AdamW(automatic.parameters())
with torch.autocast(device.type, torch.bfloat16):
    loss = automatic(inputs, targets)
loss.backward()
adamw_automatic.step()
print(per_parameter(automatic, adamw_automatic), "bytes per parameter")

# %% [markdown]
# - **autocast** keeps more activations than our version: norms and the loss stay in fp32, and it keeps a bfloat16 copy
#   of each linear layer's weight until backward. Its gradients are in fp32, so it saves nothing on the wire.
# - **8-bit Adam** (Dettmers et al. 2022) stores the momentum and the variance in one byte each. The model state is then
#   2 + 2 + 4 + 2 = 10 bytes per parameter instead of 16.
# - **float16** has a smaller range than bfloat16, so small gradients would become zero. `torch.amp.GradScaler`
#   scales the loss up before backward, and the gradients down afterwards.
# - **FSDP2** shards fp32 parameters, which are the master weights, and computes in 16 bits (chapter 10).
#
# Our `WithMasters` holds all fp32 gradients at once, and no scheduler accepts it. In the lab, you remove both limits.

# %% [markdown]
# ## Recap
#
# | | model state per rank, bytes | activations per block, bytes | sent per rank and step, bytes |
# |---|---|---|---|
# | fp32 | 4 + 4 + 8 = 16Ψ | 64 sbh | 2(N−1)/N · 4Ψ |
# | mixed precision by hand | 2 + 2 + 12 = 16Ψ, or 20Ψ with fp32 gradients | 32 sbh | 2(N−1)/N · 2Ψ |
# | autocast | 4 + 4 + 8 = 16Ψ | between the two | 2(N−1)/N · 4Ψ |
# | with checkpointing | unchanged | 4 sbh, or 2 sbh in 16 bits¹ | unchanged |
#
# ¹ Plus one whole block while backward recomputes it.
#
# **Terms**
#
# - **model state**: the parameters, their gradients and the optimizer state.
# - **optimizer state**: what an optimizer remembers for each parameter, such as Adam's momentum and variance.
# - **activations**: the tensors that forward keeps because backward needs them.
# - **mixed precision**: computing in a 16-bit format, and updating the parameters in fp32.
# - **master weight**: the fp32 copy of a 16-bit parameter, which the optimizer updates.
# - **fused attention**: attention in one kernel that never stores the scores and recomputes them in backward.
# - **activation checkpointing**: keeping only the input of a block, and recomputing its other activations in backward.
# - **selective checkpointing**: recomputing only activations that are large and cheap to compute.
# - **autocast**: a context in which torch casts fp32 tensors to 16 bits for operators that gain from it.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): how to read a GPU's memory.
# - Rajbhandari et al., *ZeRO*, 2020, §3 (arXiv 1910.02054): where the memory goes, byte by byte.
# - Micikevicius et al., *Mixed precision training*, 2018, §3 (arXiv 1710.03740): master weights and loss scaling.
# - Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022, §4 (arXiv 2205.05198):
#   the formula for activations, tensor by tensor.
# - Dao et al., *FlashAttention*, 2022, §3.1 (arXiv 2205.14135): how a kernel avoids storing the scores.
# - Dettmers et al., *8-bit optimizers via block-wise quantization*, 2022 (arXiv 2110.02861): Adam's state in one byte.

# %% [markdown]
# ## What is still wasted
#
# Half of your 112 GB is AdamW's. Is its momentum the same on every rank?

# %%
# %%ranks
momentum = torch.cat([state["exp_avg"].flatten() for state in adamw.state.values()])
of_rank_0 = momentum.clone()
dist.broadcast(of_rank_0, src=0)
print("equal:", torch.equal(momentum, of_rank_0))

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert torch.equal(momentum, of_rank_0)
variance = torch.cat([state["exp_avg_sq"].flatten() for state in adamw.state.values()])
of_rank_0 = variance.clone()
dist.broadcast(of_rank_0, src=0)
assert torch.equal(variance, of_rank_0)

# %% [markdown]
# Yes, on every rank, bit for bit, and so is the variance. In mixed precision, with the master weights, AdamW's state is
# three quarters of the model state. All ranks use it to compute the same updates. So rank r could keep only a shard of
# it, update its shard of the parameters, and send the result to the others. That is ZeRO-1, in chapter 07: the first
# bar that fits.

# %%
ranks.stop()
