# Built by `make notebooks` from source/09_zero3/lab.py: edit that, not this.
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
        # The shard is a copy, because flat_param's memory is freed below.
        own_shard = self.layout.shard_of(self.flat_param).clone()
        self.shard = nn.Parameter(own_shard, requires_grad=parameters[0].requires_grad)
        if compute_dtype and self.flat_param.is_floating_point():  # int8 weights stay what they are
            self.flat_param = self.flat_param.to(compute_dtype)
        self._alias_parameters()  # from now on, the model's parameters are slices of flat_param
        self.reshard()

    def unshard(self):
        """Give flat_param its memory back and launch the all-gather that fills it. Returns a handle with wait().

        Communication: one all-gather.
        """
        allow_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
        shard = self.shard.detach().to(self.flat_param.dtype)
        return launch_all_gather(self.flat_param, shard, self.layout.group)

    def reshard(self) -> None:
        """Free flat_param's memory. The parameters keep their shapes, but must not be read."""
        forbid_reads(self.layout.parameters)
        self.flat_param.untyped_storage().resize_(0)


class UnitState(enum.Enum):
    """What a unit holds in each state. Its parameters take ψ bytes in the dtype that it computes with."""

    SHARDED = "this rank's shards"
    UNSHARDING = "this rank's shards, and ψ bytes that an all-gather is filling"
    UNSHARDED = "this rank's shards, and ψ bytes of parameters"
    BACKWARD = "this rank's shards, ψ bytes of parameters, and up to ψ bytes of gradients"


class Call:
    """One call of a unit. The autograd graph keeps it alive for as long as backward may still reach that call."""


class Unit:
    """Parameters that are unsharded and resharded together.

    `open_calls` are the calls of this unit in forward that backward has not finished yet. The set is weak: when a graph
    is freed, its calls drop out.
    """

    def __init__(self, flat_parameters: list[ShardedFlatParameter], reshard_after_forward: bool = True):
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
        if self.state is UnitState.SHARDED:
            return
        self.wait_for_unshard()  # an all-gather in flight would write into the freed memory
        for flat_parameter in self.flat_parameters:
            flat_parameter.reshard()
        self.state = UnitState.SHARDED


def owned_parameters(module: nn.Module, units: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
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
        flat_parameters = [new_flat_parameter(same_kind, group, compute_dtype) for same_kind in by_kind.values()]
        sharded[owner] = Unit(flat_parameters, reshard_after_forward and owner is not module)
    return sharded
