# ---
# jupyter:
#   course:
#     module: manual_ddp
#     minutes: 55
# ---

# %% [markdown]
# # Lab 02 · Data parallelism by hand
#
# **55 minutes, 10 points.** The stretch exercise adds 15 minutes and 2 points. In this lab, you build `ManualDDP`, a
# wrapper that trains a module on N ranks as one process would train it on the full batch. The lesson's `ShortDDP` did
# that for a plain model. Yours will also accept frozen parameters (`requires_grad=False`), parameters that get no
# gradient on some ranks, keyword arguments, and any group of ranks. The checks also try tied parameters (one tensor
# that several layers use), buffers, gradient accumulation and bf16. At the end, you average over ranks that have
# different numbers of samples.
#
# Each exercise has a check, which draws new weights and samples every time, and gives each rank only its own samples.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import manual_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism by hand: replicate the module, give each rank its own samples, and average the gradients."""

import math
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from shared import guards

# %% [markdown]
# ## Exercise 2.1 · A mean over ranks (5 min, 1 point)
#
# In the lesson, the mean was always over all ranks. In later chapters, only some of the ranks will average gradients.
# So your functions take a process group, a set of ranks that communicate with each other. For example,
# `dist.new_group([1, 2])` creates the group of ranks 1 and 2.
#
# - Replace each element of `tensor`, in place, with its mean over the ranks of `group`. `group=None` means all ranks.
# - Only the ranks of the group call your function. Pass the group to the collective: `group=group`.
# - Target: one `all_reduce`.
#
# For each index `i`, the result must be:
# ```python
# mean[i] = sum(tensor_of[r][i] for r in ranks_of_the_group) / number_of_ranks_in_the_group
# ```
#
# <details><summary>Hint</summary><code>all_reduce</code> leaves the sum on every rank of the group. What must you
# divide it by? <code>dist.get_world_size</code> also takes a group. And which operator divides a tensor in
# place?</details>


# %% tags=["exercise", "export"] grade_id="mean-over-ranks"
# %%ranks
def mean_over_ranks_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace a tensor, in place, with its mean over the ranks of the group.

    Communication: one all-reduce. As a ring, it sends 2(N−1)/N of the tensor's bytes per rank.
    """
    ### BEGIN SOLUTION
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-mean-over-ranks" points=1
check.mean_over_ranks_()

# %% [markdown]
# ## Exercise 2.2 · A common start (10 min, 1 point)
#
# Give every rank of `group` the parameters and buffers of the group's *first* rank, so that all replicas are equal:
#
# - Include frozen parameters. They are not trained, but forward uses them as well.
# - Include buffers that `state_dict()` leaves out (those registered with `persistent=False`).
# - Write into the tensors that the module already has, because an optimizer or a view may refer to them.
# - Target: one broadcast per tensor. A tied parameter counts as one tensor.
# - In the group `[1, 2]`, rank 1 is the first rank. `dist.broadcast` takes the source either as `src`, its index among
#   all ranks, or as `group_src`, its index within the group.
#
# <details><summary>Hint</summary>Which two methods of a module yield its parameters and its buffers, each only once?
# Which index does the first rank have within its group? If a later backward warns about <code>c10d::broadcast_</code>,
# look at how the lesson avoids that warning.</details>
#
# > **Found in the wild.** A collective sends memory, not values. For a parameter that is not contiguous, such as a
# > column of a larger tensor, gloo broadcasts the wrong elements without an error (pytorch/pytorch#192920). Our
# > solution therefore broadcasts a contiguous copy of such a tensor, with `guards.contiguous`. The check does not ask
# > for it.


# %% tags=["exercise", "export"] grade_id="broadcast-state"
# %%ranks
def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy parameters and buffers from the first rank of the group to all its ranks.

    Communication: one broadcast per parameter and buffer.
    """
    ### BEGIN SOLUTION
    for tensor in chain(module.parameters(), module.buffers()):
        with guards.contiguous(tensor.detach()) as packed:
            dist.broadcast(packed, group=group, group_src=0)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-broadcast-state" points=1
check.broadcast_state()

# %% [markdown]
# ## Exercise 2.3 · Break it, then fix it (15 min, 4 points)
#
# It seems harmless to skip parameters that have no gradient. But in some models, different inputs use different
# parameters. The model below has two *experts*, and sends each sample through one of them:


# %%
# %%ranks
def average_existing_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class TwoExperts(nn.Module):
    """Send samples with a positive first feature to expert 0, and all others to expert 1."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x):
        return sum(self.experts[int(row[0] <= 0)](row).sum() for row in x)


# %% [markdown]
# In the next cell, only rank 1 has samples for expert 1, and it has none for expert 0. **Predict.** How many times
# would each rank call `all_reduce`, and what happens? Then run the cell and read the report.

# %% tags=["raises-exception", "nbval-ignore-output"]
# %%ranks
model = TwoExperts().to(device)
x = torch.full((3, 4), -1.0 if rank == 1 else 1.0, device=device)
model(x).backward()
average_existing_gradients(model)

# %% [markdown]
# Each rank would call `all_reduce` twice, for the weight and the bias of one expert. But the sizes already differ in
# the first call. The error comes from the course's mismatch detection (chapter 00). Without it, gloo may crash a
# process while the other ranks raise an error. If the sizes happen to be equal, gloo adds up the gradients of different
# parameters.
#
# All ranks must make the same calls, whatever their samples are. Write a function that guarantees this:
#
# - Replace the `grad` of each *trainable* parameter of `module` with its mean over the ranks of `group`. Send nothing
#   for a frozen parameter, even if it still has a `grad` from before it was frozen.
# - A `grad` that is None counts as zeros. Afterwards, it holds the mean, as on the other ranks. You still divide by the
#   size of the whole group.
# - Target: one `all_reduce` per trainable parameter. A tied parameter counts as one parameter.
# - Optional: our solution sends −0.0 for None, so that the ranks can tell when *none* of them had a gradient.
#   `shared/guards/unused.py` explains this trick. The check accepts any zeros.
#
# <details><summary>Hint 1</summary>Which property of a parameter is the same on all ranks, whatever their samples are:
# whether it has a gradient, or whether it is trainable?</details>
#
# <details><summary>Hint 2</summary>A rank whose gradient is None must take part in the all-reduce, and needs the mean
# afterwards. What can you store in <code>parameter.grad</code> before the call?</details>


# %% tags=["exercise", "export"] grade_id="average-gradients"
# %%ranks
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average the gradients of all trainable parameters over the group.

    A gradient that is None on this rank counts as zeros, so that all ranks call the same collectives.

    Communication: one all-reduce per trainable parameter.
    """
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, guards.UNUSED)  # [Note: negative zeros]
        mean_over_ranks_(parameter.grad, group)
    ### END SOLUTION


# %% [markdown]
# Try it on the model that failed. Before averaging, each element of an expert's bias gradient is the number of samples
# that the expert got on this rank. Ranks 0, 2 and 3 have three samples each for expert 0, and rank 1 has three for
# expert 1. So all ranks should print 2.25 and 0.75, the means of 3, 0, 3, 3 and of 0, 3, 0, 0.

# %%
# %%ranks
model = TwoExperts().to(device)
x = torch.full((3, 4), -1.0 if rank == 1 else 1.0, device=device)
model(x).backward()
average_gradients(model)
print([expert.bias.grad[0].item() for expert in model.experts])

# %% [markdown]
# In the check, look at the line `plain model` first. The other lines try tied, frozen and unused parameters and groups
# of ranks, and count the all-reduces:

# %% tags=["check"] grade_id="check-average-gradients" points=4
check.average_gradients()

# %% [markdown]
# ## Exercise 2.4 · The wrapper (10 min, 2 points)
#
# Now put the functions together. `ManualDDP(module, group=None)` is used like this:
# ```python
# model = ManualDDP(module)
# for micro_batch in micro_batches:          # accumulation: no communication in this loop
#     (model(micro_batch) / len(micro_batches)).backward()
# model.finish_gradient_sync()               # averages the accumulated gradients once
# optimizer.step()
# ```
#
# - The constructor gives all ranks of the group the same initial state.
# - The module itself, not a copy, is available as `.module`.
# - `forward` passes all inputs on to the module, keyword arguments included, and returns its output.
# - `finish_gradient_sync()` averages the gradients. Nothing is sent during forward or backward.
# - Wrapping changes nothing else: `requires_grad`, the train or eval mode and torch's random state stay as they were,
#   and `parameters()`, `state_dict()` and `eval()` work as on the module.
#
# `@guards.guarded(…)` is given. It raises an error on every rank if a parameter is frozen, replaced or added after
# wrapping, even if that happens on one rank only. Otherwise, the ranks would train different models, or wait forever.
# It also notices if you clip gradients, or call the optimizer's `step()`, before `finish_gradient_sync()`.
#
# <details><summary>Hint</summary>Two of the three methods call a function that you have written. Which attributes
# must <code>__init__</code> store for the other methods? And what must an <code>nn.Module</code> call before it can
# store a module?</details>


# %% tags=["exercise", "export"] grade_id="manual-ddp"
# %%ranks
@guards.guarded(guards.PerParameter)
class ManualDDP(nn.Module):
    """Trains a replica of a module on each rank of the group, as one process would train it on the full batch.

    Call finish_gradient_sync() right after backward(), before you clip gradients and before the step. The wrapped
    module is available as `.module`. The gradients equal those of one process if the loss is a mean over samples, every
    rank has equally many samples, and the module processes each sample independently of the others. If no rank has used
    a parameter, its gradient is zeros, or None if you send −0.0 for None (exercise 2.3).

    Communication: one broadcast per parameter and buffer when built, and one all-reduce per trainable parameter in each
        step.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        super().__init__()
        self.module = module
        self.group = group
        broadcast_state(module, group)
        ### END SOLUTION

    def forward(self, *inputs, **kwargs):
        ### BEGIN SOLUTION
        return self.module(*inputs, **kwargs)
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Average the gradients that backward() has accumulated since zero_grad()."""
        ### BEGIN SOLUTION
        average_gradients(self.module, self.group)
        ### END SOLUTION


# %% [markdown]
# Try it on a single layer. The ranks have different seeds, but all should print the same weight, because the
# constructor broadcasts it. All elements of the two samples on rank r are r, and the loss is a sum, so the gradient
# there is 2r. After averaging, all ranks should print 3.0, the mean of 0, 2, 4 and 6.

# %%
# %%ranks
torch.manual_seed(rank)
model = ManualDDP(nn.Linear(4, 1).to(device))
model(torch.full((2, 4), float(rank), device=device)).sum().backward()
model.finish_gradient_sync()
weight = model.module.weight
print(f"weight {weight[0, 0].item():+.4f}, gradient {weight.grad[0, 0].item()}")

# %% [markdown]
# In the check, look at the lines `same start` and `plain model` first. The other lines train models with tied, frozen
# or unused parameters, with buffers or with dropout, and try accumulation, groups and bf16:

# %% tags=["check"] grade_id="check-manual-ddp" points=2
check.ManualDDP()

# %% [markdown]
# ## Exercise 2.5 · Unequal shares (10 min, 2 points)
#
# In the lesson, ranks with different numbers of samples scaled their losses before backward. Here, they scale their
# gradients after it. `samples` is the number of samples in this rank's batch, and this rank's gradients are those of
# the mean loss over these samples. Replace each gradient with the gradient of the mean loss over the samples of *all*
# ranks of the group:
# ```python
# gradient = sum(samples_of[r] * gradient_of[r] for r in ranks) / sum(samples_of[r] for r in ranks)
# ```
#
# - The number of samples may differ between ranks. It may be 0 on some of them, which then have no gradients.
# - Treat frozen parameters and gradients that are None as in exercise 2.3.
# - Target: one `all_reduce` per trainable parameter, and one more of a single element.
# - Compute the factor for this rank's gradients as a Python float. Convert the total to a Python number with `.item()`,
#   and divide afterwards. (An int divided by an *integer* tensor gives a float32 tensor, which is too imprecise for the
#   check.)
# - Add the numbers of samples in a tensor on the parameters' device, in a dtype that is exact enough, whatever dtype
#   the parameters have: bf16 rounds 257 to 256.
#
# <details><summary>Hint</summary>No rank knows the denominator by itself. Which collective gives it to all ranks? By
# what must each rank multiply its gradient so that the sum over the ranks is already the result?</details>


# %% tags=["exercise", "export"] grade_id="weighted"
# %%ranks
def average_gradients_weighted(
    module: nn.Module, samples: int, group: dist.ProcessGroup | None = None
) -> None:
    """Average gradients over ranks with different numbers of samples, weighting each rank by its number.

    Args:
        module: The module whose gradients to average.
        samples: The number of samples in this rank's batch.
        group: The ranks to average over. By default, all ranks.

    Communication: one all-reduce of one element, then one per trainable parameter.
    """
    ### BEGIN SOLUTION
    device = next(module.parameters()).device
    total_samples = torch.tensor([samples], dtype=torch.float64, device=device)
    dist.all_reduce(total_samples, group=group)
    weight = samples / total_samples.item()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= weight
        dist.all_reduce(parameter.grad, group=group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-weighted" points=2
check.average_gradients_weighted()

# %% [markdown]
# ## Exercise 2.6 · Stretch: sharding the data set (15 min, 2 points)
#
# Iterating over a `ShardedSampler(length, rank, world_size, shuffle=True, seed=0)` yields the indices of this rank's
# samples for one epoch. `length` is the number of samples in the data set.
#
# - Together, the ranks yield all indices from 0 to `length − 1`.
# - Every rank yields ⌈length / world_size⌉ indices, and `len()` returns that number. If world_size does not divide the
#   length, some indices are repeated. If none were, a rank with fewer samples could keep the others waiting in the
#   last step.
# - Without `shuffle`, rank r yields r, r + world_size, r + 2·world_size, … After index `length − 1`, counting continues
#   at 0, several times if necessary: with a single sample, all four ranks yield `[0]`.
# - With `shuffle`, do the same with a random order instead of 0, 1, 2, … The order depends only on `length`, `seed`
#   and the epoch, so it is the same on all ranks and for every `world_size`.
# - The epoch is 0 until `set_epoch(epoch)` is called. Iterating twice without this call yields the same indices.
#   Two iterators over the same sampler do not disturb each other.
# - Do not change the global random state of torch or of Python's `random`.
# - The indices are plain ints, and the ranks do not communicate.
# - Write it without torch's `DistributedSampler`, which the check does not accept.
#
# <details><summary>Hint 1</summary>Begin without <code>shuffle</code>. Which indices would rank r yield if the data set
# had <code>len(self) * world_size</code> samples? Which operator turns <code>length</code> into 0, and <code>length +
# 1</code> into 1?</details>
#
# <details><summary>Hint 2</summary>With <code>shuffle</code>, those indices are positions in the random order. The
# lesson's <code>sample_indices</code> draws that order from a generator of its own. When must you draw it so that
# <code>set_epoch</code> has an effect?</details>


# %% tags=["exercise", "export"] grade_id="sharded-sampler"
# %%ranks
class ShardedSampler:
    """Yields the sample indices of this rank: all ranks draw the same order, and each takes every world_size-th index.

    Every rank yields equally many indices. If world_size does not divide the length, the first ones are repeated.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, shuffle: bool = True, seed: int = 0
    ):
        ### BEGIN SOLUTION
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        ### END SOLUTION

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the shuffled order depends. Without this call, every epoch has the same order."""
        ### BEGIN SOLUTION
        self.epoch = epoch
        ### END SOLUTION

    def __len__(self) -> int:
        ### BEGIN SOLUTION
        return math.ceil(self.length / self.world_size)
        ### END SOLUTION

    def __iter__(self):
        ### BEGIN SOLUTION
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator)
        # Positions past the end wrap around, so that every rank gets len(self) samples.
        positions = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return iter(order[positions % self.length].tolist())
        ### END SOLUTION


# %% [markdown]
# Try it on ten samples without `shuffle`. The ranks should print `[0, 4, 8]`, `[1, 5, 9]`, `[2, 6, 0]` and `[3, 7, 1]`:

# %%
# %%ranks
print(list(ShardedSampler(10, rank, world_size, shuffle=False)))

# %% tags=["check"] grade_id="check-sharded-sampler" points=2
check.ShardedSampler()

# %% [markdown]
# ## Comparing your wrapper with torch's (5 min)
#
# This part has no exercises. The next cells train a classifier of handwritten digits with your `ManualDDP`, and then
# again with torch's `DistributedDataParallel`, from the same initial state. torch's `DistributedSampler` divides the
# samples among the ranks.


# %%
# %%ranks
from torch.utils.data import DistributedSampler

from shared.data import digits
from shared.models import MLP

images, labels = (tensor.to(device) for tensor in digits())


def train(wrapper, steps_per_epoch=20, epochs=2):
    model, losses = wrapper(MLP(seed=rank).to(device)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(images, world_size, rank)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        indices = torch.tensor(list(sampler))
        for batch in indices.split(16)[:steps_per_epoch]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            if isinstance(model, ManualDDP):
                model.finish_gradient_sync()
            optimizer.step()
            mean_loss = loss.detach().clone()
            mean_over_ranks_(mean_loss)
            losses.append(mean_loss.item())
    return losses


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

losses, ddp_losses = train(ManualDDP), train(DistributedDataParallel)
print(f"The loss falls from {losses[0]:.1f} to {losses[-1]:.1f}.")

# %%
curves = {"ManualDDP": ranks.pull("losses")[0], "torch's DDP": ranks.pull("ddp_losses")[0]}
difference = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
print(f"largest difference below 0.01: {difference < 0.01}")
assert difference < 0.01
plots.loss_curves(curves)

# %% [markdown]
# The two curves agree: your wrapper trains the same model as torch's. In chapter 03, you will send the same gradients
# in fewer collectives. The script `labs/simple_ddp.py` compares the two wrappers without a notebook. It uses your
# `ManualDDP` once all checks of exercise 2.4 have passed in JupyterLab:
# `torchrun --nproc_per_node=2 labs/simple_ddp.py`.

# %%
ranks.stop()
