# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 75
# ---

# %% [markdown]
# # Lab 10 · FSDP
#
# **75 minutes, 17 points.** `PlainZeRO3` of lab 09 trains plain models. In this lab you build `ZeRO3`, which trains any
# model: with frozen, tied and unused parameters, nested units, activation checkpointing and bf16. It prefetches, and it
# can be saved on four ranks and loaded on two. It is what torch calls *fully sharded data parallelism* (FSDP), and its
# methods have the names that they have in torch's `fully_shard`.
#
# You build it from small objects, and connect them once. Each exercise has a check. Its first line is a plain case, and
# passes when the main idea is right.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero3 as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""ZeRO stage 3: every rank holds one shard of everything, and unshards a unit's parameters while the unit computes.

One training step calls these methods of ZeRO3, in this order:

1. In forward, the root is unsharded first, and stays so until step 3. For each other unit, pre_forward() unshards it:
   it waits for the all-gather of its parameters, which it launches first if the unit was not prefetched. From the
   second forward on, it then prefetches the next unit. The unit computes. Then post_forward() reshards it: the storage
   of flat_param shrinks to 0 bytes. The parameters that autograd has saved for backward share this storage, so they
   have their values again after the next unshard.
2. In backward, for each unit in reverse order: pre_backward() unshards it again, and prefetches the one called before
   it. Autograd computes the gradients, and GradientReducer packs each of them, divided by N, into a bucket. Then
   post_backward() waits for the reduce-scatter that was launched before, and adds its result to `shard.grad`. It
   launches the unit's own reduce-scatter, and reshards the unit. A unit whose inputs need no gradient, such as a root
   that gets tokens, has no post_backward().
3. finish_gradient_sync() launches the reduce-scatters that are left, such as the root's, waits until every shard has
   its mean gradient, and reshards all units. If backward did not reach a trained parameter, its gradient is zeros.
4. The caller's optimizer updates the shards. The next forward all-gathers the updated parameters.

Two things overlap. A prefetched all-gather is in flight while the current unit computes. A unit's reduce-scatter is in
flight during the backward of the next unit, whose own launch waits for it. The root prefetches nothing, so the first
all-gathers of forward and of backward are not hidden.
"""

import copy
from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from solutions.clipping import clip_shards_
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
# - `in_forward(unit)` is called when a unit's forward begins. Add the unit to `called`. If `called` is equal to the
#   beginning of `expected`, prefetch the units that follow in `expected`. If the order has changed, prefetch nothing.
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


# %% tags=["export"] module="prefetching"
# %%ranks
"""Prefetching: the all-gathers of the next units are launched before anything waits for them."""

from solutions.units import Unit


# %% tags=["exercise", "export"] grade_id="prefetcher" module="prefetching"
# %%ranks
class Prefetcher:
    """Launches the all-gathers of the next units while the current one computes.

    In forward, it expects the order of the previous forward; in backward, the reverse of this forward's order.

    Args:
        units_ahead: how many units to prefetch.
    """

    def __init__(self, units_ahead: int):
        self.units_ahead = units_ahead
        # In the order of their calls: the units of the previous forward, and those of this one.
        self.expected: list[Unit] = []
        self.called: list[Unit] = []

    def begin_forward(self) -> None:
        """Expect the order of the forward that has just ended, and record the calls of a new one."""
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
            reversed_calls = self.called[::-1]
            following = reversed_calls[reversed_calls.index(unit) + 1 :]
            self._unshard([earlier for earlier in following if earlier.open_calls])
        ### END SOLUTION

    def _unshard(self, following: list[Unit]) -> None:
        """Launch the all-gathers of the first units_ahead units of a list."""
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
# Suppose that every rank launches a block's reduce-scatter when the last of its gradients is complete. Backward has
# just unsharded block 1. Which collective does each rank launch next?

# %%
prediction_rank_0 = ""  # <- "reduce-scatter of block …" or "all-gather of block …"
prediction_rank_1 = ""

# %% [markdown]
# Rank 0 launches the reduce-scatter of block 1. On rank 1, block 1 is never full, so the next thing it launches is the
# all-gather of block 0. The two collectives do not belong together: the ranks hang, crash, or compute wrong values.
#
# So `GradientReducer` separates the two steps. `on_gradient` only packs. The wrapper calls `reduce` at a moment that is
# the same on every rank.
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
# Once a bucket is launched, none of its gradients may be missing. If you leave indices in `self.missing`, a gradient
# that comes too late is packed into a bucket that is in flight.
#
# </details>


# %% tags=["export"] module="reducing"
# %%ranks
"""Reducing gradients: packed as soon as they are complete, reduce-scattered when all ranks are at the same point."""

from collections.abc import Iterable, Sequence

from solutions.overlapped_ddp import watch_gradients
from solutions.zero2 import ShardedBucket


# %% tags=["export"] module="reducing"
# %%ranks
class GradientReducer:
    """Packs gradients while backward computes them, and reduce-scatters buckets when reduce() is called.

    The hook of a gradient launches nothing, because a parameter may be unused on some ranks, and every rank must launch
    the same collectives in the same order.

    `missing[bucket]` holds the indices of the gradients that are not packed yet. `launched` lists the buckets launched
    in this backward, in order.
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
        watch_gradients(self.buckets, self.on_gradient)  # deepcopy does not copy hooks


# %% tags=["exercise", "export"] grade_id="gradient-reducer" module="reducing"
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
        """Launch the reduce-scatters of buckets that are not launched yet. Missing gradients count as zeros.

        Communication: one reduce-scatter per bucket launched.
        """
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
        """Reduce the remaining buckets, wait for all of them, and get ready for the next backward."""
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
# Lab 09 counted gradients, and the count is never complete when one is missing. Autograd knows better. Backward
# computes the gradients of a unit's *inputs* last, when everything inside the unit is done. So we pass the inputs
# through a function that changes nothing, but whose backward calls `post_backward`. FSDP2 does the same.


# %% tags=["export"]
# %%ranks
def needs_gradient(value) -> bool:
    """Tell whether a value among the inputs or outputs of a unit is a tensor that autograd tracks."""
    return isinstance(value, torch.Tensor) and value.requires_grad


class AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. It calls post_backward() when backward is done with this call of the unit.

    Autograd computes the gradients of a unit's inputs last, so the gradients of its parameters are packed by then.
    """

    @staticmethod
    def forward(ctx, post_backward, *inputs: torch.Tensor):
        ctx.post_backward = post_backward
        ctx.set_materialize_grads(False)  # an input without a gradient gets None, not zeros
        return inputs

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        ctx.post_backward()
        return None, *gradients


# %%
# %%ranks 0
x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
weight.register_hook(lambda _: print("The gradient of the weight is complete."))
(inside,) = AfterBackward.apply(lambda: print("Backward is done with this call."), x)
output = inside * weight
output.register_hook(lambda _: print("The gradient of the output is complete."))
output.sum().backward()

# %% [markdown]
# Two hooks for `state_dict()` are given, too. A wrapper's `state_dict()` holds this rank's shards, and leaves out the
# parameters of the model, which have no memory between steps.


# %% tags=["export"] module="model_state"
# %%ranks
"""State dicts of a sharded model: full ones, and sharded ones for torch.distributed.checkpoint."""

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
    """Leave the module's parameters out of a wrapper's state_dict(): between steps, only its shards have memory."""
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def expect_no_full_parameters(wrapper: nn.Module, keys) -> None:
    """Let a wrapper's load_state_dict() accept a state without the module's parameters."""
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

    parameters() are this rank's shards: give them to any optimizer that updates each element by itself. Call
    finish_gradient_sync() after backward(). All ranks must call the same units in the same order, and backward must
    reach the same ones. As in FSDP2, a unit may not change an input that needs a gradient in place: autograd raises a
    RuntimeError.

    Args:
        units: submodules that are unsharded one at a time; by default, the layers of the module's ModuleLists and
            Sequentials.
        compute_dtype: dtype of the unsharded parameters and of the gradients that are sent; by default, the parameters'
            own.
        prefetch: how many units to unshard ahead.
        reshard_after_forward: whether to free a unit's parameters between its forward and its backward.

    Memory: with Adam in fp32, 16Ψ/N bytes for Ψ parameters on N ranks, plus the unsharded units: the root, the current
        unit and the prefetched ones; and in backward the full gradients of the root, of the current unit, and of the
        unit whose reduce-scatter is in flight. A unit whose inputs need no gradient stays until finish_gradient_sync().
    Communication: per micro-batch and unit of ψ parameters, two all-gathers and one reduce-scatter: 3(N−1)/N · 4ψ bytes
        sent per rank; 2(N−1)/N · 4ψ for the root, and for every unit if reshard_after_forward is False.
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

        # This also broadcasts the parameters.
        unit_of = shard_into_units(module, units, compute_dtype, reshard_after_forward, group)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.flat_parameters = [flat for unit in self.units for flat in unit.flat_parameters]
        self.shards = nn.ParameterList(flat.shard for flat in self.flat_parameters)

        self.prefetcher = Prefetcher(prefetch)
        self.buckets_of = {
            unit: [ShardedBucket(flat) for flat in unit.flat_parameters if flat.shard.requires_grad]
            for unit in self.units
        }
        self.reducer = GradientReducer(list(chain.from_iterable(self.buckets_of.values())))
        self.calls: dict[Unit, Call] = {}  # the current call of each unit whose forward is running
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

    # One training step, in the order in which it happens.

    def forward(self, *inputs, **kwargs):
        """Run the module's forward, with each unit unsharded while it computes.

        Communication: one all-gather per flat parameter. A unit has one for each dtype and device of its parameters,
            and separate ones for frozen parameters.
        """
        # After an earlier micro-batch that was not finished, some gradients may still be in buckets.
        if self.pending:
            self.finish_gradient_sync()
        self._reshard_all()  # after a forward without backward, the root still has the parameters of that time
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
# - `pre_forward`: wait until the unit's parameters are unsharded. If gradients are recorded
#   (`torch.is_grad_enabled()`), return what `self._watch_inputs(unit, inputs, kwargs)` returns: the new inputs.
#   Otherwise return `None`.
# - `post_forward`: if gradients are recorded, call `self._watch_outputs(unit, output)`, for every unit, the root too.
#   Then reshard the unit if `unit.reshard_after_forward` is True. Without gradients, always reshard it, because there
#   will be no backward.
# - If the unit is in state BACKWARD, activation checkpointing is running its forward again. Both hooks then do nothing.
#
# The root's `reshard_after_forward` is False. The two `_watch` methods are given below the exercise. They ask autograd
# to call the hooks of backward: `post_backward` through `AfterBackward` on the inputs, and `pre_backward` when the
# gradient of an output is complete.
#
# <details><summary>Hint</summary>
#
# Both hooks begin with the same question: does this forward run inside backward?
#
# </details>


# %% tags=["exercise", "export"] grade_id="forward-hooks"
# %%ranks
class ZeRO3(ZeRO3):
    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, kwargs: dict):
        """Unshard a unit before its forward, or wait for its prefetched all-gather, and prefetch the next unit."""
        ### BEGIN SOLUTION
        if unit.state is UnitState.BACKWARD:
            return None  # activation checkpointing is running this unit's forward again
        unit.wait_for_unshard()
        # The root computes before and after all others, so it has no next unit.
        if unit is not self.root:
            self.prefetcher.in_forward(unit)
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None
        ### END SOLUTION

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        """Reshard a unit after its forward, and ask autograd to call pre_backward()."""
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
        """Return the inputs, such that autograd calls post_backward() when it is done with this call of the unit."""
        call = self.calls[unit] = Call()
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if needs_gradient(leaf)]
        if indices:
            tensors = [leaves[index] for index in indices]
            watched = AfterBackward.apply(lambda: self.post_backward(unit, call), *tensors)
            for index, tensor in zip(indices, watched, strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, structure)

    def _watch_outputs(self, unit: Unit, output) -> None:
        """Ask autograd to call pre_backward() when the gradient of an output is complete.

        The hooks keep the call alive: it stays in the unit's open_calls for as long as backward may reach it.
        """
        call = self.calls.pop(unit)
        for leaf in tree_leaves(output):
            if needs_gradient(leaf):
                unit.open_calls.add(call)
                leaf.register_hook(lambda _gradient: self.pre_backward(unit, call))


# %% tags=["check"] grade_id="check-forward" points=3
check.Forward()

# %% [markdown]
# ## Exercise 10.4 · The hooks of backward (15 min, 4 points)
#
# - `pre_backward` is called when the gradient of one of the unit's outputs is complete. Set `self.pending` to True,
#   wait until the unit's parameters are unsharded, and set its state to BACKWARD.
# - `post_backward` is called when backward is done with one call of the unit. Take `call` out of `unit.open_calls`. If
#   there are other open calls, backward will come back to this unit, so do nothing else. Otherwise reduce
#   `self.buckets_of[unit]`, and reshard the unit.
# - `finish_gradient_sync`: finish the reducer, reshard all units, clear their open calls, and set `self.pending` to
#   False.
#
# All ranks run these hooks in the same order, because they call the same units in the same order. So the hooks may
# launch collectives. Two cases are left to `finish_gradient_sync`: a unit that this step did not call, and a unit whose
# inputs need no gradient, for which there is no `AfterBackward`.
#
# <details><summary>Hint 1</summary>
#
# A unit may be called twice, or in two forwards that share one backward. What would happen to it if it were reduced
# after the first of two calls?
#
# </details>
# <details><summary>Hint 2</summary>
#
# If the output of a forward is not used, its calls stay open, because backward never reaches them. When their graph is
# freed, the calls drop out of the weak set, unless something else keeps them alive.
#
# </details>


# %% tags=["exercise", "export"] grade_id="backward-hooks"
# %%ranks
class ZeRO3(ZeRO3):
    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Unshard a unit before its backward, or wait for its all-gather, and prefetch the unit called before it."""
        ### BEGIN SOLUTION
        self.pending = True
        unit.wait_for_unshard()
        unit.state = UnitState.BACKWARD
        self.prefetcher.in_backward(unit)  # does nothing for the root, which is never in `called`
        ### END SOLUTION

    def post_backward(self, unit: Unit, call: Call) -> None:
        """Reduce a unit's gradients after its backward, and reshard it."""
        ### BEGIN SOLUTION
        unit.open_calls.discard(call)
        if not unit.open_calls:  # otherwise, backward will come back to this unit
            self.reducer.reduce(self.buckets_of[unit])
            unit.reshard()
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Launch the remaining reduce-scatters, wait until every shard has its mean gradient, and reshard all units.

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
# - In `pre_forward`, call `in_forward(unit)` after waiting for the unit's own parameters, so that its all-gather is
#   launched first. Do not call it for the root, which is neither prefetched nor prefetches other units.
# - In `pre_backward`, call `in_backward(unit)` at the end.
#
# <details><summary>Hint</summary>
#
# In state BACKWARD, `pre_forward` must not call the prefetcher, or the unit would be listed as called twice.
#
# </details>

# %% tags=["check"] grade_id="check-prefetching" points=2
check.Prefetching()

# %% [markdown]
# The rest of the class is given. Clipping needs only the shards (lab 07). Saving and loading call functions that you
# write next.


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm.

        Returns:
            The norm before scaling.
        """
        gradients = [shard.grad for shard in self.shards if shard.grad is not None]
        return clip_shards_(gradients, max_norm, self.group)

    # Saving, loading and copying.

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather what module.state_dict() would return without sharding. See gather_full_state()."""
        return gather_full_state(self.module, self.flat_parameters)

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Keep this rank's shard of a full state. See load_full_state()."""
        load_full_state(self.module, self.flat_parameters, state_dict)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """View this rank's shards for torch.distributed.checkpoint. See sharded_state()."""
        return sharded_state(self.module, self.flat_parameters, optimizer)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        for flat_parameter in self.flat_parameters:
            # deepcopy cannot copy a parameter without memory. These become slices of the copied flat_param.
            for parameter in flat_parameter.layout.parameters:
                memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
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
# - `load_full_state(module, flat_parameters, state_dict)` gets a full state on every rank. Each rank keeps its shards.
#   If the state has other names or shapes than the module's, raise a `ValueError`. Buffers are loaded as well.
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
# buffer to its new value. Take out the parameters, and the buffers are left.
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
    full_value = {}
    for flat_parameter in flat_parameters:
        layout = flat_parameter.layout
        flat = gather_shards(flat_parameter.shard, layout.group)
        full_value |= zip(layout.parameters, layout.views(flat), strict=True)
    state = module.state_dict(keep_vars=True)
    return {name: full_value.get(value, value).detach().clone() for name, value in state.items()}
    ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="load-full-state" module="model_state"
# %%ranks
@torch.no_grad()
def load_full_state(
    module: nn.Module,
    flat_parameters: Iterable[ShardedFlatParameter],
    state_dict: dict[str, torch.Tensor],
) -> None:
    """Keep this rank's shards of a full state, and load the buffers.

    Raises:
        ValueError: if the state belongs to another module.
    """
    ### BEGIN SOLUTION
    own = module.state_dict(keep_vars=True)
    own_shapes = {name: value.shape for name, value in own.items()}
    given_shapes = {name: value.shape for name, value in state_dict.items()}
    if own_shapes != given_shapes:
        different = sorted({name for name, _ in own_shapes.items() ^ given_shapes.items()})
        raise ValueError(
            "this state belongs to another module: "
            f"{different} are not in both, or do not have the same shape in both"
        )
    new_value = {value: state_dict[name] for name, value in own.items()}
    for flat_parameter in flat_parameters:
        layout, shard = flat_parameter.layout, flat_parameter.shard
        flat = layout.new_flat(shard.dtype)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(new_value.pop(parameter))
        shard.copy_(layout.shard_of(flat))
    for buffer, value in new_value.items():
        buffer.copy_(value)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-full-state" points=2
check.FullState()

# %% [markdown]
# ## Exercise 10.7 · A sharded state dict (10 min, 2 points)
#
# A full state needs a rank with enough memory for it. `torch.distributed.checkpoint` lets each rank write its own
# shards, and lets any other number of ranks read what they need. For that it must know where a shard belongs in the
# flat tensor of all ranks, and a `DTensor` holds this information. `as_dtensor(layout, value)` is given. So is
# `begin_state(optimizer)`, because a new optimizer has no state to load into.


# %% tags=["export"] module="model_state"
# %%ranks
def as_dtensor(layout: FlatLayout, value: torch.Tensor) -> DTensor:
    """Describe where a shard belongs in the flat tensor of all ranks. The result is a view, without the padding."""
    begin = dist.get_rank(layout.group) * value.numel()
    unpadded = value.detach()[: max(0, layout.numel - begin)]
    mesh = DeviceMesh.from_group(layout.group or dist.group.WORLD, value.device.type)
    shape = {"shape": torch.Size([layout.numel]), "stride": (1,)}
    return DTensor.from_local(unpadded, mesh, [Shard(0)], run_check=False, **shape)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state before its first step, so that a checkpoint can be loaded into it.

    It steps once with gradients of zero and a learning rate of 0, which changes no parameter.
    """
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
# The check saves on four ranks and continues training on two. It also tries everything that the finished class can do:
# clipping, a subgroup, bf16, copies.
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
    """View this rank's shards, and the optimizer's state for them, in a dict for torch.distributed.checkpoint.

    An optimizer that has not stepped has no state to load into: call begin_state() first.
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
# beside your `ZeRO2` and torch's FSDP2. Mismatch detection is switched off, because it sends messages of its own.
#
# **Predict.** The parameters take Ψ bytes, nearly all of them in eight blocks of equal size, and there are four ranks.
# What is the most that parameters take on a rank during a step, as a fraction of Ψ?

# %%
prediction_peak_with_units = None  # <- as a fraction of Ψ; 1 would mean all parameters at once
prediction_peak_without = None  # <- as a fraction of Ψ

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
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
    model, mesh = new_model(), init_device_mesh(device.type, (world_size,))
    for submodule in (*model.blocks, model):
        fully_shard(submodule, mesh=mesh)
    return with_adamw(model)


# %%
# %%ranks
def steps_of(model, optimizer, steps=4):
    """Train, and return the last loss, the ledger of the last step, and the memory over one more step."""

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
    measured = most_bytes[name] / most_bytes["DDP, AdamW"]
    print(f"{name}: you predicted {fraction} Ψ, and it was {measured:.2f} Ψ.")

# %% [markdown]
# With units, a rank holds its shards, the root and two blocks: one computes, and the next one is prefetched. This
# second block is why your `ZeRO3` holds more than FSDP2 here.
#
# With a single unit, the values are right, and the model sends less. But its parameters take more than Ψ at the peak,
# and its whole peak is above that of `ZeRO2`, which shards no parameters.
#
# ## Your figure, and torch's answer
#
# This is one step of your `ZeRO3` with units:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO3"][2].samples)

# %% [markdown]
# In forward, the blocks are unsharded and resharded from first to last, and in backward from last to first. The rest is
# what one rank must hold in any case: its shards, the units that compute, and the activations of its own micro-batch.
# To make activations smaller, use activation checkpointing (chapter 06), or split the computation itself with tensor
# parallelism (chapter 13).

# %%
ranks.stop()
