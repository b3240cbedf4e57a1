# Built by `make notebooks` from source/10_fsdp/lab.py: edit that, not this.
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

import copy
from collections.abc import Iterable
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from solutions.clipping import clip_shards_
from solutions.deferred import DeferredFlatParameter
from solutions.model_state import (
    drop_full_parameters,
    expect_no_full_parameters,
    gather_full_state,
    load_extra_state,
    load_full_state,
    sharded_state,
    tensors_and_extra,
)
from solutions.prefetching import Prefetcher
from solutions.reducing import GradientBucket, GradientReducer
from solutions.sharded_guards import UnchangedParameters, broadcast_buffers, expect_shardable, tensors_in
from solutions.units import Call, Unit, UnitState, describe, shard_into_units


def needs_gradient(value) -> bool:
    """Tell whether a value among the inputs or outputs of a unit is a tensor that autograd tracks."""
    return isinstance(value, torch.Tensor) and value.requires_grad


class AfterBackward(torch.autograd.Function):
    """The identity on a unit's inputs. It calls post_backward() when backward is done with this call of the unit.

    Autograd computes the gradients of a unit's inputs last, so the gradients of its parameters are packed by then. The
    witness gets no gradient, but tells whether this backward is for parameters.
    """

    @staticmethod
    def forward(ctx, post_backward, witness: torch.Tensor, *inputs: torch.Tensor):
        ctx.post_backward = post_backward
        ctx.set_materialize_grads(False)  # an input without a gradient gets None, not zeros
        return inputs

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        ctx.post_backward()
        return None, None, *gradients


class ZeRO3(nn.Module):
    """ZeRO stage 3: train module with parameters, gradients and optimizer state sharded over the ranks of the group.

    parameters() are this rank's shards: give them to any optimizer that updates each element by itself. Call
    finish_gradient_sync() after backward(). All ranks must call the same units in the same order, and backward must
    reach the same ones. As in FSDP2, a unit may not change an input that needs a gradient in place: autograd raises a
    RuntimeError.

    The module's own parameters have memory only while their unit computes. Reading or changing them in between raises a
    RuntimeError, and so does backward() if one was frozen, unfrozen, replaced or added after wrapping. A loss must
    depend on what a unit returns, not on tensors that it has stored elsewhere. The gradient of a parameter that no rank
    used is zeros, not None, so weight decay and momentum change it, unlike in one process.

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
        expect_shardable(module)
        self.module, self.group = module, group
        new_flat_parameter = None  # the default, which also broadcasts the parameters
        if materializer is not None:
            materializer.fill_buffers(module)
            new_flat_parameter = partial(DeferredFlatParameter, materializer=materializer)
        broadcast_buffers(module, group)

        unit_of = shard_into_units(module, units, compute_dtype, reshard_after_forward, group, new_flat_parameter)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.flat_parameters = [flat for unit in self.units for flat in unit.flat_parameters]
        self.shards = nn.ParameterList(flat.shard for flat in self.flat_parameters)

        self.prefetcher = Prefetcher(prefetch)
        self.buckets_of = {
            unit: [GradientBucket(flat) for flat in unit.flat_parameters if flat.shard.requires_grad]
            for unit in self.units
        }
        self.reducer = GradientReducer(list(chain.from_iterable(self.buckets_of.values())))
        self.calls: dict[Unit, Call] = {}  # the current call of each unit whose forward is running
        self.pending = False  # whether backward has run since the last finish_gradient_sync()
        self.backward_runs = self.is_for_inputs = False  # set by _begin_backward() and _end_call()
        self.witness = torch.empty(0, requires_grad=True)
        self.unchanged = UnchangedParameters(module, self.flat_parameters)

        self._register_hooks(unit_of)

    def _register_hooks(self, unit_of: dict[nn.Module, Unit]) -> None:
        for submodule, unit in unit_of.items():
            # First, because other hooks may use the parameters, such as those of weight_norm.
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit), prepend=True, with_kwargs=True)
            submodule.register_forward_hook(partial(self.post_forward, unit))
        self.register_state_dict_post_hook(drop_full_parameters)
        self.register_load_state_dict_post_hook(expect_no_full_parameters)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Name this rank's shards, for an optimizer."""
        return self.shards.named_parameters(prefix, recurse, remove_duplicate)

    # One training step, in the order in which it happens.

    def forward(self, *inputs, **kwargs):
        """Run the module's forward, with each unit unsharded while it computes.

        Communication: one all-gather per flat parameter. A unit has one for each dtype and device of its parameters,
            and separate ones for frozen parameters.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1  # checkpointing runs this forward again
        if self.pending:
            if self.backward_runs and not is_in_backward:
                self.reducer.drop()  # an error ended the last backward
            # After an earlier micro-batch that was not finished, some gradients may still be in buckets.
            self.finish_gradient_sync()
        self.backward_runs = self.backward_runs and is_in_backward
        self._reshard_all()  # after a forward without backward, the root still has the parameters of that time
        self.prefetcher.begin_forward()
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            self._reshard_all()  # units that were prefetched but not called
        return output

    def _reshard_all(self) -> None:
        for unit in self.units:
            unit.reshard()

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

    def _watch_inputs(self, unit: Unit, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the inputs, such that autograd calls post_backward() when it is done with this call of the unit."""
        call = self.calls[unit] = Call()
        call.begins_at = torch._C._autograd._get_sequence_nr()
        call.versions = [flat.shard._version for flat in unit.flat_parameters]
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if needs_gradient(leaf)]
        if indices:
            tensors = [leaves[index] for index in indices]
            watched = AfterBackward.apply(lambda: self._end_call(unit, call), self.witness, *tensors)
            for index, tensor in zip(indices, watched, strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, structure)

    def _watch_outputs(self, unit: Unit, output) -> None:
        """Ask autograd to call pre_backward() when the gradient of an output is complete.

        The hooks keep the call alive: it stays in the unit's open_calls for as long as backward may reach it.
        """
        call = self.calls.pop(unit)

        def hook(_gradient: Tensor) -> None:
            self._begin_call(unit, call)

        for tensor in tensors_in(output):
            if needs_gradient(tensor):
                unit.open_calls.add(call)
                tensor.register_hook(hook)
                # If somebody changes a view in place, backward passes its base, but not the view itself.
                node = None if tensor._base is None else tensor._base.grad_fn
                if node is not None and node._sequence_nr() >= call.begins_at:
                    tensor._base.register_hook(hook)

    def _begin_call(self, unit: Unit, call: Call) -> None:
        """Call pre_backward(), if this backward is possible."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported, because collectives do not record a graph: compute a gradient "
                "penalty with the module itself, before you wrap it"
            )
        if call.versions != [flat.shard._version for flat in unit.flat_parameters]:
            raise RuntimeError(
                f"{describe(unit.flat_parameters[0].layout.parameters[0])} has changed since this forward, "
                "for example in optimizer.step(), so its gradients would be wrong: run forward again before backward()"
            )
        if not self.backward_runs:
            self.backward_runs, self.is_for_inputs = True, False
            Variable._execution_engine.queue_callback(self._end_backward)
        self.pre_backward(unit, call)

    def _end_call(self, unit: Unit, call: Call) -> None:
        """Call post_backward(), unless autograd.grad() needs the gradients of inputs only, and those of units later."""
        witness = torch.autograd.graph.get_gradient_edge(self.witness).node
        if torch._C._will_engine_execute_node(witness):
            self.post_backward(unit, call)
        else:
            self.is_for_inputs = True

    def _end_backward(self) -> None:
        """Look for changes of the model, and let zero_grad() drop the gradients that are still in buckets."""
        self.backward_runs = False
        self.unchanged.check()
        if self.is_for_inputs:
            if any(bucket.flat is not None for bucket in self.reducer.buckets):
                raise RuntimeError("backward(inputs=...) is not supported for parameters: leave out inputs")
            self._reshard_all()
            self.pending = False
        for bucket in self.reducer.buckets:
            bucket.mark()

    def pre_backward(self, unit: Unit, call: Call) -> None:
        """Unshard a unit before its backward, or wait for its all-gather, and prefetch the unit called before it."""
        self.pending = True
        unit.wait_for_unshard()
        unit.state = UnitState.BACKWARD
        not_open = {each for each in self.units if not each.open_calls}
        # This does nothing for the root, which is never in `called`.
        self.prefetcher.in_backward(unit, not_open)

    def post_backward(self, unit: Unit, call: Call) -> None:
        """Reduce a unit's gradients after its backward, and reshard it."""
        unit.open_calls.discard(call)
        if not unit.open_calls:  # otherwise, backward will come back to this unit
            self.reducer.reduce(self.buckets_of[unit])
            unit.reshard()

    def finish_gradient_sync(self) -> None:
        """Launch the remaining reduce-scatters, wait until every shard has its mean gradient, and reshard all units.

        Communication: one reduce-scatter per bucket that is not launched yet.
        """
        self.reducer.finish()
        self._reshard_all()
        for unit in self.units:
            unit.open_calls.clear()
        self.pending = False

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm.

        Returns:
            The norm before scaling.
        """
        if self.pending:
            self.finish_gradient_sync()
        shards = [shard for shard in self.shards if shard.grad is not None]
        gradients = [shard.grad.as_subclass(Tensor) for shard in shards]  # the plain tensors, in the same memory
        return clip_shards_(gradients, max_norm, self.group)

    # Saving, loading and copying.

    def get_extra_state(self) -> Tensor:
        """Record whose shards a state_dict() holds."""
        return torch.tensor([dist.get_rank(self.group), dist.get_world_size(self.group)])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise a RuntimeError if load_state_dict() got the shards of another rank."""
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise RuntimeError(
                f"this state_dict() holds the shards of rank {state[0]} of {state[1]}, and this is rank "
                f"{dist.get_rank(self.group)} of {dist.get_world_size(self.group)}: let each rank save and load its "
                "own, or use full_state_dict() and load_full_state_dict()"
            )

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather what module.state_dict() would return without sharding. See gather_full_state()."""
        return gather_full_state(self.module, self.flat_parameters)

    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Keep this rank's shard of a full state. See load_full_state()."""
        self._reshard_all()  # the root may still have the old values
        load_full_state(self.module, self.flat_parameters, state_dict)
        load_extra_state(self.module, tensors_and_extra(state_dict)[1])

    def sharded_state_dict(self, optimizer: torch.optim.Optimizer) -> dict:
        """View this rank's shards for torch.distributed.checkpoint. See sharded_state()."""
        if extra := tensors_and_extra(self.module.state_dict(keep_vars=True))[1]:
            raise ValueError(f"a sharded state cannot hold {sorted(extra)}: use full_state_dict(), which does")
        return sharded_state(self.module, self.flat_parameters, optimizer)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        self._reshard_all()
        for flat_parameter in self.flat_parameters:
            # deepcopy cannot copy a parameter without memory. These become slices of the copied flat_param.
            for parameter in flat_parameter.layout.parameters:
                alias = parameter.detach().as_subclass(Tensor)
                copied = memo[id(parameter)] = nn.Parameter(alias, parameter.requires_grad)
                copied.name_in_model = parameter.name_in_model
        memo[id(self.group)] = self.group  # the copy communicates in the same group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied
