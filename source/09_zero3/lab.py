# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 145
#     gpu_per_rank: true
# ---

# %% [markdown]
# # Lab 09 · ZeRO-3
#
# **145 minutes, 21 points.** You build `ZeRO3`: parameters live as shards, are gathered unit by unit while a unit
# computes, and freed when it is done. It is what torch calls fully sharded data parallelism.
#
# Each exercise has a check. Times are never judged; bytes are, at every moment of a step. The lab may be done in two
# sittings: after exercise 9.4, forward works. To go on, run the cells from the top.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero3 as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""ZeRO stage 3: each rank holds one N-th of everything, and gathers a unit's parameters while it computes with them."""

import copy
import enum
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from solutions.overlapped_ddp import LaunchQueue, on_gradients
from solutions.zero1 import FlatParameters, begin_all_gather, clip_norm_, collect
from solutions.zero2 import TravellingGradients

# %% [markdown]
# ## Exercise 9.1 · Parameters without memory (20 min, 3 points)
#
# A tensor is a window on a *storage*, and a storage can be resized, to nothing and back. The window stays:

# %%
# %%ranks 0
tensor = torch.ones(1000)
part = tensor[:10]
storage = tensor.untyped_storage()
storage.resize_(0)
print(part.shape, storage.nbytes(), "bytes")
storage.resize_(tensor.nbytes)
tensor.fill_(2.0)
print(part[:3].tolist())

# %% [markdown]
# What autograd saves for backward is such a window, too. So a parameter may lose its memory after forward, and backward
# does not notice, if the same values are in place again by then. (What reads a tensor without memory mostly raises
# `RuntimeError: setStorage: … out of bounds for storage of size 0`. Where torch does not look, the process ends with a
# segmentation fault, SIGSEGV; then you are told so, and get new ranks.)
#
# `ShardedParameters(parameters, group, compute_dtype)` is lab 07's `FlatParameters` with two differences. `shard`, the
# `nn.Parameter` that an optimizer gets, has memory *of its own*, in the parameters' dtype. `flat`, of which the model's
# parameters are slices, is of `compute_dtype`, and has memory only between `gather()` and `free()`.
#
# - When built, all ranks get the values of the group's first one, and `flat` is free.
# - `gather()` begins to fill `flat` with all shards, in `compute_dtype`. → a handle with `wait()`. Use lab 07's
#   `begin_all_gather(flat, own, group)`.
# - `shard.requires_grad` is that of the parameters, which are of one kind.
#
# Target: after `free()`, one N-th of the parameters' bytes.


# %% tags=["exercise", "export"] grade_id="sharded-parameters"
# %%ranks
class ShardedParameters(FlatParameters):
    """Parameters of one dtype and device, of which each rank keeps one N-th, and has the rest from gather() to free().

    Shapes: shard [n], an nn.Parameter; flat [N · n] in compute_dtype, whose slices are the parameters.
    Comm: when built, one broadcast; gather() is one all_gather of flat.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group=None, compute_dtype: torch.dtype | None = None
    ):
        ### BEGIN SOLUTION
        super().__init__(parameters, group)
        dist.broadcast(self.flat, group=group, group_src=0)
        self.shard = nn.Parameter(
            self.own(self.flat).clone(), requires_grad=parameters[0].requires_grad
        )
        self.flat = self.flat.to(compute_dtype or self.flat.dtype)
        self._move_in()
        self.free()
        ### END SOLUTION

    def gather(self):
        """Begin to fill flat with all shards. → a handle with wait()"""
        ### BEGIN SOLUTION
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        return begin_all_gather(self.flat, self.shard.detach().to(self.flat.dtype), self.group)
        ### END SOLUTION

    def free(self) -> None:
        """Give flat's memory back."""
        ### BEGIN SOLUTION
        self.flat.untyped_storage().resize_(0)
        ### END SOLUTION

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)  # deepcopy: parameters must be slices of flat again
        self._move_in()


# %% tags=["check"] grade_id="check-sharded-parameters" points=3
check.ShardedParameters()

# %% [markdown]
# ## Exercise 9.2 · A unit and its states (10 min, 3 points)
#
# A **unit** is a part of the model that is gathered and freed as one, such as a block of a GPT. Its parameters may be
# of several kinds, so it has a list of `ShardedParameters`. At any time it is in one of four states:


# %% tags=["export"]
# %%ranks
class UnitState(enum.Enum):
    """Where a unit's parameters are, and what that costs. ψ: their bytes in the dtype that the unit computes with."""

    SHARDED = "this rank's part"
    GATHERING = "this rank's part, and ψ which fill while the others' parts arrive"
    GATHERED = "this rank's part, and ψ to compute with"
    BACKWARD = "this rank's part, ψ to compute with, and up to ψ of gradients"


class Call:
    """One call of a unit. Autograd holds it for as long as a backward may reach that."""


# %% [markdown]
# | | from | to |
# |---|---|---|
# | `begin_gather()` | SHARDED | GATHERING; from any other state, nothing happens |
# | `wait()` | SHARDED, GATHERING | GATHERED; in other states nothing happens |
# | `reshard()` | any | SHARDED. What is still under way must arrive first: its memory may not go |
#
# BACKWARD is set from outside. `open` is a set that you will need in exercise 9.5: the unit's calls that backward has
# still to reach. It is a weak set: a call whose graph is gone drops out of it.


# %% tags=["exercise", "export"] grade_id="unit"
# %%ranks
class Unit:
    """A part of the model whose parameters are gathered and freed together."""

    def __init__(self, parts: list[ShardedParameters]):
        self.parts, self.state, self.handles = parts, UnitState.SHARDED, []
        self.open = weakref.WeakSet()

    def begin_gather(self) -> None:
        """Begin to gather the parameters, unless they are here or on their way."""
        ### BEGIN SOLUTION
        if self.state is UnitState.SHARDED:
            self.handles = [part.gather() for part in self.parts]
            self.state = UnitState.GATHERING
        ### END SOLUTION

    def wait(self) -> None:
        """Have the parameters here."""
        ### BEGIN SOLUTION
        self.begin_gather()
        if self.state is UnitState.GATHERING:
            for handle in self.handles:
                handle.wait()
            self.handles = []
            self.state = UnitState.GATHERED
        ### END SOLUTION

    def reshard(self) -> None:
        """Keep this rank's part of the parameters only."""
        ### BEGIN SOLUTION
        if self.state is UnitState.SHARDED:
            return
        self.wait()
        for part in self.parts:
            part.free()
        self.state = UnitState.SHARDED
        ### END SOLUTION


# %% tags=["check"] grade_id="check-unit" points=3
check.Unit()

# %% [markdown]
# ## Exercise 9.3 · Whose parameter is it? (15 min, 2 points)
#
# `owned_parameters(module, units)`: units are modules inside `module`, and may be nested. Each parameter belongs to the
# innermost unit around it. What is in no unit belongs to the **root**, the module itself. So does a *tied* parameter
# that stands at two places with different innermost units: no one of them could free it.
#
# ```python
# owned_parameters(gpt, list(gpt.blocks))    # {block 0: [...], block 1: [...], ..., gpt: [embeddings, final norm]}
# ```
# Every unit is a key, in the given order, and `module` is the last one. Each parameter comes once, frozen ones too. A
# unit that is not inside `module`, or is `module` itself, is refused with a `ValueError`.


# %% tags=["exercise", "export"] grade_id="owned-parameters"
# %%ranks
def owned_parameters(
    module: nn.Module, units: Iterable[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Give each parameter to the innermost unit around it, or to the module, where there is none or not one only.

    Raises: ValueError for a unit that is not inside module, or is module itself.
    """
    ### BEGIN SOLUTION
    units = list(units)
    unit_at = {
        path: each
        for path, each in module.named_modules(remove_duplicate=False)
        if each in units and path
    }
    if missing := set(units) - set(unit_at.values()):
        raise ValueError(f"units must be parts of the module, got {next(iter(missing))}")
    owner = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = [path for path in unit_at if name.startswith(f"{path}.")]
        innermost = unit_at[max(around, key=len)] if around else module
        owner[parameter] = innermost if owner.get(parameter, innermost) is innermost else module
    owned = {each: [] for each in (*units, module)}
    for parameter, each in owner.items():
        owned[each].append(parameter)
    return owned
    ### END SOLUTION


# %% tags=["check"] grade_id="check-owned-parameters" points=2
check.owned_parameters()

# %% [markdown]
# Given: which units there are if nobody says so, and how their parameters are sorted.


# %% tags=["export"]
# %%ranks
def default_units(module: nn.Module) -> list[nn.Module]:
    """Take the blocks of a model: what its outermost lists of layers hold."""
    found, inside = [], set()
    for each in module.modules():
        if isinstance(each, nn.ModuleList | nn.Sequential) and each not in inside:
            found += [layer for layer in each if any(True for _ in layer.parameters())]
            inside |= set(each.modules())
    return list(dict.fromkeys(found))


def of_one_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sort parameters into lists of one dtype, one device, and all trainable or all frozen."""
    kinds = {}
    for each in parameters:
        kinds.setdefault((each.dtype, each.device, each.requires_grad), []).append(each)
    return list(kinds.values())


# %% [markdown]
# And two hooks, so that `state_dict()` is about this rank's shards, as `parameters()` is, and not about parameters that
# have no memory.


# %% tags=["export"]
# %%ranks
def _leave_out_whole_parameters(wrapper: nn.Module, state: dict, prefix: str, _metadata) -> None:
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def _miss_no_whole_parameters(wrapper: nn.Module, keys) -> None:
    whole = {name for name, _ in wrapper.module.named_parameters("module", remove_duplicate=False)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in whole]


# %% [markdown]
# Given as well: a module whose units are sharded, and which tells an optimizer of its shards alone.


# %% tags=["export"]
# %%ranks
class HoldsShards(nn.Module):
    """Shards a module's parameters, unit by unit; its parameters() are this rank's shards."""

    def __init__(self, module: nn.Module, units=None, compute_dtype=None, group=None):
        super().__init__()
        self.module, self.group = module, group
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        owned = owned_parameters(module, default_units(module) if units is None else units)
        self.units = {
            each: Unit(
                [ShardedParameters(kind, group, compute_dtype) for kind in of_one_kind(parameters)]
            )
            for each, parameters in owned.items()
        }
        self.root = self.units[module]
        self.parts = [part for unit in self.units.values() for part in unit.parts]
        self.shards = nn.ParameterList(part.shard for part in self.parts)
        self.register_state_dict_post_hook(_leave_out_whole_parameters)
        self.register_load_state_dict_post_hook(_miss_no_whole_parameters)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, which an optimizer gets."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        for part in self.parts:
            # What has no memory cannot be copied: these will be slices of the new flat.
            memo |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in part.parameters}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied


# %% [markdown]
# ## Exercise 9.4 · Forward (15 min, 3 points)
#
# Hooks do the rest. `_before_forward` is called before a unit's forward, `_after_forward` after it, and `_called` is
# given: it asks autograd to call `_before_backward` when the gradient of an output is known.
#
# - Before forward, the unit's parameters are here.
# - After it, where gradients are recorded (`torch.is_grad_enabled()`), `_called(unit, output)` is called: for the root
#   too, and whatever `reshard_after_forward` is. Then the unit is resharded, but not
#   - the root: its embedding and its output layer are needed first and last;
#   - when `reshard_after_forward` is False: that saves a gather in backward, and costs ψ.
# - Where gradients are not recorded, every unit is resharded after its forward, the root too: no backward will come to
#   do it.
# - In state BACKWARD a forward is one that a checkpoint computes again: both hooks leave everything as it is.


# %% tags=["exercise", "export"] grade_id="gathers-for-forward"
# %%ranks
class GathersForForward(HoldsShards):
    """Gathers the parameters of each unit for its forward."""

    def __init__(self, module: nn.Module, units=None, reshard_after_forward=True, **options):
        super().__init__(module, units, **options)
        self.reshard_after_forward = reshard_after_forward
        for each, unit in self.units.items():
            each.register_forward_pre_hook(partial(self._before_forward, unit))
            each.register_forward_hook(partial(self._after_forward, unit))

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: tuple) -> None:
        ### BEGIN SOLUTION
        if unit.state is not UnitState.BACKWARD:
            unit.wait()
        ### END SOLUTION

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: tuple, output) -> None:
        ### BEGIN SOLUTION
        if unit.state is UnitState.BACKWARD:
            return
        recorded = torch.is_grad_enabled()
        if recorded:
            self._called(unit, output)
        if not recorded or (self.reshard_after_forward and unit is not self.root):
            unit.reshard()
        ### END SOLUTION

    def _called(self, unit: Unit, output) -> None:
        call = Call()  # a unit may be called several times in one forward
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                unit.open.add(call)
                tensor.register_hook(partial(self._before_backward, unit, call))

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        raise NotImplementedError  # exercise 9.5


# %% tags=["check"] grade_id="check-gathers-for-forward" points=3
check.GathersForForward()

# %% [markdown]
# ## Exercise 9.5 · Backward (45 min, 5 points)
#
# In backward a unit is gathered again, its gradients travel as in lab 08, and it is resharded when they are all packed.
# `travelling` holds a `TravellingGradients` per trainable part, in the order in which backward should reach them, in a
# `LaunchQueue`; `_unit_of[number]` says whose part it is.
#
# - `_before_backward(unit, call, gradient)`: a call that is in `unit.open`, or whose unit is not in `entered`, puts its
#   unit into state BACKWARD, with the parameters here, and into the list `entered`. It takes itself out of `unit.open`:
#   once that is empty, no call of this unit is left for backward to reach.
# - `_on_gradient(parameter)`: add it to the queue. When its unit is complete (`_is_complete`, below), reshard that. A
#   second gradient before `finish_gradient_sync()` is refused, as in lab 04, and `pending` is true from the first one
#   on.
# - `finish_gradient_sync()`: finish the queue, reshard every unit, forget what was entered, open and pending. A
#   `forward()` that finds gradients pending, of an earlier micro-batch, calls it first, and then reshards what another
#   one has left gathered, in case a step has come between; that is given.
#
# **Predict.** Two ranks, three blocks, and a parameter of block 1 that rank 1 does not use. There, block 1 is never
# complete; on rank 0 it is, and sends. With no more than the three methods above: what does each launch next?

# %%
prediction_rank_0 = ""  # <- after the gather of block 1
prediction_rank_1 = ""

# %% [markdown]
# On a rank where something is missing, the unit must be completed at the same place in the order of messages as
# elsewhere: when backward has *left* it. It has left all that it entered before, when it enters another unit, except
# units around or inside that one (`kin`), and units with open calls. So `_before_backward` begins with a `_leave` for
# each of these: it takes what is missing for zeros, and reshards. What was left stays in `entered`. What is launched:
#
# | when backward | rank 0 | rank 1 |
# |---|---|---|
# | enters block 2 | gather 2 | gather 2 |
# | has its gradients | reduce-scatter 2 | reduce-scatter 2 |
# | enters block 1 | gather 1 | gather 1 |
# | has its gradients | reduce-scatter 1 | – |
# | enters block 0 | – | reduce-scatter 1, by `_leave` |
# | | gather 0 | gather 0 |
# | has its gradients | reduce-scatter 0 | reduce-scatter 0 |


# %% [markdown]
# Given: the queue, its hooks, and who is kin.


# %% tags=["export"]
# %%ranks
class QueuesGradients(GathersForForward):
    """Has the gradients of its units in a queue, in the order in which backward should reach them."""

    def __init__(self, module: nn.Module, units=None, **options):
        super().__init__(module, units, **options)
        inside = {each: set(each.modules()) for each in self.units}
        self.kin = {
            unit: {u for its, u in self.units.items() if its in inside[each] or each in inside[its]}
            for each, unit in self.units.items()
        }
        *inner, root = self.units.values()
        in_order = [(part, unit) for unit in (*inner[::-1], root) for part in unit.parts]
        trainable = [(part, unit) for part, unit in in_order if part.shard.requires_grad]
        self.travelling = [TravellingGradients(part) for part, _ in trainable]
        self._unit_of = [unit for _, unit in trainable]
        for before, each in pairwise(self.travelling):
            each.before = before
        self.queue, self.entered, self.pending = LaunchQueue(self.travelling), [], False
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        self._place_of = {
            parameter: (number, place)
            for number, each in enumerate(self.travelling)
            for place, parameter in enumerate(each.parameters)
        }
        wrapper = weakref.ref(self)  # held by hooks, a wrapper could not be thrown away
        on_gradients(list(self._place_of), lambda each: wrapper()._on_gradient(each))

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._watch_gradients()  # deepcopy: hooks stay behind, with the original's parameters


# %% [markdown]
# Given too: whether a unit's gradients are all packed, and what to do when backward leaves it without some of them.


# %% tags=["export"]
# %%ranks
class CompletesUnits(QueuesGradients):
    """Knows when a unit's gradients are all packed, and can do without those that are missing."""

    def _is_complete(self, unit: Unit) -> bool:
        """Tell whether backward is done with the unit: all gradients are packed. Of frozen parts, none tells that."""
        numbers = self._numbers_of(unit)
        all_trainable = len(numbers) == len(unit.parts)
        return all_trainable and not any(self.queue.missing[number] for number in numbers)

    def _leave(self, unit: Unit) -> None:
        """Take missing gradients for zeros, and let the parameters go."""
        for number in self._numbers_of(unit):
            for place in sorted(self.queue.missing[number]):
                self.queue.add(number, place)
        unit.reshard()

    def _numbers_of(self, unit: Unit) -> list[int]:
        return [number for number, its in enumerate(self._unit_of) if its is unit]


# %% tags=["exercise", "export"] grade_id="reduces-gradients"
# %%ranks
class ReducesGradients(CompletesUnits):
    """Gathers units for backward too, reduce-scatters their gradients, and frees them."""

    def forward(self, *inputs, **kwargs):
        if self.pending:
            self.finish_gradient_sync()
        for unit in self.units.values():
            unit.reshard()  # an optimizer may have stepped since it was gathered
        return super().forward(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Wait until each shard has its part of the mean gradient. Comm: reduce_scatters of what has not come."""
        ### BEGIN SOLUTION
        self.queue.finish()
        for unit in self.units.values():
            unit.reshard()
            unit.open.clear()
        self.entered, self.pending = [], False
        ### END SOLUTION

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        ### BEGIN SOLUTION
        for each in self.entered:
            if each not in self.kin[unit] and not each.open:
                self._leave(each)
        is_due = call in unit.open or unit not in self.entered
        unit.open.discard(call)
        if is_due and unit.state is not UnitState.BACKWARD:
            unit.wait()
            unit.state = UnitState.BACKWARD
            self.entered.append(unit)
        ### END SOLUTION

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        ### BEGIN SOLUTION
        number, place = self._place_of[parameter]
        if place not in self.queue.missing[number]:
            raise RuntimeError("call finish_gradient_sync() after each backward(): this came twice")
        self.pending = True
        self.queue.add(number, place)
        if self._is_complete(self._unit_of[number]):
            self._unit_of[number].reshard()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-reduces-gradients" points=5
check.ReducesGradients()

# %% [markdown]
# Without `_leave`, rank 0 launches the reduce-scatter of block 1 and rank 1 the gather of block 0: the two do not fit,
# and the ranks hang, or end with SIGABRT.
#
# ## Exercise 9.6 · Ahead of time (15 min, 2 points)
#
# So far the model waits for each unit. With `prefetch=1` the next one's parameters travel while this one computes, at
# the price of one more gathered unit.
#
# Which one is next? `called` lists the units of this forward, without the root, in the order of their calls, and
# `expected` those of the forward before. As long as the two agree, look at what was called next then. In backward, go
# through `called` from its end; a unit that is not `open` backward will not reach, as nothing before it is trainable.
# The root neither begins to gather others nor is gathered ahead.


# %% tags=["exercise", "export"] grade_id="looks-ahead"
# %%ranks
class LooksAhead(ReducesGradients):
    """Begins to gather the next units while this one computes."""

    def __init__(self, module: nn.Module, units=None, prefetch: int = 1, **options):
        super().__init__(module, units, **options)
        self.prefetch, self.expected, self.called = prefetch, [], []

    def forward(self, *inputs, **kwargs):
        self.expected, self.called = self.called, []
        output = super().forward(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            for unit in self.units.values():
                unit.reshard()  # what was expected, and not called
        return output

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: tuple) -> None:
        ### BEGIN SOLUTION
        super()._before_forward(unit, module, inputs)
        if unit is not self.root and unit.state is not UnitState.BACKWARD:
            self.called.append(unit)
            if self.called == self.expected[: len(self.called)]:
                self._begin_to_gather(self.expected[len(self.called) :])
        ### END SOLUTION

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        ### BEGIN SOLUTION
        super()._before_backward(unit, call, gradient)
        if unit in self.called:  # or it is the root's turn, or that of an earlier forward
            backwards = self.called[::-1]
            following = backwards[backwards.index(unit) + 1 :]
            self._begin_to_gather([each for each in following if each.open])

    def _begin_to_gather(self, following: list[Unit]) -> None:
        for unit in following[: self.prefetch]:
            if unit not in self.entered:
                unit.begin_gather()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-looks-ahead" points=2
check.LooksAhead()

# %% [markdown]
# ## Exercise 9.7 · Whole again (25 min, 3 points)
#
# A checkpoint for any number of ranks, and for no wrapper at all, has each parameter whole, under the name that the
# module gives it:
#
# - `full_state_dict()`: called by all ranks, it gives each of them what `module.state_dict()` would, with the names in
#   the same order, in the parameters' own dtype. Buffers are included, and as copies: a later forward must not change
#   them. A tied parameter stands there under both names.
# - `load_full_state_dict(state_dict)`: each rank is given a whole state, and keeps its part, in the shard's dtype. A
#   state with other names or shapes than the module's is refused with a `ValueError`.
#
# `collect(part, group, None)` of lab 07 puts the parts of all ranks together.
#
# A state that is whole needs a rank with room for it. `torch.distributed.checkpoint` lets each rank write its own part,
# and any other number of ranks read what it needs. It has to know where a part belongs: a `DTensor` says that.
#
# - `sharded_state_dict(optimizer)`: for every part, its shard, and the optimizer's state of it, as tensors that share
#   memory with them: `torch.distributed.checkpoint.load` fills them in place. Filling at the end is not part of it, as
#   it depends on the number of ranks. `as_dtensor(part, value)` is given, and so is `begin_state(optimizer)`, which a
#   new optimizer needs before there is anything to fill.
#
# Names: `f"{number}.shard"` with the part's place in `self.parts`, and `f"{number}.{name}"` for an entry of
# `optimizer.state[part.shard]`; entries of one number, such as Adam's `step`, are as they are; and `module.`… for each
# of the module's buffers.


# %% tags=["export"]
# %%ranks
def as_dtensor(part: ShardedParameters, value: torch.Tensor) -> DTensor:
    """Say of one N-th, laid out as part.shard is, where it belongs. The result is a view, without what fills up."""
    numel = sum(each.numel() for each in part.parameters)
    left = numel - dist.get_rank(part.group) * value.numel()
    mesh = DeviceMesh.from_group(part.group or dist.group.WORLD, value.device.type)
    used = value.detach()[: max(0, left)]
    shape = {"shape": torch.Size([numel]), "stride": (1,)}
    return DTensor.from_local(used, mesh, [Shard(0)], run_check=False, **shape)


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state before the first step, so that there is something to load into."""
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
# Given: clipping by lab 07's `clip_norm_`, which needs no more than each rank's shards.


# %% tags=["export"]
# %%ranks
class ClipsShards(LooksAhead):
    """Can bound the norm of its gradients."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most max_norm. → the norm before"""
        return clip_norm_(
            [each.grad for each in self.shards if each.grad is not None], max_norm, self.group
        )


# %% tags=["exercise", "export"] grade_id="whole-state"
# %%ranks
class WholeState(ClipsShards):
    """Puts the parts of all ranks together, and takes them apart again."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Collect what module.state_dict() would be. To be called by all ranks. Comm: one all_gather per part."""
        ### BEGIN SOLUTION
        whole = {}
        for part in self.parts:
            slices = part.slices_of(collect(part.shard, self.group, None))
            whole |= zip(part.parameters, slices, strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: whole.get(value, value).detach().clone() for name, value in state.items()}
        ### END SOLUTION

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of a whole state.

        Raises: ValueError for a state of another module.
        """
        ### BEGIN SOLUTION
        own = self.module.state_dict(keep_vars=True)
        shapes = {name: value.shape for name, value in own.items()}
        if shapes != {name: value.shape for name, value in state_dict.items()}:
            differ = sorted(set(shapes) ^ set(state_dict)) or "their shapes"
            raise ValueError(f"this is the state of another module: {differ} differ")
        given = {value: state_dict[name] for name, value in own.items()}
        for part in self.parts:
            flat = part.shard.new_zeros(part.flat.numel())
            for piece, parameter in zip(part.slices_of(flat), part.parameters, strict=True):
                piece.copy_(given.pop(parameter))
            part.shard.copy_(part.own(flat))
        for buffer, value in given.items():
            buffer.copy_(value)
        ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="zero3"
# %%ranks
class ZeRO3(WholeState):
    """ZeRO stage 3: train module with parameters, gradients and optimizer state shared out over the group's ranks.

    Options: units, the modules to gather one by one (default: the layers of its lists); compute_dtype; prefetch, how
    many units to gather ahead; reshard_after_forward; group. parameters() are this rank's shards: any optimizer that
    treats each number by itself may step them. All ranks must call the same units in the same order.

    Memory: with Adam in fp32, 16Ψ/N bytes for Ψ parameters on N ranks, and what is gathered: root, current, prefetched.
    Comm: per micro-batch, a unit's parameters gathered twice and its gradients reduce-scattered: 3(N−1)/N · 4Ψ bytes;
    2(N−1)/N for the root, or where reshard_after_forward is False.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.3 and §7; Zhao et al. 2023, "PyTorch FSDP", §3.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        group: dist.ProcessGroup | None = None,
    ):
        options = {"reshard_after_forward": reshard_after_forward, "group": group}
        super().__init__(module, units, prefetch, compute_dtype=compute_dtype, **options)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """View this rank's parts, and the optimizer's state of them, as torch.distributed.checkpoint saves and loads.

        An optimizer that has not stepped has no state to load into: see begin_state().
        """
        ### BEGIN SOLUTION
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for number, part in enumerate(self.parts):
            entries = {"shard": part.shard} | optimizer.state.get(part.shard, {})
            for name, value in entries.items():
                is_sharded = torch.is_tensor(value) and value.shape == part.shard.shape
                state[f"{number}.{name}"] = as_dtensor(part, value) if is_sharded else value
        return state
        ### END SOLUTION


# %% tags=["check"] grade_id="check-zero3" points=3
check.ZeRO3()

# %% [markdown]
# ## Break it: no units
#
# Code in circulation wraps a model and names no units. Then there is one, the root. The same GPT both ways, beside your
# `ZeRO2` and torch's FSDP2. Ranks compare notes no more: that costs messages.
#
# **Predict.** What is the peak of the parameters, with Ψ bytes of them in eight blocks and a small root?

# %%
prediction_peak_with_units = None  # <- as a part of Ψ
prediction_peak_without = None  # <- as a part of Ψ

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
    """→ last loss, ledger of the last step, memory over one more"""

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
    numbers = (log.sent_bytes, most_bytes[name], peak.peak_bytes)
    rows.append([name, f"{loss:.4f}", *(f"{number / 1e6:.2f}" for number in numbers)])
peak_bytes = {name: peak.peak_bytes for name, (_, _, peak) in results.items()}
assert peak_bytes["your ZeRO3"] < peak_bytes["your ZeRO2"] < peak_bytes["your ZeRO3, units=[]"]
header = ["", "loss", "must send, MB", "parameters' peak, MB", "peak, MB"]
tables.Table(header, rows, "rank 0, one step")

# %% tags=["nbval-ignore-output"]
predicted = {
    "your ZeRO3": prediction_peak_with_units,
    "your ZeRO3, units=[]": prediction_peak_without,
}
for name, part in predicted.items():
    print(f"{name}: {most_bytes[name] / most_bytes['DDP, AdamW']:.2f} Ψ, predicted {part}")

# %% [markdown]
# With units it is one N-th, the root and two blocks: one computes, and `prefetch=1` has gathered the next. That next
# one is what your `ZeRO3` has more than FSDP2 here.
#
# One unit is a right answer to every check of values, and sends less. But its parameters' peak is above all of Ψ, and
# its whole peak above that of `ZeRO2`, which shards no parameters.
#
# ## Your figure, and torch's answer
#
# With units, this is a step of yours:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO3"][2].samples)

# %% [markdown]
# Blocks come and go: in forward from first to last, in backward from last to first. What is left is what one rank has
# to have: its part, the units it computes with, and the activations of its own micro-batch. To shrink those, turn to
# checkpoints (chapter 06), or split the computation itself: tensor parallelism, chapter 13.

# %%
ranks.stop()
