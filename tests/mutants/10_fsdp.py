"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from solutions import model_state, units, zero3
from solutions.model_state import as_dtensor, values_in
from solutions.overlapped_ddp import OverlappedDDP


def reducer_leaves_out_missing_gradients():
    """Launches a bucket without packing zeros for missing gradients.

    caught by: GradientReducer · missing gradients
    """

    class GradientReducer(zero3.GradientReducer):
        def reduce(self, buckets):
            for bucket in buckets:
                self.missing[bucket] = set()
            super().reduce(buckets)


def accepts_a_second_backward():
    """Silently drops a second gradient that is computed before finish_gradient_sync().

    caught by: ZeRO3 · second backward
    """

    class Reducer(zero3.GradientReducer):
        def on_gradient(self, bucket_index, index):
            if index in self.missing[self.buckets[bucket_index]]:
                super().on_gradient(bucket_index, index)

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.GradientReducer = zero3.GradientReducer, Reducer
            try:
                super().__init__(*args, **options)
            finally:
                zero3.GradientReducer = before


def checkpoint_frees_what_it_needs():
    """Treats a forward recomputed by activation checkpointing like any other and reshards the unit that backward needs.

    caught by: ZeRO3 · checkpoints
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            if unit is not self.root:
                self.calls.setdefault(unit, zero3.Call())
                self._watch_outputs(unit, output)
                unit.reshard()
            else:
                super().post_forward(unit, submodule, inputs, output)


def collects_outside_its_group():
    """Gathers the full state from all ranks, although its group is smaller.

    caught by: ZeRO3 · group
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            for flat_parameter in self.flat_parameters:
                flat_parameter.layout.group = None
            try:
                return super().full_state_dict()
            finally:
                for flat_parameter in self.flat_parameters:
                    flat_parameter.layout.group = self.group


def evaluates_and_frees_at_the_end():
    """Reshards units only at the end of a forward without gradients, not one by one.

    caught by: ZeRO3 · prefetched memory
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            if torch.is_grad_enabled() or not self.prefetcher.units_ahead:
                super().post_forward(unit, submodule, inputs, output)


def evaluates_and_keeps_the_root():
    """Keeps the root unsharded after a forward without gradients.

    caught by: ZeRO3 · forward memory
    """

    class ZeRO3(zero3.ZeRO3):
        def forward(self, *inputs, **kwargs):
            if self.pending:
                self.finish_gradient_sync()
            self._reshard_all()
            self.prefetcher.begin_forward()
            return self.module(*inputs, **kwargs)

        def post_forward(self, unit, submodule, inputs, output):
            if unit is not self.root or torch.is_grad_enabled():
                super().post_forward(unit, submodule, inputs, output)


def forward_always_frees():
    """Reshards every unit after forward, even with reshard_after_forward=False.

    caught by: ZeRO3 · states
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            super().post_forward(unit, submodule, inputs, output)
            if unit is not self.root and unit.state is not zero3.UnitState.BACKWARD:
                unit.reshard()


def forward_forgets_to_finish():
    """Starts a forward while the gradients of an earlier micro-batch are still pending.

    caught by: ZeRO3 · accumulation
    """

    class ZeRO3(zero3.ZeRO3):
        @property
        def pending(self):
            return False

        @pending.setter
        def pending(self, value):
            pass


def forward_frees_in_backward():
    """Reshards a unit that activation checkpointing recomputes, in the middle of its backward.

    caught by: ZeRO3 · states
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            if unit.state is zero3.UnitState.BACKWARD:
                unit.reshard()
            else:
                super().post_forward(unit, submodule, inputs, output)


def forward_frees_the_root():
    """Reshards the root after forward, although backward needs it first.

    caught by: ZeRO3 · states
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            super().post_forward(unit, submodule, inputs, output)
            if unit is self.root:
                unit.reshard()


def forward_returns_the_given_inputs():
    """Watches the inputs of each unit, but does not return them, so post_backward() is never called.

    caught by: ZeRO3 · backward hooks
    """

    class ZeRO3(zero3.ZeRO3):
        def pre_forward(self, unit, submodule, inputs, kwargs):
            super().pre_forward(unit, submodule, inputs, kwargs)


def forward_tells_of_what_it_freed():
    """Watches the outputs only of units that are resharded after forward.

    caught by: ZeRO3 · states
    """

    class ZeRO3(zero3.ZeRO3):
        def _watch_outputs(self, unit, output):
            if unit.reshard_after_forward:
                super()._watch_outputs(unit, output)


def frees_before_backward_is_done():
    """Reshards a unit once its gradients are packed, although backward still needs its frozen parameters.

    caught by: ZeRO3 · awkward models
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            for unit, buckets in self.buckets_of.items():
                for parameter in (each for bucket in buckets for each in bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: self.reshard_if_packed(unit))

        def reshard_if_packed(self, unit):
            if not any(self.reducer.missing[bucket] for bucket in self.buckets_of[unit]):
                unit.reshard()


def gathers_once():
    """Keeps each unit unsharded from forward to backward, even with reshard_after_forward=True.

    caught by: ZeRO3 · wire
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, **options):
            super().__init__(module, units, **options | {"reshard_after_forward": False})


def gathers_the_root_twice():
    """Reshards the root after forward as well.

    caught by: ZeRO3 · wire
    """

    class ZeRO3(zero3.ZeRO3):
        def post_forward(self, unit, submodule, inputs, output):
            super().post_forward(unit, submodule, inputs, output)
            if unit is self.root and unit.state is not zero3.UnitState.BACKWARD:
                unit.reshard()


def gathers_twice_in_spite():
    """Ignores reshard_after_forward=False.

    caught by: ZeRO3 · wire
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, **options):
            super().__init__(module, units, **options | {"reshard_after_forward": True})


def gradients_by_all_reduce():
    """All-reduces every bucket and keeps the rank's shard, which sends twice the bytes.

    caught by: ZeRO3 · wire
    """

    class Bucket(zero3.UnitBucket):
        def launch(self):
            dist.all_reduce(self.flat, group=self.layout.group)
            own = self.layout.shard_of(self.flat).clone()
            self.in_flight = SimpleNamespace(wait=lambda: own)

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.UnitBucket = zero3.UnitBucket, Bucket
            try:
                super().__init__(*args, **options)
            finally:
                zero3.UnitBucket = before


def gradients_of_few_digits():
    """Gives the optimizer shards and gradients in compute_dtype.

    caught by: ZeRO3 · bf16
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, compute_dtype=None, **options):
            super().__init__(module.to(compute_dtype) if compute_dtype else module, units, **options)


def gradients_of_the_last_micro_batch():
    """Replaces the accumulated mean gradient instead of adding to it.

    caught by: ZeRO3 · accumulation
    """

    class Bucket(zero3.UnitBucket):
        def wait(self):
            if self.in_flight is not None:
                self.flat_parameter.shard.grad = None
            super().wait()

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.UnitBucket = zero3.UnitBucket, Bucket
            try:
                super().__init__(*args, **options)
            finally:
                zero3.UnitBucket = before


def gradients_stay_whole():
    """Keeps the full gradients after they have been reduced.

    caught by: ZeRO3 · memory
    """

    class Bucket(zero3.UnitBucket):
        def launch(self):
            super().launch()
            self.sent = self.flat

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.UnitBucket = zero3.UnitBucket, Bucket
            try:
                super().__init__(*args, **options)
            finally:
                zero3.UnitBucket = before


def gradients_summed():
    """Sums gradients without dividing by the number of ranks.

    caught by: ZeRO3 · plain model
    """

    class Bucket(zero3.UnitBucket):
        def launch(self):
            super().launch()
            in_flight, size = self.in_flight, dist.get_world_size(self.layout.group)
            self.in_flight = SimpleNamespace(wait=lambda: in_flight.wait().mul_(size))

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.UnitBucket = zero3.UnitBucket, Bucket
            try:
                super().__init__(*args, **options)
            finally:
                zero3.UnitBucket = before


def ignores_compute_dtype():
    """Ignores compute_dtype and computes in the parameters' own dtype.

    caught by: ZeRO3 · bf16
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, compute_dtype=None, **options):
            super().__init__(module, units, **options)


def keeps_calls_open():
    """Leaves calls that backward never reached open after finish_gradient_sync().

    caught by: ZeRO3 · memory
    """

    class ZeRO3(zero3.ZeRO3):
        def finish_gradient_sync(self):
            kept = [(unit, list(unit.open_calls)) for unit in self.units]
            super().finish_gradient_sync()
            for unit, calls in kept:
                unit.open_calls.update(calls)


def launches_when_full():
    """Launches a bucket when it is full, which is not at the same point on every rank.

    caught by: ZeRO3 · unused on one rank
    """

    class Reducer(zero3.GradientReducer):
        def on_gradient(self, bucket_index, index):
            super().on_gradient(bucket_index, index)
            if not self.missing[self.buckets[bucket_index]]:
                self.reduce([self.buckets[bucket_index]])

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, zero3.GradientReducer = zero3.GradientReducer, Reducer
            try:
                super().__init__(*args, **options)
            finally:
                zero3.GradientReducer = before


def loads_a_view_of_everything():
    """After loading, each shard is a slice of the whole flat tensor, whose memory it keeps.

    caught by: ZeRO3 · another world size
    """

    class ZeRO3(zero3.ZeRO3):
        @torch.no_grad()
        def load_full_state_dict(self, state_dict):
            new_value = values_in(self.module, state_dict)
            for flat_parameter in self.flat_parameters:
                layout, shard = flat_parameter.layout, flat_parameter.shard
                flat = layout.new_flat(shard.dtype)
                for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
                    view.copy_(new_value.pop(parameter))
                shard.data = layout.shard_of(flat)
            for buffer, value in new_value.items():
                buffer.copy_(value)


def loads_before_training_only():
    """Ignores load_full_state_dict() once it has been trained.

    caught by: ZeRO3 · another world size
    """

    class ZeRO3(zero3.ZeRO3):
        was_trained = False

        def finish_gradient_sync(self):
            super().finish_gradient_sync()
            self.was_trained = True

        def load_full_state_dict(self, state_dict):
            if not self.was_trained:
                super().load_full_state_dict(state_dict)


def loads_in_few_digits():
    """Rounds loaded values to compute_dtype.

    caught by: ZeRO3 · another world size
    """

    class ZeRO3(zero3.ZeRO3):
        def load_full_state_dict(self, state_dict):
            few = self.flat_parameters[0].flat_param.dtype
            super().load_full_state_dict({name: value.to(few) for name, value in state_dict.items()})


def loads_into_other_memory():
    """Replaces the memory of the shards when it loads a full state.

    caught by: ZeRO3 · another world size
    """

    class ZeRO3(zero3.ZeRO3):
        @torch.no_grad()
        def load_full_state_dict(self, state_dict):
            super().load_full_state_dict(state_dict)
            for flat_parameter in self.flat_parameters:
                flat_parameter.shard.data = flat_parameter.shard.detach().clone()


def loads_no_buffers():
    """Loads the parameters but not the buffers.

    caught by: ZeRO3 · another world size
    """

    class ZeRO3(zero3.ZeRO3):
        def load_full_state_dict(self, state_dict):
            before = [each.clone() for each in self.module.buffers()]
            super().load_full_state_dict(state_dict)
            for buffer, value in zip(self.module.buffers(), before, strict=True):
                buffer.copy_(value)


def loads_strangers():
    """Loads the entries that fit and silently ignores the rest.

    caught by: ZeRO3 · another module
    """

    class ZeRO3(zero3.ZeRO3):
        def load_full_state_dict(self, state_dict):
            own = self.module.state_dict(keep_vars=True)
            if all(state_dict[name].shape == value.shape for name, value in own.items() if name in state_dict):
                full = super().full_state_dict()
                state_dict = {name: state_dict.get(name, full[name]) for name in own}
            super().load_full_state_dict(state_dict)


def looks_ahead_in_forward_only():
    """Prefetches nothing in backward.

    caught by: ZeRO3 · prefetched order
    """

    class Prefetcher(zero3.Prefetcher):
        def in_backward(self, unit, unreached=()):
            pass

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def looks_ahead_in_spite():
    """Keeps prefetching in the previous forward's order after this forward has diverged from it.

    caught by: ZeRO3 · prefetched wire
    """

    class Prefetcher(zero3.Prefetcher):
        def in_forward(self, unit):
            self.called.append(unit)
            self._unshard(self.expected[len(self.called) :])

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def looks_ahead_in_the_order_of_units():
    """Prefetches in the order in which units are listed instead of the order of their calls.

    caught by: ZeRO3 · prefetched wire
    """

    class Prefetcher(zero3.Prefetcher):
        def in_forward(self, unit):
            self.called.append(unit)
            if self.called == self.expected[: len(self.called)]:
                self._unshard(self.units[len(self.called) :])

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)
            self.prefetcher.units = self.units


def looks_ahead_in_training_only():
    """Prefetches nothing in a forward without gradients.

    caught by: ZeRO3 · forward order
    """

    class ZeRO3(zero3.ZeRO3):
        def pre_forward(self, unit, submodule, inputs, kwargs):
            if torch.is_grad_enabled():
                return super().pre_forward(unit, submodule, inputs, kwargs)
            unit.wait_for_unshard()
            return None


def looks_ahead_unasked():
    """Prefetches one unit even with prefetch=0.

    caught by: ZeRO3 · prefetch=0
    """

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, module, units=None, prefetch=1, **options):
            super().__init__(module, units, prefetch=max(1, prefetch), **options)


def looks_one_unit_ahead():
    """Prefetches only one unit, even with prefetch=2.

    caught by: ZeRO3 · prefetched order
    """

    class Prefetcher(zero3.Prefetcher):
        def _unshard(self, following):
            super()._unshard(following[:1])

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def looks_too_far_ahead():
    """Prefetches all remaining units.

    caught by: ZeRO3 · prefetched memory
    """

    class Prefetcher(zero3.Prefetcher):
        def _unshard(self, following):
            for unit in following:
                unit.unshard()

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def looks_where_backward_never_comes():
    """Prefetches frozen units that backward never reaches.

    caught by: ZeRO3 · prefetched wire
    """

    class Prefetcher(zero3.Prefetcher):
        def in_backward(self, unit, unreached=()):
            super().in_backward(unit)

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def makes_masters_unasked():
    """Converts the shards of a bfloat16 model to float32.

    caught by: ZeRO3 · bf16
    """

    class Flat(units.ShardedFlatParameter):
        def __init__(self, *args):
            super().__init__(*args)
            if self.shard.dtype == torch.bfloat16:
                self.shard = nn.Parameter(self.shard.detach().float(), self.shard.requires_grad)

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            before, units.ShardedFlatParameter = units.ShardedFlatParameter, Flat
            try:
                super().__init__(*args, **options)
            finally:
                units.ShardedFlatParameter = before


def never_looks_ahead():
    """Prefetches nothing.

    caught by: ZeRO3 · prefetched order
    """

    class Prefetcher(zero3.Prefetcher):
        def _unshard(self, following):
            pass

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)


def positional_inputs_only():
    """Accepts no keyword arguments in forward.

    caught by: ZeRO3 · a module
    """

    class ZeRO3(zero3.ZeRO3):
        def forward(self, *inputs):
            return super().forward(*inputs)


def restores_buffers():
    """Restores all buffers after each forward: the running statistics of BatchNorm never change.

    caught by: ZeRO3 · awkward models
    """

    class ZeRO3(zero3.ZeRO3):
        def forward(self, *inputs, **kwargs):
            before = [buffer.clone() for buffer in self.module.buffers()]
            output = super().forward(*inputs, **kwargs)
            for buffer, value in zip(self.module.buffers(), before, strict=True):
                buffer.data.copy_(value)
            return output


def saves_buffers_as_the_modules():
    """Saves buffers under the module's own names, without the prefix "module.".

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = super().sharded_state_dict(optimizer)
            return {name.removeprefix("module."): value for name, value in state.items()}


def saves_copies():
    """Returns copies instead of the model's own tensors, so loading into them does not change the model.

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = super().sharded_state_dict(optimizer)
            return {name: value.clone() if zero3.torch.is_tensor(value) else value for name, value in state.items()}


def saves_no_optimizer():
    """Saves the parameters but not the optimizer state.

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = super().sharded_state_dict(optimizer)
            return {
                name: value for name, value in state.items() if name.endswith("shard") or name.startswith("module.")
            }


def saves_only_tensors():
    """Expects every entry of the optimizer's state to be a tensor.

    caught by: ZeRO3 · trained shards
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
            for index, flat_parameter in enumerate(self.flat_parameters):
                shard, layout = flat_parameter.shard, flat_parameter.layout
                for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                    state[f"{index}.{name}"] = as_dtensor(layout, value) if value.shape == shard.shape else value
            return state


def saves_padding():
    """Saves shards with their padding, which depends on the number of ranks.

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
            for index, flat_parameter in enumerate(self.flat_parameters):
                shard, group = flat_parameter.shard, flat_parameter.layout.group
                mesh = model_state.DeviceMesh.from_group(group or zero3.dist.group.WORLD, shard.device.type)
                for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                    if zero3.torch.is_tensor(value) and value.shape == shard.shape:
                        placements = [model_state.Shard(0)]
                        value = model_state.DTensor.from_local(value.detach(), mesh, placements, run_check=False)
                    state[f"{index}.{name}"] = value
            return state


def saves_scalars_as_shards():
    """Takes every entry with as many elements as the shard for a shard, also Adam's step if the shard has one element.

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
            for index, flat_parameter in enumerate(self.flat_parameters):
                shard, layout = flat_parameter.shard, flat_parameter.layout
                for name, value in ({"shard": shard} | optimizer.state.get(shard, {})).items():
                    is_sharded = torch.is_tensor(value) and value.numel() == shard.numel()
                    state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
            return state


def saves_state_by_position():
    """Finds the optimizer's state of a shard by its position, although the optimizer may have only some of the shards.

    caught by: ZeRO3 · trained shards
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
            entries_of = optimizer.state_dict()["state"]
            for index, flat_parameter in enumerate(self.flat_parameters):
                shard, layout = flat_parameter.shard, flat_parameter.layout
                for name, value in ({"shard": shard} | entries_of.get(index, {})).items():
                    is_sharded = torch.is_tensor(value) and value.shape == shard.shape
                    state[f"{index}.{name}"] = as_dtensor(layout, value) if is_sharded else value
            return state


def saves_whole_tensors():
    """Saves full tensors, so every rank writes everything.

    caught by: ZeRO3 · sharded state
    """

    class ZeRO3(zero3.ZeRO3):
        def sharded_state_dict(self, optimizer):
            state = super().sharded_state_dict(optimizer)
            return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def shards_nothing():
    """Cheats by keeping everything on every rank and averaging gradients.

    caught by: ZeRO3 · parameters
    """

    class ZeRO3(OverlappedDDP):
        def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
            super().__init__(module, group=group)

        def full_state_dict(self):
            return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


def state_is_not_a_copy():
    """Returns the buffers themselves instead of copies, so the saved state keeps changing.

    caught by: ZeRO3 · full state
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            buffers = dict(self.module.named_buffers())
            return {name: buffers.get(name, value) for name, value in super().full_state_dict().items()}


def state_names_each_tensor_once():
    """Saves a tied parameter under only one of its names.

    caught by: ZeRO3 · full state
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            once = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
            return {name: value for name, value in super().full_state_dict().items() if name in once}


def state_of_few_digits():
    """Rounds saved values to compute_dtype.

    caught by: ZeRO3 · full state
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            few = self.flat_parameters[0].flat_param.dtype
            return {name: value.to(few).to(value.dtype) for name, value in super().full_state_dict().items()}


def state_of_this_rank():
    """Saves the rank's own shards and zeros for all others.

    caught by: ZeRO3 · full state
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            before, model_state.gather_shards = model_state.gather_shards, among_zeros
            try:
                return super().full_state_dict()
            finally:
                model_state.gather_shards = before

    def among_zeros(shard, group):
        flat = shard.new_zeros(dist.get_world_size(group), shard.numel())
        flat[dist.get_rank(group)] = shard
        return flat.view(-1)


def state_without_buffers():
    """Saves the parameters but not the buffers.

    caught by: ZeRO3 · full state
    """

    class ZeRO3(zero3.ZeRO3):
        def full_state_dict(self):
            own = dict(self.module.named_parameters(remove_duplicate=False))
            return {name: value for name, value in super().full_state_dict().items() if name in own}


def stuck_after_an_error():
    """Rejects every forward after one that failed.

    caught by: ZeRO3 · several forwards
    """

    class ZeRO3(zero3.ZeRO3):
        is_inside = False

        def forward(self, *inputs, **kwargs):
            if self.is_inside:
                raise RuntimeError("a forward is running")
            self.is_inside = True
            output = super().forward(*inputs, **kwargs)
            self.is_inside = False
            return output


def torch_inside():
    """Cheats by calling torch's fully_shard.

    caught by: ZeRO3 · everything
    """

    class ZeRO3(torch.nn.Module):
        def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
            super().__init__()
            mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
            for each in (*module.blocks, module):
                fully_shard(each, mesh=mesh, reshard_after_forward=reshard_after_forward)
            self.module = module

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)

        def finish_gradient_sync(self):
            pass


def waits_for_what_is_ahead():
    """Waits for a prefetched all-gather before the current unit computes.

    caught by: ZeRO3 · prefetched order
    """

    class Prefetcher(zero3.Prefetcher):
        def _unshard(self, following):
            super()._unshard(following)
            for unit in following[: self.units_ahead]:
                unit.wait_for_unshard()

    class ZeRO3(zero3.ZeRO3):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.prefetcher = Prefetcher(self.prefetcher.units_ahead)
