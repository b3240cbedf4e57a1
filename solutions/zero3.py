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
from solutions.deferred import DeferredFlatParameter
from solutions.model_state import ShardedModule
from solutions.prefetching import Prefetcher
from solutions.reducing import GradientReducer, UnitBucket
from solutions.units import Call, Unit, UnitState, shard_into_units


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
        unit_of = shard_into_units(module, units, compute_dtype, reshard_after_forward, group, new_flat_parameter)
        self.units, self.root = list(unit_of.values()), unit_of[module]
        self.flat_parameters = [flat for unit in self.units for flat in unit.flat_parameters]
        self.shards = nn.ParameterList(flat.shard for flat in self.flat_parameters)

        self.prefetcher = Prefetcher(prefetch)
        self.buckets_of = {
            unit: [UnitBucket(flat) for flat in unit.flat_parameters if flat.shard.requires_grad] for unit in self.units
        }
        self.reducer = GradientReducer(list(chain.from_iterable(self.buckets_of.values())))
        self.calls: dict[Unit, Call] = {}  # the current call of each unit whose forward is running
        self.pending = False  # whether backward has run since the last finish_gradient_sync()
        self.backward = Backward(at_end=self._end_backward)
        self.unchanged = UnchangedParameters(module, self.flat_parameters)
        self.order = OrderOfUnits(group)

        self._register_hooks(unit_of)

    def _register_hooks(self, unit_of: dict[nn.Module, Unit]) -> None:
        for submodule, unit in unit_of.items():
            # First, because other hooks may use the parameters, such as those of weight_norm.
            submodule.register_forward_pre_hook(partial(self.pre_forward, unit), prepend=True, with_kwargs=True)
            submodule.register_forward_hook(partial(self.post_forward, unit))

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
        call.begin = ForwardBegin(unit.flat_parameters, (inputs, kwargs))
        leaves, structure = tree_flatten((inputs, kwargs))
        indices = [index for index, leaf in enumerate(leaves) if getattr(leaf, "requires_grad", False)]
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
        return clip_shards_(plain_gradients(self.shards), max_norm, self.group)
