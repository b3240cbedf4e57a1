# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
"""ZeRO stage 3: every rank holds one shard of everything, and unshards a unit's parameters while it computes."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from solutions.clipping import clip_shards_
from solutions.model_state import (
    drop_full_parameters,
    expect_no_full_parameters,
    gather_full_state,
    load_full_state,
    sharded_state,
)
from solutions.overlapped_ddp import watch_gradients
from solutions.units import Call, Unit, UnitState, shard_into_units
from solutions.zero2 import ShardedBucket


class Prefetcher:
    """Launches the all-gathers of the next units while the current one computes.

    In forward, it expects the order of the previous forward; in backward, the reverse of this forward's order.
    """

    def __init__(self, units_ahead: int):
        self.units_ahead = units_ahead
        self.expected: list[Unit] = []  # the units of the previous forward, in the order of their calls
        self.called: list[Unit] = []  # those of this forward

    def begin_forward(self) -> None:
        self.expected, self.called = self.called, []

    def in_forward(self, unit: Unit) -> None:
        """Prefetch what followed this unit in the previous forward, as long as the order is the same."""
        self.called.append(unit)
        if self.called == self.expected[: len(self.called)]:
            self._unshard(self.expected[len(self.called) :])

    def in_backward(self, unit: Unit) -> None:
        """Prefetch the units that were called before this one, if backward will reach them."""
        if unit in self.called:  # the unit may belong to an earlier forward
            backwards = self.called[::-1]
            following = backwards[backwards.index(unit) + 1 :]
            self._unshard([each for each in following if each.open_calls])

    def _unshard(self, following: list[Unit]) -> None:
        for unit in following[: self.units_ahead]:
            unit.unshard()


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
        watch_gradients(self.buckets, self.on_gradient)  # deepcopy: the hooks stay with the original's parameters

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that backward() has just completed.

        Raises:
            RuntimeError: if this parameter's gradient is already packed.
        """
        bucket = self.buckets[bucket_index]
        if index not in self.missing[bucket]:
            raise RuntimeError(
                "got a second gradient for this parameter: call finish_gradient_sync() after each backward()"
            )
        self.missing[bucket].remove(index)
        bucket.pack(index)

    def reduce(self, buckets: Iterable[ShardedBucket]) -> None:
        """Launch the reduce-scatters of buckets, unless they are launched. Missing gradients count as zeros."""
        for bucket in buckets:
            if bucket in self.launched:
                continue
            for index in sorted(self.missing[bucket]):
                bucket.pack(index)
            self.missing[bucket] = set()
            bucket.previous = self.launched[-1] if self.launched else None
            bucket.launch()
            self.launched.append(bucket)

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all of them, and begin anew."""
        self.reduce(self.buckets)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()


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

    def pre_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, kwargs: dict):
        """Before a unit's forward: wait for its parameters, and prefetch the next unit's."""
        if unit.state is UnitState.BACKWARD:  # activation checkpointing computes this unit's forward again
            return None
        unit.wait_for_unshard()
        if unit is not self.root:  # its embedding and its head are needed first and last: nothing runs ahead of it
            self.prefetcher.in_forward(unit)
        return self._watch_inputs(unit, inputs, kwargs) if torch.is_grad_enabled() else None

    def post_forward(self, unit: Unit, submodule: nn.Module, inputs: tuple, output) -> None:
        """After a unit's forward: reshard it, and ask autograd to call pre_backward()."""
        if unit.state is UnitState.BACKWARD:
            return
        if torch.is_grad_enabled():
            self._watch_outputs(unit, output)
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()

    def _watch_inputs(self, unit: Unit, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Ask autograd to call post_backward() when it is done with this call of the unit."""
        call = self.calls[unit] = Call()
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
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

    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Before a unit's backward: wait for its parameters, and prefetch the next unit's."""
        self.pending = True
        unit.wait_for_unshard()
        unit.state = UnitState.BACKWARD
        self.prefetcher.in_backward(unit)

    def post_backward(self, unit: Unit, call: Call) -> None:
        """After a unit's backward: reduce its gradients, and reshard it."""
        unit.open_calls.discard(call)
        if not unit.open_calls:  # or backward will come back to this unit
            self.reducer.reduce(self.buckets_of[unit])
            unit.reshard()

    def finish_gradient_sync(self) -> None:
        """Wait until every shard has its mean gradient.

        Communication: one reduce-scatter per bucket that is not launched yet.
        """
        self.reducer.finish()
        self._reshard_all()
        for unit in self.units:
            unit.open_calls.clear()
        self.pending = False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm. Returns the norm before."""
        return clip_shards_([shard.grad for shard in self.shards if shard.grad is not None], max_norm, self.group)

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
            memo |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in parameters}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied
