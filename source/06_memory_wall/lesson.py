# ---
# jupyter:
#   course:
#     module: memory_wall
# ---

# %% [markdown]
# # 06 · The memory wall
#
# **50–80 minutes.** After this lesson, you will be able to:
#
# - say what a rank holds at each moment of a training step, in bytes per parameter,
# - train in mixed precision by hand, and say what it saves and what it does not,
# - derive how many bytes a transformer block keeps for backward, and what fused attention changes,
# - save memory by recomputing activations, and say what that costs,
# - tell which models fit on a GPU, and why data parallelism on more GPUs does not change that.
#
# You need the wrappers from chapters 02 and 03. Ψ is the number of parameters, N the number of ranks.

# %% [markdown]
# ## Where we are
#
# The parameters of a 7B model take 28 GB in fp32. You rent a hundred GPUs of 80 GB, wrap the model in DDP, and every
# one of the hundred runs out of memory in its first step. Where did the bytes go? Let's count them in a small GPT with
# AdamW, using `shared.memory`.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, planner, plots, ranks, tables, widgets
from shared.plots import diagrams
from shared.plots import memory_plan as planner_plots
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
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
# After a step, a rank holds three things: the parameters, their gradients, and the **optimizer state**, which is what
# the optimizer remembers for each parameter. Together, they are called the **model state**.
#
# **Predict.** In fp32, each element takes 4 bytes. How many bytes *per parameter* does the model state take, with
# AdamW? 4 means that only the parameters count.

# %%
my_prediction = None


# %%
# %%ranks
def step(model, optimizer):
    model.zero_grad()
    model(inputs, targets).backward()
    if isinstance(model, ManualDDP):
        model.finish_gradient_sync()
    optimizer.step()


step(model, adamw)  # AdamW creates its state in the first step
with memory.peak(model, adamw) as peak:
    step(model, adamw)

# %% tags=["nbval-ignore-output"]
peak, parameters = ranks.pull("peak")[0], ranks.pull("parameters")[0]
end, at_peak = peak.samples[-1].held, peak.held.total_bytes / parameters
state = (end.parameters_bytes, end.gradients_bytes, end.optimizer_bytes)
each = [f"{nbytes / parameters:.2f}" for nbytes in state]
print(f"{predicted(my_prediction)}measured {' + '.join(each)} bytes per parameter")
print(f"at the peak, in {peak.phase}: {at_peak:.1f} bytes per parameter")
assert each == ["4.00", "4.00", "8.00"]
assert at_peak > 20 and peak.phase in ("forward", "backward")

# %% [markdown]
# The model state takes 4 + 4 + 8 = 16 bytes per parameter. AdamW's 8 bytes are two averages, the momentum and the
# variance.
#
# Yet at its peak, the step held more than twice as much, and hardly any gradient existed. Nearly two thirds of it were
# **activations**: tensors that forward keeps because backward will need them. In this example, which bands keep their
# height, and which grow and shrink?

# %%
diagrams.training_memory()

# %% [markdown]
# Here is the step that you measured. *Other* means temporary tensors.

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(peak.samples)

# %% [markdown]
# Forward adds the activations of one layer after another, and backward frees them in reverse order while it creates
# gradients. Here, the peak lies where forward ends and backward begins. The size of the activations depends on the
# number and length of the samples. The size of the model state does not, and more ranks do not make it smaller: one
# process would need it once, but N ranks hold it N times.

# %%
each_gb = formulas.model_state_bytes(7e9, ranks=1, stage=0) / 1e9
for n in (4, 100):
    print(f"7B parameters on {n} ranks: {n} × {each_gb:.0f} = {n * each_gb:,.0f} GB", end=", ")
    print(f"redundant copies: {formulas.redundant_copies(n)}")

# %% [markdown]
# Each of your hundred GPUs needs 112 GB. This is the memory wall: with data parallelism, more ranks do not make room
# for a larger model. From chapter 07 on, the ranks shard the model state. But a rank can already do two things alone:
# store elements in fewer bytes, and keep fewer activations.

# %% [markdown]
# ## Fewer bytes per element
#
# A bfloat16 takes 2 bytes instead of 4. If we store *everything* in bfloat16, 16 bytes per parameter should become 8:


# %%
# %%ranks
def per_parameter(module, optimizer):
    """Return the bytes per parameter of the parameters, the gradients and the optimizer state."""
    held = memory.held(module, optimizer)
    kinds = (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)
    return [f"{kind / parameters:.0f}" for kind in kinds]


all_low = TinyGPT(config).to(device, torch.bfloat16)
adamw_low = torch.optim.AdamW(all_low.parameters(), lr=1e-5)
before = [p.detach().clone() for p in all_low.parameters()]
step(all_low, adamw_low)
print(" + ".join(per_parameter(all_low, adamw_low)), "bytes per parameter")

# %% [markdown]
# That works. But a bfloat16 has only 8 significant bits: near a weight w, the next one is w/256 to w/128 away. So an
# update smaller than w/512 always rounds back to w, and one larger than w/256 never does.
#
# **Predict.** AdamW's first step changes each weight by about the learning rate, here 1e−5. The weights were drawn from
# a normal distribution with a standard deviation of 0.02. What share of them has changed? 1 means all.

# %%
my_share = None

# %%
# %%ranks
old, new = (nn.utils.parameters_to_vector(each) for each in (before, all_low.parameters()))
changed, ratios = (old != new).float(), old.float().abs() / 1e-5  # weight / update
shares = [some.mean().item() for some in (changed, changed[ratios < 256], changed[ratios > 512])]

# %% tags=["nbval-ignore-output"]
moved, of_small, of_large = ranks.pull("shares")[0]
print(f"{predicted(my_share, '{:.0%}')}measured {moved:.0%}")
print(f"{of_small:.0%} of the weights below 256 × the update changed, {of_large:.0%} above 512 ×")
assert of_large < 0.01 < moved < 0.5 < 0.99 < of_small

# %% [markdown]
# Most weights have not changed, and will not while the updates stay this small.
#
# The remedy is to *compute* in bfloat16 and *update* in fp32, which is called **mixed precision** (Micikevicius et al.
# 2018, §3.1). Each parameter gets a **master weight**: an fp32 copy that the optimizer updates. The parameter itself is
# the rounded master weight.

# %% [markdown]
# ## The short version
#
# A dozen lines are enough for a plain model:


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


low = TinyGPT(config).to(device, torch.bfloat16)
with_masters = WithMasters(low.parameters(), lr=1e-5)

# %% [markdown]
# **Predict.** The parameters and gradients are in bfloat16, the master weights and AdamW's state in fp32. Assume that
# the fp32 copies of the gradients are freed after the step (`WithMasters` does not do that). How many bytes per
# parameter does the model state take then?

# %%
my_prediction = None

# %%
# %%ranks
state = {"fp32": per_parameter(model, adamw), "all bf16": per_parameter(all_low, adamw_low)}
step(low, with_masters)
state["mixed, as above"] = per_parameter(low, with_masters)
for master in with_masters.masters:
    master.grad = None
state["mixed, fp32 gradients freed"] = per_parameter(low, with_masters)

# %%
rows = [[name, *held, f"{sum(map(int, held))}"] for name, held in ranks.pull("state")[0].items()]
print(f"{predicted(my_prediction)}measured {rows[-1][-1]} bytes per parameter")
assert [row[-1] for row in rows] == ["16", "8", "20", "16"]
tables.Table(["bytes per parameter", "parameters", "gradients", "optimizer", "total"], rows)

# %% [markdown]
# The total is 16 again: 2 + 2 + 12, where the 12 are the master weight, the momentum and the variance (ZeRO paper,
# §3.1). Mixed precision does *not* make the model state smaller than it is in fp32. If fp32 gradients are kept as well,
# the total is 20.
#
# Are master weights worth these bytes? The next cell trains the digits MLP in three ways, with a small learning rate.


# %%
# %%ranks
from torch.nn.functional import cross_entropy

from shared.data import digits
from shared.models import MLP
from solutions.bucketed_ddp import BucketedDDP

images, labels = (tensor.to(device) for tensor in digits())


def train(dtype, optimizer_cls, steps=300):
    """Train on 32 samples per rank. Returns each step's loss, averaged over the ranks."""
    mlp = BucketedDDP(MLP().to(device, dtype))
    optimizer = optimizer_cls(mlp.parameters(), lr=1e-4)
    losses = []
    for seed in range(steps):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        batch = order[32 * rank : 32 * (rank + 1)].to(device)
        mlp.zero_grad()
        loss = cross_entropy(mlp(images[batch].to(dtype)).float(), labels[batch])
        loss.backward()
        mlp.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


curves = {
    "fp32": train(torch.float32, torch.optim.AdamW),
    "all bf16": train(torch.bfloat16, torch.optim.AdamW),
    "mixed": train(torch.bfloat16, WithMasters),
}

# %% tags=["nbval-ignore-output"]
curves = ranks.pull("curves")[0]
at_end = {name: sum(losses[-30:]) / 30 for name, losses in curves.items()}
print("last 30 steps:", ", ".join(f"{name} {loss:.2f}" for name, loss in at_end.items()))
fell = {name: losses[0] - at_end[name] for name, losses in curves.items()}
assert fell["all bf16"] < 0.2 * fell["fp32"]
assert abs(fell["mixed"] - fell["fp32"]) < 0.05 * fell["fp32"]
plots.loss_curves(curves)

# %% [markdown]
# Without master weights, the loss hardly falls, because most updates are rounded away. With them, it falls as in fp32.
# Then what is mixed precision for? Speed, above all: GPUs multiply 16-bit matrices several times faster. It also halves
# the gradient traffic and the activations.

# %% [markdown]
# ## What forward keeps
#
# Nearly two thirds of the peak in your first step were activations. Sixteen bits halve them. Could a rank also keep
# *fewer* of them? To find out, we need to know which tensors they are.
#
# Take one block of our GPT, and ask what backward needs. A linear layer needs its input, to compute the gradient of its
# weight. A norm and GELU need their inputs, too. An addition needs nothing. We count in units of *s·b·h* elements
# (sequence length × batch size × hidden width):
#
# | layers | tensors kept for backward | elements / sbh |
# |---|---|---|
# | two norms | their inputs (the first norm's is the block's input) | 2 |
# | `query_key_value`, `project`, `up` | their inputs | 3 |
# | attention | query, key and value | 3 |
# | GELU | its input, which has width 4h | 4 |
# | `down` | its input, which has width 4h | 4 |
#
# Together, these are 16 sbh elements: 64 sbh bytes in fp32, and 32 sbh in bfloat16. Is that what a block holds after
# its forward?


# %%
# %%ranks
def kept_bytes(block, dtype, sequence=64, batch=8):
    """Run a block's forward. Returns the bytes that are then held for backward."""
    block = block.to(device, dtype)
    x = torch.randn(batch, sequence, config.width, device=device, dtype=dtype)
    with memory.peak(block) as peak:
        # x existed before memory.peak began, so it does not count as an activation. The output counts instead: it has
        # the same size, and the next block keeps it as its input.
        _result = block(x.requires_grad_())
    return peak.samples[-1].held.activations_bytes


dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
kept = {name: kept_bytes(Block(config), dtype) for name, dtype in dtypes.items()}

# %% tags=["nbval-ignore-output"]
tokens, width, heads = 64 * 8, 128, 4
for name, bytes_each in {"fp32": 4, "bf16": 2}.items():
    measured, derived = ranks.pull("kept")[0][name] / (tokens * width), 16 * bytes_each
    print(f"{name}: derived {derived}, measured {measured:.2f} bytes per sbh element")
    assert 1 <= measured / derived < 1.1

# %% [markdown]
# What are the 0.25 extra bytes in fp32? Half are the mean and standard deviation of each norm. The other half belongs
# to attention: one element per token and head, the log-sum-exp of a row of scores. It is fp32 even in a bf16 block.
#
# A well-known formula gives the bytes of a layer's 16-bit activations (Korthikanti et al. 2022, §4), where *a* is the
# number of attention heads:
#
# $$sbh\,(34 + 5\,as/h)$$
#
# The 34 are our 32 plus two dropout masks of 1 byte per element. The second term comes from *materialized* attention,
# which stores three s × s matrices per sample and head: the output of softmax (2 bytes per element), a dropout mask (1)
# and the result of dropout (2). The next cell builds such a block:


# %%
# %%ranks
def dropout(x):
    return torch.native_dropout(x, 0.1, True)[0]  # its mask has 1 byte per element


class AsCounted(Block):
    """A block with materialized attention, and with dropout on its scores and on both results."""

    def attend(self, x):
        (batch, tokens, width), heads = x.shape, self.attention.heads
        split = self.attention.query_key_value(x).view(batch, tokens, 3, heads, width // heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / (width // heads) ** 0.5
        weights = dropout((scores + self.causal[:tokens, :tokens]).softmax(-1))
        return self.attention.project((weights @ value).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + dropout(self.attend(self.norm_1(x)))
        return x + dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))


block = AsCounted(config)
block.register_buffer("causal", torch.full((512, 512), float("-inf")).triu(1))
lengths = (64, 128, 256, 512)
kept = {
    "materialized": {s: kept_bytes(block, torch.bfloat16, s, 1) / s for s in lengths},
    "fused": {s: kept_bytes(Block(config), torch.bfloat16, s, 1) / s for s in lengths},
}

# %% [markdown]
# Our own block uses **fused attention**, as in FlashAttention: one kernel that never stores the scores. Backward
# computes them again, piece by piece. To turn a score back into its softmax weight, it only needs the log-sum-exp of
# the row, because the weight is exp(score − log-sum-exp). So forward keeps one element per row instead of s. Look at
# how the bytes *per token* grow with the sequence length in the two blocks:

# %% tags=["nbval-ignore-output"]
kept = ranks.pull("kept")[0]
of_formula = {
    "materialized": lambda s: formulas.activation_bytes(s, 1, width, heads) / s,
    "fused": lambda s: 32 * width,  # this block has no dropout
}
for name, of_lengths in kept.items():
    ratios = [per_token / of_formula[name](s) for s, per_token in of_lengths.items()]
    print(f"{name}: measured / formula from {min(ratios):.3f} to {max(ratios):.3f}")
    assert all(1 <= ratio < 1.1 for ratio in ratios)
curves = {name: {s: formula(s) for s in range(1, 513)} for name, formula in of_formula.items()}
planner_plots.activation_growth(curves, kept)

# %% [markdown]
# With materialized attention, the bytes per token grow with s, so those of a whole sequence grow with s². With fused
# attention, they stay constant.

# %% [markdown]
# ## Recomputing activations
#
# Sharding the *model state* does not help with activations, because each rank's activations belong to its own samples.
# But a rank can keep fewer of them. With **activation checkpointing**, a block keeps only its input, and backward runs
# the block's forward again to recompute the rest (Chen et al. 2016). In torch, this is `checkpoint`:


# %%
# %%ranks
from functools import partial

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
def follow(model):
    model.zero_grad()
    with memory.peak(model) as peak:
        model(inputs, targets).backward()
    return peak


peaks = {"plain": follow(plain), "checkpointed": follow(saving)}
pairs = zip(plain.parameters(), saving.parameters(), strict=True)
assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)

# %% tags=["nbval-ignore-output"]
peaks = ranks.pull("peaks")[0]
most = {name: max(s.held.activations_bytes for s in peak.samples) for name, peak in peaks.items()}
left, derived = most["checkpointed"] / most["plain"], (8 * 1 + 15) / (8 * 16)
print(f"left: {predicted(my_share, '{:.0%}')}derived {derived:.0%}, measured {left:.0%}")
assert 0.9 * derived < left < derived
plots.memory_over_step(peaks["checkpointed"].samples)

# %% [markdown] tags=["open"]
# In backward, each block is recomputed, used and freed before the next one begins: every spike is one block. The
# activations peak at the first spike, while the inputs of all eight blocks are still held. All memory together peaks at
# the last one, when nearly all gradients exist. Without checkpointing, the activations alone take about twice that.
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
parts_ms = ranks.pull("times")[0].parts_ms()
extra = sum(parts_ms["checkpointed"].values()) / sum(parts_ms["plain"].values()) - 1
print(f"{predicted(my_extra, '{:.0%}')}measured {extra:.0%} longer")
backward_ms = {name: parts["backward"] for name, parts in parts_ms.items()}
measure.expect(extra > 0.05, "the checkpointed step takes longer")
measure.expect(backward_ms["checkpointed"] > 1.1 * backward_ms["plain"], "backward takes longer")
rows = [(phase, name) for phase in ("forward", "backward") for name in parts_ms]
plots.bars({f"{phase}, {name}": parts_ms[name][phase] for phase, name in rows}, "ms (median of 10)")

# %% [markdown]
# Most of the extra time is in backward, which now also runs the forward of the blocks. If backward takes twice as long
# as forward, one more forward adds a third. If both take equally long, it adds half. The plain model's two bars tell
# you where you are: divide its forward by the sum of the two.
#
# Did you measure more than that? The difference is the price of `checkpoint` itself. It runs Python code for each
# tensor that a block saves, in the first forward and again in the second. Our blocks are so small that this takes a
# visible share of the time. In the large blocks of a real model, that share vanishes, and about a third remains.
#
# **Selective checkpointing** (`create_selective_checkpoint_contexts`) recomputes only what is large and cheap to
# compute, such as materialized scores.

# %% [markdown]
# ## How large a model fits?
#
# Back to your hundred GPUs. Fewer activations do not save them, because the model state alone needs 112 GB on each. In
# chapters 07 to 09, the ranks shard more and more of it. What will that buy? In mixed precision, the model state of a
# rank takes these bytes:
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | data parallelism | 2Ψ | 2Ψ | 12Ψ |
# | ZeRO-1 | 2Ψ | 2Ψ | 12Ψ/N |
# | ZeRO-2 | 2Ψ | 2Ψ/N | 12Ψ/N |
# | ZeRO-3 | 2Ψ/N | 2Ψ/N | 12Ψ/N |
#
# **Predict.** Does the model state fit into 80 GB per GPU? Write y or n for each case:
#
# - **A**: 8B parameters, with plain data parallelism on a thousand GPUs.
# - **B**: 70B, with ZeRO-2 on as many GPUs as you like.
# - **C**: 70B, on 32 GPUs: each layer is split over 8 of them (tensor parallelism), and the four groups of 8 use plain
#   data parallelism.
# - **D**: as C, but with ZeRO-1 over the four groups.
# - **E**: 70B, with ZeRO-3 over 32 GPUs.

# %%
my_answers = None


# %%
def state_gb(billions, ranks, stage, each=formulas.MIXED_ADAM):
    return formulas.model_state_bytes(1e9 * billions, ranks, stage, each) / 1e9


any_number = 10**9  # of ranks: as good as infinitely many
cases_gb = {
    "A: 8B, data parallelism": state_gb(8, 1000, stage=0),
    "B: 70B, ZeRO-2, N → ∞": state_gb(70, any_number, stage=2),
    "C: an eighth of 70B, data parallelism": state_gb(70 / 8, 4, stage=0),
    "D: an eighth of 70B, ZeRO-1, 4 groups": state_gb(70 / 8, 4, stage=1),
    "E: 70B, ZeRO-3, 32 GPUs": state_gb(70, 32, stage=3),
}
rows = [[name, f"{gb:.4g}", "y" if gb <= 80 else "n"] for name, gb in cases_gb.items()]
answers = "".join(row[-1] for row in rows)
print(f"{predicted(my_answers)}computed {answers}")
assert answers == "nnnyy"
tables.Table(["", "GB per GPU", "fits"], rows)

# %% [markdown]
# - **A**: a thousand GPUs hold no larger model than one. This model needs GPUs of 141 GB.
# - **B**: ZeRO-2 does not shard the 2Ψ bytes of the parameters.
# - **C**: the GPUs have 32 · 80 = 2,560 GB, but the four groups hold four copies of 16 · 70 = 1,120 GB. It trains only
#   if the groups also shard, as in D.
#
# At most this many parameters fit:

# %%
rows = []
for gpu_gb in planner_plots.GPUS_GB:
    largest = [gpu_gb / state_gb(1, any_number, stage) for stage in (0, 1, 2)]
    rows.append([f"{gpu_gb} GB", *(f"{billions:.1f}B" for billions in largest)])
tables.Table(["GPU", "data parallelism, any N", "ZeRO-1, N → ∞", "ZeRO-2, N → ∞"], rows)

# %% [markdown]
# A planner adds up activations and model state, for models whose shapes are published. In its figure, *gathered* stands
# for the parameters that ZeRO-3 holds in full while it needs them.
#
# **Predict.** You train Llama-2 7B on eight GPUs of 24 GB, with sequences of 4,096 tokens and all layers checkpointed.
# Which is the first strategy that fits: "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3" or "none"?

# %%
my_prediction = None

# %% tags=["nbval-ignore-output"]
print(predicted(my_prediction, then="\n"), end="")
widgets.memory_planner("Llama-2 7B", ranks=8)

# %% [markdown]
# Only ZeRO-3 stays below 24 GB. Leave a tenth of a GPU's memory free, because the planner does not count temporary
# tensors in kernels, communication buffers or fragmentation. It counts every layer as a GPT layer with dropout masks
# and GELU, which Llama-2 does not have. It does count the *logits*, which are in no layer: with Llama 3 8B and 8,192
# tokens, they take 8,192 · 128,256 · 4 bytes = 4.2 GB per copy, and a plain loss makes two or three.
#
# The planner's figure assumes fused attention and checkpointing. How large are the activations without checkpointing?

# %%
from shared.planner.shapes import SHAPES

for attention in planner.ATTENTION:
    plan = planner.plan(SHAPES["Llama-2 7B"], ranks=8, stage=3, attention=attention)
    print(f"{attention} attention: {plan.activations / 1e9:.0f} GB of activations")

# %% [markdown]
# Neither fits: next to its model state and gathered layers, ZeRO-3 leaves less than 10 GB of a 24 GB GPU. With
# materialized attention, a single sequence overflows even 80 GB.
#
# ZeRO helps if you lack *capacity*. A kernel is **memory-bound** if the *bandwidth* of the GPU's memory limits it, and
# sharding does not change that:
#
# | you lack | symptom | what helps |
# |---|---|---|
# | capacity | out of memory | checkpointing, smaller micro-batches, ZeRO |
# | memory bandwidth | norms and GELU on large tensors take long | fused kernels: `torch.compile`, FlashAttention |
# | a faster CPU | small operators leave the GPU idle between launches | CUDA graphs, larger micro-batches |
# | network bandwidth | exposed communication | overlap, larger batches, sending less (chapters 04 and 19) |
# | computing power | none of these | more ranks, 16-bit formats |

# %% [markdown]
# ## The production version
#
# In practice, you rarely write this yourself. Under **autocast**, parameters stay in fp32, so they are their own
# master weights. torch casts them to 16 bits for each operator that gains from it:


# %%
# %%ranks
automatic = TinyGPT(config).to(device)
adamw_automatic = torch.optim.AdamW(automatic.parameters())
with memory.peak(automatic, adamw_automatic) as peaks["autocast"]:
    with torch.autocast(device.type, torch.bfloat16):
        loss = automatic(inputs, targets)
    loss.backward()
    adamw_automatic.step()
peaks["mixed by hand"] = follow(low)
print(" + ".join(per_parameter(automatic, adamw_automatic)), "bytes per parameter with autocast")

# %% [markdown]
# The figure shows the activations of each version at its peak:

# %% tags=["nbval-ignore-output"]
peaks = ranks.pull("peaks")[0]
most = {name: max(s.held.activations_bytes for s in peak.samples) for name, peak in peaks.items()}
assert most["mixed by hand"] < most["autocast"] < 0.95 * most["plain"]
plots.bars({name: nbytes / 1e6 for name, nbytes in most.items()}, "MB of activations at the peak")

# %% [markdown]
# - **autocast** saves less than our version: norms and the loss stay in fp32, and it keeps a bfloat16 copy of each
#   linear layer's weight until backward. Its gradients are in fp32, so it saves nothing on the wire.
# - **8-bit Adam** (Dettmers et al. 2022) stores the momentum and the variance in one byte each. The model state is then
#   2 + 2 + 4 + 2 = 10 bytes per parameter instead of 16.
# - **float16** has a smaller range than bfloat16, so small gradients would become zero. `torch.amp.GradScaler`
#   multiplies the loss by a large factor before backward, and divides the gradients by it afterwards.
# - **FSDP2** shards fp32 parameters, which are the master weights, and computes in 16 bits (chapter 11).
#
# Our `WithMasters` holds all fp32 gradients at once, and no scheduler accepts it. In the lab, you write an optimizer
# without these two limits.

# %% [markdown]
# ## Recap
#
# | | model state per rank, bytes | activations per block, bytes | sent per rank and step, bytes | overlap |
# |---|---|---|---|---|
# | fp32 | 4 + 4 + 8 = 16Ψ | 64 sbh | 2(N−1)/N · 4Ψ | as in chapter 04 |
# | mixed precision by hand | 2 + 2 + 12 = 16Ψ, or 20Ψ with fp32 gradients | 32 sbh | 2(N−1)/N · 2Ψ | the same |
# | autocast | 4 + 4 + 8 = 16Ψ | between the two | 2(N−1)/N · 4Ψ | the same |
# | with checkpointing | unchanged | 4 sbh, or 2 sbh in 16 bits¹ | unchanged | backward takes longer, and hides more |
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
# - **memory-bound**: a kernel is memory-bound if the bandwidth of the GPU's memory limits it.
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
# - Chen et al., *Training deep nets with sublinear memory cost*, 2016 (arXiv 1604.06174): how to place checkpoints.

# %% [markdown]
# ## What is still wasted
#
# Is AdamW's state on each rank the same as on rank 0?

# %%
# %%ranks
averages = [state[name] for state in adamw.state.values() for name in ("exp_avg", "exp_avg_sq")]
mine = torch.cat([average.flatten() for average in averages])
of_rank_0 = mine.clone()
dist.broadcast(of_rank_0, src=0)
assert torch.equal(mine, of_rank_0)
print(f"{mine.nbytes / parameters:.0f} bytes per parameter, the same as on rank 0")

# %% [markdown]
# Yes, on every rank, bit for bit. AdamW's state is half of the model state. In mixed precision, it includes the master
# weights, and is three quarters. All ranks use it to compute the same updates. So rank r could keep only a
# shard of it, update its shard of the parameters, and send the result to the others. That is ZeRO-1, in chapter 07.

# %%
ranks.stop()
