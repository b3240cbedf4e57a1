# ---
# jupyter:
#   course:
#     module: units
#     minutes: 65
# ---

# %% [markdown]
# # Lab 09 · ZeRO-3
#
# **65 minutes, 12 points.** You will train a model whose parameters are sharded: each rank keeps one shard of every
# parameter, and a part of the model has full parameters only while it computes. First you build the three pieces that
# this needs. Then you put them together in `PlainZeRO3`, which trains every plain model. Lab 10 makes it robust.
#
# Each exercise has a check. The checks never judge times. They do count bytes: on the wire, and in memory at every
# moment of a step.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import units as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Units of a sharded model: parameters that are unsharded while a part of the model computes, then resharded."""

import enum
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from solutions.async_collectives import launch_all_gather
from solutions.flat import FlatParameter

# %% [markdown]
# ## Exercise 9.1 · Parameters without memory (20 min, 3 points)
#
# A tensor is a view of a *storage*, and a storage can be resized to zero bytes and back. The views of it stay valid:

# %%
# %%ranks 0
tensor = torch.ones(1000)
view = tensor[:10]
storage = tensor.untyped_storage()
storage.resize_(0)
print(view.shape, storage.nbytes(), "bytes")
storage.resize_(tensor.nbytes)
tensor.fill_(2.0)
print(view[:3].tolist())

# %% [markdown]
# Autograd saves such views for backward, too. So you can free a parameter's memory after forward, and backward does not
# notice, as long as the same values are back in the same storage by then.
#
# (Reading a freed tensor usually raises `RuntimeError: setStorage: … out of bounds for storage of size 0`. Some
# operations do not check, and the process ends with a segmentation fault, SIGSEGV. The notebook then tells you so and
# starts new ranks.)
#
# `ShardedFlatParameter(parameters, group, compute_dtype)` is lab 07's `FlatParameter` with two differences. Its
# `shard`, the `nn.Parameter` for the optimizer, has memory *of its own*. And its `flat_param`, of which the model's
# parameters are slices, has memory only between `unshard()` and `reshard()`.
#
# - The constructor broadcasts the values of the group's rank 0, so that all ranks start equal. Afterwards `flat_param`
#   is resharded: it has no memory.
# - `shard` has the parameters' dtype, and their `requires_grad`, which is the same for all of them.
# - `flat_param`, and with it the model's parameters, has the dtype `compute_dtype`; by default, the parameters' own.
# - `unshard()` gives `flat_param` its memory back and launches the all-gather that fills it. It returns a handle with
#   `wait()`. Use lab 01's `launch_all_gather(flat, shard, group)`.
# - `reshard()` frees `flat_param`'s memory. A rank then holds one shard, 1/N of the parameters' bytes.
#
# `FlatParameter` gives you `self.layout` (with `layout.group` and `layout.shard_of(flat)`), `self.flat_param`, and
# `self._alias_parameters()`, which makes the parameters slices of the current `self.flat_param`.
#
# <details><summary>Hint 1</summary>
#
# After `super().__init__(…)`, `self.shard` is a view of `self.flat_param`. What happens to the shard's values when
# `flat_param`'s memory is freed?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Clone the shard first, then convert `flat_param` to `compute_dtype`. The conversion may create a new tensor, and the
# model's parameters are still slices of the old one.
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

    def __init__(
        self, parameters: list[nn.Parameter], group=None, compute_dtype: torch.dtype | None = None
    ):
        ### BEGIN SOLUTION
        super().__init__(parameters, group)
        dist.broadcast(self.flat_param, group=group, group_src=0)
        # The shard is a copy, because flat_param's memory is freed below.
        own_shard = self.layout.shard_of(self.flat_param).clone()
        self.shard = nn.Parameter(own_shard, requires_grad=parameters[0].requires_grad)
        self.flat_param = self.flat_param.to(compute_dtype or self.flat_param.dtype)
        self._alias_parameters()
        self.reshard()
        ### END SOLUTION

    def unshard(self):
        """Give flat_param its memory back and launch the all-gather that fills it. Returns a handle with wait().

        Communication: one all-gather.
        """
        ### BEGIN SOLUTION
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        shard = self.shard.detach().to(self.flat_param.dtype)
        return launch_all_gather(self.flat_param, shard, self.layout.group)
        ### END SOLUTION

    def reshard(self) -> None:
        """Free flat_param's memory. The parameters keep their shapes, but must not be read."""
        ### BEGIN SOLUTION
        self.flat_param.untyped_storage().resize_(0)
        ### END SOLUTION

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._alias_parameters()  # after deepcopy, the copied parameters must be slices of the copied flat_param


# %% tags=["check"] grade_id="check-sharded-flat-parameter" points=3
check.ShardedFlatParameter()

# %% [markdown]
# ## Exercise 9.2 · A unit and its states (10 min, 3 points)
#
# A **unit** is a part of the model whose parameters are unsharded and resharded together: a block of a GPT, say. Its
# parameters may differ in dtype, so a unit has a list of `ShardedFlatParameter`s. At any time it is in one of four
# states:


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
# - `unshard()` keeps the handles in `self.works`. `wait_for_unshard()` drops them.
# - `reshard()` may be called while an all-gather is in flight. That all-gather still writes into the memory, so it must
#   complete before the memory is freed.
# - Nothing here sets BACKWARD: that is done from outside, in lab 10, where `open_calls` and `reshard_after_forward` are
#   used as well.
#
# <details><summary>Hint</summary>
#
# `wait_for_unshard()` can begin with `self.unshard()`, which does nothing if the unit is not SHARDED. Which of the two
# methods helps `reshard()`?
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
        ### BEGIN SOLUTION
        if self.state is UnitState.SHARDED:
            with record_function("ZeRO3::all_gather"):
                self.works = [flat_parameter.unshard() for flat_parameter in self.flat_parameters]
            self.state = UnitState.UNSHARDING
        ### END SOLUTION

    def wait_for_unshard(self) -> None:
        """Wait until the unit's parameters are unsharded. Launch their all-gathers first, if need be."""
        ### BEGIN SOLUTION
        self.unshard()
        if self.state is UnitState.UNSHARDING:
            for work in self.works:
                work.wait()
            self.works = []
            self.state = UnitState.UNSHARDED
        ### END SOLUTION

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


# %% tags=["check"] grade_id="check-unit" points=3
check.Unit()

# %% [markdown]
# ## Exercise 9.3 · Which unit owns a parameter? (15 min, 2 points)
#
# `owned_parameters(module, units)` assigns every parameter of `module` to one unit. Units are submodules of `module`,
# and one may lie inside another.
#
# ```python
# owned_parameters(gpt, list(gpt.blocks))    # {block 0: [...], block 1: [...], ..., gpt: [embeddings, final norm]}
# ```
#
# - A parameter belongs to the innermost unit around it.
# - A parameter in no unit belongs to the **root**, which is `module` itself.
# - A *tied* parameter has several names. If the innermost units around them differ, it belongs to the root, because
#   none of the units could reshard it alone.
# - The keys are all units in the given order, then `module`. A unit may own nothing.
# - Each parameter appears once. Frozen parameters are included.
# - Raise a `ValueError` for a unit that is not inside `module`, or is `module` itself.
#
# <details><summary>Hint 1</summary>
#
# `module.named_parameters(remove_duplicate=False)` yields a tied parameter once per name, and
# `module.named_modules(remove_duplicate=False)` yields a submodule once per path. If a parameter lies inside a unit,
# how does its name begin?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `"blocks.1"` is a prefix of `"blocks.10.weight"`, but block 1 is not around that parameter.
#
# </details>


# %% tags=["exercise", "export"] grade_id="owned-parameters"
# %%ranks
def owned_parameters(
    module: nn.Module, units: Iterable[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Assign each parameter to the innermost unit around it, or to the root, which is module itself.

    The root also owns a tied parameter that lies in several units, because none of them could reshard it alone.

    Raises:
        ValueError: for a unit that is not inside module, or is module itself.
    """
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-owned-parameters" points=2
check.owned_parameters()

# %% [markdown]
# Two functions are given. `default_units` chooses the units when nobody names them. `shard_into_units` puts your three
# pieces together: it returns a `Unit` for each submodule that is one, and for the root.


# %% tags=["export"]
# %%ranks
def default_units(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the layers in its outermost ModuleLists and Sequentials."""
    found, inside = [], set()
    for candidate in module.modules():
        if isinstance(candidate, nn.ModuleList | nn.Sequential) and candidate not in inside:
            found += [layer for layer in candidate if any(True for _ in layer.parameters())]
            inside |= set(candidate.modules())
    return list(dict.fromkeys(found))


def shard_into_units(
    module: nn.Module,
    units: Iterable[nn.Module] | None = None,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[nn.Module, Unit]:
    """Shard all parameters of module, unit by unit. The last unit is the root, which stays unsharded after forward.

    Returns:
        The unit of each submodule that is one, and of module itself.

    Communication: one broadcast per flat parameter.
    """
    sharded = {}
    owned = owned_parameters(module, default_units(module) if units is None else units)
    for owner, parameters in owned.items():
        by_kind = {}
        for parameter in parameters:
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            by_kind.setdefault(kind, []).append(parameter)
        flat_parameters = [
            ShardedFlatParameter(same_kind, group, compute_dtype) for same_kind in by_kind.values()
        ]
        sharded[owner] = Unit(flat_parameters, reshard_after_forward and owner is not module)
    return sharded


# %% [markdown]
# ## Exercise 9.4 · A sharded model that trains (20 min, 4 points)
#
# `PlainZeRO3` wraps a model and registers four of its own methods as **hooks**, which are called before and after each
# unit computes. In this exercise, the model is plain: every parameter is trained, and every unit is called once per
# forward and returns one tensor.
#
# | hook | is called | must |
# |---|---|---|
# | `pre_forward` | before a unit's forward | wait until its parameters are unsharded |
# | `post_forward` | after it | register `pre_backward` on the output, and reshard the unit |
# | `pre_backward` | when the gradient of the output is complete | wait until the parameters are unsharded again |
# | `post_backward` | when all gradients of the unit are packed | reduce-scatter its buckets, and reshard the unit |
#
# - `tensor.register_hook(function)` lets autograd call `function(gradient)` when the tensor's gradient is complete. The
#   function must return `None`.
# - Do not reshard the root after a forward with gradients: its last layer is the first that backward needs.
# - Without gradients (`torch.is_grad_enabled()` is false) there will be no backward. Reshard every unit then, the root
#   too, and register nothing.
# - `self.buckets[unit]` holds lab 08's `ShardedBucket`s. `bucket.launch()` starts the reduce-scatter of what is packed,
#   and `bucket.wait()` adds the mean to `shard.grad`. Waiting at once is fine here; lab 10 waits later.
#
# The constructor, `on_gradient` and two small methods are given. The class is spread over three cells: a cell that
# starts with `class Name(Name):` adds methods to the class of that name. When you change such a cell, also run the
# cells after it that continue the class.
#
# The first check trains a model of three blocks on two ranks. The others count bytes on the wire and in memory.
#
# <details><summary>Hint 1</summary>
#
# Write down, for a unit in the middle of the model, its state before and after each hook. Which hooks allocate memory
# for its parameters, and which ones free it?
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
        owned = [(unit, bucket) for unit in self.units for bucket in self.buckets[unit]]
        self.shards = nn.ParameterList(bucket.flat_parameter.shard for _, bucket in owned)
        for submodule, unit in unit_of.items():
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit))
            submodule.register_forward_hook(partial(self.post_forward, unit))
        self.owned, self.packed = owned, Counter()
        watch_gradients([bucket for _, bucket in owned], self.on_gradient)

    def forward(self, *inputs):
        return self.module(*inputs)

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that is complete. After the unit's last one, backward is done with the unit."""
        unit, bucket = self.owned[bucket_index]
        bucket.pack(index)
        self.packed[unit] += 1
        parameters = [parameter for bucket in self.buckets[unit] for parameter in bucket.parameters]
        if self.packed[unit] == len(parameters):
            self.packed[unit] = 0
            self.post_backward(unit)


# %% tags=["exercise"] grade_id="plain-zero3"
# %%ranks
class PlainZeRO3(PlainZeRO3):
    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple) -> None:
        ### BEGIN SOLUTION
        unit.wait_for_unshard()
        ### END SOLUTION

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        ### BEGIN SOLUTION
        if torch.is_grad_enabled():
            output.register_hook(partial(self.pre_backward, unit))
        if unit is not self.root or not torch.is_grad_enabled():
            unit.reshard()
        ### END SOLUTION

    def pre_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        ### BEGIN SOLUTION
        unit.wait_for_unshard()
        ### END SOLUTION

    def post_backward(self, unit: Unit) -> None:
        ### BEGIN SOLUTION
        for bucket in self.buckets[unit]:
            bucket.launch()
            bucket.wait()
        unit.reshard()
        ### END SOLUTION


# %% tags=["given"]
# %%ranks
class PlainZeRO3(PlainZeRO3):
    def finish_gradient_sync(self) -> None:
        """Reshard units that a forward without a backward has left unsharded. All gradients are reduced already."""
        for unit in self.units:
            unit.reshard()

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)


# %% tags=["check"] grade_id="check-plain-zero3" points=4
check.PlainZeRO3()

# %% [markdown]
# ## A GPT in shards
#
# Train the GPT of the lessons with `PlainZeRO3`, on text, beside torch's own `fully_shard` (FSDP2).
#
# **Predict.** The model has Ψ parameters, in eight blocks of nearly the same size and a small root, and there are four
# ranks. What is the most that parameters take on a rank during a step, as a fraction of Ψ?

# %%
prediction_peak = None  # <- as a fraction of Ψ; 1 would mean the whole model at once

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared import memory
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch

mismatch.ignore()  # comparing collectives between ranks costs messages of its own
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=8, width=128)
samples = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=32)
inputs, targets = (tensor.to(device) for tensor in samples)


# %%
# %%ranks
def in_fsdp2(model):
    mesh = init_device_mesh(device.type, (world_size,))
    for submodule in (*model.blocks, model):
        fully_shard(submodule, mesh=mesh)
    return model


def steps_of(model, steps=4):
    """Train, and return the losses, and the most bytes that parameters take in the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with memory.peak(model, optimizer) as peak:
            loss = model(inputs, targets)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, max(sample.held.parameters_bytes for sample in peak.samples)


torch.manual_seed(0)
plain = TinyGPT(config).to(device)
psi_bytes = sum(parameter.nbytes for parameter in plain.parameters())
results = {
    "your PlainZeRO3": steps_of(PlainZeRO3(TinyGPT(config).to(device))),
    "FSDP2": steps_of(in_fsdp2(TinyGPT(config).to(device))),
}

# %% tags=["nbval-ignore-output"]
from shared import tables

results, psi_bytes = ranks.pull("results")[0], ranks.pull("psi_bytes")[0]
(losses, peak_bytes), (fsdp2_losses, _) = results.values()
assert max(abs(ours - torchs) for ours, torchs in zip(losses, fsdp2_losses, strict=True)) < 1e-3
assert peak_bytes < 0.5 * psi_bytes
print(f"You predicted {prediction_peak} Ψ.")
rows = [
    [name, *(f"{loss:.4f}" for loss in losses), f"{most_bytes / psi_bytes:.2f} Ψ"]
    for name, (losses, most_bytes) in results.items()
]
header = ["", *(f"loss {step}" for step in range(1, 5)), "parameters at most"]
tables.Table(header, rows, "rank 0's samples; four ranks")

# %% [markdown]
# The losses agree, and a rank holds 1/N of the parameters, the root, and one block at a time.
#
# ## What it cannot do yet
#
# `PlainZeRO3` knows that backward is done with a unit when it has counted all the unit's gradients. Freeze one
# parameter, or skip one for some samples, and the count is never complete: that unit's gradients are not reduced. Wrap
# a block in activation checkpointing, and it is resharded in the middle of its own backward. `PlainZeRO3` also waits
# for every all-gather and every reduce-scatter. In lab 10 you build `ZeRO3`. It asks autograd when backward is done
# with a unit, prefetches the next one, and can be saved and loaded.

# %%
ranks.stop()
