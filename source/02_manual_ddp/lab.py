# ---
# jupyter:
#   course:
#     module: manual_ddp
#     minutes: 65
# ---

# %% [markdown]
# # Lab 02 · Data parallelism by hand
#
# **65 minutes, 12 points.** You build `ManualDDP`: a wrapper that makes any module train on N ranks exactly as one
# process would on the full batch. The lesson's version was three lines; yours must survive tied, frozen and unused
# parameters, buffers, accumulation, bf16 and groups that are not the whole world.
#
# Each exercise has a check. It draws new weights and samples every time, and hands each rank only its own.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import manual_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism by hand: replicate the module, give each rank its samples, average the gradients."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

# %% [markdown]
# ## Exercise 2.1 · A mean over ranks (5 min, 1 point)
#
# Replace `tensor`, in place, by its mean over the ranks of `group`. What it must equal:
# ```python
# for i in range(tensor.numel()):
#     mean[i] = sum(tensor_of[r][i] for r in ranks_of_the_group) / number_of_ranks_in_the_group
# ```
# A *group* is some of the ranks, made with `dist.new_group`: only they call your function, collectives take it as
# `group=`, and `dist.get_world_size(group)` is its size. `group=None` means all ranks.
#
# Target: one `all_reduce`.


# %% tags=["exercise", "export"] grade_id="mean-over-ranks"
# %%ranks
def mean_over_ranks_(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its mean over the group's ranks.

    Comm: one all_reduce of tensor; a ring sends 2(N−1)/N of its bytes per rank.
    """
    ### BEGIN SOLUTION
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-mean-over-ranks" points=1
check.mean_over_ranks_()

# %% [markdown]
# ## Exercise 2.2 · A common start (10 min, 2 points)
#
# Give every rank of `group` the state of the group's *first* rank: all that a forward uses. Frozen parameters count,
# and so does what a module holds besides parameters.
#
# Target: each tensor is sent once. The group `[1, 2]` has rank 1 as its first; look at what `dist.broadcast` offers
# besides `src`.


# %% tags=["exercise", "export"] grade_id="broadcast-state"
# %%ranks
def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Copy parameters and buffers from the group's first rank to all its ranks.

    Comm: one broadcast per tensor.
    """
    ### BEGIN SOLUTION
    for tensor in chain(module.parameters(), module.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-broadcast-state" points=2
check.broadcast_state()

# %% [markdown]
# ## Exercise 2.3 · Break it (10 min, 2 points)
#
# An average that skips parameters without a gradient looks harmless. Then comes a model where a sample's road depends
# on the sample.


# %%
# %%ranks
def hasty_average(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class TwoExperts(nn.Module):
    """Samples with a positive first feature go to expert 0, the others to expert 1."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x):
        return sum(self.experts[int(row[0] <= 0)](row).sum() for row in x)


# %% [markdown]
# Rank 1 alone has samples for expert 1. **Predict**: which ranks call `all_reduce` how often, and what happens? Then
# run it, and read the doctor's report (chapter 00): who calls what, and where do the shapes part?

# %% tags=["raises-exception", "nbval-ignore-output"]
# %%ranks
model = TwoExperts().to(device)
x = torch.full((3, 4), -1.0 if rank == 1 else 1.0, device=device)
model(x).backward()
hasty_average(model)

# %% [markdown]
# That was the kind end: here the ranks compare notes before each call. Elsewhere gloo may end a process while the
# others raise, or add one parameter's gradient to another's where the sizes happen to agree.
#
# Every rank must make the same calls, whatever its samples were. Write the average that does. A `grad` that is None
# counts as zeros, and its rank counts in the mean like any other.
#
# Target: each *trainable* parameter's gradient travels once; a tied parameter is one parameter; a frozen one has no
# gradient to send.


# %% tags=["exercise", "export"] grade_id="average-gradients"
# %%ranks
def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Average each trainable parameter's gradient over the group.

    A gradient that is None on this rank counts as zeros, so that all ranks make the same calls.

    Comm: one all_reduce per trainable parameter.
    """
    ### BEGIN SOLUTION
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean_over_ranks_(parameter.grad, group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-average-gradients" points=2
check.average_gradients()

# %% [markdown]
# ## Exercise 2.4 · The wrapper (10 min, 3 points)
#
# `ManualDDP(module, group=None)` makes all ranks start equal, forwards everything to `module`, and averages the
# gradients when `finish_gradient_sync()` is called after `backward()`:
# ```python
# model = ManualDDP(module)
# for micro_batch in micro_batches:          # accumulation: no message in here
#     (model(micro_batch) / len(micro_batches)).backward()
# model.finish_gradient_sync()               # one average for all of them
# optimizer.step()
# ```


# %% tags=["exercise", "export"] grade_id="manual-ddp"
# %%ranks
class ManualDDP(nn.Module):
    """Train a replica of module on each rank of the group as one process would on the full batch.

    The module itself is kept as `.module`.

    Call finish_gradient_sync() after backward() and before the optimizer's step. Exact for losses that are
    means over equally many samples per rank, and for modules that treat each sample on its own.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per trainable parameter.
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
        """Average what backward() has accumulated since zero_grad()."""
        ### BEGIN SOLUTION
        average_gradients(self.module, self.group)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-manual-ddp" points=3
check.ManualDDP()

# %% [markdown]
# ## Exercise 2.5 · Who gets which sample (10 min, 2 points)
#
# `ShardedSampler(length, rank, world_size, shuffle=True, seed=0)` yields this rank's sample numbers for one epoch.
#
# - Together the ranks cover all of `0 … length−1`. Every rank yields equally many, ⌈length / world_size⌉: where that
#   does not divide, some samples come twice (a rank with one sample less would leave the others waiting).
# - Without `shuffle`, rank r yields r, r + world_size, r + 2·world_size, … (and from 0 again where that ends).
# - With `shuffle`, the order depends on `seed` and on the epoch set by `set_epoch(epoch)`, 0 at first; the same on all
#   ranks, and nobody else's random numbers are touched.
# - Plain ints, and no messages.
#
# Mind a length smaller than the world.


# %% tags=["exercise", "export"] grade_id="sharded-sampler"
# %%ranks
class ShardedSampler:
    """Yield this rank's sample numbers: all ranks shuffle alike, then each takes every world_size-th.

    Every rank yields the same number of samples; the first ones come again where the length does not divide.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, shuffle: bool = True, seed: int = 0
    ):
        ### BEGIN SOLUTION
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        ### END SOLUTION

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has; without it every epoch is the same."""
        ### BEGIN SOLUTION
        self.epoch = epoch
        ### END SOLUTION

    def __len__(self) -> int:
        ### BEGIN SOLUTION
        return -(-self.length // self.world_size)
        ### END SOLUTION

    def __iter__(self):
        ### BEGIN SOLUTION
        order = torch.arange(self.length)
        if self.shuffle:
            draw = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=draw)
        places = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return iter(order[places % self.length].tolist())
        ### END SOLUTION


# %% tags=["check"] grade_id="check-sharded-sampler" points=2
check.ShardedSampler()

# %% [markdown]
# ## Exercise 2.6 · Stretch: unequal shares (5 min, 2 points)
#
# `samples` is how many this rank had, another number on each rank, perhaps 0 on one. Average so that the result is the
# gradient of the mean over *all* samples:
# ```python
# gradient = sum(samples_of[r] * gradient_of[r] for r in ranks) / sum(samples_of[r] for r in ranks)
# ```
# Target: the gradients' bytes and one number more.


# %% tags=["exercise", "export"] grade_id="weighted"
# %%ranks
def average_gradients_weighted(
    module: nn.Module, samples: int, group: dist.ProcessGroup | None = None
) -> None:
    """Average gradients over ranks that had different numbers of samples, each weighted by its share.

    Comm: one all_reduce of one number, then one per trainable parameter.
    """
    ### BEGIN SOLUTION
    device = next(module.parameters()).device
    total = torch.tensor([samples], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    share = samples / total.item()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad *= share
        dist.all_reduce(parameter.grad, group=group)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-weighted" points=2
check.average_gradients_weighted()

# %% [markdown]
# ## Your figure, and torch's answer
#
# Train handwritten digits with your pieces, and with `DistributedDataParallel`, from the same start.


# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = (tensor.to(device) for tensor in digits())


def train(wrapper, steps_per_epoch=20, epochs=2):
    model, losses = wrapper(MLP(seed=rank).to(device)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = ShardedSampler(len(images), rank, world_size)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        samples = torch.tensor(list(sampler))
        for mine in samples.split(16)[:steps_per_epoch]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            if isinstance(model, ManualDDP):
                model.finish_gradient_sync()
            optimizer.step()
            reported = loss.detach().clone()
            mean_over_ranks_(reported)
            losses.append(reported.item())
    return losses


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

ours, theirs = train(ManualDDP), train(DistributedDataParallel)
print(f"from {ours[0]:.1f} to {ours[-1]:.1f}")

# %%
curves = {"ManualDDP": ranks.pull("ours")[0], "torch's DDP": ranks.pull("theirs")[0]}
apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
print(f"largest difference below 0.01: {apart < 0.01}")
assert apart < 0.01
plots.loss_curves(curves)

# %% [markdown]
# Done. Next: the same bytes in fewer messages (chapter 03). As a script outside notebooks, the same idea is
# `labs/simple_ddp.py`: `torchrun --nproc_per_node=2 labs/simple_ddp.py`.

# %%
ranks.stop()
