# ---
# jupyter:
#   course:
#     module: units
#     minutes: 80
# ---

# %% [markdown]
# # Lab 09 · ZeRO-3
#
# **80 minutes, 15 points.** In this lab, you build `PlainZeRO3`, which is the lesson's wrapper in a form that chapter
# 10 can extend. Between steps, each rank keeps only its shard of the parameters. A unit has its full parameters only
# while it computes. At the end, you train a GPT with it, and compare it with torch's FSDP2.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 9.1 | `ShardedFlatParameter`: parameters whose memory is freed and restored | 16 | 3 |
# | 9.2 | `Unit`: when may its memory be freed? | 6 | 2 |
# | 9.3 | `PlainZeRO3`: the hooks of forward | 13 | 2 |
# | 9.4 | `PlainZeRO3`: the hooks of backward | 11 | 2 |
# | 9.5 | `Prefetcher`: which units come next? | 13 | 3 |
# | 9.6 | `PrefetchingZeRO3`: prefetching in a step | 4 | 2 |
# | 9.7 | `KeepsLastBlock`: it sends less than FSDP2 does by default | 6 | 1 |
#
# The remaining 11 minutes are for the code that is given before exercise 9.3, and for the GPT between 9.6 and 9.7.
#
# Each exercise has a check. Its first line tries the simplest model or order, and the other lines look closer. The
# checks never judge times. They count the bytes on the wire, and the bytes in memory at every moment of a step.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import units as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Units of a sharded model: parameters that are unsharded while a part of the model computes, then resharded."""

import enum
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared.sharded.parameters import allow_reads, forbid_reads
from solutions.async_collectives import launch_all_gather
from solutions.flat import FlatLayout, FlatParameter

# %% [markdown]
# ## Exercise 9.1 · Parameters without memory (16 min, 3 points)
#
# In the lesson, you resized a tensor's `untyped_storage()` to zero bytes and back. Its views stayed valid, including
# those that autograd had saved. So you can free a parameter's memory after forward, and backward does not notice, as
# long as the same values are back in *the same storage* by then.
#
# Reading a freed tensor usually raises `RuntimeError: setStorage: … out of bounds for storage of size 0`. Some
# operations do not check, and the process ends with a segmentation fault, SIGSEGV. The notebook then tells you so and
# starts new ranks. In the exercise, `allow_reads` and `forbid_reads` turn such reads of a parameter into errors.
#
# `ShardedFlatParameter(parameters, group, compute_dtype)` is lab 07's `FlatParameter` with two differences:
#
# - Its `shard`, the `nn.Parameter` for the optimizer, has memory *of its own*. It is no longer a view of `flat_param`.
# - Its `flat_param` has memory only between `unshard()` and `reshard()`. The model's parameters are still slices of it.
#
# Most of the constructor is given. It broadcasts the values of the group's first rank, so that all ranks start with the
# same parameters. At its end, it converts `flat_param` to `compute_dtype`, the dtype that the model computes with, and
# reshards it. Write three things:
#
# - The line that is missing in the constructor creates `self.shard`. All parameters that the constructor gets have the
#   same dtype and the same `requires_grad`, and the shard has them, too. Your line comes before the conversion, so
#   `flat_param` still has the parameters' dtype there.
# - `unshard()` gives `flat_param` its memory back and launches the all-gather that fills it. It returns a handle with
#   `wait()`, and does not wait itself. Use lab 01's `launch_all_gather(flat, shard, group)`. Autograd must not record
#   it, so `flat_param` never requires a gradient.
# - `reshard()` frees `flat_param`'s memory. Then the rank holds one shard, 1/N of the parameters' bytes.
#
# The two tensors of the all-gather must have the same dtype, because NCCL rejects an all-gather of two dtypes.
# `self.layout.shard_of(flat)` is this rank's shard of a flat tensor, and `self.layout.group` is the process group.
#
# The first line of the check, `plain parameters`, tries three parameters of one dtype. The other lines also try a
# `compute_dtype`, frozen parameters (`requires_grad=False`) and subgroups.
#
# <details><summary>Hint 1</summary>
#
# In lab 07, `self.shard` is a view of `self.flat_param`. What happens to the shard's values when `flat_param`'s memory
# is freed?
#
# </details>
# <details><summary>Hint 2</summary>
#
# With a `compute_dtype`, which dtype does `shard` have, and which does `flat_param` have? Which of the two should the
# all-gather send?
#
# </details>


# %% tags=["exercise", "export"] grade_id="sharded-flat-parameter"
# %%ranks
class ShardedFlatParameter(FlatParameter):
    """A flat parameter of which this rank keeps only its shard, except between unshard() and reshard().

    Args:
        compute_dtype: dtype of flat_param, and so of the parameters; by default, their own.

    Shape: shard [n], an nn.Parameter with memory of its own, in the parameters' dtype; flat_param [N · n] in
        compute_dtype, whose slices are the parameters.
    Communication: when built, one broadcast.
    """

    def __init__(self, parameters: list[nn.Parameter], group=None, compute_dtype=None):
        self.layout = FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        for view, parameter in zip(self.layout.views(self.flat_param), parameters, strict=True):
            view.copy_(parameter.detach())
        dist.broadcast(self.flat_param, group=group, group_src=0)
        ### BEGIN SOLUTION
        # The shard is a copy, because flat_param's memory is freed below.
        own_shard = self.layout.shard_of(self.flat_param).clone()
        self.shard = nn.Parameter(own_shard, requires_grad=parameters[0].requires_grad)
        ### END SOLUTION
        if compute_dtype and self.flat_param.is_floating_point():  # int8 weights stay what they are
            self.flat_param = self.flat_param.to(compute_dtype)
        self._alias_parameters()  # from now on, the model's parameters are slices of flat_param
        self.reshard()

    def unshard(self):
        """Give flat_param its memory back and launch the all-gather that fills it. Returns a handle with wait().

        Communication: one all-gather.
        """
        allow_reads(self.layout.parameters)
        ### BEGIN SOLUTION
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        shard = self.shard.detach().to(self.flat_param.dtype)
        return launch_all_gather(self.flat_param, shard, self.layout.group)
        ### END SOLUTION

    def reshard(self) -> None:
        """Free flat_param's memory. The parameters keep their shapes, but must not be read."""
        forbid_reads(self.layout.parameters)
        ### BEGIN SOLUTION
        self.flat_param.untyped_storage().resize_(0)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-sharded-flat-parameter" points=3
check.ShardedFlatParameter()

# %% [markdown]
# ## Exercise 9.2 · A unit and its states (6 min, 2 points)
#
# A unit is a part of the model whose parameters are unsharded and resharded together, such as a block of a GPT. Its
# parameters may differ in dtype, but a flat parameter has only one dtype. So a unit has a list of
# `ShardedFlatParameter`s. At any time, the unit is in one of four states. You never set `BACKWARD`, but your method
# must treat it as the table below says. `Call`, `open_calls` and `reshard_after_forward` are for lab 10; you do not
# need them yet.


# %% tags=["export"]
# %%ranks
class UnitState(enum.Enum):
    """What a unit holds in each state. Its parameters take ψ bytes in the dtype that it computes with."""

    SHARDED = "this rank's shards"
    UNSHARDING = "this rank's shards, and ψ bytes that an all-gather is filling"
    UNSHARDED = "this rank's shards, and ψ bytes of parameters"
    BACKWARD = "this rank's shards, ψ bytes of parameters, and up to ψ bytes of gradients"


class Call:
    """One call of a unit. The autograd graph keeps it alive for as long as backward may still reach that call."""


# %% [markdown]
# `unshard()` and `wait_for_unshard()` are the lesson's, for a list of flat parameters, and given. Write `reshard()`.
# What a method does depends on the state:
#
# | method | in state | what it does | state afterwards |
# |---|---|---|---|
# | `unshard()` | SHARDED | launches an all-gather per flat parameter, and returns at once | UNSHARDING |
# | | any other | nothing | as before |
# | `wait_for_unshard()` | SHARDED | launches the all-gathers and waits for them | UNSHARDED |
# | | UNSHARDING | waits for the all-gathers | UNSHARDED |
# | | any other | nothing | as before |
# | `reshard()` | SHARDED | nothing | SHARDED |
# | | any other | frees every flat parameter | SHARDED |
#
# - `unshard()` keeps the handles in `self.works`. `wait_for_unshard()` empties that list, because a second wait for the
#   same handle can hang.
# - The lesson's `reshard()` frees the memory in any state. In one of them, that is a bug. In which one, and what has to
#   happen first?
# - `record_function(…)` only gives the all-gathers a name in torch's profiler.
#
# The first line of the check, `a plain forward`, unshards, waits and reshards, twice. The other lines call the methods
# in random order.
#
# <details><summary>Hint</summary>
#
# Who writes into the memory while the unit is UNSHARDING? Which of the given methods can `reshard()` call?
#
# </details>


# %% tags=["exercise", "export"] grade_id="unit"
# %%ranks
class Unit:
    """Parameters that are unsharded and resharded together.

    `open_calls` are the calls of this unit in forward that backward has not finished yet. The set is weak: when a graph
    is freed, its calls drop out.
    """

    def __init__(
        self, flat_parameters: list[ShardedFlatParameter], reshard_after_forward: bool = True
    ):
        self.flat_parameters, self.reshard_after_forward = flat_parameters, reshard_after_forward
        self.state, self.works = UnitState.SHARDED, []
        self.open_calls: weakref.WeakSet[Call] = weakref.WeakSet()

    def unshard(self) -> None:
        """Launch the all-gathers of the parameters, unless they are complete or in flight."""
        if self.state is UnitState.SHARDED:
            with record_function("ZeRO3::all_gather"):
                self.works = [flat_parameter.unshard() for flat_parameter in self.flat_parameters]
            self.state = UnitState.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Wait until the unit's parameters are unsharded. Launch their all-gathers first, if need be."""
        self.unshard()
        if self.state is UnitState.UNSHARDING:
            for work in self.works:
                work.wait()
            self.works = []
            self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Free the unit's parameters, except this rank's shards."""
        ### BEGIN SOLUTION
        if self.state is UnitState.SHARDED:
            return
        self.wait_for_unshard()  # an all-gather in flight would write into the freed memory
        for flat_parameter in self.flat_parameters:
            flat_parameter.reshard()
        self.state = UnitState.SHARDED
        ### END SOLUTION


# %% tags=["check"] grade_id="check-unit" points=2
check.Unit()

# %% [markdown]
# ## Which unit owns a parameter? (3 min)
#
# The next three functions are given. Run their folded cells. You need to know only this description.
# `owned_parameters` assigns each parameter of a module to the innermost unit around it. Parameters in no unit belong to
# the root, which is the module itself. For the GPT of the lesson:
#
# ```python
# owned_parameters(gpt, list(gpt.blocks))    # {block 0: [...], block 1: [...], ..., gpt: [embeddings, final norm]}
# ```
#
# `default_units` chooses the units if you do not name any. `shard_into_units` combines these functions with your two
# classes. It returns a dict with the `Unit` of each submodule that is one, and of the root.


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
def owned_parameters(
    module: nn.Module, units: Iterable[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Assign each parameter to the innermost unit around it, or to the root, which is module itself.

    The root also owns a tied parameter that lies in several units, because none of them could reshard it alone.

    Raises:
        ValueError: for a unit that is not inside module, or is module itself.
    """
    units = list(units)
    unit_at = {
        path: submodule
        for path, submodule in module.named_modules(remove_duplicate=False)
        if submodule in units and path  # the path of module itself is empty
    }
    if outside := set(units) - set(unit_at.values()):
        raise ValueError(f"units must be submodules of the module, got {next(iter(outside))}")
    owner_of = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        paths_around = [path for path in unit_at if name.startswith(f"{path}.")]
        innermost = unit_at[max(paths_around, key=len)] if paths_around else module
        is_in_one_unit = owner_of.get(parameter, innermost) is innermost
        owner_of[parameter] = innermost if is_in_one_unit else module
    owned = {owner: [] for owner in (*units, module)}
    for parameter, owner in owner_of.items():
        owned[owner].append(parameter)
    return owned


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
def default_units(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the layers in its outermost ModuleLists and Sequentials."""
    found, inside = [], set()
    for candidate in module.modules():
        if isinstance(candidate, nn.ModuleList | nn.Sequential) and candidate not in inside:
            found += [layer for layer in candidate if any(True for _ in layer.parameters())]
            inside |= set(candidate.modules())
    return list(dict.fromkeys(found))


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
def shard_into_units(
    module: nn.Module,
    units: Iterable[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    group: dist.ProcessGroup | None = None,
    new_flat_parameter: Callable[..., ShardedFlatParameter] | None = None,
) -> dict[nn.Module, Unit]:
    """Shard all parameters of module, unit by unit. The last unit is the root, which stays unsharded after forward.

    Args:
        new_flat_parameter: creates a unit's flat parameters; by default, ShardedFlatParameter.

    Returns:
        The unit of each submodule that is one, and of module itself.

    Communication: one broadcast per flat parameter.
    """
    sharded, new_flat_parameter = {}, new_flat_parameter or ShardedFlatParameter
    owned = owned_parameters(module, default_units(module) if units is None else units)
    for owner, parameters in owned.items():
        by_kind = {}
        for parameter in parameters:
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            by_kind.setdefault(kind, []).append(parameter)
        flat_parameters = [
            new_flat_parameter(same_kind, group, compute_dtype) for same_kind in by_kind.values()
        ]
        sharded[owner] = Unit(flat_parameters, reshard_after_forward and owner is not module)
    return sharded


# %% [markdown]
# ## Exercise 9.3 · The hooks of forward (13 min, 2 points)
#
# `PlainZeRO3` wraps a model. Four of its methods are hooks, which run before or after a unit computes. The model is
# plain: every parameter is trained, and every unit is called once per forward and returns one tensor.
#
# | hook | is called | must |
# |---|---|---|
# | `pre_forward` | before a unit's forward | wait until its parameters are unsharded |
# | `post_forward` | after a unit's forward | register `pre_backward` on the output, and reshard the unit |
# | `pre_backward` (9.4) | when the output's gradient is complete | wait until the parameters are unsharded again |
# | `post_backward` (9.4) | when all the unit's gradients are complete | reduce-scatter its gradients, and reshard it |
#
# The constructor registers the first two for every unit. `pre_forward` is the lesson's, and given. Write
# `post_forward`:
#
# - `tensor.register_hook(function)` lets autograd call `function(gradient)` when the tensor's gradient is complete. The
#   function must return `None`. Here, it is `self.pre_backward` for this unit.
# - The root is an exception after a forward with gradients: its last layer is the first that backward needs. Should you
#   reshard it? And an evaluation may run between this forward and its backward. Does the root need `pre_backward`?
# - Without gradients (`torch.is_grad_enabled()` is false), there will be no backward. In that case, reshard every unit
#   after its forward, including the root, and register nothing.
#
# The constructor and two small methods are given below. The constructor also lets autograd call `on_gradient` for every
# gradient. You write it in exercise 9.4, and it will call `post_backward`.
#
# The class is spread over several cells: a cell that begins with `class Name(Name):` adds methods to the class of that
# name. If you change the first one, also run the cells after it that continue the class or inherit from it.
#
# The first line of the check, `plain forward`, compares the outputs with those of one process, with gradients and
# without. The other lines look at what is unsharded after a forward, at whether backward calls `pre_backward`, and at
# the bytes that a forward sends and the memory that it needs.
#
# <details><summary>Hint 1</summary>
#
# Consider a unit in the middle of the model, and the root. Write down the state of each before and after the two hooks,
# once with gradients and once without.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `partial(self.pre_backward, unit)` is a function of the gradient alone.
#
# </details>


# %% tags=["given"]
# %%ranks
from collections import Counter
from functools import partial

from solutions.overlapped_ddp import watch_gradients
from solutions.zero2 import ShardedBucket


class PlainZeRO3(nn.Module):
    """ZeRO stage 3 for plain models: every parameter is trained, every unit called once per forward."""

    def __init__(self, module: nn.Module, units=None, group=None):
        super().__init__()
        self.module = module
        unit_of = shard_into_units(module, units, group=group)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.buckets = {unit: list(map(ShardedBucket, unit.flat_parameters)) for unit in self.units}
        self.owned = [(unit, bucket) for unit in self.units for bucket in self.buckets[unit]]
        self.shards = nn.ParameterList(bucket.flat_parameter.shard for _, bucket in self.owned)
        self.packed = Counter()  # how many gradients of each unit are packed
        for submodule, unit in unit_of.items():
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit))
            submodule.register_forward_hook(partial(self.post_forward, unit))
        watch_gradients([bucket for _, bucket in self.owned], self.on_gradient)

    def forward(self, *inputs):
        return self.module(*inputs)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def pre_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        raise NotImplementedError("run the cell with pre_backward, in exercise 9.4")

    def on_gradient(self, bucket_index: int, index: int) -> None:
        raise NotImplementedError("run the cell with on_gradient, in exercise 9.4")


# %% tags=["exercise"] grade_id="plain-forward"
# %%ranks
class PlainZeRO3(PlainZeRO3):
    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple) -> None:
        unit.wait_for_unshard()

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        ### BEGIN SOLUTION
        if torch.is_grad_enabled():
            output.register_hook(partial(self.pre_backward, unit))
        if unit is not self.root or not torch.is_grad_enabled():
            unit.reshard()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-plain-forward" points=2
check.Forward()

# %% [markdown]
# ## Exercise 9.4 · The hooks of backward (11 min, 2 points)
#
# `pre_backward` is the lesson's, and given. It returns `None`, because any other value would replace the gradient.
# Write the other two:
#
# - Autograd calls `on_gradient(bucket_index, index)` whenever a gradient is complete. `self.owned[bucket_index]` is a
#   pair, the unit and one of its buckets, and `bucket.pack(index)` packs the gradient. After the unit's last gradient,
#   call `post_backward(unit)`. A unit has as many gradients as all its buckets have `parameters`, and `self.packed` is
#   a `Counter` for your use. What must it be when the next backward begins?
# - `post_backward(unit)` does what the table in exercise 9.3 says. `self.buckets[unit]` holds lab 08's
#   `ShardedBucket`s. `bucket.launch()` starts the reduce-scatter of the packed gradients, and `bucket.wait()` adds the
#   mean to `shard.grad`. You may wait immediately here; lab 10 waits later.
# - The lesson reduces first, and then reshards. Does the reduce-scatter read the parameters? Both orders pass the
#   check, but one of them has the lower peak of memory.
#
# The first line of the check, `plain model`, trains three blocks on one and on two ranks. It also looks at the units'
# states when they compute, and after backward. `world sizes` tries other numbers of ranks and other optimizers, a
# single unit, and units that are called from last to first. `wire` counts the collectives, and `memory` the bytes that
# a rank holds at every moment of a step.
#
# <details><summary>Hint</summary>
#
# After `post_backward`, nobody needs the unit's full parameters until the next forward.
#
# </details>


# %% tags=["given"]
# %%ranks
class PlainZeRO3(PlainZeRO3):
    def finish_gradient_sync(self) -> None:
        """Reshard units that a forward without a backward has left unsharded. All gradients are reduced already."""
        for unit in self.units:
            unit.reshard()


# %% tags=["exercise"] grade_id="plain-backward"
# %%ranks
class PlainZeRO3(PlainZeRO3):
    def pre_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        unit.wait_for_unshard()

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that is complete. After the unit's last one, backward is done with the unit."""
        ### BEGIN SOLUTION
        unit, bucket = self.owned[bucket_index]
        bucket.pack(index)
        self.packed[unit] += 1
        if self.packed[unit] == sum(len(bucket.parameters) for bucket in self.buckets[unit]):
            self.packed[unit] = 0
            self.post_backward(unit)
        ### END SOLUTION

    def post_backward(self, unit: Unit) -> None:
        ### BEGIN SOLUTION
        unit.reshard()  # the gradients are in the buckets
        for bucket in self.buckets[unit]:
            bucket.launch()
            bucket.wait()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-plain-backward" points=2
check.Backward()

# %% [markdown]
# ## Exercise 9.5 · Which units come next? (13 min, 3 points)
#
# Your `PlainZeRO3` waits for each unit's all-gather before the unit computes. As in the lesson, you could launch the
# all-gather of the *next* unit while this one computes. The lesson had a list of units in the right order. In general,
# nobody tells the wrapper the order, so a `Prefetcher` remembers the order of the calls:
#
# - `called` lists the units that this forward has called so far.
# - `expected` lists the units of the previous forward, in the order of their calls.
#
# Both lists are given, and so is `_unshard(following)`, which launches the all-gathers of the first `units_ahead` units
# of a list. Write two methods:
#
# - `in_forward(unit)` runs when a unit's forward begins. Add the unit to `called`. As long as `called` equals the
#   beginning of `expected`, prefetch the units that follow in `expected`. If the order has changed, prefetch nothing.
# - `in_backward(unit, unreached)` runs when a unit's backward begins. Backward goes through `called` from its end, so
#   prefetch the units that were called *before* this one, nearest first. Leave out those in `unreached`, because
#   backward does not reach them. Do so before `_unshard` takes the first `units_ahead` units. If the unit is not in
#   `called`, prefetch nothing.
#
# ```python
# # with units_ahead = 1; the previous forward was a b c d, and this forward is a b c d, too
# in_forward(b)                       # launches c
# in_backward(c)                      # launches b
# in_backward(d, unreached={c})       # launches b
# ```
#
# In a plain model, backward reaches every unit, and every unit is called once. Lab 10 needs `unreached`.
#
# The units in the check only log the calls of `unshard()`, so no rank communicates here. The first line of the check
# tries a plain forward.
#
# <details><summary>Hint 1</summary>
#
# `self.expected[: len(self.called)]` is the beginning that `called` must be equal to. Where does the rest begin?
#
# </details>
# <details><summary>Hint 2</summary>
#
# For backward, reverse a copy of `called`. Where in it is the unit, and what comes after it?
#
# </details>


# %% tags=["export"] module="prefetching"
# %%ranks
"""Prefetching: the all-gathers of the next units are launched before anything waits for them."""

from collections.abc import Collection


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

    def in_backward(self, unit: Unit, unreached: Collection[Unit] = ()) -> None:
        """Prefetch the units that were called before this one, except those that backward does not reach."""
        ### BEGIN SOLUTION
        if unit in self.called:  # otherwise, the unit belongs to an earlier forward
            reversed_calls = self.called[::-1]
            following = reversed_calls[reversed_calls.index(unit) + 1 :]
            self._unshard([earlier for earlier in following if earlier not in unreached])
        ### END SOLUTION

    def _unshard(self, following: list[Unit]) -> None:
        """Launch the all-gathers of the first units_ahead units of a list."""
        for unit in following[: self.units_ahead]:
            unit.unshard()


# %% tags=["check"] grade_id="check-prefetcher" points=3
check.Prefetcher()

# %% [markdown]
# ## Exercise 9.6 · Prefetching in a step (4 min, 2 points)
#
# `PrefetchingZeRO3` is your `PlainZeRO3` with a `Prefetcher`. Its constructor and `forward` are given. Extend the two
# hooks that unshard a unit. Each of them does what it does in `PlainZeRO3`, and calls the prefetcher:
#
# - `pre_forward` calls `self.prefetcher.in_forward(unit)`, except for one unit, which has no place in the order of the
#   others. Which one?
# - `pre_backward` calls `self.prefetcher.in_backward(unit)` for every unit.
#
# Which of the two comes first? All-gathers share one link, and run in the order in which they are launched.
#
# The first line of the check, `prefetched order`, looks at the order in which all-gathers are launched and waited for.
# In the first forward, the order of the units is not known yet, so the check looks at the second and third steps.
# With `prefetch=0`, nothing may be launched ahead. The last three lines repeat checks of exercise 9.4 with prefetching.
# One more unit may then be unsharded.
#
# <details><summary>Hint</summary>
#
# `super().pre_forward(unit, submodule, inputs)` runs the hook of exercise 9.3. Which unit's forward contains those of
# all the others?
#
# </details>


# %% tags=["exercise"] grade_id="prefetching-zero3"
# %%ranks
class PrefetchingZeRO3(PlainZeRO3):
    """PlainZeRO3, which also launches the all-gathers of the next units while one computes."""

    def __init__(self, module: nn.Module, units=None, prefetch: int = 1, group=None):
        super().__init__(module, units, group)
        self.prefetcher = Prefetcher(prefetch)

    def forward(self, *inputs):
        self.prefetcher.begin_forward()
        return super().forward(*inputs)

    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple) -> None:
        ### BEGIN SOLUTION
        super().pre_forward(unit, submodule, inputs)
        if unit is not self.root:
            self.prefetcher.in_forward(unit)
        ### END SOLUTION

    def pre_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        ### BEGIN SOLUTION
        super().pre_backward(unit, gradient)
        self.prefetcher.in_backward(unit)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-prefetching-zero3" points=2
check.Prefetching()

# %% [markdown]
# ## A GPT in shards (8 min)
#
# Now train a GPT on text with both of your classes, and with torch's FSDP2 for comparison. Mismatch detection (chapter
# 00) is turned off from here on, because it adds a small all-reduce to each collective.


# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared import memory
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=8, width=128)


def in_fsdp2(model):
    mesh = init_device_mesh(device.type, (world_size,))
    for submodule in (*model.blocks, model):
        fully_shard(submodule, mesh=mesh)
    return model


def batch_of(step):
    """Draw two samples for each rank, different ones in each step. Returns those of this rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text.tokens) - 33, (2 * world_size,), generator=generator)
    return [tensor.to(device) for tensor in text.windows(starts[rank::world_size], length=32)]


# %%
# %%ranks --timeout 180
def trained(model, steps=30):
    """Train. Returns the loss of each step, averaged over the ranks, and the memory during one more step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.zeros(steps)

    def compute_gradients(batch):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        return loss.item()

    for step in range(steps):
        losses[step] = compute_gradients(batch_of(step))
        optimizer.step()
    batch = batch_of(steps)
    with memory.peak(model, optimizer) as peak:
        compute_gradients(batch)
        optimizer.step()
    losses = losses.to(device)
    dist.all_reduce(losses)
    return (losses / world_size).tolist(), peak


parameters_bytes = sum(parameter.nbytes for parameter in TinyGPT(config).parameters())
results = {
    "your PlainZeRO3": trained(PlainZeRO3(TinyGPT(config).to(device))),
    "your PrefetchingZeRO3": trained(PrefetchingZeRO3(TinyGPT(config).to(device))),
    "FSDP2": trained(in_fsdp2(TinyGPT(config).to(device))),
}

# %% tags=["nbval-ignore-output"]
from shared import plots
from shared.predictions import predicted

results = ranks.pull("results")[0]
curves = {name: losses for name, (losses, _) in results.items()}
for of_step in zip(*curves.values(), strict=True):
    assert max(of_step) - min(of_step) < 0.05
assert all(losses[-1] < 0.9 * losses[0] for losses in curves.values())
most = max(max(of_step) - min(of_step) for of_step in zip(*curves.values(), strict=True))
print(f"largest difference of the losses: {most:.0e}")

# %% [markdown]
# Thirty steps, three wrappers, the same losses. The loop did not call `finish_gradient_sync()`, because your classes
# have reduced all gradients by the end of backward.
#
# **Predict.** The model has Ψ parameters, in eight blocks of the same size and a root of about 1% of Ψ. What is the
# most memory that parameters take on one of the four ranks during a step, as a multiple of a full copy? 1 would mean
# the whole model.

# %%
my_peaks = {"your PlainZeRO3": None, "your PrefetchingZeRO3": None}

# %% tags=["nbval-ignore-output"]
measured = {}
for name, my_peak in my_peaks.items():
    most_bytes = max(sample.held.parameters_bytes for sample in results[name][1].samples)
    measured[name] = most_bytes / ranks.pull("parameters_bytes")[0]
    print(f"{name}: {predicted(my_peak)}measured {measured[name]:.2f}")
assert 0.25 < measured["your PlainZeRO3"] < measured["your PrefetchingZeRO3"] < 0.6
plots.memory_over_step(results["your PlainZeRO3"][1].samples)

# %% [markdown]
# A rank holds a quarter of the parameters, the root, and one block. With prefetching, it holds two blocks: the one that
# computes, and the next one. The figure shows a step of your `PlainZeRO3`. At the end of forward, the parameters drop
# to the shards and the root, until backward reaches the last block: the final norm, the output layer and the loss need
# only the root. A thin vertical line, if there is one, is a moment between two blocks.
#
# ## Exercise 9.7 · The all-gather that nobody needs (6 min, 1 point)
#
# In the lesson's timeline, block 5 was all-gathered twice in a row: at the end of forward, and again when backward
# began. Write `KeepsLastBlock.post_forward`, which saves the second all-gather. It does what `PrefetchingZeRO3` does,
# except for the last block in a forward with gradients. `self.units` holds the blocks in order, and then the root.
#
# In the check, look at the line `kept values` first. `kept wire` expects one all-gather less per step, and `kept order`
# is the check of exercise 9.6: the block before the last one must still be prefetched.
#
# <details><summary>Hint</summary>
#
# `post_forward` does two things for a block. In backward, the last block has nothing to wait for. Does anything else
# depend on its `pre_backward`?
#
# </details>


# %% tags=["exercise"] grade_id="keeps-last-block"
# %%ranks
class KeepsLastBlock(PrefetchingZeRO3):
    """Leaves the last block unsharded between its forward and its backward."""

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        ### BEGIN SOLUTION
        if torch.is_grad_enabled() and unit is self.units[-2]:  # the last unit is the root
            output.register_hook(partial(self.pre_backward, unit))
        else:
            super().post_forward(unit, submodule, inputs, output)
        ### END SOLUTION


# %% tags=["check"] grade_id="check-keeps-last-block" points=1
check.KeepsLast()

# %% [markdown]
# What does that save, and does the peak rise?


# %%
# %%ranks
from shared import wire


def sent_and_peak(model):
    """Return what the second of two steps sends, and the parameters' peak. The first one learns the order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        with memory.peak(model, optimizer) as peak, wire.ledger() as log:
            model(*batch_of(step)).backward()
            optimizer.step()
    return log.sent_bytes, max(sample.held.parameters_bytes for sample in peak.samples)


kinds = {"resharded": PrefetchingZeRO3, "kept": KeepsLastBlock}
last_block = {name: sent_and_peak(kind(TinyGPT(config).to(device))) for name, kind in kinds.items()}

# %% [markdown]
# **Predict.** How much less does a step send, as a multiple of f · 4Ψ bytes? 1 would mean one all-gather of the whole
# model. And how much higher is the parameters' peak, as a multiple of a full copy?

# %%
my_prediction = {"sent less": None, "higher peak": None}

# %%
last_block, full_bytes = ranks.pull("last_block")[0], ranks.pull("parameters_bytes")[0]
(sent, peak), (sent_if_kept, peak_if_kept) = last_block["resharded"], last_block["kept"]
less, higher = (sent - sent_if_kept) / (0.75 * full_bytes), (peak_if_kept - peak) / full_bytes
for name, found in {"sent less": less, "higher peak": higher}.items():
    print(f"{name}: {predicted(my_prediction[name])}measured {found:.2f}")
assert less > 0.1 and abs(higher) < 0.01

# %% [markdown]
# One of the sixteen all-gathers of blocks is gone, an eighth of f · 4Ψ, and the parameters' peak is the same: when two
# blocks have memory anyway, one of the two may be the last block. The peak of the whole step may rise, because the
# logits are alive then, too. Your four lines save 4% of a step's bytes. They still register `pre_backward`: without it,
# nobody would prefetch the block before the last one.
#
# ## What it cannot do yet
#
# `PlainZeRO3` knows that backward is done with a unit when it has counted all the unit's gradients. So it fails as soon
# as a model is not plain:
#
# - If a parameter is frozen, the constructor raises an error, because torch allows no gradient hook on it. If one is
#   unused in a step, the count is not complete, and the unit's gradients are not reduced.
# - If a block uses activation checkpointing, its hooks may run again in backward, and `post_forward` would then reshard
#   the block before its own backward.
#
# It also waits for every reduce-scatter right after its launch. In lab 10, you build `ZeRO3`. It asks autograd when
# backward is done with a unit, waits for reduce-scatters later, and can be saved and loaded.

# %%
ranks.stop()
