# ---
# jupyter:
#   course:
#     module: zero3
#     minutes: 90
# ---

# %% [markdown]
# # Lab 10 · FSDP
#
# **90 minutes, 12 points**, and another 13 minutes and 3 points for an optional exercise. You begin where the lesson's
# small FSDP2 stops: with parameters whose rows do not divide by the ranks. Then you turn lab 09's `PlainZeRO3` into
# `ZeRO3`, which also trains models with frozen, tied and unused parameters, nested units, activation checkpointing,
# micro-batches and bf16. Its methods have the names that torch's `fully_shard` gives them. In exercise 10.5, which is
# optional, you create a model that no rank ever holds in full.
#
# | exercise | you build | minutes | points |
# |---|---|---|---|
# | 10.1 | `RowShards`: copy-in and copy-out, as in FSDP2 | 22 | 3 |
# | 10.2 | `GradientReducer`: pack now, reduce later | 15 | 2 |
# | 10.3 | `ZeRO3`: the hooks of backward | 27 | 5 |
# | 10.4 | a sharded state dict | 12 | 2 |
# | | you train a GPT that was never whole | 14 | |
# | 10.5 | optional: `Materializer` | 13 | 3 |
#
# Each exercise has a check. Its first line is a plain case, which passes when the main idea is right. The other lines
# try awkward models, and count bytes.
#
# Much of the code is given. Run all of it, but read only the parts that the text asks you to read.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero3 as check
from shared.predictions import predicted

ranks.start(world_size=4)

# %% [markdown]
# ## Exercise 10.1 · Copy-in and copy-out (22 min, 3 points)
#
# In the lesson's small FSDP2, the rows of every parameter divide by the ranks. A bias with 7 elements breaks it: on 4
# ranks, `torch.chunk` makes shards of 2, 2, 2 and 1 rows. A parameter with a single row lies on rank 0 alone. But an
# all-gather wants equally many elements from every rank. So a rank sends a **slot**, which gives each parameter
# ⌈rows/N⌉ rows, and pads what is missing:
#
# ```text
# a has 5 rows, b has 1 row, 4 ranks. A dot is a row of padding.
#
#            rank 0        rank 1        rank 2        rank 3
# shards     a0 a1  b0     a2 a3         a4
# slots      a0 a1  b0     a2 a3  ·      a4 ·   ·      ·  ·   ·
# ```
#
# `RowShards` shards each parameter of a unit by its rows. Its constructor, `unshard` and `reshard` are given. You write
# the two copies around the all-gather:
#
# - `copy_in()` returns this rank's slot: a tensor with one dimension, in the dtype of the shards. The parameters follow
#   each other in the order of `self.parameters`. For each of them, the slot has this rank's rows, flattened, and then
#   zeros for the missing rows.
# - `copy_out(gathered)` gets the slots of all ranks, one after the other, in a tensor with one dimension. It copies the
#   rows of each parameter into the memory of `parameter.data`, and leaves out the padding. (Autograd would notice a
#   copy into the parameter itself, and a backward that needs the parameter would raise an error.)
# - Neither of them communicates, because `unshard`, which calls both inside `torch.no_grad()`, has to get by with one
#   all-gather.
# - `self.world_size` is the N of the group. `self.shards[i]` holds this rank's rows of `self.parameters[i]`, and it may
#   have no rows at all. A parameter has at least one row, and keeps its shape while it has no memory.
#
# A cell that starts with `class Name(Name):` adds methods to the class of that name. If you change the first one, also
# run the cells after it that continue the class.
#
# **Predict.** `nn.Linear(5, 7)` has 42 parameters, and a flat parameter on 4 ranks would have 44 elements. How many
# elements does the all-gather of a `RowShards` carry?

# %%
my_elements = None

# %% [markdown]
# The first line of the check tries rows that divide by the ranks, so there is no padding. The others try shapes such as
# [7], [1] and [5, 2, 2] on 1, 2 and 4 ranks, and compare every element.
#
# <details><summary>Hint 1</summary>
#
# Write down the shapes for a parameter with 7 rows of 3 elements on 4 ranks. How many elements does it take in the slot
# of rank 0, and how many in that of rank 3?
#
# </details>
# <details><summary>Hint 2</summary>
#
# View `gathered` as a matrix with one slot per row. Which columns belong to one parameter? If you read these columns
# slot by slot, where does all the padding lie?
#
# </details>


# %% tags=["export"] module="row_shards"
# %%ranks
"""Parameters that are sharded by their rows, as in FSDP2, and unshard with one all-gather."""

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single


class RowShards:
    """The parameters of a unit, of one dtype, each sharded along its first dimension as torch.chunk does.

    Shape: shards[i] is [this rank's rows, *parameters[i].shape[1:]].
    Memory: this rank's rows; between unshard() and reshard(), the parameters, too.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.world_size = dist.get_world_size(group)
        self.shards = [self._own_rows(parameter.detach()).clone() for parameter in parameters]

    def _own_rows(self, full: torch.Tensor) -> torch.Tensor:
        chunks, rank = full.chunk(self.world_size), dist.get_rank(self.group)
        return chunks[rank] if rank < len(chunks) else full[:0]

    @torch.no_grad()
    def unshard(self) -> None:
        """Fill the parameters with the rows of all ranks. Communication: one all-gather."""
        slot = self.copy_in()
        gathered = slot.new_empty(self.world_size * slot.numel())
        all_gather_single(gathered, slot, group=self.group)
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(parameter.nbytes)
        self.copy_out(gathered)

    def reshard(self) -> None:
        """Free the memory of the parameters."""
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)


# %% tags=["exercise", "export"] grade_id="row-shards" module="row_shards"
# %%ranks
class RowShards(RowShards):
    def copy_in(self) -> torch.Tensor:
        """Put this rank's rows of all parameters side by side, padded to as many elements as every rank sends."""
        ### BEGIN SOLUTION
        pieces = []
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            padded = shard.new_zeros(self._slot_rows(parameter), *parameter.shape[1:])
            padded[: len(shard)] = shard
            pieces.append(padded.flatten())
        return torch.cat(pieces)
        ### END SOLUTION

    def copy_out(self, gathered: torch.Tensor) -> None:
        """Copy the rows of each parameter out of the slots of all ranks, without the padding."""
        ### BEGIN SOLUTION
        slots, first = gathered.view(self.world_size, -1), 0
        for parameter in self.parameters:
            numel = self._slot_rows(parameter) * parameter[0].numel()
            # Only the last ranks have padding, so it follows all rows.
            rows = slots[:, first : first + numel].flatten()[: parameter.numel()]
            parameter.copy_(rows.view(parameter.shape))
            first += numel

    def _slot_rows(self, parameter: nn.Parameter) -> int:
        return -(-len(parameter) // self.world_size)  # rounded up
        ### END SOLUTION


# %% tags=["check"] grade_id="check-row-shards" points=3
check.RowShards()

# %% [markdown]
# Does FSDP2 do the same? Both shard the same layer here, and unshard it.

# %%
# %%ranks
import copy

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared import wire

layer = nn.Linear(5, 7).to(device)
theirs = fully_shard(copy.deepcopy(layer), mesh=init_device_mesh(device.type, (world_size,)))
yours = RowShards(list(layer.parameters()))
yours.reshard()
with wire.ledger() as of_yours:
    yours.unshard()
with wire.ledger() as of_theirs:
    theirs.unshard()
pairs = zip(layer.parameters(), theirs.parameters(), strict=True)
same = all(torch.equal(our, their) for our, their in pairs)
sent = [[(entry.op, entry.elements) for entry in log.entries] for log in (of_yours, of_theirs)]

# %%
sent, same = ranks.pull("sent")[0], ranks.pull("same")
print(predicted(my_elements, "{} elements", "\n"), end="")
print(f"yours: {sent[0]}\nFSDP2: {sent[1]}")
assert sent[0] == sent[1] == [("all_gather", 48)] and all(same)

# %% [markdown]
# Your `RowShards` sends what FSDP2 sends, and the parameters are equal. The rest of this lab keeps lab 09's flat
# parameters: with them, the optional exercise can give each rank only the parameters that lie in its shard. The hooks
# that you write next would be the same with `RowShards`.
#
# ## From `PlainZeRO3` to `ZeRO3`
#
# The next cell begins the module of `ZeRO3`. Its docstring describes a whole training step. Read it after exercise
# 10.3.

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
   post_backward() waits for the reduce-scatter of the previous unit, and adds its result to that unit's `shard.grad`.
   It launches the unit's own reduce-scatter, and reshards the unit. A unit whose inputs need no gradient, such as a
   root that gets tokens, has no post_backward().
3. finish_gradient_sync() launches the reduce-scatters that are left, such as the root's, waits until every shard has
   its mean gradient, and reshards all units. If backward did not reach a trained parameter, its gradient is zeros.
4. The caller's optimizer updates the shards. The next forward all-gathers the updated parameters.

Two things overlap. A prefetched all-gather is in flight while the current unit computes. A unit's reduce-scatter is in
flight during the backward of the next unit, whose own launch waits for it. The root prefetches nothing, so the first
all-gathers of forward and of backward are not hidden.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shared.sharded.backward import Backward, ForwardBegin, OrderOfUnits
from shared.sharded.gradients import plain_gradients
from shared.sharded.parameters import UnchangedParameters, broadcast_buffers, expect_shardable
from shared.sharded.states import expect_no_replacements
from solutions.clipping import clip_shards_
from solutions.prefetching import Prefetcher
from solutions.units import Call, Unit, UnitState, shard_into_units

# %% [markdown]
# ## Exercise 10.2 · Reducing the gradients of a unit (15 min, 2 points)
#
# Each unit has one `ShardedBucket` (lab 08) per flat parameter that is trained. In lab 04, you launched a bucket as
# soon as its last gradient was complete. Is that safe here?
#
# **Predict.** There are two ranks, three blocks, and no prefetching. Rank 0 uses all parameters, and rank 1 does not
# use one parameter of block 1. Suppose that each rank launches the reduce-scatter of a block as soon as the last
# gradient of the block is complete. Both have just unsharded block 1 for backward. Which collective does each rank
# launch next? Write "reduce-scatter" or "all-gather", and the number of the block.

# %%
my_rank_0 = None
my_rank_1 = None

# %%
print(f"rank 0: {predicted(my_rank_0)}it launches the reduce-scatter of block 1")
print(f"rank 1: {predicted(my_rank_1)}it launches the all-gather of block 0")

# %% [markdown]
# On rank 1, the bucket of block 1 is never full, so backward simply goes on to block 0. The two collectives do not
# belong together: the ranks hang, crash, or compute wrong values.
#
# So a `GradientReducer` separates two steps. When a gradient is complete, it is only packed. The launch comes later, at
# a moment that is the same on all ranks.
#
# - `on_gradient(bucket_index, index)` is called by autograd for `self.buckets[bucket_index].parameters[index]`. Pack
#   the gradient with `bucket.pack(index)`, and remove `index` from `self.missing[bucket]`. If `index` is not in that
#   set, raise a `RuntimeError` that says to call `finish_gradient_sync()` after each `backward()`. The imported
#   `second_gradient(parameter)` returns such a message.
# - `reduce(buckets)` is called by the wrapper. It launches each of these buckets, except those in `self.launched`:
#   1. Pack every index that is still missing, and empty that set, so that a gradient which comes later is an error. For
#      a gradient of `None`, `bucket.pack(index)` packs zeros.
#   2. Set `bucket.previous` to the bucket that was launched last, or to `None`. A bucket's `launch()` waits for its
#      `previous` one, so only one reduce-scatter is in flight.
#   3. Launch the bucket, and add it to `self.launched`.
# - `finish()` reduces the remaining buckets, waits for all of them with `bucket.wait()`, and calls `self._begin()` for
#   the next backward.
#
# The beginning of the class is given below, and the exercise continues it.
#
# <details><summary>Hint</summary>
#
# Suppose that rank 0 has packed all gradients of a bucket, and rank 1 none of them. Which lines of your `reduce` run on
# both ranks, and which ones only on rank 1?
#
# </details>


# %% tags=["export"] module="reducing"
# %%ranks
"""Reducing gradients: packed as soon as they are complete, reduce-scattered when all ranks are at the same point."""

from collections.abc import Iterable, Sequence

from shared.sharded.gradients import DroppedByZeroGrad, second_gradient
from solutions.overlapped_ddp import watch_gradients
from solutions.zero2 import ShardedBucket


class UnitBucket(DroppedByZeroGrad, ShardedBucket):
    """A ShardedBucket whose gradients zero_grad() drops, too, even before finish_gradient_sync() has added them."""


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

    def drop(self) -> None:
        """Drop the gradients of a backward() that has not been finished."""
        for bucket in self.buckets:
            bucket.drop()
        self._begin()


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
            raise RuntimeError(second_gradient(bucket.parameters[index]))
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
# Lab 09 counts gradients, and the count is never complete if one is missing. As in the lesson, we let autograd tell us:
# it computes the gradients of a unit's *inputs* last. So the inputs pass through `AfterBackward`. It changes nothing,
# and its backward calls `post_backward`. You know it from the lesson:


# %% tags=["export"]
# %%ranks
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


# %% [markdown]
# The next two cells begin the module of exercise 10.4. You don't need to read them.


# %% tags=["export"] module="model_state" jupyter={"source_hidden": true}
# %%ranks
"""State dicts of a sharded model: full ones, and sharded ones for torch.distributed.checkpoint."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shared.sharded.states import (
    OwnShards,
    expect_no_extra_state,
    extra_state_in,
    load_extra_state,
    without_extra_state,
)
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


# %% tags=["export"] module="model_state" jupyter={"source_hidden": true}
# %%ranks
class ShardedModule(OwnShards, nn.Module):
    """The base of ZeRO3, which knows all about its states: those of the rank's shards, full ones, and sharded ones.

    A subclass has `module`, `group`, `flat_parameters`, their `shards`, and _reshard_all().
    """

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(drop_full_parameters)
        self.register_load_state_dict_post_hook(expect_no_full_parameters)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather what module.state_dict() would return without sharding. See gather_full_state()."""
        with without_extra_state(self.module) as extra:
            return gather_full_state(self.module, self.flat_parameters) | extra

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Keep this rank's shard of a full state. See load_full_state()."""
        extra = extra_state_in(state_dict, self.module)
        tensors = {name: value for name, value in state_dict.items() if name not in extra}
        self._reshard_all()  # the root may still have the old values
        with without_extra_state(self.module):
            load_full_state(self.module, self.flat_parameters, tensors)
        load_extra_state(self.module, extra)

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """View this rank's shards for torch.distributed.checkpoint. See sharded_state()."""
        expect_no_extra_state(self.module)
        return sharded_state(self.module, self.flat_parameters, optimizer)


# %% [markdown]
# ## The class
#
# `ZeRO3` is one class in nine cells, which follow the order of a training step. The first four are given: what the
# class does, its constructor, its hooks, and `forward`. You don't need to read them. You will use these parts of the
# class:
#
# | attribute | meaning |
# |---|---|
# | `self.root` | the unit of the whole model. `self.units` lists all units, the root last |
# | `self.prefetcher` | the `Prefetcher` of lab 09 |
# | `self.reducer`, `self.buckets_of[unit]` | your `GradientReducer`, and the buckets of a unit |
# | `self.pending` | whether backward has run since the last `finish_gradient_sync()` |
# | `self._reshard_all()` | reshards all units |
#
# You will also use these parts of lab 09's `Unit`:
#
# | attribute or method | meaning |
# |---|---|
# | `unit.wait_for_unshard()` | launches the all-gather if it is not in flight, and waits for it |
# | `unit.reshard()` | frees the parameters, and sets the state back to `UnitState.SHARDED` |
# | `unit.state` | a `UnitState`. `pre_backward` sets it to `UnitState.BACKWARD` |
# | `unit.reshard_after_forward` | False for the root, and for all units if the user chooses that |
# | `unit.open_calls` | a set of `Call`s, with `add`, `discard` and `clear`. It is false when empty, like any set |


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ShardedModule):
    """ZeRO stage 3: train module with parameters, gradients and optimizer state sharded over the ranks of the group.

    parameters() are this rank's shards: give them to any optimizer that updates each element by itself. Call
    finish_gradient_sync() after backward(). All ranks must call the same units in the same order (only the first step
    compares it), and backward must reach the same ones, so a rank without a batch of its own needs a dummy one, with a
    loss of 0. As in FSDP2, a unit may not change an input that needs a gradient in place. torch.compile and torch.func
    are not supported.

    The module's own parameters have memory only while their unit computes. Reading or changing them in between raises a
    RuntimeError, and so does backward() if one was frozen, unfrozen, replaced or added after wrapping. What forward()
    writes into one's .data is lost. A loss must depend on what a unit returns, not on tensors that it has stored
    elsewhere. A shard has one dimension, and holds weights and biases, so param groups cannot choose between them. Its
    .grad has this rank's norm only: clip_grad_norm_(math.inf) returns the model's. The gradient of a parameter that no
    rank used is zeros, not None, so weight decay and momentum change it, unlike in one process. As in FSDP2, the model
    cannot be copied.

    Args:
        units: submodules that are unsharded one at a time; by default, the layers of the module's ModuleLists and
            Sequentials.
        compute_dtype: dtype of the unsharded parameters and of the gradients that are sent; by default, the parameters'
            own.
        prefetch: how many units to unshard ahead.
        reshard_after_forward: whether to free a unit's parameters between its forward and its backward.
        materializer: a Materializer, for a module on the meta device. It gives the shards and the buffers memory and
            values.

    Memory: with Adam in fp32, 16Ψ/N bytes for Ψ parameters on N ranks, plus the unsharded units: the root, the current
        unit and the prefetched ones; and in backward the full gradients of the root, of the current unit, and of the
        unit whose reduce-scatter is in flight. A unit whose inputs need no gradient stays unsharded until
        finish_gradient_sync().
        With a materializer, the constructor needs memory for the shards and for one unit.
    Communication: per micro-batch and unit of ψ parameters, two all-gathers and one reduce-scatter: 3(N−1)/N · 4ψ bytes
        sent per rank; 2(N−1)/N · 4ψ for the root, and for every unit if reshard_after_forward is False.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.3 and §7; Zhao et al. 2023, "PyTorch FSDP", §3.
    """


# %% tags=["export"] jupyter={"source_hidden": true}
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
        materializer=None,
    ):
        super().__init__()
        expect_shardable(module, group, getattr(materializer, "device", None))
        self.module, self.group = module, group
        new_flat_parameter = None  # the default, which also broadcasts the parameters
        if materializer is not None:
            materializer.fill_buffers(module)
            new_flat_parameter = partial(DeferredFlatParameter, materializer=materializer)
        broadcast_buffers(module, group)
        unit_of = shard_into_units(
            module, units, compute_dtype, reshard_after_forward, group, new_flat_parameter
        )
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.flat_parameters = [flat for unit in self.units for flat in unit.flat_parameters]
        self.shards = nn.ParameterList(flat.shard for flat in self.flat_parameters)

        self.prefetcher = Prefetcher(prefetch)
        self.buckets_of = {
            unit: [UnitBucket(flat) for flat in unit.flat_parameters if flat.shard.requires_grad]
            for unit in self.units
        }
        self.reducer = GradientReducer(list(chain.from_iterable(self.buckets_of.values())))
        self.calls: dict[Unit, Call] = {}  # the current call of each unit whose forward is running
        self.pending = False  # whether backward has run since the last finish_gradient_sync()
        self.backward = Backward(at_end=self._end_backward)
        self.unchanged = UnchangedParameters(module, self.flat_parameters)
        self.order = OrderOfUnits(group)

        self._register_hooks(unit_of)


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ZeRO3):
    def _register_hooks(self, unit_of: dict[nn.Module, Unit]) -> None:
        for submodule, unit in unit_of.items():
            # First, because other hooks may use the parameters, such as those of weight_norm.
            submodule.register_forward_pre_hook(
                partial(self.pre_forward, unit), prepend=True, with_kwargs=True
            )
            submodule.register_forward_hook(partial(self.post_forward, unit))


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ZeRO3):
    # One training step, in the order in which it happens.

    def forward(self, *inputs, **kwargs):
        """Run the module's forward, with each unit unsharded while it computes.

        Communication: one all-gather per flat parameter. A unit has one for each dtype and device of its parameters,
            and separate ones for frozen parameters.
        """
        expect_no_replacements(self)
        if self.backward.was_interrupted():
            self.reducer.drop()
        # After an earlier micro-batch that was not finished, some gradients may still be in buckets.
        if self.pending:
            self.finish_gradient_sync()
        self._reshard_all()  # after a forward without backward, the root still has the parameters of that time
        self.prefetcher.begin_forward()
        with self.order.waiting_after(self.prefetcher):
            output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self._reshard_all()  # units that were prefetched but not called
        return output

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()


# %% [markdown]
# ## The hooks of forward
#
# Both hooks of forward are given. Read them: the hooks of backward, which you write next, rely on what they do.
#
# - The unit's own all-gather is launched before the prefetched one. Otherwise, it would queue behind that of the next
#   unit.
# - A unit is in state BACKWARD when activation checkpointing runs its forward again, in the middle of its backward. It
#   is unsharded already, and must stay so.
# - Without gradients, nobody needs the unit again, so even the root is resharded.


# %% tags=["export"]
# %%ranks
class ZeRO3(ZeRO3):
    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, kwargs: dict):
        """Unshard a unit before its forward, or wait for its prefetched all-gather, and prefetch the next unit."""
        if unit.state is UnitState.BACKWARD:
            return None  # activation checkpointing is running this unit's forward again
        unit.wait_for_unshard()
        # The root's forward contains those of all other units, so it has no place in their order.
        if unit is not self.root:
            self.prefetcher.in_forward(unit)
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        """Reshard a unit after its forward, and ask autograd to call pre_backward()."""
        if unit.state is UnitState.BACKWARD:
            return
        if torch.is_grad_enabled():
            self._watch_outputs(unit, output)
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()


# %% [markdown]
# The next two cells let autograd call the hooks of backward: `post_backward` through `AfterBackward` on the inputs, and
# `pre_backward` when the gradient of an output is complete. They also raise an error where the gradients would be
# wrong. You don't need to read them.


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ZeRO3):
    def _watch_inputs(self, unit: Unit, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the inputs, such that autograd calls post_backward() when it is done with this call of the unit."""
        call = self.calls[unit] = Call()
        call.begin = ForwardBegin(unit.flat_parameters, (inputs, kwargs))
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [
            index for index, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)
        ]
        if indices:
            tensors = [*(leaves[index] for index in indices), self.backward.witness]
            watched = AfterBackward.apply(lambda: self._end_call(unit, call), *tensors)
            for index, tensor in zip(indices, watched[:-1], strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, structure)

    def _watch_outputs(self, unit: Unit, output) -> None:
        """Ask autograd to call pre_backward() when the gradient of an output is complete.

        The hooks keep the call alive: it stays in the unit's open_calls for as long as backward may reach it.
        """
        call = self.calls.pop(unit)
        for tensor in call.begin.tensors_of(output):
            unit.open_calls.add(call)
            tensor.register_hook(lambda _gradient: self._begin_call(unit, call))


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ZeRO3):
    def _begin_call(self, unit: Unit, call: Call) -> None:
        """Call pre_backward(), unless the gradients would be wrong."""
        self.backward.begin()
        call.begin.expect_same_parameters()
        with self.order.waiting_for(unit):
            self.pre_backward(unit, call)

    def _end_call(self, unit: Unit, call: Call) -> None:
        """Call post_backward(), unless autograd.grad() computes only the gradients of inputs."""
        if self.backward.is_for_parameters():
            self.post_backward(unit, call)

    def _end_backward(self) -> None:
        """Look for changes of the model, and let zero_grad() drop the gradients that are still in buckets."""
        self.unchanged.check()
        self.order.expect_same(self.prefetcher.called)
        if self.backward.is_for_inputs:
            if any(bucket.flat is not None for bucket in self.reducer.buckets):
                raise RuntimeError(
                    "backward(inputs=...) is not supported for parameters: leave out inputs"
                )
            self._reshard_all()
            self.pending = False
        for bucket in self.reducer.buckets:
            bucket.mark()


# %% [markdown]
# ## Exercise 10.3 · The hooks of backward (27 min, 5 points)
#
# A unit can be called more than once: twice in one forward, or in two forwards that share one backward. Then backward
# also reaches it more than once, and the unit must not be reduced before the last time. So each call of a unit in
# forward gets a `Call` object, and `unit.open_calls` holds the calls that backward has not finished.
#
# In the lesson, FSDP2 reduced such a unit only once, because autograd completes a gradient only after the last call. If
# you reduced it after an earlier call, you would send zeros, and your `GradientReducer` would reject the gradient when
# it comes.
#
# ```text
# pre_backward(unit, call):             # the gradient of one of the unit's outputs is complete
#     self.pending is now True
#     wait until the unit is unsharded; its state is now BACKWARD
#     call self.prefetcher.in_backward(unit, not_open), where not_open is the set of all units without open calls
# ```
#
# - `post_backward(unit, call)`: backward is done with this call of the unit. Close the call. Then decide whether the
#   unit's buckets may be reduced and the unit resharded now, or whether backward will come back. Until the last call,
#   the unit stays unsharded, unlike in FSDP2.
# - `finish_gradient_sync()`: the user calls it after backward. Afterwards, all gradients are reduced, nothing is
#   unsharded, no call is open, and `self.pending` is False.
#
# `not_open` tells the prefetcher which units to leave out: those that backward has finished or does not reach. The
# order of the lines matters: the unit's own all-gather must be launched before that of the next one.
#
# The hooks launch collectives. That is safe, because all ranks call the same units in the same order, so they also run
# these hooks in the same order. Two cases are left to `finish_gradient_sync`: a unit that this step did not call, and a
# unit whose inputs need no gradient, which has no `AfterBackward`.
#
# The check begins with the line `plain model`, and stops there if it fails. The other lines try awkward models,
# parameters that only some ranks use, micro-batches, activation checkpointing and several forwards. They took 1 to 4
# minutes on two busy cores.
#
# <details><summary>Hint 1</summary>
#
# What would happen to a unit that is called twice if it were reduced after the backward of one of its calls?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `open_calls` is a weak set, so a call drops out of it when its graph is freed. But suppose that the user keeps the
# output of a forward, and never calls backward for it. Which of your methods closes the calls of that forward?
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
        not_open = {each for each in self.units if not each.open_calls}
        # This does nothing for the root, which is never in `called`.
        self.prefetcher.in_backward(unit, not_open)
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


# %% tags=["check"] grade_id="check-backward" points=5
check.Backward()

# %% [markdown]
# The rest of the class is given, and you don't need to read it. Clipping needs only the shards and one all-reduce (lab
# 07).


# %% tags=["export"] jupyter={"source_hidden": true}
# %%ranks
class ZeRO3(ZeRO3):
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm.

        Returns:
            The norm before scaling.
        """
        if self.pending:
            self.finish_gradient_sync()
        return clip_shards_(plain_gradients(self.shards), max_norm, self.group)


# %% [markdown]
# ## A full state dict
#
# A full state dict holds every parameter in full, under the name that the module gives it. Any number of ranks can load
# it, and so can a program without a wrapper. Read `gather_full_state` only: on every rank, it gathers the whole model,
# and then copies it. Chapter 12 measures what that costs.


# %% tags=["export"] module="model_state" jupyter={"source_hidden": true}
# %%ranks
def values_in(
    module: nn.Module, state_dict: dict[str, torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the value that a full state has for each parameter and buffer of module.

    Raises:
        ValueError: if the state belongs to another module.
    """
    own = module.state_dict(keep_vars=True)
    own_shapes = {name: value.shape for name, value in own.items()}
    given_shapes = {name: value.shape for name, value in state_dict.items()}
    if own_shapes != given_shapes:
        different = sorted({name for name, _ in own_shapes.items() ^ given_shapes.items()})
        raise ValueError(
            "this state belongs to another module: "
            f"{different} are not in both, or do not have the same shape in both"
        )
    return {value: state_dict[name] for name, value in own.items()}


# %% tags=["export"] module="model_state"
# %%ranks
@torch.no_grad()
def gather_full_state(
    module: nn.Module, flat_parameters: Iterable[ShardedFlatParameter]
) -> dict[str, torch.Tensor]:
    """Gather what module.state_dict() would return if module were not sharded. All ranks must call this.

    Communication: one all-gather per flat parameter.
    """
    full_value = {}
    for flat_parameter in flat_parameters:
        layout = flat_parameter.layout
        flat = gather_shards(flat_parameter.shard, layout.group)
        full_value |= zip(layout.parameters, layout.views(flat), strict=True)
    state = module.state_dict(keep_vars=True)
    return {name: full_value.get(value, value).detach().clone() for name, value in state.items()}


# %% tags=["export"] module="model_state" jupyter={"source_hidden": true}
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
    new_value = values_in(module, state_dict)
    for flat_parameter in flat_parameters:
        layout, shard = flat_parameter.layout, flat_parameter.shard
        flat = layout.new_flat(shard.dtype)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(new_value.pop(parameter))
        shard.copy_(layout.shard_of(flat))
    for buffer, value in new_value.items():
        buffer.copy_(value)


# %% [markdown]
# ## Exercise 10.4 · A sharded state dict (12 min, 2 points)
#
# A full state dict needs a rank with enough memory for the whole model. With `torch.distributed.checkpoint`, each rank
# writes its own shards, and any other number of ranks can read what they need. For that, torch must know where a shard
# lies in the flat tensor of all ranks, and a `DTensor` contains that information.
#
# Two functions are given. `as_dtensor(layout, value)` describes a shard as a `DTensor`. `begin_state(optimizer)` lets a
# new optimizer create its state, so that there is something to load into. Your code calls only `as_dtensor`.


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
# `sharded_state(module, flat_parameters, optimizer)` returns a dictionary of the rank's shards, and of the optimizer's
# state for them. Its tensors share memory with the model and the optimizer, because `torch.distributed.checkpoint.load`
# writes into them.
#
# - `f"{index}.shard"` is the shard of `flat_parameters[index]`, as a `DTensor`.
# - `f"{index}.{name}"` is `optimizer.state[shard][name]`, for each name in the optimizer's state of that shard, such as
#   Adam's `exp_avg`. If it has the shape of the shard, make it a `DTensor`, too. Tensors of another shape, such as
#   Adam's `step`, and values that are not tensors stay as they are.
# - `f"module.{name}"` is the buffer `name` of the module's `named_buffers()`.
#
# The first line of the check saves on four ranks, and continues the training on two. The others try what the finished
# class can do: clipping, bf16, groups of ranks, and `state_dict()`.
#
# <details><summary>Hint</summary>
#
# If an optimizer has not stepped, it has no state for a shard: `optimizer.state.get(shard, {})` is empty.
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
# ## Exercise 10.5 · Stretch: deferred initialization (13 min, 3 points)
#
# So far, `ZeRO3` shards a model that exists already, so each rank needs room for the whole model once. The lesson
# builds the model on the meta device instead, and draws one parameter at a time in full. But each rank still draws all
# parameters, and keeps only 1/N of them. On 1,000 ranks, nearly all of that work is wasted.
#
# A `Materializer` draws only the parameters that lie in the rank's shard, one at a time. It is used like this:
#
# ```python
# with torch.device("meta"):
#     module = TinyGPT(config)
# model = ZeRO3(module, materializer=Materializer(module, initialize, device))
# ```
#
# The function `initialize(name, tensor)` fills a tensor in place, with any function of `torch.nn.init`. All of
# `Materializer` is given, except one method. `value_of(tensor)` returns the values of a parameter or buffer, in a new
# tensor on `self.device`. They may be random, but they depend only on the seed and on the tensor's name.
#
# You write `shard_of(layout)`. It returns this rank's shard of the flat tensor that the parameters of `layout` form:
#
# - The shard is on `self.device`. It has the shape `layout.shard_shape` and the dtype of the parameters. Its padding is
#   zeros.
# - Call `value_of` only for parameters that lie at least partly in the shard.
# - A parameter may be non-contiguous: use `reshape(-1)`, because `view(-1)` fails then.
# - Before you draw the next parameter, the values of the last one must be gone. A variable that still refers to them,
#   or to a slice of them, keeps them alive.
# - At the peak, a rank holds at most its shard and one parameter, each of them twice. So you may make one copy.
#
# ```text
# parameters:  a a a a a b b b c c c     11 elements
# rank:        0 0 0 0 1 1 1 1 2 2 2 2   3 shards of 4 elements
# ```
#
# In this example, rank 1 draws a, and keeps its last element. Then it draws b, and keeps all of it. It does not draw c.
# The last element of rank 2's shard is padding. In general, rank r's shard begins at element r · n of the flat tensor,
# where n is the number of elements in a shard, and r is the rank in `layout.group`.
#
# **Predict.** Suppose that a rank sets one seed, and then draws all parameters one after the other, unit by unit. Are
# the initial values with `units=[]` the same as with a unit per block? Write "yes" or "no".

# %%
my_answer = None

# %%
print(f"{predicted(my_answer)}the answer is no")

# %% [markdown]
# With a unit per block, the blocks are drawn first, and the embeddings in the root last. With `units=[]`, the
# embeddings are drawn first. That is why each name has a seed of its own.
#
# The first line of the check draws a plain model on two ranks.
#
# <details><summary>Hint 1</summary>
#
# Go through the parameters, and keep track of where the shard begins and ends, counted from the first element of the
# current parameter. When is its beginning negative? When does no part of the parameter lie in the shard?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Let the parameter's elements `first` to `last` be those in the shard. Which elements of the shard are they? Neither
# `first` nor `last` may lie outside of the parameter, and a negative index counts from the end.
#
# </details>


# %% tags=["export"] module="deferred"
# %%ranks
"""Deferred initialization: a model on the meta device is sharded, and then only this rank's shards are materialized."""

import contextlib
import zlib
from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from solutions.flat import FlatLayout
from solutions.units import ShardedFlatParameter


def seed_of(seed: int, name: str) -> int:
    """Return a seed for each name. Python's hash() of a string would differ from process to process."""
    return zlib.crc32(f"{seed}.{name}".encode())


@contextlib.contextmanager
def seeded(seed: int, device: torch.device):
    """Seed torch's generators for the with-block, and restore their states at its end."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# %% tags=["export"] module="deferred"
# %%ranks
class Materializer:
    """Gives tensors of a module on the meta device memory and values.

    The values of a tensor depend on the seed and on its name, but not on the number of ranks or on the units.

    Args:
        module: the module that has the tensors as parameters or buffers.
        initialize: initialize(name, tensor) fills a tensor in place. A tied parameter has its first name.
        device: where to allocate memory. A GPU draws other random values than a CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        initialize: Callable[[str, torch.Tensor], object],
        device: torch.device | str,
        seed: int = 0,
    ):
        self.initialize, self.device, self.seed = initialize, torch.device(device), seed
        named = chain(module.named_parameters(), module.named_buffers())
        self.name_of = {tensor: name for name, tensor in named}

    @torch.no_grad()
    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor on self.device, of the shape and dtype of one on the meta device, with its values."""
        name, value = self.name_of[tensor], torch.empty_like(tensor, device=self.device)
        with seeded(seed_of(self.seed, name), self.device):
            self.initialize(name, value)
        return value

    def fill_buffers(self, module: nn.Module) -> None:
        """Materialize the module's buffers that are on the meta device. They stay the same objects."""
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                # Tensors that have weak references cannot be swapped.
                layer._flat_weight_refs = [None] * len(layer._flat_weights_names)
        for buffer in module.buffers():
            if buffer.is_meta:
                torch.utils.swap_tensors(buffer, self.value_of(buffer))


# %% tags=["exercise", "export"] grade_id="materializer" module="deferred"
# %%ranks
class Materializer(Materializer):
    @torch.no_grad()
    def shard_of(self, layout: FlatLayout) -> torch.Tensor:
        """Materialize this rank's shard. No more than one parameter exists in full at any time.

        Shape: returns layout.shard_shape, padded with zeros.
        """
        ### BEGIN SOLUTION
        dtype = layout.parameters[0].dtype
        shard = torch.zeros(layout.shard_shape, dtype=dtype, device=self.device)
        # Where the shard begins, counted from the first element of the current parameter.
        begin = dist.get_rank(layout.group) * shard.numel()
        for parameter in layout.parameters:
            first, last = max(begin, 0), min(begin + shard.numel(), parameter.numel())
            if first < last:
                # A variable for the values would keep them in memory while the next ones are drawn.
                shard[first - begin : last - begin] = self.value_of(parameter).flatten()[first:last]
            begin -= parameter.numel()
        return shard
        ### END SOLUTION


# %% tags=["check"] grade_id="check-materializer" points=3
check.Materializer()

# %% [markdown]
# `DeferredFlatParameter` is given. `ZeRO3` uses it if it gets a `Materializer`, which makes the shard. The class does
# not call the constructor of `ShardedFlatParameter`, which would need memory for all parameters. A parameter on the
# meta device cannot get a slice of `flat_param` as its data, so `swap_tensors` first replaces it with an empty one on
# the rank's device. If you import your own class from lab 09, its methods find `layout`, `flat_param`, `shard` and the
# constructor's arguments in `self`, but no other attributes.


# %% tags=["export"] module="deferred" jupyter={"source_hidden": true}
# %%ranks
class DeferredFlatParameter(ShardedFlatParameter):
    """A sharded flat parameter whose parameters are on the meta device until this rank's shard is materialized.

    Memory: flat_param's for a moment, then the shard's and that of one parameter in full.
    Communication: when built, none, because every rank draws the same values.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        materializer: Materializer,
    ):
        self.parameters, self.group, self.compute_dtype = parameters, group, compute_dtype
        self.layout, first = FlatLayout(parameters, group), parameters[0]
        padded_numel = dist.get_world_size(group) * self.layout.shard_shape.numel()
        dtype = compute_dtype if compute_dtype and first.is_floating_point() else first.dtype
        # Neither a tensor nor a view can be created without memory, so flat_param has some until reshard().
        self.flat_param = torch.empty(padded_numel, dtype=dtype, device=materializer.device)
        views = self.layout.views(self.flat_param)
        self.flat_param.untyped_storage().resize_(0)
        own_shard = materializer.shard_of(self.layout)
        self.shard = nn.Parameter(own_shard, requires_grad=first.requires_grad)
        for parameter, view in zip(parameters, views, strict=True):
            # The parameter stays the same object, so modules that share it still do.
            empty = nn.Parameter(view.new_empty(0), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
            parameter.data = view
        self.reshard()


# %% [markdown]
# ## A model that was never whole
#
# The rest of this lab has no points. If you skipped exercise 10.5, skip the cell that begins with `import tempfile`,
# too. You can now do everything that you need for a model that does not fit on one rank: create it, train it, clip its
# gradients, save it, and resume. The next cells do that with a GPT on four ranks. They save after three steps and train
# three more. Then two ranks create the same model, load the checkpoint, and train the same three steps. Mismatch
# detection is switched off from here on, because it sends messages of its own.

# %%
# %%ranks
import torch.distributed.checkpoint as dcp

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=8, width=128)
settings = {"lr": 3e-3}


def initialize(name, tensor):
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.02)
    else:  # of a LayerNorm
        nn.init.constant_(tensor, float(name.endswith("weight")))


def never_whole():
    with torch.device("meta"):
        module = TinyGPT(config)
    model = ZeRO3(module, materializer=Materializer(module, initialize, device))
    return model, torch.optim.AdamW(model.parameters(), **settings)


# %%
# %%ranks
def train_on(model, optimizer, steps):
    """Return the losses. A batch has 8 samples on any number of ranks."""
    losses = []
    for step in steps:
        batch = text.windows(range(1000 * step, 1000 * step + 800, 100), length=32)
        x, y = (tokens[rank::world_size].to(device) for tokens in batch)
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        model.finish_gradient_sync()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / world_size)
    return losses


# %%
# %%ranks
def saved(folder):
    """Create, train and save. Return the losses after that, and the most bytes that parameters took."""
    # The empty tensor tells memory.peak which device to watch before there is a model.
    with memory.peak(extra={"parameters": [torch.empty(0, device=device)]}) as creation:
        model, optimizer = never_whole()
    with memory.peak(model, optimizer) as training:
        train_on(model, optimizer, range(3))
        dcp.save({"zero3": model.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    most_bytes = max(sample.held.parameters_bytes for sample in training.samples)
    return train_on(model, optimizer, range(3, 6)), creation.peak_bytes, most_bytes


def resumed(folder):
    model, optimizer = never_whole()
    begin_state(optimizer)  # something to load into
    dcp.load({"zero3": model.sharded_state_dict(optimizer)}, checkpoint_id=folder)
    return train_on(model, optimizer, range(3, 6))


psi_bytes = sum(parameter.nbytes for parameter in TinyGPT(config).parameters())

# %% tags=["nbval-ignore-output"]
import tempfile

with tempfile.TemporaryDirectory() as folder:
    on_4, creation_bytes, training_bytes = ranks.run(lambda path: saved(path), folder)[0]
    with ranks.world(2):
        on_2 = ranks.run(lambda path: resumed(path), folder)[0]
print("4 ranks:", [f"{loss:.4f}" for loss in on_4], "2 ranks:", [f"{loss:.4f}" for loss in on_2])
psi_bytes = ranks.pull("psi_bytes")[0]
multiples = [size / psi_bytes for size in (creation_bytes, training_bytes)]
print(
    "the most that the parameters took: {:.2f} Ψ while created, {:.2f} Ψ after that".format(
        *multiples
    )
)
assert all(abs(one - other) < 1e-4 for one, other in zip(on_4, on_2, strict=True))
assert max(multiples) < 1

# %% [markdown]
# The losses are equal. In training, a rank holds at most about half of the parameters: its shards, the root and two
# blocks. With more ranks, the shards shrink.
#
# ## Break it: no units
#
# Code that wraps a model in FSDP sometimes names no units, and then the root is the only unit. The next cells train the
# same GPT with and without units, next to your `ZeRO2` and torch's FSDP2.
#
# **Predict.** With units, a rank holds at most about half of the parameters. What is the most that it holds without
# units, as a multiple of Ψ? 1 means the whole model.

# %%
my_peak = None

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from solutions.manual_ddp import broadcast_state
from solutions.zero2 import ZeRO2

samples = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=32)
inputs, targets = (tensor.to(device) for tensor in samples)


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
measured = {name: size / most_bytes["DDP, AdamW"] for name, size in most_bytes.items()}
without_units, with_units = measured["your ZeRO3, units=[]"], measured["your ZeRO3"]
print(f"{predicted(my_peak, '{} Ψ')}measured {without_units:.2f} Ψ; with units {with_units:.2f} Ψ")
assert with_units < 1 < without_units

# %% [markdown]
# With units, a rank holds its shards, the root and two blocks: the one that computes, and the prefetched one. In
# backward, FSDP2 prefetches a block, too. Until that block computes, it lies in a buffer of the all-gather, which the
# column of the parameters does not count.
#
# With a single unit, the values are right, and the model even sends less. But its parameters take more than Ψ at the
# peak, and its total peak memory is above that of `ZeRO2`, which does not shard parameters at all.
#
# ## Your figure
#
# This is one step of your `ZeRO3` with units. Follow the parameters through forward and backward:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO3"][2].samples)

# %% [markdown]
# The parameters stay at one level for most of the step: whenever a block is resharded, the next one is prefetched. In
# between, you see short dips. Above the parameters lie the shards of the optimizer state and of the gradients, the
# gradients in buckets, and the activations of the rank's own samples. Activation checkpointing makes the activations
# smaller (chapter 06), and so does splitting the layers themselves (chapter 13).

# %%
ranks.stop()
