# ---
# jupyter:
#   course:
#     module: manual_ddp
# ---

# %% [markdown]
# # 02 · Data parallelism by hand
#
# **55–85 minutes.** After this lesson, you will be able to:
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
# model as one, and that they are almost four times as fast. Neither comes by itself. The first can go wrong in at least
# five ways, and you will try out all five in this lesson. The second takes until chapter 04.
#
# Let's begin on one GPU. A batch that does not fit into its memory is cut into **micro-batches**, which run one after
# the other. Their gradients add up, and the optimizer takes one step at the end. This is called **gradient
# accumulation**. The next cells do this with a small GPT of two blocks and eight samples of real text. Each loss is
# divided by the number of micro-batches, so the accumulated gradient is the mean over them.

# %%
import torch

from shared import plots, ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.predictions import predicted

torch.set_num_threads(1)  # one process on one core, as each rank later
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size)
model = TinyGPT(config, seed=0).double()  # in float64, rounding errors are below 1e-12
inputs, targets = text.windows(range(0, 800, 100), length=64)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, inputs {list(inputs.shape)}")


# %% tags=["nbval-ignore-output"]
def accumulate(micro_batches):
    """Run the micro-batches one after the other. Returns their mean gradient, as one flat tensor."""
    model.zero_grad()
    for x, y in micro_batches:
        loss = model(x, y)
        (loss / len(micro_batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


full = accumulate([(inputs, targets)])
micro_batches = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
four = accumulate(micro_batches)
print(f"largest difference {(four - full).abs().max():.0e}", end=", ")
print(f"largest gradient {full.abs().max():.2f}")
assert torch.allclose(four, full, atol=1e-12)

# %% [markdown]
# Four micro-batches of two samples give the same gradient as one batch of eight, up to rounding.

# %% [markdown]
# ## What is wasted
#
# How long does that take? Our model is too small to keep a GPU busy. So each block of the model becomes a **stand-in
# for a GPU**: in addition to its computation, it sleeps for 20 ms in forward and 40 ms in backward. While a process
# sleeps, time passes and no core is used, as if a GPU were doing the work. Look at the order of the bars (one per
# block, and slivers for the other layers): each micro-batch runs forward and then backward.

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
from shared import measure, timeline
from shared.models import stand_in_for_gpu

handles = stand_in_for_gpu(model.blocks, forward_ms=20, backward_ms=40)
jobs = {"accumulation": lambda: accumulate(micro_batches)}
records = measure.recorded(jobs, lambda: timeline.record(model), rounds=5)  # keeps the median round
for handle in handles:
    handle.remove()  # the model no longer sleeps
plots.timeline(records["accumulation"], names=["one process"], exposed=False)

# %% [markdown] slideshow={"slide_type": "-"}
# Each micro-batch waits for the previous one without needing its result: all of them use the same parameters, and
# gradients can be added up in any order. So four ranks could run them at the same time.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Replicate, slice, average
#
# That is the idea of **data parallelism**: every rank holds a full copy of the model, called a **replica**, and
# computes the gradient of its own samples. Then the ranks average their gradients. Read the diagram from top to bottom.
# Its model has a single parameter w, and all values are made up.

# %% slideshow={"slide_type": "-"}
from shared.plots import diagrams

diagrams.data_parallelism()

# %% [markdown]
# Step 5 needs no communication. All ranks start from the same w and subtract the same update, so their replicas stay
# equal. Steps 1 to 4 become three short pieces of code.

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=4, detect_mismatch=False)  # mismatch detection adds collectives of its own

# %% [markdown]
# **Replicate.** Every rank builds its own model. Here, the seed is the rank:

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
# These are four different models. So rank 0 broadcasts its parameters once, before training starts. It also broadcasts
# its **buffers**: tensors that belong to a module but are not trained, such as BatchNorm's running statistics.
# In the code, `detach()` avoids a warning, because autograd cannot differentiate a broadcast.


# %%
# %%ranks
def broadcast_from_rank_0(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


broadcast_from_rank_0(model)
print(f"first weight {model.token_embedding.weight[0, 0]:+.4f}")

# %% [markdown]
# **Slice.** The eight samples are now the **global batch**: the samples of all ranks that contribute to one step of the
# optimizer. Each rank takes two of them, its *share*, and runs forward and backward as if it were alone.

# %%
# %%ranks
inputs, targets = text.windows(range(0, 800, 100), length=64)
share = slice(2 * rank, 2 * rank + 2)
loss = model(inputs[share], targets[share])
loss.backward()
before = model.norm.weight.grad.clone()
print(f"loss {loss:.4f}")

# %% [markdown]
# **Average.** `all_reduce` leaves the sum of all ranks' gradients on every rank, and dividing by the number of ranks
# turns it into the mean:


# %%
# %%ranks
def average_gradients(module):
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


average_gradients(model)
averaged = torch.cat([p.grad.flatten() for p in model.parameters()])
after = model.norm.weight.grad.clone()
print(f"norm of the mean gradient {averaged.norm():.3f}")

# %% [markdown]
# Here are 32 elements of the gradient of the last LayerNorm's weight. In each panel, compare the four rows.

# %% slideshow={"slide_type": "slide"}
before = [gradient[:32] for gradient in ranks.pull("before")]
after = [gradient[:32] for gradient in ranks.pull("after")]
plots.gradients_before_and_after(before, after, "norm.weight")

# %% [markdown] slideshow={"slide_type": "-"}
# Afterwards, all ranks have the same gradient. Is it the gradient that one process computed from all eight samples?

# %% tags=["nbval-ignore-output"]
averaged = ranks.pull("averaged")[0]
print(f"largest difference to one process: {(averaged - full).abs().max():.0e}")
assert torch.allclose(averaged, full, atol=1e-12)

# %% [markdown]
# It is. If a rank's share does not fit into its memory, the rank also accumulates gradients, and the ranks average once
# at the end. In general:
#
# $$\text{global batch} = \text{micro-batch} \times \text{accumulation steps} \times N$$

# %% [markdown]
# ## What four ranks gain
#
# **Predict.** In the timeline above, four micro-batches ran one after the other. Now each of four ranks runs one of
# them, and then the ranks average their gradients with 20 all-reduces, one for each tensor in `model.parameters()`. How
# many times faster is that? 1 means no faster.
#
# For an estimate, assume that each of these all-reduces takes 5 ms, because four ranks share two cores and often wait
# for one. Each micro-batch now sleeps for 240 ms, twice as long as before.

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


ways = {"in sequence, on one rank": in_sequence, "at the same time, on four": on_four_ranks}
jobs = {n: measure.Job({"gradients": way}, prepare=sleeping.zero_grad) for n, way in ways.items()}
times = measure.jobs(jobs, rounds=3)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
from shared import measure

times = ranks.pull("times")[0]
sequence_ms, four_ms = times.ms().values()
faster = sequence_ms / four_ms
print(f"{predicted(my_prediction)}measured {faster:.1f} times faster")
averaging_ms = (four_ms - sequence_ms / 4) / 20
print(f"each of the 20 all-reduces adds {averaging_ms:.1f} ms")
measure.expect(1 < faster < 4, "four ranks are up to four times as fast")
measure.expect(2 < averaging_ms < 15, "an all-reduce among four ranks takes several ms")
plots.bars(times.ms(), "ms until the gradients are ready (median of 3, blocks that sleep)")

# %% [markdown] slideshow={"slide_type": "-"}
# Four ranks are faster, but not four times as fast. With 5 ms per all-reduce, the estimate is 4 · 240 / (240 + 20 · 5),
# which is 2.8. The micro-batches do run at the same time and take about a quarter of the upper bar. Most of the rest is
# averaging: every all-reduce adds several milliseconds, however small its tensor, because four processes take turns on
# this machine's cores.

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
def gradient_of(loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_gradient(loss):
    """Return the gradient of the loss, averaged over the ranks."""
    total = gradient_of(loss)
    dist.all_reduce(total)
    return total / world_size


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# %% [markdown]
# ### Ranks with different numbers of samples
#
# **Predict.** The four ranks have 5, 1, 1 and 1 samples. How large is the error of the plain mean, relative to the
# correct gradient: 0 (no error), about 0.3, or about 1 (as large as the gradient itself)?

# %%
my_error = None

# %% [markdown]
# The next cell also computes a weighted mean. Each rank multiplies its loss by $N\,|B_r|/|B|$ before backward, so the
# mean over the ranks is the loss of the full batch:
#
# $$\frac{1}{N}\sum_r N\,\frac{|B_r|}{|B|}\,L_r = \sum_r \frac{|B_r|}{|B|}\,L_r$$

# %%
# %%ranks
x, y = inputs.split([5, 1, 1, 1])[rank], targets.split([5, 1, 1, 1])[rank]
full = gradient_of(model(inputs, targets))
plain = relative_error(mean_gradient(model(x, y)), full)
weighted = relative_error(mean_gradient(world_size * len(x) / len(inputs) * model(x, y)), full)
assert weighted < 1e-12 < 0.1 < plain

# %% tags=["nbval-ignore-output"]
print(f"{predicted(my_error)}measured {ranks.pull('plain')[0]:.2f} for the plain mean")
print(f"measured {ranks.pull('weighted')[0]:.0e} for the weighted mean")

# %% [markdown]
# Each of the eight samples should have the weight 1/8. With the plain mean, each of the five on rank 0 has 1/4 · 1/5,
# which is 1/20, and the one on rank 1 has 1/4: it counts five times as much.
#
# ### A loss that is a sum
#
# If the loss is a sum over the samples, the gradients of the ranks must be added up. Their mean is too small by a
# factor of N:

# %%
# %%ranks
from torch.nn.functional import cross_entropy


def summed_loss(x, y):
    return cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


full = gradient_of(summed_loss(inputs, targets))
mean = mean_gradient(summed_loss(inputs[share], targets[share]))
print(f"The gradient of the full batch is {full.norm() / mean.norm():.1f} times the mean.")
assert relative_error(4 * mean, full) < 1e-12

# %% [markdown]
# ### Sequences with padding
#
# This is the case you are most likely to meet with language models. Documents have different lengths, so the shorter
# ones are extended to the length of the longest with **padding**: tokens that carry no content. The loss must ignore
# these tokens. In torch, you set their targets to −100, the default of `ignore_index` in `cross_entropy`, which then
# takes the mean over the other tokens.
#
# Every rank still has two samples, and the loss is still a mean. But it is a mean over *tokens*, and now the ranks have
# different numbers of them. The next cell pads our eight samples as if they had different lengths.

# %%
# %%ranks
lengths = torch.tensor([64, 64, 48, 32, 16, 16, 8, 4], device=device)
padded = targets.masked_fill(torch.arange(64, device=device) >= lengths[:, None], -100)


def loss_per_token(x, y):
    """Return N · (the sum over this rank's tokens) / (the number of tokens on all ranks)."""
    tokens = (y != -100).sum()
    dist.all_reduce(tokens)  # one element
    return world_size * summed_loss(x, y) / tokens


full = gradient_of(model(inputs, padded))
plain = relative_error(mean_gradient(model(inputs[share], padded[share])), full)
corrected = relative_error(mean_gradient(loss_per_token(inputs[share], padded[share])), full)
print(f"{(padded[share] != -100).sum()} tokens on this rank")
assert corrected < 1e-12 < 0.1 < plain

# %% tags=["nbval-ignore-output"]
print(f"relative error: plain mean {ranks.pull('plain')[0]:.2f}, ", end="")
print(f"loss per token {ranks.pull('corrected')[0]:.0e}")

# %% [markdown]
# In the plain mean, every rank has the same weight. So a token on a rank with short documents counts more than a token
# on a rank with long ones, and no error warns you.
#
# **Found in the wild.** In October 2024, a user of Hugging Face's Trainer switched gradient accumulation on, and got
# other losses than with the same batch in one piece. The Trainer took the mean over each micro-batch, however few
# tokens it had. That was soon repaired. Then somebody asked whether the ranks average their gradients in the same
# wrong way. They did (transformers, pull request 34191 and issue 34242).
#
# The remedy is to sum the loss and divide it by the number of tokens *on all ranks*, which costs an all-reduce of one
# element. As before, the factor N cancels the division in the mean.
#
# ### A layer that looks at the whole batch
#
# BatchNorm subtracts the batch's mean and divides by the batch's standard deviation. Here, each of the four ranks has 8
# of 32 samples:


# %%
# %%ranks
torch.manual_seed(0)  # the same weights and samples on all ranks
weight = torch.randn(16, 16, dtype=torch.float64, device=device, requires_grad=True)
samples = torch.randn(32, 16, dtype=torch.float64, device=device)
norm = torch.nn.BatchNorm1d(16, dtype=torch.float64, device=device)


def batch_norm_gradient(x):
    loss = norm(x @ weight).pow(3).mean()  # any loss will do
    return torch.autograd.grad(loss, weight)[0].contiguous()  # all_reduce needs contiguous tensors


full, mean = batch_norm_gradient(samples), batch_norm_gradient(samples.chunk(4)[rank])
dist.all_reduce(mean)
mean /= world_size
print(f"relative error of the mean: {relative_error(mean, full):.1f}")
assert relative_error(mean, full) > 0.1

# %% [markdown]
# Each rank normalizes with the statistics of its own samples, so forward computes a different function than it would in
# one process with all samples. No weighting of the gradients can correct that. With `SyncBatchNorm`, the ranks exchange
# their statistics in every forward and backward. Our GPT uses LayerNorm, which normalizes each token separately.

# %% [markdown]
# ## Dividing a data set
#
# So far, we have sliced one batch. An epoch should use every sample once, in a random order that differs from epoch to
# epoch. If each rank shuffled with a seed of its own, some samples would be used more than once, and others never.
#
# Instead, all ranks draw *the same* order: they seed their generators with the same number, a fixed seed plus the
# epoch. Then rank r takes every N-th index of that order, starting at position r. An object that yields the indices of
# a rank's samples is called a **distributed sampler**.


# %%
# %%ranks
def sample_indices(length, epoch, seed=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    return order[rank::world_size]


print(f"epoch 0: {sample_indices(12, epoch=0).tolist()}", end=", ")
print(f"epoch 1: {sample_indices(12, epoch=1).tolist()}")

# %% [markdown]
# In each epoch, every index appears on exactly one rank. A shared seed is enough, without any communication.
#
# In torch, this is `torch.utils.data.DistributedSampler`. If the data set cannot be divided equally, it repeats some
# samples, so that all ranks take the same number of steps. With `drop_last=True`, as below, it leaves some out instead.
# The sampler cannot know when a new epoch begins, so call `sampler.set_epoch(epoch)` before each one. If you forget the
# call, every epoch silently uses the order of epoch 0.
#
# In a script, the sampler goes into the data loader, and the loop around it looks like this:
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
#         torch.save(model.module.state_dict(), "model.pt")  # once, and without the wrapper's prefix
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
# | dropout masks | different on each rank | the same units are dropped in all shards of the batch |
#
# Nothing fails if you get the last two wrong. Training only becomes a little worse, which nobody notices. The usual
# recipe is one seed for the model, `torch.manual_seed(seed)`, and then `torch.manual_seed(seed + rank)` before
# training.

# %% [markdown]
# ## The short version
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
# ## Training to the end
#
# Let's train a small network to recognize handwritten digits, using 1,440 images, and test it on the other 357.

# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = (tensor.to(device) for tensor in digits(torch.float64))
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train_set, test_set = order[:1440], order[1440:]
test_labels = labels[test_set]


# %% [markdown]
# The loop is the one you know, except for `finish_gradient_sync()` between backward and the optimizer's step. The
# global batch has 96 samples, whatever the number of ranks. On four ranks, each rank takes every fourth index of the
# order. So in each step, the ranks together take the same 96 samples as one process. If each rank kept 96 samples
# instead, the global batch would grow with N, and the learning rate would have to follow. Chapter 05 tries that.


# %%
# %%ranks
def train(wrap, epochs=12, global_batch=96):
    """Train. Returns the loss of each step, averaged over the ranks, and the predictions for the test set."""
    model = wrap(MLP(seed=rank).double().to(device))  # the ranks have different seeds
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(epochs):
        indices = train_set[sample_indices(len(train_set), epoch)]
        for batch in indices.split(global_batch // world_size):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            if hasattr(model, "finish_gradient_sync"):  # torch's DDP, below, has no such method
                model.finish_gradient_sync()
            optimizer.step()
            losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return (losses / world_size).tolist(), model(images[test_set]).argmax(1)


# %% [markdown]
# We start with one process. `ranks.world(1)` forms a process group of rank 0 alone, in which `world_size` is 1.
# `ranks.run` calls a function on the group's ranks. The function can use their variables, such as `train`.

# %%
with ranks.world(1):
    one_losses, one_predicted = ranks.run(lambda: train(ShortDDP))[0]
test_labels = ranks.pull("test_labels")[0]
accuracy = (one_predicted == test_labels).double().mean()
print(f"one process: {accuracy:.1%} of {len(test_labels)} test images are right")
assert accuracy > 0.9

# %% [markdown]
# **Predict.** Next, we train on four ranks. On how many of the 357 test images will the two models disagree? 0 means
# that both predict the same digit for every image.

# %%
my_different_images = None

# %%
# %%ranks
losses, predicted = train(ShortDDP)
print(f"{(predicted == test_labels).double().mean():.1%} of the test images are right")

# %%
four_losses, four_predicted = ranks.pull("losses")[0], ranks.pull("predicted")[0]
different = (four_predicted != one_predicted).sum().item()
print(f"{predicted(my_different_images)}measured {different}")
assert different == 0
assert max(abs(a - b) for a, b in zip(one_losses, four_losses, strict=True)) < 1e-6
plots.loss_curves({"1 process": one_losses, "4 ranks": four_losses})

# %% [markdown]
# The four ranks trained *the same* model: it predicts the same digits, and the two curves coincide up to rounding.

# %% [markdown]
# ## Without the broadcast
#
# Four of the five ways to train a different model were about the mean. The fifth is about the start.
#
# **Predict.** What happens if we forget the broadcast, so that four different models average their gradients?
#
# - A: an error
# - B: the loss does not fall
# - C: the loss falls, but less than before
# - D: the loss falls as before

# %%
my_outcome = None  # "A", "B", "C" or "D"

# %%
# %%ranks
unequal_losses, unequal_predicted = train(lambda module: ShortDDP(module, broadcast=False))
print(f"{(unequal_predicted == test_labels).double().mean():.1%} of the test images are right")

# %% slideshow={"slide_type": "slide"}
unequal_losses = ranks.pull("unequal_losses")[0]
answers = torch.stack(ranks.pull("unequal_predicted"))
disagree = (answers != answers[0]).any(0).sum().item()
last_epoch, last_epoch_unequal = sum(four_losses[-15:]) / 15, sum(unequal_losses[-15:]) / 15
print(f"{predicted(my_outcome)}the loss of the last epoch is {last_epoch_unequal:.2f}", end=" ")
print(f"instead of {last_epoch:.2f}, and the ranks disagree on {disagree} test images")
assert last_epoch < last_epoch_unequal < unequal_losses[0] and disagree > 0
plots.loss_curves({"4 ranks": four_losses, "4 ranks, no broadcast": unequal_losses})

# %% [markdown] slideshow={"slide_type": "-"}
# The answer is C, and that is the worst kind of bug: there is no error, and the loss falls. But the mean gradient is
# not the gradient of any of the four models, so the loss falls later and ends higher. In the end, there are still four
# different models, and a script usually saves only rank 0's model.

# %% [markdown]
# ## What torch calls it
#
# torch's wrapper is `DistributedDataParallel`, or **DDP**. Its constructor also broadcasts, but DDP averages the
# gradients *during* `backward()`, so there is nothing to call afterwards. Does it train the same model?

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

ddp_losses, ddp_predicted = train(DistributedDataParallel)
print(f"{(ddp_predicted != predicted).sum()} test images with a different answer")
assert (ddp_predicted == predicted).all()

# %% [markdown]
# It does. What do the wrappers send? The next cells record the ledger of one training step of the small GPT with each
# wrapper, ours first:

# %%
# %%ranks
from shared import wire

by_hand = ShortDDP(TinyGPT(config).to(device))
ddp = DistributedDataParallel(TinyGPT(config).to(device))
steps = {
    "by hand": measure.training_step(by_hand, inputs[share], targets[share]),
    "torch's DDP": measure.training_step(ddp, inputs[share], targets[share]),
}
logs = measure.recorded(steps, wire.ledger, rounds=3)

# %%
logs = ranks.pull("logs")[0]  # for each wrapper, the ledgers of all ranks
logs["by hand"][0].table(times=False)

# %% [markdown]
# Here is the ledger of torch's DDP. DDP launches its all-reduce inside `backward()`, in C++, so the last column can
# only show the line of the cell that led there.

# %%
logs["torch's DDP"][0].table(times=False)

# %% [markdown]
# DDP sends the same elements in a single all-reduce: it packs gradients into flat tensors called buckets, and here one
# is enough. Look at `must send` in the last row: both wrappers send the same number of bytes. Chapter 01 predicts that
# number: to all-reduce S bytes on N ranks, a ring sends 2(N−1)/N · S bytes per rank. The next cell checks this, and
# counts the all-reduces that each wrapper launched during backward.

# %%
from shared import formulas

parameters = sum(p.numel() for p in model.parameters())
predicted_bytes = formulas.all_reduce_sent_bytes(4 * parameters, ranks=4)
for log in [*logs["by hand"], *logs["torch's DDP"]]:
    log.assert_volume(payload_bytes=4 * parameters, sent_bytes=predicted_bytes)
for name, of_ranks in logs.items():
    early = sum(entry.in_backward for entry in of_ranks[0].entries)
    print(f"{name:11} │ all-reduces {of_ranks[0].messages:>2}, launched during backward {early:>2}")
    assert early == (of_ranks[0].messages if name == "torch's DDP" else 0)

# %% [markdown]
# Are twenty small all-reduces slower than one large one? The next cell times a step with each wrapper, and a step of
# DDP without communication (`sync=False`). On CPUs, it emulates a link as in chapter 01, but with a latency of 2 ms.

# %%
# %%ranks
link = measure.behind_link("1gbit", latency_ms=2)
alone = measure.training_step(ddp, inputs[share], targets[share], sync=False)
step_times = measure.jobs({"without communication": alone, **steps}, rounds=10)

# %% tags=["nbval-ignore-output"]
step_times = ranks.pull("step_times")[0]
ratio = step_times["by hand"].time_ms / step_times["torch's DDP"].time_ms
print(f"a step by hand takes {ratio:.1f} times as long as a step of DDP")
latency_ms, bytes_ms = 20 * 6 * 2, 1e3 * 8e-9 * predicted_bytes
alone_ms = step_times["without communication"].time_ms
gloo_ms = step_times["by hand"].time_ms - latency_ms - bytes_ms - alone_ms
print(f"by hand: {latency_ms} ms of latency, {bytes_ms:.0f} ms for the bytes,", end=" ")
print(f"{alone_ms:.0f} ms of computation, {gloo_ms:.0f} ms of gloo's own work")
measure.expect(ratio > 1, "a step by hand takes longer")
measure.expect(bytes_ms + alone_ms < 20, "bytes and computation take only a few milliseconds")
plots.bars(step_times.ms(), "ms per step (median of 10)")

# %% [markdown]
# The step by hand is slower, although both send the same bytes. Twenty all-reduces, six ring steps each, 2 ms per step:
# 240 ms of pure latency. The bytes and the computation take only a few milliseconds each, and what is left is gloo's
# own work. The factor belongs to this slow link and this tiny model. Without an emulated link, and with a model a
# hundred times as large, it is below 2, as START_HERE shows.
#
# At which point in a training step is all that time spent? The next cell records a step of the model that sleeps, with
# our wrapper and an optimizer. The figure shows the rank that finished backward last, so none of its waiting is for
# another rank's backward. Look at what it computes while communication is in flight.

# %%
# %%ranks
from shared import timeline

by_hand = ShortDDP(sleeping)
optimizer = torch.optim.AdamW(by_hand.parameters(), lr=3e-3)


def step():
    by_hand(inputs[share], targets[share]).backward()
    by_hand.finish_gradient_sync()
    optimizer.step()


one_step = {"step": measure.Job({"step": step}, prepare=by_hand.zero_grad)}
lines = measure.recorded(one_step, lambda: timeline.record(sleeping, optimizer), rounds=5)["step"]
link.close()

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
lines = ranks.pull("lines")[0]
last = max(lines, key=lambda line: line.lane("communication")[0])
assert last.overlap < 0.1
plots.timeline([last])

# %% [markdown] slideshow={"slide_type": "-"}
# The rank computes nothing: all communication comes after backward and before the optimizer's step. Communication is
# called *exposed* while the rank has nothing to compute, and *hidden* while it computes.
#
# DDP differs from our short version as follows:
#
# | | by hand | torch's DDP |
# |---|---|---|
# | at the start | broadcasts parameters and buffers | checks that the shapes agree, then broadcasts both |
# | all-reduces | one per tensor | one per bucket: by default, the first is full at 1 MiB, the others at 25 MiB |
# | when | after backward | during backward, in order, as soon as a bucket is full |
# | buffers | are never sent again | rank 0 broadcasts its buffers before each forward, by default |
# | accumulation | call `finish_gradient_sync()` once | run all but the last micro-batch inside `no_sync()` |

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# There are Ψ parameters in fp32, and N ranks. Each parameter takes 16 bytes: 4 for itself, 4 for its gradient, and 8
# for the two moments of Adam.
#
# | | memory per rank | bytes sent per rank and step | all-reduces | when |
# |---|---|---|---|---|
# | one process | 16Ψ bytes | 0 | 0 | – |
# | by hand | 16Ψ | 2(N−1)/N · 4Ψ | one per parameter tensor | after backward |
# | torch's DDP | 16Ψ, and 4Ψ for buckets¹ | 2(N−1)/N · 4Ψ | one per bucket | during backward |
#
# ¹ With `gradient_as_bucket_view=True`, gradients live inside the buckets, and these 4Ψ are saved.
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
#   parallelism. Remark 3 is about the loss of each rank, as in our weighted mean, and remark 4 about shuffling.
# - Hugging Face, [Fixing Gradient Accumulation](https://huggingface.co/blog/gradient_accumulation), 2024, and
#   [transformers issue 34242](https://github.com/huggingface/transformers/issues/34242): how the mean over padded
#   sequences went wrong in practice.
# - [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
#   in the PyTorch documentation: its notes and warnings, such as the one about summed losses.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# - **Latency.** There is one all-reduce per parameter tensor, and each costs its latency, however small the tensor. In
#   chapter 03, you will pack gradients into buckets.
# - **Waiting.** All communication is exposed. It starts after backward, although the gradients of the last layers are
#   ready long before. In chapter 04, you will send them as soon as they are ready.
# - **Memory.** The recap claims 16 bytes per parameter on *every* rank. Let's count them.

# %%
# %%ranks
from shared import memory

held = memory.held(sleeping, optimizer)
parameters = sum(p.numel() for p in sleeping.parameters())
assert held.parameters_bytes == held.gradients_bytes == 4 * parameters
assert 0 <= held.optimizer_bytes - 8 * parameters < 200  # Adam also counts its steps
print(f"{held.total_bytes / parameters:.1f} bytes per parameter")

# %% [markdown]
# All four ranks hold the same values, so three of the four copies are redundant. In chapters 07 to 09, you will divide
# one copy among the ranks.
#
# Now do lab 02, in which you make the short version robust.

# %%
ranks.stop()
