# ---
# jupyter:
#   course:
#     module: manual_ddp
# ---

# %% [markdown]
# # 02 · Data parallelism by hand
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - turn gradient accumulation on one GPU into data parallelism on N ranks,
# - say when the mean of the ranks' gradients is the gradient of the full batch, and correct it when it is not,
# - divide a data set among ranks, so that each epoch uses every sample once,
# - train a model on four ranks to the same accuracy as one process,
# - find in the wire ledger how torch's `DistributedDataParallel` differs from your version.
#
# You need `%%ranks`, `all_reduce`, `broadcast` and the wire ledger (chapter 00), and the bytes that a ring all-reduce
# sends (chapter 01).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# Your model trains on one GPU, and now you get three more. You expect two things of the four: that they train the same
# model as one, and that they are almost four times as fast. Neither comes by itself. The first can go wrong in many
# ways, and you will meet five of them in this lesson. The second takes until chapter 04.
#
# Let's begin on one GPU. A batch that does not fit into its memory is cut into **micro-batches**, which run one after
# the other. Their gradients add up, and the optimizer takes one step at the end. This is called **gradient
# accumulation**. Here it is, with a small GPT of two blocks and eight samples of real text. Each loss is divided by the
# number of micro-batches, so the accumulated gradient is the mean over them.

# %% tags=["nbval-ignore-output"]
import torch

from shared import plots, ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.plots import diagrams
from shared.predictions import predicted

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size)
model = TinyGPT(config, seed=0).double()  # in float64, rounding errors are below 1e-12
inputs, targets = text.windows(range(0, 800, 100), length=64)


def accumulate(micro_batches):
    """Run the micro-batches one after the other. Returns their mean gradient, as one flat tensor."""
    model.zero_grad()
    for x, y in micro_batches:
        (model(x, y) / len(micro_batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


full = accumulate([(inputs, targets)])
four = accumulate(list(zip(inputs.chunk(4), targets.chunk(4), strict=True)))
print(f"largest difference {(four - full).abs().max():.0e}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert torch.allclose(four, full, atol=1e-12)

# %% [markdown]
# ## What is wasted
#
# Four micro-batches of two samples give the same gradient as one batch of eight, up to rounding. But each micro-batch
# waits for the previous one without needing its result: all of them use the same parameters, and gradients can be added
# up in any order. So four ranks could run them at the same time.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Replicate, slice, average
#
# That is the idea of **data parallelism**: every rank holds a full copy of the model, called a **replica**, and
# computes the gradient of its own samples. Then the ranks average their gradients. Read the diagram from top to bottom.
# Its model has a single parameter w, and all values are made up. Colors say which ranks a value comes from.

# %% slideshow={"slide_type": "-"}
diagrams.data_parallelism()

# %% [markdown]
# Step 5 needs no communication. All ranks start from the same w and subtract the same update, so their replicas stay
# equal.

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=4, detect_mismatch=False)  # mismatch detection adds collectives of its own

# %% [markdown]
# **Replicate.** Every rank builds its own model, here from a different seed. So rank 0 broadcasts its parameters once,
# before training starts. It also broadcasts its **buffers**: tensors that belong to a module but are not trained, such
# as BatchNorm's running statistics. `detach()` avoids a warning, because autograd cannot differentiate a broadcast.


# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT


def broadcast_from_rank_0(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size)
model = TinyGPT(config, seed=rank).double().to(device)
own_weight = model.token_embedding.weight[0, 0].item()
broadcast_from_rank_0(model)
print(f"first weight {own_weight:+.4f}, now {model.token_embedding.weight[0, 0]:+.4f}")

# %% [markdown]
# **Slice.** The eight samples are now the **global batch**: the samples of all ranks that contribute to one step of the
# optimizer. Each rank takes two of them, its *share*, and runs forward and backward as if it were alone.
#
# **Average.** `all_reduce` leaves the sum of all ranks' gradients on every rank, and dividing by the number of ranks
# turns it into the mean.


# %%
# %%ranks
def average_gradients(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


inputs, targets = (t.to(device) for t in text.windows(range(0, 800, 100), length=64))
share = slice(2 * rank, 2 * rank + 2)
model(inputs[share], targets[share]).backward()
average_gradients(model)
averaged = torch.cat([p.grad.flatten() for p in model.parameters()])

# %% [markdown]
# Is that the gradient that one process computed from all eight samples?

# %% tags=["nbval-ignore-output"]
averaged = ranks.pull("averaged")[0]
print(f"largest difference to one process: {(averaged - full).abs().max():.0e}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert all(torch.allclose(each, full, atol=1e-12) for each in ranks.pull("averaged"))

# %% [markdown]
# It is. If a rank's share does not fit into its memory, the rank also accumulates gradients, and the ranks average once
# at the end. In general:
#
# $$\text{global batch} = \text{micro-batch} \times \text{accumulation steps} \times N$$

# %% [markdown]
# ## What four ranks gain
#
# Four ranks cannot compute four times as fast on a few shared cores, and our model is too small to keep a GPU busy.
# So each of its two blocks becomes a **stand-in for a GPU**: in addition to its computation, it sleeps for 40 ms in
# forward and 80 ms in backward. While a process sleeps, time passes and no core is used, as if a GPU were doing the
# work. Each micro-batch now sleeps for 240 ms.
#
# **Predict.** One rank runs four micro-batches one after the other. Then each of four ranks runs one of them, and they
# average their gradients with 20 all-reduces, one for each tensor in `model.parameters()`. Assume that an all-reduce
# takes 5 ms, because four ranks share two cores and often wait for one. How many times faster are four ranks? 1 means
# no faster.

# %%
my_prediction = None

# %%
# %%ranks
from shared import measure
from shared.models import stand_in_for_gpu

sleeping = TinyGPT(config).to(device)
stand_in_for_gpu(sleeping.blocks, forward_ms=40, backward_ms=80)


def in_sequence():
    if rank == 0:  # the other ranks do nothing
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (sleeping(x, y) / 4).backward()


def on_four_ranks():
    sleeping(inputs[share], targets[share]).backward()
    average_gradients(sleeping)


times = measure.jobs({"one rank": in_sequence, "four ranks": on_four_ranks}, rounds=3)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
sequence_ms, four_ms = ranks.pull("times")[0].ms().values()
print(f"{predicted(my_prediction)}measured {sequence_ms / four_ms:.1f} times faster")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
from shared import measure

measure.expect(1 < sequence_ms / four_ms < 4, "four ranks are up to four times as fast")
averaging_ms = (four_ms - sequence_ms / 4) / 20
measure.expect(2 < averaging_ms < 15, "an all-reduce among four ranks takes several ms")

# %% [markdown] slideshow={"slide_type": "-"}
# Four ranks are faster, but not four times as fast. With 5 ms per all-reduce, the estimate is 4 · 240 / (240 + 20 · 5),
# which is 2.8. The micro-batches do run at the same time, but every all-reduce adds several milliseconds, however small
# its tensor, because four processes take turns on this machine's cores.

# %% [markdown]
# ## When the mean is not the gradient of the full batch
#
# Averaging worked for two reasons: the loss is a mean, and every rank averaged over equally many samples. What is the
# gradient of the full batch in general? Let $\ell_s$ be the loss of sample $s$. The loss $L$ of the global batch $B$ is
# the mean over its $|B|$ samples. The loss $L_r$ of rank $r$ is the mean over its share $B_r$ of $|B_r|$ samples. Then
#
# $$\nabla L = \frac{1}{|B|}\sum_{s \in B} \nabla \ell_s = \sum_r \frac{|B_r|}{|B|}\,\nabla L_r.$$
#
# The plain mean gives every rank the weight $1/N$. That is right only if all shares have the same size. Here are four
# cases in which the plain mean is wrong.


# %%
# %%ranks
def gradient_of(loss, over_ranks=False):
    model.zero_grad()
    loss.backward()
    if over_ranks:
        average_gradients(model)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_error(loss, full_loss):
    """Compare the mean of the ranks' gradients with the gradient of the full batch."""
    mean, full = gradient_of(loss, over_ranks=True), gradient_of(full_loss)
    return ((mean - full).norm() / full.norm()).item()


# %% [markdown]
# ### Ranks with different numbers of samples
#
# **Predict.** The four ranks have 5, 1, 1 and 1 samples. How large is the error of the plain mean, relative to the
# correct gradient: 0 (no error), about 0.3, or about 1 (as large as the gradient itself)?

# %%
my_error = None

# %% [markdown]
# The next cell also computes a weighted mean. Each rank multiplies its loss by $N\,|B_r|/|B|$ before backward. The
# factor N cancels the division in the mean.

# %%
# %%ranks
x, y = inputs.split([5, 1, 1, 1])[rank], targets.split([5, 1, 1, 1])[rank]
plain = relative_error(model(x, y), model(inputs, targets))
weight = world_size * len(x) / len(inputs)
weighted = relative_error(weight * model(x, y), model(inputs, targets))

# %% tags=["nbval-ignore-output"]
plain, weighted = ranks.pull("plain")[0], ranks.pull("weighted")[0]
print(f"{predicted(my_error)}measured {plain:.2f}, and {weighted:.0e} for the weighted mean")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert weighted < 1e-12 < 0.1 < plain

# %% [markdown]
# Each of the eight samples should have the weight 1/8. With the plain mean, each of the five on rank 0 has 1/4 · 1/5,
# which is 1/20, and the one on rank 1 has 1/4: it counts five times as much. But the weights still add up to 1, so
# whatever the eight gradients have in common stays right.
#
# ### Sequences with padding
#
# This is the case you are most likely to meet with language models. Documents have different lengths, so the shorter
# ones are extended to the length of the longest with **padding**: tokens that carry no content. The loss must ignore
# these tokens. In torch, you set their targets to −100, the default of `ignore_index` in `cross_entropy`, which then
# takes the mean over the other tokens.
#
# Every rank has two samples again, so is the plain mean right again? The next cell pads our eight samples as if they
# had different lengths, and prints how many tokens are left on each rank. Its `loss_per_token` is the remedy.

# %%
# %%ranks
from torch.nn.functional import cross_entropy

lengths = torch.tensor([64, 64, 48, 32, 16, 16, 8, 4], device=device)
padded = targets.masked_fill(torch.arange(64, device=device) >= lengths[:, None], -100)


def loss_per_token(x, y):
    """Return N · (the sum over this rank's tokens) / (the number of tokens on all ranks)."""
    tokens = (y != -100).sum()
    dist.all_reduce(tokens)  # one element
    return world_size * cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / tokens


plain = relative_error(model(inputs[share], padded[share]), model(inputs, padded))
corrected = relative_error(loss_per_token(inputs[share], padded[share]), model(inputs, padded))
print(f"{(padded[share] != -100).sum()} tokens, relative error of the plain mean {plain:.2f}")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert corrected < 1e-12 < 0.1 < plain

# %% [markdown]
# It is not. The loss is a mean over *tokens*, and rank 0 has over ten times as many as rank 3. In the plain mean, both
# ranks have the same weight. So a token on rank 3 counts over ten times as much, and no error warns you.
#
# > **Found in the wild.** In October 2024, a user of Hugging Face's Trainer switched gradient accumulation on, and got
# > other losses than with the same batch in one piece. The Trainer took the mean over each micro-batch, however few
# > tokens it had. That was soon repaired. Then somebody asked whether the ranks average their gradients in the same
# > wrong way. They did (transformers, pull request 34191 and issue 34242).
#
# `loss_per_token` avoids this bug: it sums the loss and divides it by the number of tokens *on all ranks*, which costs
# an all-reduce of one element. As before, a factor N cancels the division in the mean. The error is below $10^{-12}$.
#
# ### A sum, and a layer that looks at the whole batch
#
# If the loss is a *sum* over the samples, the ranks' gradients must be added up. Their mean is too small by a factor of
# N.
#
# **BatchNorm** is worse. Each rank normalizes with the statistics of its own samples, so forward computes a different
# function than it would in one process with all samples. No weighting of the gradients can correct that. With
# `SyncBatchNorm`, the ranks exchange their statistics in every forward and backward. Our GPT uses LayerNorm, which
# normalizes each token separately.

# %% [markdown]
# ## Dividing a data set
#
# Which rank reads which sample? An epoch should use every sample once, in a random order that differs from epoch to
# epoch. If each rank shuffled with a seed of its own, some samples would be used more than once, and others never.
#
# So all ranks draw *the same* order: they seed their generators with a fixed seed plus the epoch. Then rank r takes
# every N-th index of that order, starting at position r. An object that yields the indices of a rank's samples is
# called a **distributed sampler**.


# %%
# %%ranks
def sample_indices(length, epoch, seed=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    return order[rank::world_size]


print(f"epoch 0: {sample_indices(12, 0).tolist()}, epoch 1: {sample_indices(12, 1).tolist()}")

# %% [markdown]
# In each epoch, every index appears on exactly one rank, and no communication was needed.
#
# torch's version is `DistributedSampler`. If the data set cannot be divided equally, it repeats some samples, so that
# all ranks take the same number of steps. With `drop_last=True`, it leaves some out instead. If you forget `set_epoch`,
# every epoch silently uses the order of epoch 0. A script looks like this. Its `model` is a wrapper like the one that
# you will meet below: it holds your model as `.module`, and averages in `finish_gradient_sync()`.
#
# ```python
# sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
# loader = DataLoader(dataset, batch_size=32, sampler=sampler)  # 32 samples per rank
# for epoch in range(epochs):
#     sampler.set_epoch(epoch)
#     for images, labels in loader:
#         optimizer.zero_grad()
#         loss_of(model(images), labels).backward()
#         model.finish_gradient_sync()
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # after averaging, so that all ranks clip alike
#         optimizer.step()
#     if dist.get_rank() == 0:
#         torch.save(model.module.state_dict(), "model.pt")  # on one rank, and without the wrapper's prefix
# ```

# %% [markdown]
# ## Which seeds agree, and which differ
#
# The order of the samples is one of four random choices in a training run, and they do not all want the same seed.
#
# | random choice | seed | otherwise |
# |---|---|---|
# | initial parameters | the same, or broadcast from rank 0 | four different models |
# | order of the samples | the same, plus the epoch | samples are repeated and skipped |
# | augmentation of a sample | different on each rank | four ranks crop and flip in lockstep |
# | dropout masks | different on each rank | the same units are dropped in all shares of the batch |
#
# Nothing fails if you get the last two wrong. Training only becomes a little worse, which nobody notices. The usual
# recipe is `torch.manual_seed(seed)` for the model, and then `torch.manual_seed(seed + rank)` before training.

# %% [markdown]
# ## Training to the end
#
# A wrapper puts the pieces together. This one is enough for a plain model, in which every parameter gets a gradient:


# %%
# %%ranks
class ShortDDP(torch.nn.Module):
    """Trains a replica of a module on each rank. Call finish_gradient_sync() after backward()."""

    def __init__(self, module, broadcast=True):
        super().__init__()
        self.module = module
        if broadcast:
            broadcast_from_rank_0(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self):
        average_gradients(self.module)


# %% [markdown]
# Let's train a small network to recognize handwritten digits, on 1,440 images, and test it on the other 357. The loop
# is the one you know, except for `finish_gradient_sync()` between backward and the optimizer's step.
#
# The global batch has 96 samples, whatever the number of ranks, so in each step, the ranks together take the same 96
# samples as one process. If each rank kept 96 samples instead, the global batch would grow with N, and the learning
# rate would have to follow. Chapter 05 tries that.


# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = (tensor.to(device) for tensor in digits(torch.float64))
test_labels = labels[1440:]


def train(wrap, epochs=12, global_batch=96):
    """Train. Returns the loss of each step, averaged over the ranks, and the predictions for the test set."""
    model, losses = wrap(MLP(seed=rank).double().to(device)), []  # the ranks have different seeds
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for batch in sample_indices(1440, epoch).split(global_batch // world_size):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            model.finish_gradient_sync()
            optimizer.step()
            losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / world_size).tolist(), model(images[1440:]).argmax(1)


# %% [markdown]
# In `ranks.world(1)`, rank 0 is alone, and `world_size` is 1. So we train in one process, and then on four ranks:

# %%
with ranks.world(1):
    one_losses, one_digits = ranks.run(lambda: train(ShortDDP))[0]
four_losses, four_digits = ranks.run(lambda: train(ShortDDP))[0]
right = (four_digits == ranks.pull("test_labels")[0]).double().mean()
different = (four_digits != one_digits).sum()
print(f"{right:.1%} of the test images are right, {different} answers differ")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert different == 0 and right > 0.85
assert max(abs(a - b) for a, b in zip(one_losses, four_losses, strict=True)) < 1e-6

# %% [markdown]
# The four ranks trained *the same* model: it gives the same answer for every test image.
#
# ## Without the broadcast
#
# Four of the five ways to train a different model were about the batch. The fifth is about the start.
#
# **Predict.** What happens if we forget the broadcast, so that four different models average their gradients?
#
# - A: an error
# - B: the loss does not fall
# - C: the loss falls, but less than before
# - D: the loss falls as before

# %%
my_outcome = None  # "A", "B", "C" or "D"

# %% slideshow={"slide_type": "slide"}
results = ranks.run(lambda: train(lambda module: ShortDDP(module, broadcast=False)))
answers = torch.stack([answers for _, answers in results])
disagree = (answers != answers[0]).any(0).sum()
print(f"{predicted(my_outcome)}the ranks disagree on {disagree} test images")
curves = {"1 process": one_losses, "4 ranks": four_losses, "4 ranks, no broadcast": results[0][0]}
plots.loss_curves(curves, log=True)

# %% tags=["claims"] jupyter={"source_hidden": true}
last_epoch = {name: sum(losses[-15:]) / 15 for name, losses in curves.items()}
assert last_epoch["4 ranks"] < last_epoch["4 ranks, no broadcast"] < results[0][0][0]
assert disagree > 0

# %% [markdown] slideshow={"slide_type": "-"}
# The answer is C, and that is the worst kind of bug: there is no error, and the loss falls. But the mean gradient is
# not the gradient of any of the four models, so the loss falls later and ends higher. In the end, there are still four
# different models, and a script usually saves only rank 0's model.

# %% [markdown]
# ## What torch calls it
#
# torch's wrapper is `DistributedDataParallel`, or **DDP**. Its constructor also broadcasts, but DDP averages the
# gradients *during* `backward()`, so there is nothing to call afterwards. What do the two wrappers send? Here is one
# step of the small GPT, with one line of the ledger for each wrapper:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from shared import timeline, wire

wrapped = {
    "by hand": ShortDDP(sleeping),
    "torch's DDP": DistributedDataParallel(TinyGPT(config).to(device)),
}
batch = inputs[share], targets[share]
steps = {name: measure.training_step(module, *batch) for name, module in wrapped.items()}
logs = measure.recorded(steps, wire.ledger, rounds=1)
for name, of_ranks in logs.items():
    early = sum(entry.in_backward for entry in of_ranks[rank].entries)
    print(f"{name}: {of_ranks[rank].summary()} │ {early} during backward")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
from shared import formulas

parameters = sum(p.numel() for p in model.parameters())
predicted_bytes = formulas.all_reduce_sent_bytes(4 * parameters, ranks=4)
for name, of_ranks in logs.items():
    for log in of_ranks:
        log.assert_volume(payload_bytes=4 * parameters, sent_bytes=predicted_bytes)
        assert log.messages == (20 if name == "by hand" else 1)
        assert sum(e.in_backward for e in log.entries) == (0 if name == "by hand" else 1)

# %% [markdown]
# DDP sends the same elements in a single all-reduce: it packs gradients into flat tensors called buckets, and here one
# is enough. Both wrappers must send the same number of bytes, as chapter 01 predicts: to all-reduce S bytes on N ranks,
# a ring sends 2(N−1)/N · S bytes per rank.
#
# What do twenty all-reduces cost? On CPUs, the next cell emulates a link of 1 Gbit/s with a latency of 2 ms, and
# records a step of our wrapper with the blocks that sleep. The figure shows the rank that finished backward last, so
# none of its waiting is for another rank's backward. Look at what it computes while communication is in flight.

# %%
# %%ranks
link = measure.behind_link("1gbit", latency_ms=2)
step = {"step": steps["by hand"]}
lines = measure.recorded(step, lambda: timeline.record(sleeping), rounds=5)["step"]
link.close()

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
last = max(ranks.pull("lines")[0], key=lambda line: line.lane("communication")[0])
plots.timeline([last])

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
assert last.overlap < 0.1
measure.expect(240 < last.communication_ms < 350, "most of the communication is latency")

# %% [markdown] slideshow={"slide_type": "-"}
# The rank computes nothing: all communication comes after backward. Communication is called *exposed* while the rank
# has nothing to compute, and *hidden* while it computes. And the bars are about equally long, however small the tensor.
# Twenty all-reduces, six ring steps each, 2 ms per step: 240 ms of pure latency. The bytes take 5 ms, and the rest is
# Python.
#
# How else do the two wrappers differ? Ψ is the number of parameters, in fp32.
#
# | | by hand | torch's DDP |
# |---|---|---|
# | at the start | broadcasts parameters and buffers | checks that the shapes agree, then broadcasts both |
# | all-reduces | one per tensor | one per bucket: by default, the first is full at 1 MiB, the others at 25 MiB |
# | bytes sent per rank and step | 2(N−1)/N · 4Ψ | the same |
# | when | after backward | during backward, in order, as soon as a bucket is full |
# | memory with Adam | 16Ψ bytes | 16Ψ, and 4Ψ for buckets |
# | buffers | are never sent again | rank 0 broadcasts its buffers before each forward, by default |
# | accumulation | call `finish_gradient_sync()` once | run all but the last micro-batch inside `no_sync()` |

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# - The global batch is micro-batch × accumulation steps × N.
# - A rank's mean loss needs the weight $N\,|B_r|/|B|$. Count what the loss averages over: samples or tokens.
# - Each rank sends 2(N−1)/N · 4Ψ bytes per step, in one all-reduce per tensor or one per bucket.
#
# **Terms**
#
# - **micro-batch**: one of the pieces into which a batch is cut, each with its own forward and backward.
# - **gradient accumulation**: several micro-batches run one after the other and add up their gradients before the
#   optimizer takes one step.
# - **stand-in for a GPU**: a block of a model that sleeps, so that time passes as on a GPU and no core is used.
# - **data parallelism**: every rank holds the full model and computes the gradient of its own samples; the ranks
#   average these gradients.
# - **replica**: a rank's full copy of the model.
# - **buffer** (of a module): a tensor that belongs to a module but is not trained, such as BatchNorm's running
#   statistics.
# - **global batch**: the samples of all ranks that contribute to one optimizer step.
# - **padding** (of sequences): tokens without content that bring the sequences of a batch to the same length, and that
#   the loss ignores.
# - **distributed sampler**: an object that yields the indices of a rank's samples, so that the ranks together use every
#   sample at least once per epoch.
# - **DDP**: torch's `DistributedDataParallel`, which averages gradients during backward.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): the same with `torchrun` and NCCL.
# - Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel
#   Training](https://arxiv.org/abs/2006.15704), VLDB 2020, sections 2 and 3: from the naive solution, which you have
#   built, to DDP.
# - Goyal et al., [Accurate, Large Minibatch SGD](https://arxiv.org/abs/1706.02677), 2017, section 3: pitfalls of data
#   parallelism, such as the loss of each rank (remark 3) and shuffling (remark 4).
# - Hugging Face, [Fixing Gradient Accumulation](https://huggingface.co/blog/gradient_accumulation), 2024, and
#   [transformers issue 34242](https://github.com/huggingface/transformers/issues/34242): how the mean over padded
#   sequences went wrong in practice.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# - **Latency.** There is one all-reduce per parameter tensor, and each costs its latency, however small the tensor. In
#   chapter 03, you will pack gradients into buckets.
# - **Waiting.** All communication is exposed. It starts after backward, although the gradients of the last layers are
#   ready long before. In chapter 04, you will send them as soon as they are ready.
# - **Memory.** With Adam, every rank holds 16 bytes per parameter: 4 for its value, 4 for its gradient, and 8 for the
#   two moments. All four ranks hold the same values, so three of the four copies are redundant. In chapters 07 to 09,
#   you will divide one copy among the ranks.
#
# First, you make the short wrapper robust in lab 02.

# %%
ranks.stop()
