# ---
# jupyter:
#   course:
#     module: memory_wall
#     minutes: 25
# ---

# %% [markdown]
# # 06 · The memory wall
#
# **25 minutes.** You will be able to
#
# - say what a rank holds at each moment of a step, in bytes per parameter, and where each byte comes from,
# - train in mixed precision by hand, and say what it saves and what it does not,
# - derive what a transformer block keeps for backward, and trade it for time by checkpointing,
# - tell how large a model fits on a GPU, and why more GPUs do not help data parallelism.
#
# You need chapter 02 (`ManualDDP`).

# %% [markdown]
# ## What is wasted
#
# Chapter 05 ended with four ranks that hold four copies of everything. How much is everything?

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables, widgets
from shared.plots import memory_plan as planner_plots

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from torch import nn

from shared import memory
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
# **Predict.** The parameters take 4 bytes each. How many bytes *per parameter* does a rank hold when the first step
# is over: parameters, gradients, and what AdamW remembers? And is it ever more than that?

# %%
my_prediction = 0.0


# %%
# %%ranks
def step(model, optimizer):
    model.zero_grad()
    model(inputs, targets).backward()
    if isinstance(model, ManualDDP):
        model.finish_gradient_sync()
    optimizer.step()


with memory.peak(model, adamw) as peak:
    step(model, adamw)

# %% tags=["nbval-ignore-output"]
peak, parameters = ranks.pull("peak")[0], ranks.pull("parameters")[0]
held_after = {sample.phase: sample.held for sample in peak.samples}  # the last sample of each
names = ["parameters", "gradients", "optimizer", "activations"]
rows = []
for phase, held in held_after.items():
    by_component = held.by_component()
    moment = "at the start" if phase == "start" else f"after {phase}"
    rows.append([moment, *(f"{by_component[name] / parameters:.2f}" for name in names)])
each = formulas.FP32_ADAM
rows.append(["formula", *(f"{n:.2f}" for n in (each.parameter, each.gradient, each.optimizer)), ""])
end = held_after["step"]
assert end.parameters_bytes == end.gradients_bytes == 4 * parameters
assert 0 <= end.optimizer_bytes - 8 * parameters < 1000
stays = (end.parameters_bytes + end.gradients_bytes + end.optimizer_bytes) / parameters
at_peak = peak.held.total_bytes / parameters
print(f"predicted {my_prediction:g}, measured {stays:.2f} bytes per parameter")
print(f"at the peak, in {peak.phase}: {at_peak:.1f}")
tables.Table(["bytes / Ψ", *names], rows)

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(peak.samples)

# %% [markdown]
# Three things come and stay: 4 + 4 + 8 = 16 bytes per parameter. (AdamW has a momentum and a variance for each, and a
# step counter of 4 bytes for each *tensor*.) One comes and goes: the **activations**, what forward
# keeps because backward will need it. They make the peak, and depend on the batch; the rest does not.
#
# And N appears nowhere. So N ranks hold N times as much, of which one process would need one part:

# %%
each_gb = (
    formulas.model_state_bytes(7e9, ranks=1, stage=0, bytes_per_parameter=formulas.FP32_ADAM) / 1e9
)
for world_size in (4, 100):
    wasted = formulas.redundant_copies(world_size)
    in_all = f"{world_size} × {each_gb:.0f} = {world_size * each_gb:,.0f} GB"
    print(f"7B parameters on {world_size} ranks: {in_all}, {wasted} copies of it wasted")

# %% [markdown]
# Memory of data parallelism grows with the model, and not with the cluster: more ranks do not make room. This is the
# wall. Before the ranks share anything out (chapter 07), what can one rank do alone? It can hold smaller numbers, and
# fewer of them.

# %% [markdown]
# ## Smaller numbers
#
# bfloat16 takes 2 bytes. Make *everything* bfloat16, and 16 bytes become 8:


# %%
# %%ranks
def per_parameter(module, optimizer):
    """→ bytes per parameter: of parameters, gradients, the optimizer's state"""
    held = memory.held(module, optimizer)
    kinds = (held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)
    return [f"{kind / parameters:.0f}" for kind in kinds]


all_low = TinyGPT(config).to(device, torch.bfloat16)
adamw_low = torch.optim.AdamW(all_low.parameters(), lr=1e-5)
before = [p.detach().clone() for p in all_low.parameters()]
step(all_low, adamw_low)
print(" + ".join(per_parameter(all_low, adamw_low)))

# %% [markdown]
# But a bfloat16 has 8 significant bits: an update smaller than the 512th part of a weight is rounded away.
#
# **Predict.** AdamW's first step moves each weight by the learning rate, here 1e−5. The weights began with a standard
# deviation of 0.02. What share of them moved?

# %%
my_prediction = 0.0

# %%
# %%ranks
pairs = zip(all_low.parameters(), before, strict=True)
moved = sum(int((now != then).sum()) for now, then in pairs) / parameters
limit = 512 * 1e-5
sizes = torch.cat([each.flatten() for each in before]).float().abs()
below = [(sizes < part).float().mean().item() for part in (limit / 2, limit)]

# %% tags=["nbval-ignore-output"]
moved, below = ranks.pull("moved")[0], ranks.pull("below")[0]
print(f"predicted {my_prediction:.0%}, measured {moved:.0%}")
print(f"weights below half of 0.005: {below[0]:.0%}, below 0.005: {below[1]:.0%}")
assert below[0] < moved < below[1] < 0.5

# %% [markdown]
# 1e−5 is the 512th part of 0.005. Above that no weight moves; below half of it nearly all do; between the two it
# depends on the next power of 2. So the share that moves lies between those of the second line.
#
# The rest stands still, and will in every step that is no larger. So mixed precision *computes* in bfloat16 and
# *remembers* in fp32 (Micikevicius et al. 2018, §3.1): each weight is the rounded copy of a **master**, and the
# optimizer steps the master. By hand:

# %%
# %%ranks
low = TinyGPT(config).to(device, torch.bfloat16)
weights = list(low.parameters())
masters = [nn.Parameter(weight.detach().float()) for weight in weights]
adamw_masters = torch.optim.AdamW(masters, lr=1e-5)


def mixed_step():
    low.zero_grad()
    low(inputs, targets).backward()
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float()
    adamw_masters.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)


# %% [markdown]
# **Predict.** bfloat16 weights and gradients, fp32 masters and AdamW on them: how many bytes per parameter?

# %%
my_prediction = 0.0

# %%
# %%ranks
state = {"fp32": per_parameter(model, adamw), "all bf16": per_parameter(all_low, adamw_low)}
mixed_step()
state["mixed, as above"] = per_parameter(low, adamw_masters)
for master in masters:
    master.grad = None
state["mixed, fp32 gradients freed"] = per_parameter(low, adamw_masters)

# %%
state = ranks.pull("state")[0]
kinds = [
    formulas.FP32_ADAM,
    formulas.BytesPerParameter(2, 2, 4),
    formulas.MIXED_ADAM_FP32_GRADIENTS,
    formulas.MIXED_ADAM,
]
rows = []
for (name, held), kind in zip(state.items(), kinds, strict=True):
    assert held == [str(kind.parameter), str(kind.gradient), str(kind.optimizer)], (name, held)
    rows.append([name, *held, f"{kind.total}"])
print(f"predicted {my_prediction:g}, measured {rows[3][-1]} or {rows[2][-1]} bytes per parameter")
tables.Table(["", "parameters", "gradients", "optimizer", "in all"], rows)

# %% [markdown]
# 16 again. The state is *not* smaller than in fp32; only its parts are others (ZeRO paper, §3.1). 20 where the fp32
# gradients of all weights are there at once, as above, or where micro-batches are added up in fp32.
#
# From there comes a rule of thumb that circulates, "20 times the model size". It is 20 *bytes per parameter*: 10 times
# a model in bfloat16, 5 times one in fp32.
#
# For the lab, where you write such an optimizer, look at one from inside. A group holds parameters and their settings;
# `state` is a dict per parameter; `defaults` are the settings of a group that says nothing:

# %% tags=["nbval-ignore-output"]
# %%ranks
print("group:", *adamw_masters.param_groups[0].keys())
print("state:", *adamw_masters.state[masters[0]].keys())
print("defaults:", *adamw_masters.defaults.keys())

# %% [markdown]
# So what does mixed precision save? Time, since matrix units are faster in 16 bits; half of the bytes on the wire; and
# half of what forward keeps.

# %% [markdown]
# ## What forward keeps
#
# Take one block of our GPT and ask of each operator: what must backward have? A linear layer needs its input (for the
# weight's gradient), a norm and GELU too; fused attention needs query, key and value, and its output, which is the next
# layer's input. An addition needs nothing. In units of *s·b·h* numbers, sequence × batch × hidden:
#
# | kept for | what | numbers / sbh |
# |---|---|---|
# | `norm_1` | the block's input | 1 |
# | `query_key_value` | its input | 1 |
# | attention | query, key, value | 3 |
# | `project` | its input | 1 |
# | `norm_2` | its input | 1 |
# | `up` | its input | 1 |
# | GELU | its input, 4h wide | 4 |
# | `down` | its input, 4h wide | 4 |
#
# 16 numbers, so 64 bytes in fp32, and 32 in bfloat16. Measured:


# %%
# %%ranks
def kept_bytes(block, dtype, sequence=64, batch=8):
    """Run a block forward. → bytes that are then held for backward"""
    block = block.to(device, dtype)
    x = torch.randn(batch, sequence, config.width, device=device, dtype=dtype)
    with memory.peak(block) as peak:
        _result = block(x.requires_grad_())  # it counts, as the next block's input; x does not
    return peak.samples[-1].held.activations_bytes


dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
kept = {name: kept_bytes(Block(config), dtype) for name, dtype in dtypes.items()}

# %% tags=["nbval-ignore-output"]
tokens, width, heads = 64 * 8, 128, 4
for name, kept_bytes in ranks.pull("kept")[0].items():
    bytes_each = {"fp32": 4, "bf16": 2}[name]
    measured, derived = kept_bytes / (tokens * width), 16 * bytes_each
    rest_bytes = (kept_bytes - derived * tokens * width) / tokens
    print(f"{name}: derived {derived}, measured {measured:.2f}: {rest_bytes:.0f} B per token more")
    assert 1 <= measured / derived < 1.1

# %% [markdown]
# The rest is small numbers: each norm keeps a mean and a 1/σ per token, and fused attention one number per token and
# head. (That holds for the CPU. On a GPU another kernel may keep more.)
#
# The literature has a famous formula for this, in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198, §4):
#
# $$sbh\,(34 + 5\,as/h)$$
#
# 34 is our 32, and two masks of dropout with 1 byte each. And 5as/h: their attention is not fused. With *a* heads it
# writes down *a·s·s* weights: the softmax's output (2 bytes), a mask (1), what dropout leaves (2). Build a block as
# they count:


# %%
# %%ranks
def dropout(x):
    return torch.native_dropout(x, 0.1, True)[0]  # F.dropout's mask has 2 bytes on the CPU, 1 here


class AsCounted(Block):
    """Attention writes its weights down; dropout on them and on both results."""

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


# %% [markdown]
# Per token, one of the terms grows with *s*. Measure both blocks, in bfloat16, at several lengths:

# %%
# %%ranks
block = AsCounted(config)
block.register_buffer("causal", torch.full((512, 512), float("-inf")).triu(1))
lengths = (64, 128, 256, 512)
kept = {
    "attention written down": {s: kept_bytes(block, torch.bfloat16, s, 1) / s for s in lengths},
    "fused attention": {s: kept_bytes(Block(config), torch.bfloat16, s, 1) / s for s in lengths},
}

# %% tags=["nbval-ignore-output"]
kept, lengths = ranks.pull("kept")[0], range(1, 513)
written, fused = kept
formula = {
    written: {s: formulas.activation_bytes(s, 1, width, heads) / s for s in lengths},
    fused: {s: 32 * width for s in lengths},
}
for name, of_lengths in kept.items():
    ratios = [each / formula[name][s] for s, each in of_lengths.items()]
    print(f"{name}: measured / formula {min(ratios):.3f} to {max(ratios):.3f}")
    assert all(1 <= ratio < 1.1 for ratio in ratios)
planner_plots.activation_growth(formula, kept)

# %% [markdown]
# The formula holds; what it leaves out is 8 bytes per token, the norms' means again. At a width of 128 attention's
# weights are most of it by 512 tokens. Fused kernels (FlashAttention) compute them anew in backward, tile by tile, and
# the term is gone.
#
# No sharding of *states* touches any of this: activations belong to the samples that a rank computes. If one sequence
# does not fit, these help. For one layer of GPT-3:

# %%
gpt_3 = {"sequence": 2048, "batch": 1, "hidden": 12288, "heads": 96}
ways = {
    "none of these": {},
    "fused attention": {"checkpointing": "selective"},  # computed anew in backward, as it is there
    "tensor parallelism, 8 ranks": {"tensor_ranks": 8},
    "+ sequence parallelism": {"tensor_ranks": 8, "sequence_parallel": True},
    "+ fused attention": {
        "tensor_ranks": 8,
        "sequence_parallel": True,
        "checkpointing": "selective",
    },
    "checkpointing": {"checkpointing": "full"},
}
rows = []
for name, options in ways.items():
    layer_bytes = formulas.activation_bytes(**gpt_3, **options)
    rows.append([name, f"{layer_bytes / (2048 * 12288):.2f}", f"{layer_bytes / 1e9:.2f}"])
tables.Table(["", "bytes / sbh", "GB per layer"], rows)

# %% [markdown]
# (Tensor parallelism splits each layer over the ranks, chapter 13; sequence parallelism splits the tokens between those
# layers, and context parallelism in attention too.) A mixture of experts, which is often named in this place, does not
# help: it multiplies the MLP's *parameters*, and a token still passes through one expert or two. It keeps as much for
# backward as before, or more.

# %% [markdown]
# ## Compute it again
#
# The last row needs no second rank. A **checkpointed** block keeps its input only, and runs its forward once more when
# backward comes (Chen et al. 2016, arXiv 1604.06174). torch has it:


# %%
# %%ranks
from functools import partial

from torch.utils.checkpoint import checkpoint

plain, saving = TinyGPT(config).to(device), TinyGPT(config).to(device)
for block in saving.blocks:  # in place: its class and its parameters stay as they are
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)

# %% [markdown]
# **Predict.** Eight blocks, all checkpointed; of 16 parts each keeps one. But while a block is recomputed, all of its
# parts are there. What share of the blocks' activations is left at the peak?

# %%
my_prediction = 0.0


# %%
# %%ranks
def followed_step(model):
    model.zero_grad()
    with memory.peak(model) as peak:
        model(inputs, targets).backward()
    return peak


peaks = {"plain": followed_step(plain), "checkpointed": followed_step(saving)}
pairs = zip(plain.parameters(), saving.parameters(), strict=True)
print("same gradients:", all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs))

# %% tags=["nbval-ignore-output"]
peaks = ranks.pull("peaks")[0]
most = {
    name: max(sample.held.activations_bytes for sample in peak.samples)
    for name, peak in peaks.items()
}
left, derived = most["checkpointed"] / most["plain"], (8 * 1 + 15) / (8 * 16)
print(f"left: predicted {my_prediction:.0%}, derived {derived:.0%}, measured {left:.0%}")
assert left < 0.35
plots.memory_over_step(peaks["checkpointed"].samples)

# %% [markdown]
# (Measured are all activations, those of the output layer and the loss too.) A tooth for each block: recomputed, used,
# gone. What remains between the teeth are the inputs. Without checkpoints they rose to the peak of the first figure.
#
# **Predict.** If backward takes twice as long as forward: how much longer do the two take with all blocks
# checkpointed, in per cent?

# %%
my_prediction_percent = 0.0

# %%
# %%ranks
import time


def now_s():
    if device.type != "cuda":
        return time.process_time()  # this process's own: others want the same cores
    torch.cuda.synchronize()
    return time.perf_counter()


def took_s(model):
    """→ seconds of forward, and of forward and backward"""
    began_s = now_s()
    loss = model(inputs, targets)
    forward_s = now_s() - began_s
    loss.backward()
    return forward_s, now_s() - began_s


rounds = [[*took_s(plain), *took_s(saving)] for _ in range(8)][1:]

# %% tags=["nbval-ignore-output"]
of_ranks = [map(min, zip(*of_rank, strict=True)) for of_rank in ranks.pull("rounds")]
forward_s, plain_s, _, saving_s = (min(times) for times in zip(*of_ranks, strict=True))
longer = saving_s / plain_s - 1
print(f"predicted {my_prediction_percent:.0f}%, measured {longer:.0%}")
print(f"forward is {forward_s / plain_s:.0%} of the step without checkpoints")
assert 0.05 < longer < 0.8

# %% [markdown]
# The forward of the blocks is paid twice: a third more, where backward takes twice as long as forward, and about the
# second line's share here. It scatters on the CPU, where memory given back to the system must be fetched again; and
# torch stops when it has all that backward needs, so a block's last linear layer is not computed again.
#
# A good exchange, and torch makes it where you say: each block, every second, or the attention only
# ("selective"). In the lab you write `checkpoint` yourself, and place a few where they help most.

# %% [markdown]
# ## How large a model fits?
#
# Now the other way round: a GPU of M bytes, and 16 bytes per parameter.
#
# **Predict.** A thousand GPUs of 80 GB, plain
# data parallelism, no activations at all. How many billion parameters?

# %%
my_prediction_billions = 0.0

# %%
forever = 10**9  # ranks: as good as infinitely many
rows = []
for gpu_gb in planner_plots.GPUS_GB:
    largest = [
        gpu_gb * 1e9 / formulas.model_state_bytes(1, ranks=forever, stage=stage)
        for stage in (0, 1, 2)
    ]
    assert largest[0] == formulas.largest_model_parameters(gpu_gb * 1e9)
    rows.append([f"{gpu_gb} GB", *(f"{each / 1e9:.1f}B" for each in largest)])
print(f"predicted {my_prediction_billions:g}B, by formula {rows[1][1]}")
tables.Table(["GPU", "data parallelism, any N", "ZeRO-1, N → ∞", "ZeRO-2, N → ∞"], rows)

# %% [markdown]
# M/16, however many GPUs. You may read that data parallelism works up to about 8B: that is the largest GPU of the
# table, with nothing in it but state. The other columns look ahead: chapters 07 to 09 share out the optimizer's state
# (ZeRO-1), the gradients too (2), the parameters too (3). As long as each rank keeps 2 bytes per parameter whole, 80 GB
# end at 40B. You may read of 70B under ZeRO-2: that takes the largest GPU. Examples that are told, per rank:

# %%
told = {
    "7.5B on 64, 16 B": (7.5e9, 64, formulas.MIXED_ADAM),
    "7.5B on 64, shared by 8": (7.5e9, 8, formulas.MIXED_ADAM),
    "70B on 8, 16 B": (70e9, 8, formulas.MIXED_ADAM),
    "70B on 8, 12 B": (70e9, 8, formulas.MIXED_ADAM_NO_MASTER),
    "70B on 32: an 8th on 4": (70e9 / 8, 4, formulas.MIXED_ADAM),
}
rows = []
for name, (size, world_size, each) in told.items():
    sizes = [formulas.model_state_bytes(size, world_size, stage, each) / 1e9 for stage in range(4)]
    rows.append([name, *(f"{gigabytes:.4g} GB" for gigabytes in sizes)])
nothing_twice = formulas.largest_model_parameters(32 * 80e9)
print(f"32 GPUs of 80 GB, with nothing held twice: {nothing_twice / 1e9:.0f}B parameters")
note = "16 B, unless it says 12: without fp32 masters."
tables.Table(["", "data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3"], rows, note)

# %% [markdown]
# - The first is the ZeRO paper's figure 1. In the second only the 8 ranks of a host share, and each host has a copy:
#   hybrid sharding, which spares the wire between hosts (lab 11). N counts those who share.
# - 70B at 12 bytes is often told with 210 GB for ZeRO-2, 140 + 560/8: that forgets the rank's share of the gradients,
#   17.5 GB. On 8 GPUs of 80 GB no stage fits.
# - On 32, it is told, it does, with each layer split over 8 GPUs (tensor parallelism, chapter 13) and 4 such groups in
#   data parallelism. With plain data parallelism it does not; with any stage of ZeRO it does, before activations.
#   ("Fits one node", in short: 16 · 70 = 1,120 GB of state, and a node of 8 has 640.)
# - "GPT-4 scale on 32 GPUs" is told as well. What fits there is the line above the table, without activations; and
#   how large GPT-4 is has not been published (its report, arXiv 2303.08774, §2).
#
# And the "4 times" and "8 times" that ZeRO-1 and 2 are said to save are limits for N → ∞: divide along the rows.
#
# Last, activations and states together, for models with published shapes. Gathered, in the figure, are the layer that
# computes and the next one, which a rank of ZeRO-3 holds whole for a moment. (In JupyterLab you can choose another
# model, N, precision, micro-batch and checkpointing.)
#
# **Predict.** From which stage on does Llama-2 7B train on eight GPUs of 24 GB?

# %%
my_prediction = "ZeRO-?"

# %% tags=["nbval-ignore-output"]
print(f"predicted {my_prediction}")
widgets.memory_planner("Llama-2 7B", ranks=8)

# %% [markdown]
# With ZeRO-3 only. The planner counts what `shared/planner` says, and no more: no temporaries of kernels, no fragments,
# no buckets. Keep a tenth of the GPU's memory for those.
#
# One caution. "Memory bound, so use ZeRO" mixes up two things. A kernel is *memory-bound* when it waits for memory's
# *bandwidth*; sharding changes nothing there. What ZeRO gives is *capacity*. A step's time is computing plus exposed
# communication, and ZeRO adds to the second, if to any:
#
# | what is short | how it shows | what helps |
# |---|---|---|
# | capacity | out of memory | checkpointing, smaller micro-batches, ZeRO |
# | memory bandwidth | small operators take long | fusing them: compilation, FlashAttention |
# | network | exposed communication | overlap, larger batches, less to send (chapters 04, 19) |
# | computing | none of these | more ranks, 16 bits |

# %% [markdown]
# ## The production version
#
# Nobody copies masters by hand. `torch.autocast` keeps fp32 parameters, which are their own masters, and casts them
# where an operator gains by it:


# %%
# %%ranks
def autocast_step(model, optimizer):
    model.zero_grad()
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(inputs, targets)
    loss.backward()
    optimizer.step()


def followed(how, model, optimizer):
    how(model, optimizer)
    with memory.peak(model, optimizer) as peak:
        how(model, optimizer)
    most_bytes = max(sample.held.activations_bytes for sample in peak.samples)
    return per_parameter(model, optimizer), most_bytes


automatic = TinyGPT(config).to(device)
results = {
    "fp32": followed(step, plain, torch.optim.AdamW(plain.parameters())),
    "autocast": followed(autocast_step, automatic, torch.optim.AdamW(automatic.parameters())),
    "mixed by hand": followed(lambda *_: mixed_step(), low, adamw_masters),
}

# %% tags=["nbval-ignore-output"]
results = ranks.pull("results")[0]
rows = []
for name, (held, most_bytes) in results.items():
    relative = most_bytes / results["fp32"][1]
    rows.append([name, " + ".join(held), f"{relative:.0%}"])
    assert name == "fp32" or relative < 0.95
tables.Table(["", "state per parameter, bytes", "activations at the peak"], rows)

# %% [markdown]
# 16 bytes of state once more. autocast's activations lie between, because it leaves norms, sums and the loss in fp32,
# and keeps a bfloat16 copy of each weight for the step. With float16 instead, `torch.amp.GradScaler` must multiply the
# loss, or small gradients become zero; bfloat16 has fp32's range and needs none. For checkpoints the production version
# is what you used: `torch.utils.checkpoint`, with `use_reentrant=False`.
#
# Where ours differs: `mixed_step` has all gradients in fp32 at once, and nobody can schedule its learning rate. In the
# lab, `MasterWeights` is a real `torch.optim.Optimizer`, and holds one of them at a time.

# %% [markdown]
# ## Recap
#
# Ψ parameters, N ranks; w bytes per number that is computed; sent by a ring.
#
# | | state per rank | activations per block | sent per rank and step | overlap |
# |---|---|---|---|---|
# | fp32 | 4 + 4 + 8 = 16Ψ | 64sbh | 2(N−1)/N · 4Ψ | as in chapter 04 |
# | mixed | 2 + 2 + 12 = 16Ψ | 32sbh | 2(N−1)/N · 2Ψ | the same |
# | mixed, fp32 gradients | 2 + 6 + 12 = 20Ψ | 32sbh | 2(N−1)/N · 2Ψ, or 4Ψ | the same |
# | with checkpoints | unchanged | w · sbh | unchanged | backward is longer: more is hidden |

# %% [markdown]
# ## What is still wasted
#
# One rank alone can do no more. But look at four. They have trained a step together, and each has AdamW's memory of it:

# %%
# %%ranks
states = [[state["exp_avg"], state["exp_avg_sq"]] for state in adamw.state.values()]
mine = torch.cat([each.flatten() for pair in states for each in pair])
of_rank_0 = mine.clone()
dist.broadcast(of_rank_0, src=0)
same = torch.equal(mine, of_rank_0)
print(f"{mine.nbytes / parameters:.0f} bytes per parameter, as on rank 0: {same}")

# %% [markdown]
# The same numbers on every rank, to the last bit: half of all that stays, and in mixed precision three quarters. And
# AdamW needs each of them once per step, for its own parameter only. So rank *r* could keep one N-th of them, step that
# part, and hand the updated parameters around. That is ZeRO-1, chapter 07.
#
# But first the lab: count a rank's memory where the guess is wrong three times, and build what this page used, masters
# and the recomputing.

# %%
ranks.stop()
