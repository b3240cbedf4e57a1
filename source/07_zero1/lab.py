# ---
# jupyter:
#   course:
#     module: zero1
#     minutes: 120
# ---

# %% [markdown]
# # Lab 07 · ZeRO-1
#
# **120 minutes, 12 points**, and another 25 minutes and 4 points for an optional exercise. You build `ZeRO1`, an
# optimizer whose state is sharded over N ranks. In each step, a rank gets the mean gradient of its shard, updates its
# shard of the parameters, and all-gathers the other shards. The lesson's `ShortZeRO1` did that for one model and AdamW.
# Yours is a real `torch.optim.Optimizer`: it works with param groups, schedulers, clipping, frozen and unused
# parameters, and its checkpoints fit any number of ranks.
#
# You build it from small objects. When all of them are there, a training step runs like this:
#
# ```python
# zero1.zero_grad()                   # 7.4: FlatGradients.reset() makes every .grad a slice of one flat tensor
# loss.backward()                     # autograd adds this rank's gradients to that tensor
# zero1.step()                        # 7.4: calls the next three, in this order
#     gradients.reduce()              # 7.2: FlatGradients reduce-scatters; this rank gets the mean of its shard
#     inner.step()                    # 7.3: ShardedOptimizer updates this rank's shard
#     flat.launch_all_gather()        # 7.1: FlatParameter fetches the other ranks' new shards
# ```
#
# Between backward and the step, `clip_shards_` clips by one norm for all ranks (7.5). `gather_state` and `shard_entry`
# are for checkpoints (7.6, optional).
#
# Come back to the listing whenever you lose track. Several cells are given, and where the text says that you need not
# read them, run them and go on.
#
# Each exercise has a check. The checks judge values, the bytes that a rank holds, and the bytes that it sends, but
# never how long anything takes.
#
# If a class is too long for one cell, it continues in the next one: `class ZeRO1(ZeRO1):` adds methods to `ZeRO1`.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, tables
from shared.checks import zero1 as check
from shared.predictions import predicted

ranks.start(world_size=4)

# %% [markdown]
# ## Exercise 7.1 · A flat parameter (18 min, 2 points)
#
# A flat parameter holds all parameters side by side. It is padded to a multiple of N and cut into N equal shards, of
# which rank r owns the r-th. A shard may begin and end in the middle of a parameter. That does no harm, because Adam
# treats each element separately.
#
# Here is an example. Three parameters of 5, 4 and 2 elements have 11 elements together. On four ranks, they are padded
# to 12, and each rank owns three. Each digit says which parameter the element belongs to:
#
# ```python
# 0 0 0 | 0 0 1 | 1 1 1 | 2 2 _      # the shards of ranks 0 to 3; _ is padding
# ```
#
# `FlatLayout` is given. It holds no tensor of its own, but it knows where each parameter lies in a flat tensor. Its
# methods `views(flat)` and `shard_of(flat)` return views of any flat tensor with that layout. So you can use them for
# parameters, for gradients and for optimizer state.
#
# New compared with the lesson: the layout is an object of its own that works in any process group, no second copy of
# the parameters is allowed, and the all-gather is launched without a wait.


# %% tags=["export"] module="flat"
# %%ranks
"""Flat tensors that hold several parameters, or their gradients, and are sharded over the ranks.

FlatLayout knows where each parameter lies in a flat tensor, FlatParameter keeps parameters in one, and FlatGradients
keeps their gradients in another.
"""

import torch
import torch.distributed as dist
from torch import nn

from shared import guards
from solutions.async_collectives import launch_all_gather, reduce_scatter_


# %% tags=["export"] module="flat"
# %%ranks
class FlatLayout:
    """Where each parameter lies in a flat tensor, and which shard of the flat tensor this rank owns.

    Parameters lie side by side, padded at the end to a multiple of the group's world size N. Rank r owns the r-th of N
    equal shards, which may begin and end in the middle of a parameter.

    Shape: flat tensors are [N · n], shards [n].
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.numel = sum(parameter.numel() for parameter in parameters)

    @property
    def shard_shape(self) -> torch.Size:
        """The shape of one rank's shard: one dimension, ceil(numel / N) elements."""
        return torch.Size([-(-self.numel // dist.get_world_size(self.group))])

    def new_flat(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a flat tensor of zeros on the parameters' device, by default of their dtype."""
        padded_numel = dist.get_world_size(self.group) * self.shard_shape.numel()
        return self.parameters[0].new_zeros(padded_numel, dtype=dtype)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View each parameter's slice of flat in the parameter's shape."""
        slices = flat[: self.numel].split([parameter.numel() for parameter in self.parameters])
        pairs = zip(slices, self.parameters, strict=True)
        return [flat_slice.view(parameter.shape) for flat_slice, parameter in pairs]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's shard of flat."""
        return flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]


# %%
# %%ranks
layout = FlatLayout([nn.Parameter(torch.zeros(numel)) for numel in (5, 4, 2)])
flat = torch.arange(12)
print([view.tolist() for view in layout.views(flat)], "own shard:", layout.shard_of(flat).tolist())

# %% [markdown]
# You write `FlatParameter(parameters, group)`, which moves parameters of one dtype and device into a flat tensor. It
# has three attributes:
#
# - `layout`: the `FlatLayout` of these parameters.
# - `flat_param`: the flat tensor with the parameters' values. Every parameter remains the same `nn.Parameter`, with its
#   shape and its values, but its memory is now its slice of `flat_param`. (Assign to `parameter.data`.) So the model
#   computes with whatever is written into `flat_param`.
# - `shard`: an `nn.Parameter` that is a view of this rank's shard of `flat_param`. An optimizer will update it.
#
# And it has three methods:
#
# - `_alias_parameters()` makes each parameter's memory its slice of `flat_param`.
# - `launch_all_gather()` launches an all-gather of every rank's shard into `flat_param`, and returns its handle. Lab
#   01's `launch_all_gather(flat, shard, group)` does that. Pass it `self.shard.detach()`: autograd could otherwise
#   record the all-gather, and `flat_param` would require a gradient.
# - `__setstate__` is given. It repairs the views after a `deepcopy`.
#
# Target: there is no second copy of the parameters, and the all-gather sends only parameters and padding.
#
# <details><summary>Hint 1</summary>What does <code>layout.new_flat()</code> contain, and how do the values get there
# before the parameters let go of their old memory? Autograd must not record the copy.</details>
# <details><summary>Hint 2</summary><code>nn.Parameter(tensor)</code> shares the memory of the tensor. Which view of
# <code>flat_param</code> do you need for <code>shard</code>?</details>


# %% tags=["exercise", "export"] grade_id="flat-parameter" module="flat"
# %%ranks
class FlatParameter:
    """Parameters of one dtype and device, moved side by side into one flat tensor.

    Each parameter stays the same nn.Parameter, but its memory becomes its slice of flat_param. `shard`, also an
    nn.Parameter, views this rank's shard of flat_param. This is what an optimizer updates.

    Shape: flat_param [N · n], padded at the end; shard [n], a view of flat_param.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        self.layout = FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        for view, parameter in zip(self.layout.views(self.flat_param), parameters, strict=True):
            view.copy_(parameter.detach())
        self.shard = nn.Parameter(self.layout.shard_of(self.flat_param))
        self._alias_parameters()
        ### END SOLUTION

    def launch_all_gather(self):
        """Launch an all-gather of every rank's shard into flat_param. Returns a handle with wait().

        Communication: one all-gather.
        """
        ### BEGIN SOLUTION
        return launch_all_gather(self.flat_param, self.shard.detach(), self.layout.group)
        ### END SOLUTION

    def _alias_parameters(self) -> None:
        """Make each parameter's memory its slice of flat_param."""
        ### BEGIN SOLUTION
        views = self.layout.views(self.flat_param)
        for view, parameter in zip(views, self.layout.parameters, strict=True):
            parameter.data = view
        ### END SOLUTION

    def __setstate__(self, state: dict) -> None:
        # deepcopy copies each tensor by itself, so the copies must be made to share memory again.
        self.__dict__.update(state)
        self.shard.data = self.layout.shard_of(self.flat_param)
        self._alias_parameters()


# %% [markdown]
# Try it on the example from above. All ranks should print the same flat parameter: five zeros, four ones, two twos and
# a zero as padding. Rank 1's shard should be 0, 0, 1.

# %%
# %%ranks
parameters = [
    nn.Parameter(torch.full((numel,), float(index), device=device))
    for index, numel in enumerate((5, 4, 2))
]
flat_parameter = FlatParameter(parameters)
print(flat_parameter.flat_param.tolist(), "own shard:", flat_parameter.shard.tolist())

# %% [markdown]
# In the check, look at the line `layout` first. The other lines try other shapes, dtypes and groups of ranks, and
# measure the memory and the bytes sent:

# %% tags=["check"] grade_id="check-flat-parameter" points=2
check.FlatParameter()

# %% [markdown]
# ## Exercise 7.2 · The gradient of a shard (25 min, 3 points)
#
# A rank that updates one shard needs the mean gradient of that shard and no other. A reduce-scatter gives it the sum of
# exactly these gradients, and sends half as many bytes as an all-reduce.
#
# `FlatGradients(flat_parameter)` holds the gradients side by side, in the layout of the flat parameter. Its `flat` is a
# flat tensor, and `views` are the parameters' slices of it. `reset()` is given. It fills the gradients with
# `guards.UNUSED`, sets every `.grad` to its view, as in lab 03, and discards the last mean. `guards.UNUSED` is a
# negative zero: a mean of −0.0 in every element tells the optimizer that no rank had a gradient. It then leaves out the
# parameter, as in one process.
#
# New compared with the lesson: backward writes into the flat tensor, so there is no copy of the gradients, and the
# gradients may also come from elsewhere or be missing.
#
# You write `reduce()`. It sets `flat_parameter.shard.grad` to the mean, over the ranks, of this rank's shard. Use lab
# 01's `reduce_scatter_(flat, group)`, which returns this rank's shard of the sum, a view of `flat`. `shard.grad` may be
# that view. Write this for a plain loop first (`reset()`, backward, `reduce()`), and try it in the cell below.
#
# Then extend `reduce()` for the case that a `.grad` is not its view. `model.zero_grad()` sets every `.grad` to None, so
# the next backward allocates new gradients outside the flat tensor. Before it communicates, `reduce()` must bring them
# into the flat tensor:
#
# - A `.grad` that is not its view replaces the contents of its view.
# - A `.grad` of None counts as zeros: fill its view with `guards.UNUSED`.
# - Afterwards, every `.grad` is its view again.
#
# The first and last lines of `reduce()` are given: a second call, such as the one in `step()` after clipping, returns
# at once, and a backward between the two calls raises an error. You need not read `is_reduced()`.
#
# Target: each rank sends (N−1)/N of the gradients' bytes, and there is no second copy of the gradients.
#
# <details><summary>Hint 1</summary>Suppose that backward wrote a gradient into a view, and that the parameter's
# <code>.grad</code> was set to None afterwards. What does the memory of the view contain?</details>
# <details><summary>Hint 2</summary>Loop over the parameters and their views. A <code>.grad</code> is None, or its view,
# or another tensor. What must happen to the view in each of these three cases?</details>


# %% tags=["exercise", "export"] grade_id="flat-gradients" module="flat"
# %%ranks
class FlatGradients:
    """The gradients of a flat parameter, side by side in the same layout: each .grad is a slice of one flat tensor."""

    def __init__(self, flat_parameter: FlatParameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.flat = self.layout.new_flat()
        # .data has a version of its own: changes of flat, such as clipping shard.grad, do not count.
        self.views = self.layout.views(self.flat.data)
        self.reset()

    def reset(self) -> None:
        """Fill the gradients with zeros, and drop the shard's mean gradient."""
        self.flat.fill_(guards.UNUSED)  # [Note: negative zeros]
        self.flat_parameter.shard.grad = None
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            parameter.grad = view

    def reduce(self) -> None:
        """Set shard.grad to the mean over the ranks. A second call changes nothing, except after model.zero_grad().

        Communication: one reduce-scatter.
        """
        if self.is_reduced():
            return
        ### BEGIN SOLUTION
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.fill_(guards.UNUSED)  # [Note: negative zeros]
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        shard = reduce_scatter_(self.flat, self.layout.group)
        self.flat_parameter.shard.grad = shard.div_(dist.get_world_size(self.layout.group))
        ### END SOLUTION
        self.reduced_version = self.views[0]._version  # torch counts the views' changes


# %% tags=["export"] module="flat"
# %%ranks
class FlatGradients(FlatGradients):
    def send_nan(self) -> None:
        """Take part in reduce() on a rank that is about to raise an error (see shared/guards/alarms.py)."""
        reduce_scatter_(self.flat.fill_(torch.nan), self.layout.group)

    def holds_gradients(self) -> bool:
        """Tell whether any .grad is still a slice of the flat tensor. After model.zero_grad(), none is."""
        pairs = zip(self.layout.parameters, self.views, strict=True)
        return any(parameter.grad is view for parameter, view in pairs)

    def is_reduced(self) -> bool:
        """Tell whether shard.grad is the mean of the current gradients.

        Raises:
            RuntimeError: if it lacks a gradient, because backward has run since reduce().
        """
        if self.flat_parameter.shard.grad is None or not self.holds_gradients():
            return False
        pairs = zip(self.layout.parameters, self.views, strict=True)
        replaced = any(p.grad is not None and p.grad is not view for p, view in pairs)
        if replaced or self.views[0]._version != self.reduced_version:
            raise RuntimeError(
                "backward() has run after the gradients were reduced, and its gradients would be lost: "
                "call clip_grad_norm_() after the last backward(), and zero_grad() before the next one"
            )
        return True

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # After deepcopy, the copied views do not share memory with the copied flat tensor.
        self.views = self.layout.views(self.flat.data)


# %% [markdown]
# Try it on the flat parameter from above. On rank r, every gradient is r + 1, and the mean of 1, 2, 3 and 4 is 2.5. So
# all ranks should print 2.5 three times, except for rank 3. Its last element is padding, and prints as −0.0.

# %%
# %%ranks
gradients = FlatGradients(flat_parameter)
sum((rank + 1) * parameter.sum() for parameter in parameters).backward()
gradients.reduce()
print(flat_parameter.shard.grad.tolist())

# %% [markdown]
# In the check, look first at the line `plain`, which runs the plain loop on two ranks. The line `values` also tries
# every kind of `zero_grad()`:

# %% tags=["check"] grade_id="check-flat-gradients" points=3
check.FlatGradients()

# %% [markdown]
# Run the next four cells, too. They are folded, because you need them only in the last section.


# %% tags=["export"] module="overlapped_flat" jupyter={"source_hidden": true}
# %%ranks
"""Flat parameters and gradients whose collectives overlap with forward and backward: buckets of chapter 07's ZeRO1."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from shared.guards import in_flight
from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import MB, assign_buckets

LEAST_CAP_MB = 1.0  # smaller buckets would cost more latency than they hide
LEAST_IN_FLIGHT_MB = 0.5  # a smaller all-gather takes less than letting the parameters wait


# %% tags=["export"] module="overlapped_flat" jupyter={"source_hidden": true}
# %%ranks
class OverlappedFlatParameter(FlatParameter):
    """A flat parameter whose all-gather overlaps with what follows: whoever reads a parameter waits for it."""

    def launch_all_gather(self):
        """Launch an all-gather, and let the parameters wait for it. Returns a handle whose wait() returns at once.

        Communication: one all-gather.
        """
        parameters = self.layout.parameters
        in_flight.wait_for(parameters)
        is_small = self.flat_param.nbytes < LEAST_IN_FLIGHT_MB * MB
        if is_small or not in_flight.can_be_in_flight(parameters):
            return super().launch_all_gather()
        # Who reads them in another way, and does not wait, gets NaN (see shared/guards/in_flight.py).
        self.flat_param[in_flight.last_elements(self.layout)] = math.nan
        in_flight.AllGatherInFlight(super().launch_all_gather(), parameters)
        return in_flight.NothingToWaitFor()

    def __getstate__(self) -> dict:
        in_flight.wait_for(self.layout.parameters)
        return self.__dict__


def flatten_into_buckets(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None
) -> list[OverlappedFlatParameter]:
    """Flatten trainable parameters, one flat parameter per bucket, with the values of the group's rank 0.

    A bucket holds at most an eighth of the parameters, so that collectives overlap, but LEAST_CAP_MB to 25 MB.

    Communication: one broadcast per parameter.
    """
    for parameter in parameters:
        with guards.contiguous(parameter) as packed:
            dist.broadcast(packed, group=group, group_src=0)
    eighth_mb = sum(parameter.nbytes for parameter in parameters) / 8 / MB
    buckets = assign_buckets(parameters, min(max(eighth_mb, LEAST_CAP_MB), 25.0))
    return [OverlappedFlatParameter(bucket, group) for bucket in buckets]


# %% tags=["export"] module="overlapped_flat" jupyter={"source_hidden": true}
# %%ranks
class OverlappedGradients(FlatGradients):
    """The gradients of a bucket, reduce-scattered during backward. It has the methods that a LaunchQueue calls."""

    def __init__(self, flat_parameter: FlatParameter):
        self.parameters = flat_parameter.layout.parameters
        self.previous: OverlappedGradients | None = (
            None  # the bucket that is launched before this one
        )
        self.in_flight = None  # the handle of the reduce-scatter
        super().__init__(flat_parameter)
        self._view_gradients()
        self.reset()

    def reset(self) -> None:
        """Fill the gradients with zeros, and drop the shard's mean gradient."""
        super().reset()
        self.is_overwritten = False  # by a reduce-scatter: nothing may be added to these gradients
        self.reduced_version = (
            None  # how often the gradients had been changed when they were reduced
        )
        self.without: set[int] = set()  # the indices of parameters that had no gradient then

    def reject_stale(self, index: int) -> None:
        """Raise a RuntimeError if a gradient was added to what a reduce-scatter has left behind."""
        if self.is_overwritten and self.parameters[index].grad is self.views[index]:
            raise RuntimeError(guards.stale_gradient(self.parameters[index]))

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index] into its view, if it is another tensor; None counts as zeros."""
        self.reject_stale(index)
        parameter, view = self.parameters[index], self.views[index]
        with torch.no_grad():
            if parameter.grad is None:
                view.fill_(guards.UNUSED)  # [Note: negative zeros]
                self.without.add(index)
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        parameter.grad = view


# %% [markdown]
# The rest of the class launches the reduce-scatter, and waits for it.


# %% tags=["export"] module="overlapped_flat" jupyter={"source_hidden": true}
# %%ranks
class OverlappedGradients(OverlappedGradients):
    def launch(self) -> None:
        """Launch this bucket's reduce-scatter, and wait for the previous one, whose receive buffer is free then.

        Communication: one reduce-scatter.
        """
        with record_function("ZeRO1::reduce_scatter"):
            # .data has a version of its own: the guards notice when somebody else changes the gradients.
            self.in_flight = launch_reduce_scatter(self.flat.data, self.layout.group)
        if self.previous is not None:
            self.previous.wait()  # Only now, so that the link has something to send while this rank adds up.

    def wait(self) -> None:
        """Set shard.grad to the mean over the ranks, if a reduce-scatter is in flight."""
        if self.in_flight is not None:
            shard = self.in_flight.wait()
            self.flat_parameter.shard.grad = shard.div_(dist.get_world_size(self.layout.group))
            self.in_flight, self.is_overwritten = None, True
            self.reduced_version = self.flat._version

    def _view_gradients(self) -> None:
        self.views = self.layout.views(self.flat)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._view_gradients()
        self.reduced_version = self.flat._version


# %% [markdown]
# ## Exercise 7.3 · Updating shards (30 min, 3 points)
#
# You build `ShardedOptimizer`, the base class of `ZeRO1`. Both are torch optimizers, and you use them like any other. A
# step of `ZeRO1` has three parts:
#
# ```python
# self.reduce_gradients()      # each rank gets the mean gradient of its own shard
# self.inner.step()            # ... and updates its own shard
# launch_all_gather(), wait()  # every rank gets every shard; optimizer states never leave their rank
# ```
#
# `ShardedOptimizer` does the last two; `reduce_gradients()` follows in exercise 7.4. In step 1, you move the parameters
# into flat parameters. In step 2, you update their shards and all-gather them. Lab 08 will use both steps again.
#
# New compared with the lesson: several flat parameters, any inner optimizer, param groups whose settings a scheduler
# changes, frozen parameters, and parameters that join later.
#
# ### Step 1: flatten the parameters
#
# `flatten_and_broadcast(parameters, group)` returns one `FlatParameter` for each dtype and device. Only the broadcasts
# are missing, and you write them. All ranks must start with the values of the group's rank 0. That includes frozen
# parameters: they are in no flat parameter, but the model computes with them.
#
# <details><summary>Hint</summary>If you broadcast <code>flat_param</code>, which tensors have you broadcast, and which
# ones are still missing? Which argument of <code>dist.broadcast</code> is an index within the group?</details>


# %% tags=["export"]
# %%ranks
"""ZeRO stage 1: every rank holds all parameters and gradients, and one shard of the optimizer state."""

import contextlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from shared.guards import in_flight
from solutions.overlapped_ddp import GradientSync


# %% tags=["export"]
# %%ranks
def group_by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split the trainable parameters into lists of one dtype and device each."""
    by_kind = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(by_kind.values())


# %% tags=["exercise", "export"] grade_id="flatten-and-broadcast"
# %%ranks
def flatten_and_broadcast(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None
) -> list[FlatParameter]:
    """Flatten the trainable parameters, one flat parameter per dtype and device, with the values of the group's rank 0.

    Communication: one broadcast per flat parameter and per frozen parameter.
    """
    flat_parameters = [FlatParameter(same_kind, group) for same_kind in group_by_kind(parameters)]
    ### BEGIN SOLUTION
    trained = [flat_parameter.flat_param for flat_parameter in flat_parameters]
    frozen = [parameter.detach() for parameter in parameters if not parameter.requires_grad]
    for tensor in (*trained, *frozen):
        with guards.contiguous(tensor) as packed:
            dist.broadcast(packed, group=group, group_src=0)
    ### END SOLUTION
    return flat_parameters


# %% [markdown]
# Try it on a trainable and a frozen parameter, both filled with this rank's number. All ranks should print two lists of
# zeros.

# %%
# %%ranks
trained, frozen = (nn.Parameter(torch.full((2,), float(rank), device=device)) for _ in range(2))
flatten_and_broadcast([trained, frozen.requires_grad_(False)], None)
print(trained.tolist(), frozen.tolist())

# %% [markdown]
# ### Step 2: run an inner optimizer on the shards
#
# `ShardedOptimizer` wraps an inner optimizer, `inner`, which updates this rank's shards. The constructor is given. It
# creates `inner`, and then calls the constructor of torch's `Optimizer`, which calls `add_param_group()` for each param
# group. You complete two methods. `add_param_group(param_group)` may also be called later, when more parameters join.
# After its first two lines, which are given, `param_group` has the parameters and all settings:
#
# - Flatten the parameters with `self.flatten`, and add the results to `self.flat_parameters`.
# - Call `self.inner.add_param_group()` with the same settings and with this rank's shards.
#
# `update_parameters()` expects that every `shard.grad` is the mean gradient. Its first and last lines are given. They
# let `inner` skip parameters that no rank has used, as in one process, and discard the means again. In between:
#
# - Copy every setting of each param group to the inner param group. (A scheduler changes `self.param_groups` between
#   steps, and does not know about `inner`.)
# - Call `self.inner.step()`.
# - All-gather the flat parameters. Launch all of them, then wait for each.
#
# <details><summary>Hint 1</summary>The inner param groups are in the same order as <code>self.param_groups</code>.
# Which entry of a param group is not a setting, and must not be copied?</details>
# <details><summary>Hint 2</summary>A param group has more settings than <code>lr</code>. In a <em>copy</em> of
# <code>param_group</code>, which entry must you replace for <code>inner</code>?</details>


# %% tags=["export"]
# %%ranks
class ShardedOptimizer(torch.optim.Optimizer):
    """Run optimizer_cls on this rank's shard of every flat parameter, then all-gather the updated parameters.

    Before step(), each flat parameter's shard.grad must hold the mean gradient. `inner` is the optimizer_cls that
    updates the shards. Its param groups mirror those of this optimizer. Settings such as lr must be the same on every
    rank: a scheduler that reads the loss needs the mean over the ranks.

    Args:
        flatten: turns the parameters of one param group into flat parameters.

    Memory: with Adam in fp32, 8/N bytes of state per parameter.
    """

    def __init__(
        self,
        params,
        optimizer_cls: type,
        flatten: Callable[[list[nn.Parameter]], list[FlatParameter]],
        group: dist.ProcessGroup | None = None,
        **defaults,
    ):
        guards.reject_whole_tensor_updates(optimizer_cls, defaults)
        self.group, self.flatten = group, flatten
        self.flat_parameters: list[FlatParameter] = []
        # Built on an empty parameter, to learn its defaults: add_param_group() adds the real groups one by one.
        self.inner = optimizer_cls([{"params": [nn.Parameter(torch.empty(0))]}], **defaults)
        self.inner.param_groups.clear()
        self.pieces = guards.Pieces(self.inner)  # skips parameters that no rank has used
        super().__init__(guards.unshared(params), self.inner.defaults)
        self.pieces.watch(self.flat_parameters)


# %% tags=["exercise", "export"] grade_id="sharded-optimizer"
# %%ranks
class ShardedOptimizer(ShardedOptimizer):
    def add_param_group(self, param_group: dict) -> None:
        """Flatten and shard more parameters.

        Communication: that of flatten().
        """
        super().add_param_group(param_group)
        param_group = self.param_groups[-1]  # with defaults for missing settings
        ### BEGIN SOLUTION
        added = self.flatten(param_group["params"])
        self.flat_parameters += added
        shards = [flat_parameter.shard for flat_parameter in added]
        self.inner.add_param_group({**param_group, "params": shards})
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and shards."""
        with in_flight.gradients_only():
            super().zero_grad(set_to_none)
        self.pieces.zero_grad(set_to_none)
        self.pieces.end_step(self.flat_parameters)

    def step(self) -> None:
        """Update this rank's shards and all-gather the others. Each shard.grad must hold the mean gradient.

        Communication: one all-gather per flat parameter.
        """
        self.update_parameters()

    def update_parameters(self) -> None:
        """Do what step() does. A subclass calls this, because super().step() would run torch's step hooks twice."""
        self.pieces.begin_step(self.flat_parameters)
        ### BEGIN SOLUTION
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        with record_function("ZeRO::all_gather"):
            works = [flat_parameter.launch_all_gather() for flat_parameter in self.flat_parameters]
            for work in works:
                work.wait()
        ### END SOLUTION
        self.pieces.end_step(self.flat_parameters)


# %% [markdown]
# Run the next two cells, which are folded. They complete the class for 7.5 and 7.6, and call functions that you write
# there.


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ShardedOptimizer(ShardedOptimizer):
    _step_supports_amp_scaling = property(guards.reject_grad_scaler)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the mean gradient to a norm of at most max_norm, over all parameters. Returns the norm before."""
        gradients = [flat_parameter.shard.grad for flat_parameter in self.flat_parameters]
        return clip_shards_(gradients, max_norm, self.group)

    def state_dict(self, to: int | None = None) -> dict | None:
        """Gather the state that optimizer_cls alone would have. All ranks must call this.

        Args:
            to: the group rank that gets the state, while the others get None; by default, all ranks get it.

        Communication: one gather, or all-gather, per sharded tensor of state.
        """
        state_dict = super().state_dict()
        index_of = self._index_of(state_dict["param_groups"])
        are_cut = self.pieces.are_cut_anywhere(self.flat_parameters, self.group)
        for flat_parameter in self.flat_parameters:
            if are_cut:
                states = self.pieces.gather(flat_parameter, gather_state, to)
            else:
                shard_entries = self.inner.state.get(flat_parameter.shard, {})
                states = gather_state(flat_parameter.layout, shard_entries, to)
            for parameter, entries in states.items():
                state_dict["state"][index_of[parameter]] = entries
        return state_dict if to in (None, dist.get_rank(self.group)) else None


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ShardedOptimizer(ShardedOptimizer):
    def load_state_dict(self, state_dict: dict) -> None:
        """Keep this rank's shard of a full state, which may come from any number of ranks or a plain optimizer_cls.

        Raises:
            ValueError: if the state belongs to other parameters, or to another optimizer.
        """
        guards.reject_other_settings(state_dict["param_groups"], self.defaults)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        index_of = self._index_of(state_dict["param_groups"])
        for flat_parameter in self.flat_parameters:
            layout = flat_parameter.layout
            entries = [
                state_dict["state"].get(index_of[parameter], {}) for parameter in layout.parameters
            ]
            self.pieces.load(flat_parameter, shard_state(layout, entries), entries)

    def _index_of(self, packed_groups: list[dict]) -> dict[nn.Parameter, int]:
        """Map each parameter to its index in a state dict, whose param groups are packed_groups."""
        return {
            parameter: index
            for group, packed in zip(self.param_groups, packed_groups, strict=True)
            for parameter, index in zip(group["params"], packed["params"], strict=True)
        }

    def finish_parameter_sync(self) -> None:
        """Wait until all parameters are complete, if their all-gathers overlap with what follows step()."""
        in_flight.wait_for(each for group in self.param_groups for each in group["params"])

    def __getstate__(self) -> dict:
        # This is for deepcopy: torch's own method drops attributes that it does not know.
        self.finish_parameter_sync()
        return self.__dict__


# %% [markdown]
# Try it on a weight of eight zeros. There is no backward yet: the cell sets the mean gradient of each rank's shard by
# hand, to r + 1 on rank r. With SGD and a learning rate of 1, all ranks should print −1 twice, then −2, −3 and −4 twice
# each.

# %%
# %%ranks
weight = nn.Parameter(torch.zeros(8, device=device))
optimizer = ShardedOptimizer(
    [weight], torch.optim.SGD, lambda parameters: flatten_and_broadcast(parameters, None), lr=1.0
)
shard = optimizer.flat_parameters[0].shard
shard.grad = torch.full_like(shard, float(rank + 1))
optimizer.step()
print(weight.tolist())

# %% [markdown]
# In the check, look at the line `plain` first, which trains a plain model on two ranks. The check computes the mean
# gradients itself. The other lines try frozen parameters, param groups, schedulers, and parameters that join later:

# %% tags=["check"] grade_id="check-sharded-optimizer" points=3
check.ShardedOptimizer()

# %% [markdown]
# ## Exercise 7.4 · ZeRO-1 (15 min, 2 points)
#
# `ZeRO1` is a `ShardedOptimizer` that also has `FlatGradients`. New compared with the lesson: closures, and a guard
# against gradients that a step has already used. `reduce_gradients()` is given. It calls `reduce()` of each
# `FlatGradients`, and detects a common mistake: a `backward()` without a `zero_grad()` before it. After a step, the
# flat gradients are *used up*, because the reduce-scatter has overwritten them, and the next backward would add to
# these leftovers.
#
# <details><summary>What step() does in each case: you need this table only if a check about it fails</summary>
#
# | what the training loop did last | `used_up` | every `.grad` | `step()` |
# |---|---|---|---|
# | `zero_grad()` of the optimizer, then one or more backwards | False | its view | reduces, then updates |
# | the same, then `clip_grad_norm_()` | False | its view | updates: the mean is there already |
# | `zero_grad()`, backward, `clip_grad_norm_()`, then another backward | False | its view | raises a RuntimeError |
# | `step()`, then backward without any `zero_grad()` | True | its view | raises a RuntimeError |
# | `step()`, then `model.zero_grad()`, then backward | True | not its view | reduces, then updates |
#
# </details>
#
# `_flatten()` is given: it adds one `FlatGradients` for each flat parameter to `self.gradients`. You write two methods:
#
# - `zero_grad()`, after its first two lines, which are given, calls `reset()` of all gradients. Afterwards, they are no
#   longer used up.
# - `step(closure=None)` first calls `closure()` if there is one. As in torch, a closure zeroes the gradients, runs
#   backward and returns the loss, and `step()` returns what the closure returned. Then `step()` reduces the gradients,
#   calls `update_parameters()`, and sets `used_up`.
#
# Target: with Adam on N ranks, a rank holds 8/N bytes of state per parameter. In each step, there is one reduce-scatter
# and one all-gather for each flat parameter, and no new tensor is as large as all parameters together.
#
# <details><summary>Hint</summary>Both methods are short. Which method of 7.2, and which method of 7.3, do the
# work?</details>


# %% tags=["export"]
# %%ranks
class ZeRO1(ShardedOptimizer):
    """ZeRO stage 1: an optimizer_cls whose state is sharded over the ranks of the group.

    step() averages the gradients of the ranks' backward passes, updates this rank's shard, and all-gathers the
    parameters. The optimizer must update each element by itself, as SGD, Adam and AdamW do. A gradient of None counts
    as zeros if another rank has one. Parameters that no rank has used stay as they are, and so does their state.
    Buffers, such as BatchNorm's, stay different on each rank. Until step(), a .grad is this rank's own: clip with
    clip_grad_norm_(). The next backward() overwrites it. Settings such as lr must agree.

    Args:
        module: The owner of the parameters. With it, a bucket is reduce-scattered during backward, and after step(),
            whoever reads a parameter waits for its all-gather. So each backward() except the last one before step()
            needs no_sync(), and all ranks skip the same batches. An older `p.data` needs finish_parameter_sync().

    Memory: with Adam in fp32, 4Ψ + 4Ψ + 8Ψ/N bytes for Ψ parameters on N ranks, and two receive buffers with a module.
    Communication: per step, one reduce-scatter and one all-gather per param group, dtype and device, or with a module
        per bucket: 2(N−1)/N · 4Ψ bytes sent per rank.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.1 and §7. Megatron-Core's overlap_param_gather does the same.
    """

    def __init__(
        self,
        params,
        optimizer_cls: type,
        group: dist.ProcessGroup | None = None,
        module: nn.Module | None = None,
        **defaults,
    ):
        self.gradients: list[FlatGradients] = []
        self.used_up = False  # whether the last step() has consumed the gradients
        self.overlaps, self.sync = module is not None, None  # for the last section of this lab
        clip_with = "this optimizer's clip_grad_norm_(max_norm)"
        self.guard = guards.Guard(group, clip_with=clip_with, has_hooks=self.overlaps)
        if module is not None:
            params = guards.all_parameters_of(module, params)
            self.guard.watch(module)
        super().__init__(params, optimizer_cls, self._flatten, group, **defaults)
        if module is not None:
            self._sync_in_backward(module)


# %% tags=["export"]
# %%ranks
class ZeRO1(ZeRO1):
    def _flatten(self, parameters: list[nn.Parameter]) -> list[FlatParameter]:
        """Flatten and broadcast parameters, and give each flat parameter its FlatGradients."""
        if self.overlaps:
            return self._flatten_into_buckets(parameters)
        self.guard.watch_list(parameters)
        flat_parameters = flatten_and_broadcast(parameters, self.group)
        self.guard.snapshot.flat_parameters += flat_parameters
        self.gradients += [FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
        return flat_parameters


# %% tags=["exercise", "export"] grade_id="zero1"
# %%ranks
class ZeRO1(ZeRO1):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the gradients with zeros. They keep their memory, whatever set_to_none says: the collective needs it."""
        self.pieces.zero_grad(set_to_none)
        self._complete_skipped_batch()
        ### BEGIN SOLUTION
        self.used_up = False
        for gradients in self.gradients:
            gradients.reset()
        ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="zero1-2"
# %%ranks
class ZeRO1(ZeRO1):
    def reduce_gradients(self) -> None:
        """Set every shard.grad to its mean over the ranks.

        Communication: one reduce-scatter per flat parameter; none if they have been reduced since zero_grad().
        Raises:
            RuntimeError: if zero_grad() was not called since the last step(), or backward() ran after clipping.
        """
        if self.overlaps:
            return self._finish_gradient_sync()
        if self.used_up and any(gradients.holds_gradients() for gradients in self.gradients):
            raise RuntimeError(
                "step() has already used these gradients: call this optimizer's zero_grad() before backward()"
            )
        self.used_up = False
        self.pieces.forget_dropped(self.flat_parameters)
        guarding = self.guard.synchronizing(guards.AtStep(self.gradients))
        with guarding, torch.no_grad(), record_function("ZeRO1::reduce_scatter"):
            for gradients in self.gradients:
                gradients.reduce()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Average the gradients and clip them; the next step() does not average them again."""
        self.reduce_gradients()
        return super().clip_grad_norm_(max_norm)

    def step(self, closure: Callable | None = None):
        """Average the gradients, update this rank's shard, and all-gather the parameters.

        Returns:
            The result of closure(), if there is one.
        """
        ### BEGIN SOLUTION
        loss = closure() if closure else None
        self.reduce_gradients()
        self.update_parameters()
        self.used_up = True
        return loss
        ### END SOLUTION


# %% [markdown]
# Run the next two cells as well. They are folded: they are for `ZeRO1(..., module=module)`, the subject of the last
# section. Without a module, their methods do nothing.


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO1(ZeRO1):
    def no_sync(self):
        """Let gradients accumulate. With a module, backward() reduces them unless it runs inside no_sync()."""
        return contextlib.nullcontext() if self.sync is None else self.sync.no_sync()

    def _flatten_into_buckets(self, parameters: list[nn.Parameter]) -> list[FlatParameter]:
        """Flatten and broadcast parameters, bucket by bucket."""
        if self.sync is not None:
            raise ValueError(
                "this ZeRO1 has all parameters of its module: add others before you build it"
            )
        flat_parameters = flatten_into_buckets(parameters, self.group)
        self.guard.snapshot.flat_parameters += flat_parameters
        self.gradients += [OverlappedGradients(each) for each in flat_parameters]
        return flat_parameters

    def _sync_in_backward(self, module: nn.Module) -> None:
        """Reduce-scatter buckets from the last layer to the first, and all-gather them from the first to the last."""
        index_of = {id(parameter): index for index, parameter in enumerate(module.parameters())}

        def first_index(bucket: FlatParameter | FlatGradients) -> int:
            return min(index_of[id(parameter)] for parameter in bucket.layout.parameters)

        self.flat_parameters.sort(key=first_index)
        self.gradients.sort(key=first_index, reverse=True)
        for previous, bucket in pairwise(self.gradients):
            bucket.previous = previous
        self.sync = GradientSync(self.gradients)
        guards.InBackward(self).attach(self.guard)


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO1(ZeRO1):
    def _finish_gradient_sync(self) -> None:
        """Launch the remaining reduce-scatters, and wait for all of them, unless clipping has already done so."""
        if not self.sync.enabled:
            raise RuntimeError(
                "call step() and clip_grad_norm_() outside no_sync(): inside, gradients stay unreduced"
            )
        is_clipped = not (self.used_up or self.sync.pending or self.sync.done)
        if not is_clipped or any(each.shard.grad is None for each in self.flat_parameters):
            with record_function("ZeRO1::reduce_scatter"):
                self.sync.finish()  # usually, the end of backward() has done it
        guards.reject_altered(self.gradients)
        without = [
            bucket.parameters[index] for bucket in self.gradients for index in bucket.without
        ]
        self.pieces.forget(without)

    def _complete_skipped_batch(self) -> None:
        """Complete what an interrupted backward() has begun, and let the next step() expect another one."""
        if self.sync is not None:
            guards.complete_interrupted_sync(self.sync)
            self.sync.pending = self.sync.done = self.guard.pending = False


# %% [markdown]
# Try two steps of SGD, with a learning rate of 1, on a weight of eight zeros. On rank r, the gradient is r + 1, so the
# mean is 2.5, and all ranks should print −5 eight times.

# %%
# %%ranks
weight = nn.Parameter(torch.zeros(8, device=device))
zero1 = ZeRO1([weight], torch.optim.SGD, lr=1.0)
for _ in range(2):
    zero1.zero_grad()
    ((rank + 1) * weight.sum()).backward()
    zero1.step()
print(weight.tolist())

# %% [markdown]
# In the check, look at the line `values` first, which trains a plain model on two ranks. The other lines try awkward
# models, param groups, schedulers, closures, groups of ranks, bf16 and the master weights of lab 06, and measure the
# memory and the bytes sent:

# %% tags=["check"] grade_id="check-zero1" points=2
check.ZeRO1()

# %% [markdown]
# ## Exercise 7.5 · Break it: one norm for all (18 min, 2 points)
#
# Gradient clipping scales the gradients so that their norm over *all* parameters is at most `max_norm`. Now that each
# rank has the mean gradient of its own shard, it seems natural to let each rank clip that shard by itself:


# %%
# %%ranks
def local_clip(shard_gradient, max_norm):
    norm = shard_gradient.norm()
    shard_gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)


own_gradient = torch.full((2,), 3.0 * (rank + 1), device=device)
local_clip(own_gradient, max_norm=1.0)

# %% [markdown]
# **Predict.** The shards of the four ranks had two equal elements each: 3 on rank 0, 6 on rank 1, 9 on rank 2 and 12 on
# rank 3. Each rank has clipped its shard to a norm of 1. What is an element on rank 3 now, and what would it be if all
# eight elements had been clipped together?

# %%
my_element = my_correct_element = None

# %%
clipped = [gradient[0].item() for gradient in ranks.pull("own_gradient")]
norm_of_all = sum(2 * element**2 for element in (3.0, 6.0, 9.0, 12.0)) ** 0.5
print(f"now: {predicted(my_element)}measured {clipped[3]:.2f} on rank 3")
print(f"correct: {predicted(my_correct_element)}computed {12 / norm_of_all:.2f}")
assert max(clipped) - min(clipped) < 1e-3 and abs(clipped[3] - 12 / norm_of_all) > 0.1

# %% [markdown]
# The elements were 3, 6, 9 and 12, and now they are all equal. There is no error, and the loss may still fall, but the
# update no longer has the direction of the gradient. For the same reason, torch's own `clip_grad_norm_` raises an error
# for the parameters of our `ZeRO1`: it would clip each rank's gradients before they are averaged. If you compute a norm
# from each `.grad` yourself, before `step()`, it is also this rank's own, and nobody can notice. Call
# `clip_grad_norm_(math.inf)` instead: it returns the right norm, and clips nothing.
#
# Write `clip_shards_(gradients, max_norm, group)`. It gets this rank's shards of the mean gradient, one for each flat
# parameter, and does what `torch.nn.utils.clip_grad_norm_(parameters, max_norm)` does in one process:
#
# - It scales all gradients in place by `max_norm / (norm + 1e-6)`, if that is less than 1.
# - It returns the norm before scaling, as a float64 tensor, the same on every rank.
# - It adds up the squares in float64, whatever the gradients' dtype is. In fp16, the square of 300 is already infinite.
# - If every parameter is frozen, `gradients` is empty on all ranks. Then it returns a float64 tensor of 0 at once.
#
# Target: one all-reduce of one element.
#
# <details><summary>Hint</summary>The norm of all elements is not the sum of the ranks' norms. Which quantity can you
# add up over flat parameters and ranks, so that you can compute the norm from the sum?</details>

# %% tags=["export"] module="clipping"
# %%ranks
"""Gradient clipping by the norm over all ranks' shards."""

import torch
import torch.distributed as dist


# %% tags=["exercise", "export"] grade_id="clip-shards" module="clipping"
# %%ranks
@torch.no_grad()
def clip_shards_(
    gradients: list[torch.Tensor], max_norm: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale this rank's shards of a gradient so that the norm of the whole gradient is at most max_norm.

    Returns:
        The norm before scaling, the same on every rank.

    Communication: one all-reduce of one element.
    """
    ### BEGIN SOLUTION
    if not gradients:
        return torch.zeros((), dtype=torch.float64)  # every parameter is frozen, on all ranks

    def norm_of(gradient: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(gradient.dtype, torch.float64)  # complex128 for a complex one
        return torch.linalg.vector_norm(gradient, dtype=dtype)

    squared_norm = torch.stack([norm_of(gradient) for gradient in gradients]).square().sum()
    dist.all_reduce(squared_norm, group=group)
    norm = squared_norm.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm
    ### END SOLUTION


# %% [markdown]
# Try it on the same gradients. Rank 3 should print the correct element from above, and all ranks the norm 23.24.

# %%
# %%ranks
own_gradient = torch.full((2,), 3.0 * (rank + 1), device=device)
norm = clip_shards_([own_gradient], max_norm=1.0)
print(f"element {own_gradient[0].item():.2f}, norm {norm.item():.2f}")

# %% [markdown]
# The check calls `ZeRO1.clip_grad_norm_(max_norm)`, which calls your function, between `backward()` and `step()`:

# %% tags=["check"] grade_id="check-clip" points=2
check.clip_grad_norm_()

# %% [markdown]
# ## Exercise 7.6 · Stretch: a checkpoint that fits any number of ranks (25 min, 4 points)
#
# Each rank holds only its shard of the optimizer state. If you want to resume on a different number of ranks, or with a
# plain optimizer, the checkpoint must hold the full state of each parameter:
#
# ```python
# zero1.state_dict()["state"][3]["exp_avg"].shape == parameters[3].shape
# ```
#
# `ShardedOptimizer` already has two methods for this:
#
# - `state_dict(to=None)` is called by all ranks, and returns what a plain `optimizer_cls` in one process would return.
#   With `to=0`, only the group's rank 0 gets it.
# - `load_state_dict()` takes such a state, and each rank keeps its shard of it.
#
# They call two functions that you write, one for each direction. First, `gather_state(layout, shard_entries, to)` gets
# `inner.state[shard]`, a dict with entries such as Adam's `exp_avg` and `step`. It returns `states`, a dict of entries
# for each parameter. Before the first step, when there are no entries, `states` is empty. Add each entry to it:
#
# - A tensor of the shard's shape, such as `exp_avg`, is gathered with lab 01's `gather_shards(shard, group, to)`, and
#   split into the parameters' views. On a rank where `gather_shards` returns None, skip this entry and go on: the next
#   entry may need a collective, too.
# - Any other entry, such as `step`, is shared by all parameters. It may be a tensor or an int. Each parameter gets its
#   own copy. Otherwise, a plain Adam that loads the state would count the steps of all parameters in one tensor.
#
# <details><summary>Hint</summary>Loop over the entries. For each one, make a list with one value per parameter. What
# does this list contain for a tensor of the shard's shape, and for any other entry?</details>


# %% tags=["export"] module="optimizer_state"
# %%ranks
"""Optimizer state: from this rank's shards to full tensors per parameter, and back."""

import torch
from torch import nn

from solutions.collectives import gather_shards


# %% tags=["exercise", "export"] grade_id="gather-state" module="optimizer_state"
# %%ranks
def gather_state(
    layout: FlatLayout, shard_entries: dict, to: int | None = None
) -> dict[nn.Parameter, dict]:
    """Turn the optimizer state of one shard into the state of each parameter. All ranks must call this.

    Entries of the shard's shape, such as Adam's exp_avg, are gathered and split. All others, such as Adam's step, are
    shared by the parameters: each gets a copy.

    Args:
        shard_entries: the inner optimizer's state of the shard.
        to: the group rank that gets the gathered entries, or None for all ranks.

    Communication: one gather, or all-gather, per sharded entry.
    """
    states = {parameter: {} for parameter in layout.parameters} if shard_entries else {}
    ### BEGIN SOLUTION
    for name, value in shard_entries.items():
        if not torch.is_tensor(value):
            values = [value] * len(layout.parameters)
        elif value.shape != layout.shard_shape:
            values = [value.clone() for _ in layout.parameters]
        else:
            flat = gather_shards(value, layout.group, to)
            if flat is None:
                continue
            values = layout.views(flat)
        for parameter, parameter_value in zip(layout.parameters, values, strict=True):
            states[parameter][name] = parameter_value
    ### END SOLUTION
    return states


# %% [markdown]
# Loading does the reverse, one entry at a time. You write `shard_entry(layout, name, values)`. It gets one value of the
# entry for each parameter of the layout, in order. Any of them may be None, even the first: a plain optimizer has no
# state for a parameter that never had a gradient. The first value that is not None is given as `known`.
#
# Two functions help you. `is_per_element(name, values, parameters)` tells an entry like `exp_avg` from one like `step`,
# and rejects a state that belongs to other parameters. `new_entry(layout, name, dtype)` returns a flat tensor that is
# already filled with the default: zeros, or the parameter itself for master weights. Their cells are folded.
#
# - If the entry is shared, return a copy of `known`, which may be a tensor or an int.
# - Otherwise, put the values that are not None into a flat tensor from `new_entry`. It gets the dtype of the *values*:
#   fp32 master weights stay fp32 beside bf16 parameters. Return this rank's shard of it, with memory of its own.
#
# <details><summary>Hint 1</summary>Which method of <code>layout</code> shows you where each value belongs in the flat
# tensor?</details>
# <details><summary>Hint 2</summary>How many bytes does a view of a flat tensor keep alive?</details>


# %% tags=["export"] module="optimizer_state" jupyter={"source_hidden": true}
# %%ranks
def shard_state(layout: FlatLayout, entries_of: list[dict]) -> dict:
    """Keep this rank's shard of the parameters' states: the reverse of gather_state().

    Args:
        entries_of: the state of each of the layout's parameters, in order. Some may lack entries: a plain optimizer has
            no state for a parameter that never had a gradient.

    Raises:
        ValueError: if the state belongs to other parameters.
    """
    names = dict.fromkeys(name for entries in entries_of for name in entries)
    return {
        name: shard_entry(layout, name, [entries.get(name) for entries in entries_of])
        for name in names
    }


# %% tags=["export"] module="optimizer_state" jupyter={"source_hidden": true}
# %%ranks
def is_per_element(name: str, values: list, parameters: list[nn.Parameter]) -> bool:
    """Tell whether an entry has a value for each element of a parameter, such as exp_avg, or is shared, such as step.

    Args:
        values: the entry of each parameter, or None for a parameter that lacks it.

    Raises:
        ValueError: if the entry has another shape than its parameter, but is no scalar.
    """
    known = [pair for pair in zip(values, parameters, strict=True) if pair[0] is not None]
    if name == "step" or not known:  # a scalar parameter has the same shape as its step
        return False
    mismatched = [
        (value, parameter)
        for value, parameter in known
        if getattr(value, "shape", None) != parameter.shape
    ]
    if not mismatched:
        return True
    if not any(getattr(value, "ndim", 0) for value, _ in known):
        return False
    value, parameter = mismatched[0]
    raise ValueError(
        f"this state belongs to other parameters: {name} has shape {list(getattr(value, 'shape', []))}, "
        f"but its parameter has shape {list(parameter.shape)}"
    )


# %% tags=["export"] module="optimizer_state" jupyter={"source_hidden": true}
# %%ranks
def new_entry(layout: FlatLayout, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a flat tensor for one entry of the state, with the values for parameters that lack the entry.

    These are zeros. The exception is master weights (lab 06): a parameter that was never updated is its own master.
    """
    flat = layout.new_flat(torch.promote_types(dtype, layout.parameters[0].dtype))
    if name == "master":
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(parameter.detach())
    return flat


# %% tags=["exercise", "export"] grade_id="shard-entry" module="optimizer_state"
# %%ranks
def shard_entry(layout: FlatLayout, name: str, values: list):
    """Keep this rank's shard of one entry of the parameters' states, or a copy of one that they share.

    Args:
        values: the entry of each of the layout's parameters, or None for a parameter that lacks it.
    """
    known = next((value for value in values if value is not None), None)
    ### BEGIN SOLUTION
    if not is_per_element(name, values, layout.parameters):
        return known.clone() if torch.is_tensor(known) else known
    flat = new_entry(layout, name, known.dtype)
    for view, value in zip(layout.views(flat), values, strict=True):
        if value is not None:
            view.copy_(value)
    return layout.shard_of(flat).clone()  # a view would keep all of flat alive
    ### END SOLUTION


# %% [markdown]
# Try both directions. The next cell trains two parameters of 5 and 4 elements for one step, gathers the state, and
# loads it again. The gathered `exp_avg` of the first parameter should have 5 elements, and each rank's shard 3.

# %%
# %%ranks
parameters = [nn.Parameter(torch.ones(numel, device=device)) for numel in (5, 4)]
zero1 = ZeRO1(parameters, torch.optim.Adam)
sum(parameter.sum() for parameter in parameters).backward()
zero1.step()
full_state = zero1.state_dict()
zero1.load_state_dict(full_state)
shard_entries = zero1.inner.state[zero1.flat_parameters[0].shard]
print(len(full_state["state"][0]["exp_avg"]), len(shard_entries["exp_avg"]))

# %% [markdown]
# In the check, look at the line `state` first, for which `gather_state` is enough:

# %% tags=["check"] grade_id="check-state-dict" points=4
check.state_dict()

# %% [markdown]
# ## Comparing your optimizer with torch's (5 min)
#
# Three versions train a small GPT on text: plain AdamW under torch's DDP, torch's `ZeroRedundancyOptimizer` under DDP,
# and your `ZeRO1`. Mismatch detection (chapter 00) is turned off from here on, because it adds a small all-reduce to
# each collective.


# %%
# %%ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=128)
samples = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)
inputs, targets = (tensor.to(device) for tensor in samples)


def in_ddp():
    return DistributedDataParallel(TinyGPT(config).to(device), gradient_as_bucket_view=True)


# %%
# %%ranks
def steps_of(model, optimizer, steps=4):
    """Train. Returns the last loss, the last step's ledger, and the memory over one more step."""
    for _ in range(steps):
        optimizer.zero_grad()
        with wire.ledger() as log:
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
    with memory.peak(model, optimizer) as peak:
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
    return loss.item(), log, peak


# %%
# %%ranks
settings = {"lr": 3e-3}
adamw = torch.optim.AdamW
ddp, ddp_sharded, alone = in_ddp(), in_ddp(), TinyGPT(config).to(device)
sharded = ZeroRedundancyOptimizer(ddp_sharded.parameters(), adamw, **settings)
results = {
    "DDP, AdamW": steps_of(ddp, adamw(ddp.parameters(), **settings)),
    "DDP, torch's ZeRO-1": steps_of(ddp_sharded, sharded),
    "your ZeRO1": steps_of(alone, ZeRO1(alone.parameters(), adamw, **settings)),
}

# %% [markdown]
# Compare the losses, and what each version has to send:

# %% tags=["nbval-ignore-output"]
results = ranks.pull("results")[0]
losses = [loss for loss, _, _ in results.values()]
assert max(losses) - min(losses) < 1e-3
plain_mb, torchs_mb, yours_mb = (log.sent_bytes / 1e6 for _, log, _ in results.values())
assert yours_mb < 1.05 * plain_mb and torchs_mb > 1.2 * plain_mb
rows = [
    [
        name,
        f"{loss:.4f}",
        f"{log.messages}",
        f"{log.sent_bytes / 1e6:.2f}",
        f"{peak.peak_bytes / 1e6:.2f}",
    ]
    for name, (loss, log, peak) in results.items()
]
header = ["", "loss", "operations", "must send, MB", "peak of the step, MB"]
tables.Table(header, rows, "One step on rank 0.")

# %% [markdown]
# Your optimizer sends no more than data parallelism. torch's sends more, because it broadcasts the parameters after DDP
# has all-reduced the gradients. At the peak, both hold less than plain DDP, because the state is sharded. On CPUs, the
# collectives of lab 01 exchange shards directly: to each of the three other ranks, a rank sends one shard for the
# reduce-scatter and one for the all-gather, and it receives as many. The ledger counts each of these as an operation: 3
# sends and 3 receives for the reduce-scatter, and as many for the all-gather.
#
# In the figure, compare what a rank holds between steps:

# %%
held = {name: peak.samples[-1].held.by_component() for name, (_, _, peak) in results.items()}
optimizer_bytes = [parts["optimizer"] for parts in held.values()]
assert optimizer_bytes[2] < 0.27 * optimizer_bytes[0]
plots.memory_by_component(held)

# %% [markdown]
# Your optimizer state is a quarter of AdamW's. Parameters and gradients are as large as before: all four ranks still
# hold all gradients, although each needs only its shard after the reduce-scatter. Chapter 08 frees the rest.

# %% [markdown]
# ## The same bytes, and less time (5 min)
#
# The lesson overlapped the all-gathers with the next forward, and let a hook of each block wait for them. What if
# somebody reads a parameter outside forward? The cells that you skipped in 7.2 and 7.4 make that safe, and your classes
# work with them as they are.
#
# With `ZeRO1(..., module=model)`, `OverlappedGradients`, a subclass of your `FlatGradients`, has the methods of a
# bucket, so lab 04's `GradientSync` launches the reduce-scatters during backward. And `OverlappedFlatParameter`, a
# subclass of your `FlatParameter`, launches the all-gathers. While its all-gather is in flight, a parameter's class is
# `InFlightParameter`. Any torch function that needs the values waits for the all-gather first, and restores the class.
# Code that bypasses torch functions, such as a `p.data` taken before the step, finds NaN at the end of the parameter.
# In the next cell, compare the class of a weight after `step()`, after `zero_grad()`, and after a read:

# %%
# %%ranks
model = TinyGPT(config).to(device)
optimizer = ZeRO1(model.parameters(), adamw, module=model, **settings)


def class_of_weight():
    return type(model.blocks[0].up.weight).__name__


model(inputs, targets).backward()
optimizer.step()
classes = [class_of_weight()]
optimizer.zero_grad()
classes.append(class_of_weight())
model.blocks[0].up.weight.norm()
print(*classes, class_of_weight())

# %% [markdown]
# `zero_grad()` needs no value, so it does not wait. The norm does. `python -m benchmarks.sharded_overlap` measures
# what the overlap is worth.

# %%
ranks.stop()
