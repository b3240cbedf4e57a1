# ---
# jupyter:
#   course:
#     module: manual_ddp
#     minutes: 35
# ---

# %% [markdown]
# # 02 · Data parallelism by hand
#
# **35 minutes.** You will be able to
#
# - say why micro-batches can run side by side, and show it in numbers,
# - name the three places where averaging gradients is *not* the full batch,
# - train a small GPT on four ranks and get the loss curve of one process.
#
# You need chapter 00: ranks, `%%ranks`, `all_reduce`.

# %% [markdown]
# ## What is wasted
#
# A batch that does not fit is cut into micro-batches, and their gradients are added up: *gradient accumulation*.
# Here is a small GPT and eight samples of real text.

# %%
import torch

from shared import plots, ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size)
model = TinyGPT(config, seed=0).double()
inputs, targets = text.windows(range(0, 800, 100), length=64)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, inputs {list(inputs.shape)}")
print(text.decode(inputs[0])[:44])


# %%
def accumulate(micro_batches):
    """One process, one micro-batch after the other. → the gradients added up"""
    model.zero_grad()
    for x, y in micro_batches:
        (model(x, y) / len(micro_batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


full = accumulate([(inputs, targets)])
four = accumulate(list(zip(inputs.chunk(4), targets.chunk(4), strict=True)))
print(
    f"largest difference {(full - four).abs().max():.0e}, largest gradient {full.abs().max():.2f}"
)
assert torch.allclose(full, four, atol=1e-12)

# %% [markdown]
# The same gradient. And the wait?

# %% tags=["nbval-ignore-output"]
import time


def seconds_for(micro_batches):
    began = time.perf_counter()
    accumulate(micro_batches)
    return time.perf_counter() - began


torch.set_num_threads(1)  # one worker, so that the work is what is compared
parts = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
tries = [(seconds_for(parts), seconds_for(parts[:1])) for _ in range(10)]
ratio = min(four for four, one in tries) / min(one for four, one in tries)
print(f"four micro-batches in line take {ratio:.1f} times as long as one")

# %% [markdown]
# Micro-batch 2 stands in line behind micro-batch 1, though it needs nothing from it. They could run at the same time,
# on four ranks. That is all of data parallelism. The rest of this chapter is about keeping the *same gradient*.

# %% [markdown]
# ## The identity, and where it breaks
#
# The loss is a mean over the samples, so the gradient is one too:
#
# $$\nabla L = \frac{1}{|B|}\sum_{s \in B} \nabla \ell_s = \sum_i \frac{|B_i|}{|B|}\,\nabla L_i
# \qquad\text{and, for } N \text{ equal shares,}\qquad \nabla L = \frac{1}{N}\sum_i \nabla L_i$$
#
# **Predict.** The shares are now 5, 1, 1 and 1 samples. The plain mean of the four gradients is off by what part of
# the right one: nothing, about a third, or all of it? Write 0, 0.3 or 1.

# %%
my_prediction = 0.0


# %%
def mean_of_means(sizes, weights):
    """Average the gradients of shares of these sizes, with these weights."""
    shares = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    return sum(weight * accumulate([share]) for weight, share in zip(weights, shares, strict=True))


def off_by(gradient):
    return ((gradient - full).norm() / full.norm()).item()


plain = off_by(mean_of_means([5, 1, 1, 1], [1 / 4] * 4))
weighted = off_by(mean_of_means([5, 1, 1, 1], [5 / 8, 1 / 8, 1 / 8, 1 / 8]))
print(f"you said {my_prediction:.2f}; plain mean {plain:.2f}; weighted by share {weighted:.0e}")

# %% [markdown]
# Unequal shares are the first place. The second is a loss that is a *sum* over the samples: there the shares' gradients
# add up, and their mean is too small by the number of shares.

# %%
from torch.nn.functional import cross_entropy


def summed_gradient(x, y):
    model.zero_grad()
    cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


shares = zip(inputs.chunk(4), targets.chunk(4), strict=True)
mean_of_four = sum(summed_gradient(x, y) for x, y in shares) / 4
ratio = (summed_gradient(inputs, targets).norm() / mean_of_four.norm()).item()
print(f"the whole batch's gradient is {ratio:.1f} times the mean of four shares'")
assert abs(ratio - 4) < 1e-9

# %% [markdown]
# The third is a layer that looks at the whole batch at once:

# %%
torch.manual_seed(0)
norm = torch.nn.BatchNorm1d(64, affine=False).double()
table = torch.nn.Embedding(text.vocab_size, 64, dtype=torch.float64)


def batch_norm_gradient(x):
    table.zero_grad()
    norm(table(x).mean(1)).pow(3).mean().backward()
    return table.weight.grad.clone()


whole = batch_norm_gradient(inputs)
parts = sum(batch_norm_gradient(x) for x in inputs.chunk(2)) / 2
print(f"the mean of the parts is off by {((parts - whole).norm() / whole.norm()):.1f} of the whole")
assert not torch.allclose(parts, whole, rtol=0.1)

# %% [markdown]
# BatchNorm subtracts the mean of *its* batch and divides by its deviation; two shares have two of each. No averaging
# repairs that afterwards (`SyncBatchNorm` sends them around instead). Transformers use LayerNorm, which looks at one
# sample only.

# %% [markdown]
# ## Replicate
#
# Four ranks, each with the whole model. One global step then uses
#
# $$\text{batch size} = \text{micro-batch size} \times \text{accumulation steps} \times N$$

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size)
model = TinyGPT(config, seed=rank).double().to(device)
print(f"first weight {model.token_embedding.weight[0, 0]:+.4f}")

# %% [markdown]
# Four seeds gave four models, and a mean of their gradients fits none of them. So rank 0's parameters go to
# everyone, once. Buffers too, for models that have them. (`detach()`, because copying weights is nothing
# for autograd to record.)


# %%
# %%ranks
def broadcast_from_rank_0(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


broadcast_from_rank_0(model)
print(f"first weight {model.token_embedding.weight[0, 0]:+.4f}")

# %% [markdown]
# ## Slice
#
# Every rank takes its own samples of the *same* global batch, and runs forward and backward as if it were alone.

# %%
# %%ranks
inputs, targets = text.windows(range(0, 800, 100), length=64)
mine = slice(2 * rank, 2 * rank + 2)
model.zero_grad()
loss = model(inputs[mine], targets[mine])
loss.backward()
before = {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
print(f"loss {loss:.3f}, gradient norm {sum(g.norm() ** 2 for g in before.values()).sqrt():.3f}")

# %% [markdown]
# ## Average
#
# **Predict.** `all_reduce` leaves the sum on every rank. What else is needed for the mean, and on which ranks?


# %%
# %%ranks
def average_gradients(module):
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


average_gradients(model)
after = {name: p.grad.cpu().clone() for name, p in model.named_parameters()}
print(f"gradient norm {sum(g.norm() ** 2 for g in after.values()).sqrt():.3f}")

# %% [markdown]
# All four agree. Look at one parameter, the last LayerNorm's weight, on each rank before and after:

# %%
name = "norm.weight"
before = [gradients[name][:32] for gradients in ranks.pull("before")]
after = [gradients[name][:32] for gradients in ranks.pull("after")]
plots.gradients_before_and_after(before, after, name)
# %% [markdown]
# And they agree with one process that had all eight samples:

# %%
synced = torch.cat([gradient.flatten() for gradient in ranks.pull("after")[0].values()])
print(f"four ranks against one process: largest difference {(synced - full).abs().max():.0e}")
assert torch.allclose(synced, full, atol=1e-12)

# %% [markdown]
# ## Which samples are mine?
#
# Each epoch visits every sample once, in a new order. If each rank shuffled with a seed of its own, some samples would
# come twice and some never. So all ranks shuffle *alike*, from seed + epoch, and then take every N-th.


# %%
# %%ranks
def my_samples(length, epoch, seed=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    return order[rank::world_size].tolist()


print("epoch 0:", my_samples(12, epoch=0), " epoch 1:", my_samples(12, epoch=1))

# %% [markdown]
# No message was sent: a shared seed is enough. torch's `DistributedSampler` does the same, and it needs
# `sampler.set_epoch(epoch)` before each epoch. Forget it, and every epoch has the order of epoch 0: no error, and a
# model that sees its data in one order for ever.

# %% [markdown]
# ## Train
#
# The loop that you know, with one line more: `sync`. Each step draws a global batch of its own.


# %%
# %%ranks
def batch_of(step, global_batch=32):
    """This rank's share of the global batch that belongs to a step."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text.tokens) - 65, (global_batch,), generator=draw)
    return text.windows(starts[dist.get_rank() :: dist.get_world_size()], length=64)


def mean_over_ranks(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# %%
# %%ranks
def train(steps=40, start_equal=True, wrap=lambda module: module, sync=average_gradients):
    module = TinyGPT(config, seed=dist.get_rank()).to(device)
    if start_equal:
        broadcast_from_rank_0(module)
    wrapped = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = wrapped(*batch_of(step))
        loss.backward()
        sync(module)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


# %% [markdown]
# Now the same training on 1, 2 and 4 ranks, always with the same global batch of 32 samples. `ranks.world(2)` makes a
# group of the first two ranks while the others stand by; `ranks.run` calls a function on each rank of it, where
# `train` is known.


# %%
def losses_of(**options):
    """Train on every rank of the current world. → the losses, equal on all of them"""
    return ranks.run(lambda: train(**options))[0]


curves = {}
for size in (1, 2, 4):
    with ranks.world(size):
        curves[f"{size} rank{'s' if size > 1 else ''}"] = losses_of()
plots.loss_curves(curves)
# %%
one = torch.tensor(curves["1 rank"])
for name, curve in curves.items():
    apart = (torch.tensor(curve) - one).abs().max()
    assert apart < 0.01 and curve[-1] < 0.75 * curve[0]
    print(f"{name}: from {curve[0]:.1f} to {curve[-1]:.1f}, less than 0.01 from one rank's")

# %% [markdown]
# One curve, drawn three times. What is left between them is rounding: float32 sums taken in another order.
#
# **Predict.** Leave the broadcast out: four seeds, gradients averaged all the same. Does the loss still fall?

# %%
with ranks.world(4):
    unequal = losses_of(start_equal=False)
assert unequal[-1] > curves["4 ranks"][-1]
plots.loss_curves({"4 ranks": curves["4 ranks"], "4 ranks, no broadcast": unequal})

# %% [markdown]
# It falls, more slowly, and nothing raises an error: the worst kind of bug. Each rank walks from its own start along
# a gradient that fits none of the four models.

# %% [markdown]
# ## The production version
#
# torch's `DistributedDataParallel` broadcasts when it is built and averages during `backward()`. Same loop, no `sync`:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

theirs = train(wrap=DistributedDataParallel, sync=lambda module: None)
print(f"from {theirs[0]:.1f} to {theirs[-1]:.1f}")

# %%
apart = (torch.tensor(ranks.pull("theirs")[0]) - torch.tensor(curves["4 ranks"])).abs().max()
print(f"DDP's losses are ours: {'yes' if apart < 0.01 else 'no'}")
assert apart < 0.01

# %% [markdown]
# Same losses. What does one step of each put on the wire? The ledger of rank 0 tells; first by hand:

# %%
# %%ranks
from shared import wire


def one_step(wrap, sync):
    module = TinyGPT(config).to(device)
    wrapped = wrap(module)
    for _ in range(3):  # the last counts: DDP settles its buckets in the first two
        with wire.ledger() as log:
            wrapped(*batch_of(0)).backward()
            sync(module)
    return log


by_hand = one_step(lambda module: module, average_gradients)
by_ddp = one_step(DistributedDataParallel, lambda module: None)

# %%
ranks.pull("by_hand")[0].table(times=False)

# %% [markdown]
# And torch's DDP:

# %%
ranks.pull("by_ddp")[0].table(times=False)

# %% [markdown]
# Both are what the formula says, on every rank: an all-reduce of S bytes makes a rank send 2(N−1)/N·S by the ring
# algorithm (nccl-tests, PERFORMANCE.md); chapter 01 builds it.

# %%
from shared import formulas

parameters = sum(p.numel() for p in TinyGPT(config).parameters())
sent_bytes = formulas.all_reduce_sent_bytes(4 * parameters, ranks=4)
for log in [*ranks.pull("by_hand"), *ranks.pull("by_ddp")]:
    log.assert_volume(payload_bytes=4 * parameters, sent_bytes=sent_bytes)
print(f"{sent_bytes / 1e6:.2f} MB sent by each rank, either way")

# %%
for name, logs in {"by hand": ranks.pull("by_hand"), "DDP": ranks.pull("by_ddp")}.items():
    early = sum(entry.in_backward for entry in logs[0].entries)
    print(f"{name:8} messages {logs[0].messages:>3}, launched during backward {early:>3}")
    assert early == (logs[0].messages if name == "DDP" else 0)

# %% [markdown]
# The same bytes, in one message: DDP packs gradients into *buckets*, by default of about 25 MB after a first one of
# 1 MB; our 0.44 MB fit into that one. What does that buy here? Both steps, and one that sends nothing, taken in turn,
# ten times:

# %%
# %%ranks
import time


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU still works when the call has returned
    return time.perf_counter() * 1e3


def step_ms(wrapped, module, sync):
    dist.barrier()
    began_ms = now_ms()
    wrapped(*batch_of(0)).backward()
    sync(module)
    return now_ms() - began_ms


def nothing(module):
    pass


# %%
# %%ranks
module = TinyGPT(config).to(device)
ddp = DistributedDataParallel(module)
kinds = [(module, average_gradients), (ddp, nothing), (module, nothing)]
times = [[step_ms(wrapped, module, sync) for wrapped, sync in kinds] for _ in range(12)][2:]

# %% tags=["nbval-ignore-output"]
by_hand, by_ddp, alone = torch.tensor(ranks.pull("times")).max(0).values.median(0).values.tolist()
print(f"by hand / DDP = {by_hand / by_ddp:.2f}")
plots.bars(
    {"compute alone": alone, "torch's DDP": by_ddp, "by hand": by_hand},
    "ms per step (slowest rank, median of 10)",
)

# %% [markdown]
# Twenty small messages cost far more than one, though the bytes are the same. Overlap is not in this figure: a single
# bucket is full only when backward ends. With several, DDP sends the first while backward still runs (chapter 04).
#
# Where exactly does the time by hand go? The *timeline* of one step knows:

# %%
# %%ranks
from shared import timeline

module = TinyGPT(config).to(device)
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
for _ in range(2):  # the second counts: the first builds the optimizer's state
    optimizer.zero_grad()
    dist.barrier()
    with timeline.record(module, optimizer) as line:
        module(*batch_of(0)).backward()
        average_gradients(module)
        optimizer.step()

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("line")
assert all(line.overlap < 0.1 for line in lines)
plots.timeline(lines)

# %% [markdown]
# *Exposed* is the time in which something is on the wire and this rank does not compute. By hand that is all of it.

# %% [markdown]
# ## Recap
#
# Messages, bytes and times are measured. What does a rank hold at the end of a step?

# %%
# %%ranks
from shared import memory

held = memory.held(module, optimizer)
print(held)

# %% [markdown]
# Every rank holds all of it: for Ψ parameters in fp32 4Ψ bytes of weights, 4Ψ of gradients, 8Ψ of Adam's two moments
# (and a counter of 4 bytes per tensor).

# %%
for held in ranks.pull("held"):
    assert held.parameters_bytes == held.gradients_bytes == 4 * parameters
    assert 0 <= held.optimizer_bytes - 8 * parameters < 200
print(f"{held.total_bytes / parameters:.1f} bytes per parameter, {len(ranks.pull('held'))} times")

# %% [markdown]
# | | memory per rank | sent per rank and step | messages | overlap |
# |---|---|---|---|---|
# | one process | 16Ψ bytes | 0 | 0 | – |
# | by hand | 16Ψ | 2(N−1)/N · 4Ψ | one per parameter | none |
# | torch's DDP | 16Ψ, + 4Ψ of buckets¹ | 2(N−1)/N · 4Ψ | one per bucket | yes |
#
# ¹ unless gradients are views into them: `gradient_as_bucket_view=True`.

# %% [markdown]
# ## What is still wasted
#
# - **Messages.** One per parameter. Each costs its latency, whatever it carries. Chapter 03 packs them into buckets.
# - **Waiting.** All communication comes after backward, while the last layers' gradients were ready long before.
#   Chapter 04 sends them early.
# - **Memory.** Four ranks hold four copies of everything. Chapters 06 to 09 share it out.
#
# Further reading: Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020
# (arXiv 2006.15704), sections 2 and 3. Then do the lab.

# %%
ranks.stop()
