# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 75
#     gpu_per_rank: true
# ---

# %% [markdown]
# # Lab 10 · FSDP
#
# **75 minutes, 17 points.** `PlainZeRO3` of lab 09 trains plain models. In this lab you build `ZeRO3`, which trains any
# model: with frozen, tied and unused parameters, nested units, activation checkpointing and bf16. It prefetches, and it
# can be saved on four ranks and loaded on two. It is what torch calls *fully sharded data parallelism* (FSDP), and its
# methods have the names that they have in torch's `fully_shard`.
#
# You build it from small objects and wire them once. Each exercise has a check, and its first line, a plain case,
# passes when the main idea is right.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero3 as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""ZeRO stage 3: every rank holds one shard of everything, and unshards a unit's parameters while it computes."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from solutions.clipping import clip_shards_
from solutions.overlapped_ddp import watch_gradients
from solutions.units import Call, Unit, UnitState, shard_into_units
from solutions.zero2 import ShardedBucket

# %% [markdown]
# ## Exercise 10.1 · Prefetching the next units (10 min, 2 points)
#
# `PlainZeRO3` waits for each unit's all-gather before the unit computes. If the all-gather of the *next* unit is
# launched now, it is in flight while this one computes. That is called **prefetching**, and it costs the memory of one
# more unsharded unit.
#
# Which unit is next? A `Prefetcher` remembers. `called` lists the units of this forward in the order of their calls,
# and `expected` lists those of the previous forward. Both are given, and so is `_unshard(following)`, which launches
# the first `units_ahead` of a list.
#
# - `in_forward(unit)` is called when a unit's forward begins. Add the unit to `called`. As long as `called` is how
#   `expected` begins, prefetch what followed in `expected`. If the order has changed, prefetch nothing.
# - `in_backward(unit)` is called when a unit's backward begins. Backward goes through `called` from its end, so the
#   units that were called *before* this one come next. Skip those without `open_calls`: backward will not reach them,
#   because nothing before them is trained. A unit that is not in `called` belongs to an earlier forward; prefetch
#   nothing then.
#
# ```python
# # previous forward: a b c d                 # this forward: a b c d
# in_forward(b)     # launches c              in_backward(c)     # launches b
# ```
#
# The check uses units that only log `unshard()`, so no rank communicates here.
#
# <details><summary>Hint</summary>
#
# `self.expected[: len(self.called)]` is what `called` must be equal to, and `self.expected[len(self.called) :]` is what
# comes next.
#
# </details>


# %% tags=["exercise", "export"] grade_id="prefetcher"
# %%ranks
class Prefetcher:
    """Launches the all-gathers of the next units while the current one computes.

    In forward, it expects the order of the previous forward; in backward, the reverse of this forward's order.
    """

    def __init__(self, units_ahead: int):
        self.units_ahead = units_ahead
        self.expected: list[
            Unit
        ] = []  # the units of the previous forward, in the order of their calls
        self.called: list[Unit] = []  # those of this forward

    def begin_forward(self) -> None:
        self.expected, self.called = self.called, []

    def in_forward(self, unit: Unit) -> None:
        """Prefetch what followed this unit in the previous forward, as long as the order is the same."""
        ### BEGIN SOLUTION
        self.called.append(unit)
        if self.called == self.expected[: len(self.called)]:
            self._unshard(self.expected[len(self.called) :])
        ### END SOLUTION

    def in_backward(self, unit: Unit) -> None:
        """Prefetch the units that were called before this one, if backward will reach them."""
        ### BEGIN SOLUTION
        if unit in self.called:  # the unit may belong to an earlier forward
            backwards = self.called[::-1]
            following = backwards[backwards.index(unit) + 1 :]
            self._unshard([each for each in following if each.open_calls])
        ### END SOLUTION

    def _unshard(self, following: list[Unit]) -> None:
        for unit in following[: self.units_ahead]:
            unit.unshard()


# %% tags=["check"] grade_id="check-prefetcher" points=2
check.Prefetcher()

# %% [markdown]
# ## Exercise 10.2 · Reducing the gradients of a unit (10 min, 2 points)
#
# Each unit has one `ShardedBucket` (lab 08) per trained flat parameter. In lab 04 a bucket was launched as soon as it
# was full. Here that is not safe.
#
# **Predict.** Two ranks, three blocks, `prefetch=0`. Rank 1 does not use one parameter of block 1, rank 0 uses all.
# Suppose that every rank launches a block's reduce-scatter when its last gradient has come. Backward has just unsharded
# block 1. Which collective does each rank launch next?

# %%
prediction_rank_0 = ""  # <- "reduce-scatter of block …" or "all-gather of block …"
prediction_rank_1 = ""

# %% [markdown]
# Rank 0 launches the reduce-scatter of block 1. On rank 1, block 1 is never full, so the next thing it launches is the
# all-gather of block 0. The two collectives do not belong together: the ranks hang, crash, or compute wrong values.
#
# So `GradientReducer` separates the two steps. `on_gradient` only packs. Somebody else, who is at the same point on
# every rank, says when buckets are to be reduced.
#
# - `on_gradient(bucket_index, index)` is called by autograd for `self.buckets[bucket_index].parameters[index]`. Pack
#   the gradient with `bucket.pack(index)`, and take `index` out of `self.missing[bucket]`. If it is not in there, raise
#   a `RuntimeError` that says to call `finish_gradient_sync()` after each `backward()`.
# - `reduce(buckets)` launches each of these buckets unless it is in `self.launched` already. Before the launch, pack
#   every index that is still missing: `bucket.pack(index)` takes a gradient of `None` for zeros. Set `bucket.previous`
#   to the bucket that was launched last, or to `None`; a bucket's `launch()` waits for its `previous` one.
# - `finish()` reduces the remaining buckets, waits for all of them, and begins anew.
#
# The beginning of the class is given below. The exercise continues it: a cell that starts with `class Name(Name):` adds
# methods to the class of that name. When you change such a cell, also run the cells after it that continue the class.
#
# <details><summary>Hint</summary>
#
# A bucket that is launched has nothing missing any more. If you leave its indices in `self.missing`, a gradient that
# comes too late is packed into a bucket that is in flight.
#
# </details>


# %% tags=["export"]
# %%ranks
class GradientReducer:
    """Packs gradients as backward computes them, and reduce-scatters whole buckets when it is told to.

    A gradient's hook packs, but launches nothing: a parameter may be unused on some ranks, and every rank must launch
    the same collectives in the same order.
    """

    def __init__(self, buckets: Sequence[ShardedBucket]):
        self.buckets = buckets
        self._begin()
        watch_gradients(buckets, self.on_gradient)

    def _begin(self) -> None:
        self.missing = {bucket: set(range(len(bucket.parameters))) for bucket in self.buckets}
        self.launched: list[ShardedBucket] = []

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        watch_gradients(
            self.buckets, self.on_gradient
        )  # deepcopy: the hooks stay with the original's parameters


# %% tags=["exercise", "export"] grade_id="gradient-reducer"
# %%ranks
class GradientReducer(GradientReducer):
    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that backward() has just completed.

        Raises:
            RuntimeError: if this parameter's gradient is already packed.
        """
        ### BEGIN SOLUTION
        bucket = self.buckets[bucket_index]
        if index not in self.missing[bucket]:
            raise RuntimeError(
                "got a second gradient for this parameter: call finish_gradient_sync() after each backward()"
            )
        self.missing[bucket].remove(index)
        bucket.pack(index)
        ### END SOLUTION

    def reduce(self, buckets: Iterable[ShardedBucket]) -> None:
        """Launch the reduce-scatters of buckets, unless they are launched. Missing gradients count as zeros."""
        ### BEGIN SOLUTION
        for bucket in buckets:
            if bucket in self.launched:
                continue
            for index in sorted(self.missing[bucket]):
                bucket.pack(index)
            self.missing[bucket] = set()
            bucket.previous = self.launched[-1] if self.launched else None
            bucket.launch()
            self.launched.append(bucket)
        ### END SOLUTION

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and begin anew."""
        ### BEGIN SOLUTION
        self.reduce(self.buckets)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-gradient-reducer" points=2
check.GradientReducer()

# %% [markdown]
# ## When is backward done with a unit?
#
# Lab 09 counted gradients, and the count never ends when one is missing. Autograd knows better. Backward computes the
# gradients of a unit's *inputs* last, when everything inside the unit is done. So we pass the inputs through a function
# that changes nothing, and whose backward calls us. This is FSDP2's trick too.


# %% tags=["export"]
# %%ranks
class AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs when backward is done with that call of the unit."""

    @staticmethod
    def forward(ctx, post_backward, *inputs: torch.Tensor):
        ctx.post_backward = post_backward
        ctx.set_materialize_grads(False)  # an input without a gradient stays without one
        return inputs

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        ctx.post_backward()
        return None, *gradients


# %%
# %%ranks 0
x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
weight.register_hook(lambda _: print("the gradient of the weight"))
(inside,) = AfterBackward.apply(lambda: print("backward is done with this call"), x)
output = inside * weight
output.register_hook(lambda _: print("the gradient of the output"))
output.sum().backward()

# %% [markdown]
# Also given: two hooks for `state_dict()`. A wrapper's `state_dict()` holds this rank's shards, and leaves out the
# parameters of the model, which have no memory between steps.


# %% tags=["export"] module="model_state"
# %%ranks
"""State of a sharded model: full state dicts, and views for torch.distributed.checkpoint."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from solutions.collectives import gather_shards
from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter


def drop_full_parameters(wrapper: nn.Module, state: dict, prefix: str, _metadata) -> None:
    """Keep a wrapper's state_dict() about its shards: the module's parameters have no memory between steps."""
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def expect_no_full_parameters(wrapper: nn.Module, keys) -> None:
    """Let a wrapper's load_state_dict() do without the module's parameters."""
    full = {name for name, _ in wrapper.module.named_parameters("module", remove_duplicate=False)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in full]


# %% [markdown]
# ## The class
#
# `ZeRO3` is one class, spread over seven cells in the order in which a training step happens. The first three are
# given: what the class is, its constructor, and `forward`. Read them before you go on.


# %% tags=["export"]
# %%ranks
class ZeRO3(nn.Module):
    """ZeRO stage 3: train module with parameters, gradients and optimizer state sharded over the ranks of the group.

    parameters() are this rank's shards: give them to any optimizer that treats each element by itself. Call
    finish_gradient_sync() after backward(). All ranks must call the same units in the same order, and backward must
    reach the same ones. As in FSDP2, a unit may not change an input that needs a gradient in place: autograd raises a
    RuntimeError.

    Args:
        units: submodules to unshard one at a time; by default, the layers of the module's ModuleLists and Sequentials.
        compute_dtype: dtype of the unsharded parameters; by default, the parameters' own.
        prefetch: how many units to unshard ahead.
        reshard_after_forward: whether to free a unit's parameters between its forward and its backward.

    Memory: with Adam in fp32, 16Ψ/N bytes for Ψ parameters on N ranks, plus the unsharded units: the root, the current
        unit and the prefetched ones. In backward, a unit whose inputs need no gradient stays until
        finish_gradient_sync().
    Communication: per micro-batch, two all-gathers and one reduce-scatter of each unit: 3(N−1)/N · 4Ψ bytes sent per
        rank; 2(N−1)/N · 4Ψ for the root, and for every unit if reshard_after_forward is False.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.3 and §7; Zhao et al. 2023, "PyTorch FSDP", §3.
    """


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.module, self.group = module, group
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)

        unit_of = shard_into_units(module, units, compute_dtype, reshard_after_forward, group)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.flat_parameters = [flat for unit in self.units for flat in unit.flat_parameters]
        self.shards = nn.ParameterList(flat.shard for flat in self.flat_parameters)

        self.prefetcher = Prefetcher(prefetch)
        self.buckets_of = {
            unit: [ShardedBucket(flat) for flat in unit.flat_parameters if flat.shard.requires_grad]
            for unit in self.units
        }
        self.reducer = GradientReducer([each for own in self.buckets_of.values() for each in own])
        self.calls: dict[Unit, Call] = {}  # of the units whose forward is running
        self.pending = False  # whether backward has run since the last finish_gradient_sync()

        for submodule, unit in unit_of.items():
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit), with_kwargs=True)
            submodule.register_forward_hook(partial(self.post_forward, unit))
        self.register_state_dict_post_hook(drop_full_parameters)
        self.register_load_state_dict_post_hook(expect_no_full_parameters)


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    # -- one training step, in the order in which it happens

    def forward(self, *inputs, **kwargs):
        if self.pending:  # gradients of an earlier micro-batch
            self.finish_gradient_sync()
        self._reshard_all()  # an optimizer may have stepped since a unit was unsharded
        self.prefetcher.begin_forward()
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self._reshard_all()  # units that were prefetched but not called
        return output

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()


# %% [markdown]
# ## Exercise 10.3 · The hooks of forward (10 min, 3 points)
#
# - `pre_forward`: make sure that the unit's parameters are here. If gradients are recorded (`torch.is_grad_enabled()`),
#   return what `self._watch_inputs(unit, inputs, kwargs)` returns: the new inputs. Otherwise return `None`.
# - `post_forward`: if gradients are recorded, call `self._watch_outputs(unit, output)`, for every unit, the root too.
#   Then reshard the unit, if `unit.reshard_after_forward` says so. Without gradients, always reshard it: no backward
#   will come.
# - In state BACKWARD, a forward is one that activation checkpointing runs again. Both hooks then do nothing.
#
# The root's `reshard_after_forward` is False. The two `_watch` methods are given below the exercise. They ask autograd
# to call the hooks of backward: `post_backward` through `AfterBackward` on the inputs, and `pre_backward` when the
# gradient of an output is complete.
#
# <details><summary>Hint</summary>
#
# Both hooks begin with the same question: is this a forward that runs inside backward?
#
# </details>


# %% tags=["exercise", "export"] grade_id="forward-hooks"
# %%ranks
class ZeRO3(ZeRO3):
    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, kwargs: dict):
        """Before a unit's forward: wait for its parameters, and prefetch the next unit's."""
        ### BEGIN SOLUTION
        if (
            unit.state is UnitState.BACKWARD
        ):  # activation checkpointing computes this unit's forward again
            return None
        unit.wait_for_unshard()
        if (
            unit is not self.root
        ):  # its embedding and its head are needed first and last: nothing runs ahead of it
            self.prefetcher.in_forward(unit)
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None
        ### END SOLUTION

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        """After a unit's forward: reshard it, and ask autograd to call pre_backward()."""
        ### BEGIN SOLUTION
        if unit.state is UnitState.BACKWARD:
            return
        if torch.is_grad_enabled():
            self._watch_outputs(unit, output)
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()
        ### END SOLUTION


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def _watch_inputs(self, unit: Unit, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Ask autograd to call post_backward() when it is done with this call of the unit."""
        call = self.calls[unit] = Call()
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if indices:
            inputs = (leaves[i] for i in indices)
            watched = AfterBackward.apply(lambda: self.post_backward(unit, call), *inputs)
            for i, tensor in zip(indices, watched, strict=True):
                leaves[i] = tensor
        return tree_unflatten(leaves, structure)

    def _watch_outputs(self, unit: Unit, output) -> None:
        """Ask autograd to call pre_backward() when the gradient of an output is complete."""
        call = self.calls.pop(unit)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                unit.open_calls.add(call)
                tensor.register_hook(lambda _gradient: self.pre_backward(unit, call))


# %% tags=["check"] grade_id="check-forward" points=3
check.Forward()

# %% [markdown]
# ## Exercise 10.4 · The hooks of backward (15 min, 4 points)
#
# - `pre_backward` is called when the gradient of one of the unit's outputs is complete. Set `self.pending`, make sure
#   that the parameters are here, and set the unit's state to BACKWARD.
# - `post_backward` is called when backward is done with one call of the unit. Take `call` out of `unit.open_calls`. If
#   there are other open calls, backward will come back to this unit, so stop here. Otherwise reduce
#   `self.buckets_of[unit]`, and reshard the unit.
# - `finish_gradient_sync`: finish the reducer, reshard all units, clear their open calls, and reset `self.pending`.
#
# All ranks run these hooks in the same order, because they call the same units in the same order. So that is where
# collectives may be launched. Two cases are left to `finish_gradient_sync`: a unit that this step did not call, and a
# unit whose inputs need no gradient, for which there is no `AfterBackward`.
#
# <details><summary>Hint 1</summary>
#
# A unit may be called twice, or in two forwards that share one backward. What would happen to it if it were reduced
# after the first of two calls?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A forward whose output nobody uses leaves calls that backward never reaches. Their graph is dropped, and with it the
# calls drop out of the weak set, unless something else holds them.
#
# </details>


# %% tags=["exercise", "export"] grade_id="backward-hooks"
# %%ranks
class ZeRO3(ZeRO3):
    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Before a unit's backward: wait for its parameters, and prefetch the next unit's."""
        ### BEGIN SOLUTION
        self.pending = True
        unit.wait_for_unshard()
        unit.state = UnitState.BACKWARD
        self.prefetcher.in_backward(unit)
        ### END SOLUTION

    def post_backward(self, unit: Unit, call: Call) -> None:
        """After a unit's backward: reduce its gradients, and reshard it."""
        ### BEGIN SOLUTION
        unit.open_calls.discard(call)
        if not unit.open_calls:  # or backward will come back to this unit
            self.reducer.reduce(self.buckets_of[unit])
            unit.reshard()
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Wait until every shard has its mean gradient.

        Communication: one reduce-scatter per bucket that is not launched yet.
        """
        ### BEGIN SOLUTION
        self.reducer.finish()
        self._reshard_all()
        for unit in self.units:
            unit.open_calls.clear()
        self.pending = False
        ### END SOLUTION


# %% tags=["check"] grade_id="check-backward" points=4
check.Backward()

# %% [markdown]
# ## Exercise 10.5 · Prefetching in a step (5 min, 2 points)
#
# Add one call of `self.prefetcher` to your `pre_forward`, and one to your `pre_backward`. Then run all cells of `ZeRO3`
# again, in order.
#
# - In `pre_forward`, call `in_forward(unit)` after the unit's own parameters are here, so that its all-gather goes
#   first. The root is not prefetched, and does not prefetch: nothing runs ahead of it.
# - In `pre_backward`, call `in_backward(unit)` at the end.
#
# <details><summary>Hint</summary>
#
# A forward in state BACKWARD must not reach the prefetcher: it would be listed as called twice.
#
# </details>

# %% tags=["check"] grade_id="check-prefetching" points=2
check.Prefetching()

# %% [markdown]
# The rest of the class is given. Clipping needs no more than the shards (lab 07). Saving and loading call functions
# that you write next.


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm. Returns the norm before."""
        return clip_shards_(
            [shard.grad for shard in self.shards if shard.grad is not None], max_norm, self.group
        )

    # -- copying, saving and loading

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather what module.state_dict() would return. See gather_full_state()."""
        return gather_full_state(self.module, self.flat_parameters)

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Keep this rank's shard of a full state. See load_full_state()."""
        load_full_state(self.module, self.flat_parameters, state_dict)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """View this rank's shards for torch.distributed.checkpoint. See sharded_state()."""
        return sharded_state(self.module, self.flat_parameters, optimizer)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        for flat_parameter in self.flat_parameters:
            # A parameter without memory cannot be copied: these become slices of the copied flat_param.
            parameters = flat_parameter.layout.parameters
            memo |= {
                id(each): nn.Parameter(each.detach(), each.requires_grad) for each in parameters
            }
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied


# %% [markdown]
# ## Exercise 10.6 · A full state dict (15 min, 2 points)
#
# A checkpoint for any number of ranks, and for no wrapper at all, holds every parameter in full, under the name that
# the module gives it.
#
# - `gather_full_state(module, flat_parameters)` is called by all ranks, and returns on each of them what
#   `module.state_dict()` would return without sharding: the same names in the same order, in the shards' dtype, buffers
#   included. All tensors are copies, so that a later forward does not change them. A tied parameter appears under all
#   its names.
# - `load_full_state(module, flat_parameters, state_dict)` is given a full state on every rank. Each rank keeps its
#   shards. A state with other names or shapes than the module's raises a `ValueError`. Buffers are loaded as well.
#
# `gather_shards(shard, group)` of lab 01 returns the flat tensor of all ranks' shards. A flat parameter's `layout` has
# `parameters`, `views(flat)`, `shard_of(flat)`, `new_flat(dtype)` and `group`. `module.state_dict(keep_vars=True)` has
# the parameters themselves as values, also while they have no memory.
#
# <details><summary>Hint 1</summary>
#
# Build a dictionary from each parameter to its full value. Then go through `module.state_dict(keep_vars=True)`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# To load, turn `own` (name to parameter) and `state_dict` (name to value) into a dictionary from each parameter or
# buffer to its new value. What is left when the parameters are taken out are the buffers.
#
# </details>


# %% tags=["exercise", "export"] grade_id="gather-full-state" module="model_state"
# %%ranks
@torch.no_grad()
def gather_full_state(
    module: nn.Module, flat_parameters: Iterable[ShardedFlatParameter]
) -> dict[str, torch.Tensor]:
    """Gather what module.state_dict() would return if module were not sharded. All ranks must call this.

    Communication: one all-gather per flat parameter.
    """
    ### BEGIN SOLUTION
    full = {}
    for flat_parameter in flat_parameters:
        flat = gather_shards(flat_parameter.shard, flat_parameter.layout.group)
        full |= zip(
            flat_parameter.layout.parameters, flat_parameter.layout.views(flat), strict=True
        )
    state = module.state_dict(keep_vars=True)
    return {name: full.get(value, value).detach().clone() for name, value in state.items()}
    ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="load-full-state" module="model_state"
# %%ranks
@torch.no_grad()
def load_full_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    state_dict: dict[str, torch.Tensor],
) -> None:
    """Keep this rank's shard of a full state.

    Raises:
        ValueError: for the state of another module.
    """
    ### BEGIN SOLUTION
    own = module.state_dict(keep_vars=True)
    shapes = {name: value.shape for name, value in own.items()}
    if shapes != {name: value.shape for name, value in state_dict.items()}:
        different = sorted(set(shapes) ^ set(state_dict)) or "the shapes"
        raise ValueError(f"this is the state of another module: {different} differ")
    given = {value: state_dict[name] for name, value in own.items()}
    for flat_parameter in flat_parameters:
        layout, shard = flat_parameter.layout, flat_parameter.shard
        flat = layout.new_flat(shard.dtype)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(given.pop(parameter))
        shard.copy_(layout.shard_of(flat))
    for buffer, value in given.items():
        buffer.copy_(value)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-full-state" points=2
check.FullState()

# %% [markdown]
# ## Exercise 10.7 · A sharded state dict (10 min, 2 points)
#
# A full state needs a rank with room for it. `torch.distributed.checkpoint` lets each rank write its own shards, and
# lets any other number of ranks read what they need. For that it must know where a shard belongs in the whole, and a
# `DTensor` says so. `as_dtensor(layout, value)` is given. So is `begin_state(optimizer)`, which a new optimizer needs
# before there is anything to load into.


# %% tags=["export"] module="model_state"
# %%ranks
def as_dtensor(layout: FlatLayout, value: torch.Tensor) -> DTensor:
    """Describe where a shard belongs in the flat tensor of all ranks. The result is a view, without the padding."""
    left = layout.numel - dist.get_rank(layout.group) * value.numel()
    mesh = DeviceMesh.from_group(layout.group or dist.group.WORLD, value.device.type)
    shape = {"shape": torch.Size([layout.numel]), "stride": (1,)}
    return DTensor.from_local(
        value.detach()[: max(0, left)], mesh, [Shard(0)], run_check=False, **shape
    )


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state before the first step, so that there is something to load into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# %% [markdown]
# `sharded_state(module, flat_parameters, optimizer)` returns a dictionary of this rank's shards and of the optimizer's
# state for them. The tensors share memory with the model and the optimizer, because `torch.distributed.checkpoint.load`
# fills them in place.
#
# - `f"{index}.shard"` is the shard of `flat_parameters[index]`, as a `DTensor`.
# - `f"{index}.{name}"` is the entry `name` of `optimizer.state` for that shard: a `DTensor` if it has the shard's
#   shape. Other entries, such as Adam's `step`, stay as they are.
# - `f"module.{name}"` is a buffer of the module.
#
# The check saves on four ranks and trains on with two. It also tries the finished class in all ways at once: clipping,
# a subgroup, bf16, copies.
#
# <details><summary>Hint</summary>
#
# `optimizer.state.get(shard, {})` is empty for an optimizer that has not stepped.
#
# </details>


# %% tags=["exercise", "export"] grade_id="sharded-state" module="model_state"
# %%ranks
def sharded_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    optimizer: torch.optim.Optimizer,
) -> dict:
    """View this rank's shards, and the optimizer's state of them, as torch.distributed.checkpoint saves and loads them.

    An optimizer that has not stepped has no state to load into: see begin_state().
    """
    ### BEGIN SOLUTION
    state = {f"module.{name}": buffer for name, buffer in module.named_buffers()}
    for index, flat_parameter in enumerate(flat_parameters):
        shard, layout = flat_parameter.shard, flat_parameter.layout
        for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
            is_sharded = torch.is_tensor(value) and value.shape == shard.shape
            state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
    return state
    ### END SOLUTION


# %% tags=["check"] grade_id="check-sharded-state" points=2
check.ShardedState()

# %% [markdown]
# ## Break it: no units
#
# Some code on the web wraps a model and names no units. Then the root is the only unit. Here is the same GPT both ways,
# beside your `ZeRO2` and torch's FSDP2. The ranks no longer compare their collectives, because that costs messages of
# its own.
#
# **Predict.** Ψ bytes of parameters, nearly all of them in eight blocks of equal size, and four ranks. What is the most
# that parameters take on a rank during a step, as a fraction of Ψ?

# %%
prediction_peak_with_units = None  # <- as a fraction of Ψ; 1 would mean: all parameters at once
prediction_peak_without = None  # <- as a fraction of Ψ

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.manual_ddp import broadcast_state
from solutions.zero2 import ZeRO2

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=8, width=128)
samples = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=32)
inputs, targets = (tensor.to(device) for tensor in samples)
settings = {"lr": 3e-3}


# %%
# %%ranks
def new_model():
    model = TinyGPT(config).to(device)
    broadcast_state(model)
    return model


def with_adamw(model):
    return model, torch.optim.AdamW(model.parameters(), **settings)


def in_zero2():
    model = ZeRO2(new_model(), torch.optim.AdamW, bucket_cap_mb=0.25, **settings)
    return model, model


def in_fsdp2():
    model = new_model()
    for each in (*model.blocks, model):
        fully_shard(each)
    return with_adamw(model)


# %%
# %%ranks
def steps_of(model, optimizer, steps=4):
    """Return the last loss, the ledger of the last step, and the memory of one more."""

    def step():
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()
        optimizer.step()
        return loss.item()

    for _ in range(steps):
        with wire.ledger() as log:
            loss = step()
    with memory.peak(model, optimizer) as peak:
        step()
    return loss, log, peak


# %%
# %%ranks
results = {
    "DDP, AdamW": steps_of(*with_adamw(DistributedDataParallel(new_model()))),
    "your ZeRO2": steps_of(*in_zero2()),
    "your ZeRO3, units=[]": steps_of(*with_adamw(ZeRO3(new_model(), units=[]))),
    "your ZeRO3": steps_of(*with_adamw(ZeRO3(new_model()))),
    "FSDP2": steps_of(*in_fsdp2()),
}

# %% tags=["nbval-ignore-output"]
from shared import plots, tables

results = ranks.pull("results")[0]
losses = [loss for loss, _, _ in results.values()]
assert max(losses) - min(losses) < 1e-3
rows, most_bytes = [], {}
for name, (loss, log, peak) in results.items():
    most_bytes[name] = max(sample.held.parameters_bytes for sample in peak.samples)
    sizes = (log.sent_bytes, most_bytes[name], peak.peak_bytes)
    rows.append([name, f"{loss:.4f}", *(f"{size / 1e6:.2f}" for size in sizes)])
peak_bytes = {name: peak.peak_bytes for name, (_, _, peak) in results.items()}
assert peak_bytes["your ZeRO3"] < peak_bytes["your ZeRO2"] < peak_bytes["your ZeRO3, units=[]"]
header = ["", "loss", "must send, MB", "parameters' peak, MB", "peak, MB"]
tables.Table(header, rows, "rank 0, one step")

# %% tags=["nbval-ignore-output"]
predicted = {
    "your ZeRO3": prediction_peak_with_units,
    "your ZeRO3, units=[]": prediction_peak_without,
}
for name, fraction in predicted.items():
    print(f"{name}: {most_bytes[name] / most_bytes['DDP, AdamW']:.2f} Ψ, predicted {fraction}")

# %% [markdown]
# With units, a rank holds its shards, the root and two blocks: one computes, and the next is prefetched. That second
# block is what your `ZeRO3` holds more than FSDP2 here.
#
# A single unit passes every check of values, and sends less. But its parameters take more than all of Ψ at the peak,
# and its whole peak is above that of `ZeRO2`, which shards no parameters.
#
# ## Your figure, and torch's answer
#
# This is one step of your `ZeRO3` with units:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO3"][2].samples)

# %% [markdown]
# In forward the blocks are unsharded and resharded from first to last, in backward from last to first. What is left is
# what one rank must hold: its shards, the units that compute, and the activations of its own micro-batch. To make
# activations smaller, use activation checkpointing (chapter 06) or split the computation itself: tensor parallelism,
# chapter 13.

# %%
ranks.stop()
