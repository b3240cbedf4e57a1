# Built by `make notebooks` from source/09_zero3/lab.py: edit that, not this.
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


class ShardedParameters(FlatParameters):
    """Parameters of one dtype and device, of which each rank keeps one N-th, and has the rest from gather() to free().

    Shapes: shard [n], an nn.Parameter; flat [N · n] in compute_dtype, whose slices are the parameters.
    Comm: when built, one broadcast; gather() is one all_gather of flat.
    """

    def __init__(self, parameters: list[nn.Parameter], group=None, compute_dtype: torch.dtype | None = None):
        super().__init__(parameters, group)
        dist.broadcast(self.flat, group=group, group_src=0)
        self.shard = nn.Parameter(self.own(self.flat).clone(), requires_grad=parameters[0].requires_grad)
        self.flat = self.flat.to(compute_dtype or self.flat.dtype)
        self._move_in()
        self.free()

    def gather(self):
        """Begin to fill flat with all shards. → a handle with wait()"""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        return begin_all_gather(self.flat, self.shard.detach().to(self.flat.dtype), self.group)

    def free(self) -> None:
        """Give flat's memory back."""
        self.flat.untyped_storage().resize_(0)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)  # deepcopy: parameters must be slices of flat again
        self._move_in()


class UnitState(enum.Enum):
    """Where a unit's parameters are, and what that costs. ψ: their bytes in the dtype that the unit computes with."""

    SHARDED = "this rank's part"
    GATHERING = "this rank's part, and ψ which fill while the others' parts arrive"
    GATHERED = "this rank's part, and ψ to compute with"
    BACKWARD = "this rank's part, ψ to compute with, and up to ψ of gradients"


class Call:
    """One call of a unit. Autograd holds it for as long as a backward may reach that."""


class Unit:
    """A part of the model whose parameters are gathered and freed together."""

    def __init__(self, parts: list[ShardedParameters]):
        self.parts, self.state, self.handles = parts, UnitState.SHARDED, []
        self.open = weakref.WeakSet()

    def begin_gather(self) -> None:
        """Begin to gather the parameters, unless they are here or on their way."""
        if self.state is UnitState.SHARDED:
            self.handles = [part.gather() for part in self.parts]
            self.state = UnitState.GATHERING

    def wait(self) -> None:
        """Have the parameters here."""
        self.begin_gather()
        if self.state is UnitState.GATHERING:
            for handle in self.handles:
                handle.wait()
            self.handles = []
            self.state = UnitState.GATHERED

    def reshard(self) -> None:
        """Keep this rank's part of the parameters only."""
        if self.state is UnitState.SHARDED:
            return
        self.wait()
        for part in self.parts:
            part.free()
        self.state = UnitState.SHARDED


def owned_parameters(module: nn.Module, units: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Give each parameter to the innermost unit around it, or to the module, where there is none or not one only.

    Raises: ValueError for a unit that is not inside module, or is module itself.
    """
    units = list(units)
    unit_at = {path: each for path, each in module.named_modules(remove_duplicate=False) if each in units and path}
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


def _leave_out_whole_parameters(wrapper: nn.Module, state: dict, prefix: str, _metadata) -> None:
    for name, _ in wrapper.module.named_parameters(remove_duplicate=False):
        del state[f"{prefix}module.{name}"]


def _miss_no_whole_parameters(wrapper: nn.Module, keys) -> None:
    whole = {name for name, _ in wrapper.module.named_parameters("module", remove_duplicate=False)}
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in whole]


class HoldsShards(nn.Module):
    """Shards a module's parameters, unit by unit; its parameters() are this rank's shards."""

    def __init__(self, module: nn.Module, units=None, compute_dtype=None, group=None):
        super().__init__()
        self.module, self.group = module, group
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        owned = owned_parameters(module, default_units(module) if units is None else units)
        self.units = {
            each: Unit([ShardedParameters(kind, group, compute_dtype) for kind in of_one_kind(parameters)])
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


class GathersForForward(HoldsShards):
    """Gathers the parameters of each unit for its forward."""

    def __init__(self, module: nn.Module, units=None, reshard_after_forward=True, **options):
        super().__init__(module, units, **options)
        self.reshard_after_forward = reshard_after_forward
        for each, unit in self.units.items():
            each.register_forward_pre_hook(partial(self._before_forward, unit))
            each.register_forward_hook(partial(self._after_forward, unit))

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: tuple) -> None:
        if unit.state is not UnitState.BACKWARD:
            unit.wait()

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: tuple, output) -> None:
        if unit.state is UnitState.BACKWARD:
            return
        recorded = torch.is_grad_enabled()
        if recorded:
            self._called(unit, output)
        if not recorded or (self.reshard_after_forward and unit is not self.root):
            unit.reshard()

    def _called(self, unit: Unit, output) -> None:
        call = Call()  # a unit may be called several times in one forward
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                unit.open.add(call)
                tensor.register_hook(partial(self._before_backward, unit, call))

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        raise NotImplementedError  # exercise 9.5


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
        self.queue.finish()
        for unit in self.units.values():
            unit.reshard()
            unit.open.clear()
        self.entered, self.pending = [], False

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        for each in self.entered:
            if each not in self.kin[unit] and not each.open:
                self._leave(each)
        is_due = call in unit.open or unit not in self.entered
        unit.open.discard(call)
        if is_due and unit.state is not UnitState.BACKWARD:
            unit.wait()
            unit.state = UnitState.BACKWARD
            self.entered.append(unit)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        number, place = self._place_of[parameter]
        if place not in self.queue.missing[number]:
            raise RuntimeError("call finish_gradient_sync() after each backward(): this came twice")
        self.pending = True
        self.queue.add(number, place)
        if self._is_complete(self._unit_of[number]):
            self._unit_of[number].reshard()


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
        super()._before_forward(unit, module, inputs)
        if unit is not self.root and unit.state is not UnitState.BACKWARD:
            self.called.append(unit)
            if self.called == self.expected[: len(self.called)]:
                self._begin_to_gather(self.expected[len(self.called) :])

    def _before_backward(self, unit: Unit, call: Call, gradient: torch.Tensor) -> None:
        super()._before_backward(unit, call, gradient)
        if unit in self.called:  # or it is the root's turn, or that of an earlier forward
            backwards = self.called[::-1]
            following = backwards[backwards.index(unit) + 1 :]
            self._begin_to_gather([each for each in following if each.open])

    def _begin_to_gather(self, following: list[Unit]) -> None:
        for unit in following[: self.prefetch]:
            if unit not in self.entered:
                unit.begin_gather()


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


class ClipsShards(LooksAhead):
    """Can bound the norm of its gradients."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most max_norm. → the norm before"""
        return clip_norm_([each.grad for each in self.shards if each.grad is not None], max_norm, self.group)


class WholeState(ClipsShards):
    """Puts the parts of all ranks together, and takes them apart again."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Collect what module.state_dict() would be. To be called by all ranks. Comm: one all_gather per part."""
        whole = {}
        for part in self.parts:
            slices = part.slices_of(collect(part.shard, self.group, None))
            whole |= zip(part.parameters, slices, strict=True)
        state = self.module.state_dict(keep_vars=True)
        return {name: whole.get(value, value).detach().clone() for name, value in state.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of a whole state.

        Raises: ValueError for a state of another module.
        """
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
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for number, part in enumerate(self.parts):
            entries = {"shard": part.shard} | optimizer.state.get(part.shard, {})
            for name, value in entries.items():
                is_sharded = torch.is_tensor(value) and value.shape == part.shard.shape
                state[f"{number}.{name}"] = as_dtensor(part, value) if is_sharded else value
        return state
