"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from shared.c10d import all_gather_single
from solutions import flat, optimizer_state, zero1
from solutions.async_collectives import reduce_scatter_
from solutions.flat import FlatLayout


def flat_copies_parameters():
    """Copies the parameters into flat_param, but the model still computes with the old tensors.

    caught by: FlatParameter · views
    """

    class FlatParameter(zero1.FlatParameter):
        def _alias_parameters(self):
            pass


def flat_gathers_by_all_reduce():
    """Zeroes the other ranks' shards and all-reduces the flat tensor: the result is right, at twice the bytes.

    caught by: FlatParameter · all-gather
    """

    class FlatParameter(zero1.FlatParameter):
        def launch_all_gather(self):
            own = self.shard.detach().clone()
            with torch.no_grad():
                self.flat_param.zero_()
                self.shard.copy_(own)
            return dist.all_reduce(self.flat_param, group=self.layout.group, async_op=True)


def flat_gathers_by_broadcasts():
    """Uses one broadcast per rank: N collectives instead of one.

    caught by: FlatParameter · all-gather
    """

    class FlatParameter(zero1.FlatParameter):
        def launch_all_gather(self):
            shards = self.flat_param.chunk(dist.get_world_size(self.layout.group))
            for rank, shard in enumerate(shards):
                work = dist.broadcast(shard, group=self.layout.group, group_src=rank, async_op=True)
                work.wait()
            return work


def flat_gathers_without_a_handle():
    """Waits inside launch_all_gather() and returns no handle.

    caught by: FlatParameter · all-gather
    """

    class FlatParameter(zero1.FlatParameter):
        def launch_all_gather(self):
            super().launch_all_gather().wait()


def flat_keeps_the_old_memory():
    """Keeps the original parameter tensors: a permanent second copy.

    caught by: FlatParameter · memory
    """

    class FlatParameter(zero1.FlatParameter):
        def __init__(self, parameters, group=None):
            self.before = [parameter.detach() for parameter in parameters]
            super().__init__(parameters, group)


def flat_owns_by_global_rank():
    """Uses the global rank to choose a shard, although the group has fewer ranks.

    caught by: FlatParameter · layout
    """

    class _Layout(flat.FlatLayout):
        def shard_of(self, flat):
            size = dist.get_world_size(self.group)
            return flat.view(size, -1)[dist.get_rank() % size]

    class FlatParameter(flat.FlatParameter):
        def __init__(self, parameters, group=None):
            with mock.patch.object(flat, "FlatLayout", _Layout):
                super().__init__(parameters, group)


def flat_owns_every_nth_element():
    """Assigns every N-th element to a rank: the shards have equal sizes but are not contiguous.

    caught by: FlatParameter · layout
    """

    class _Layout(flat.FlatLayout):
        def shard_of(self, flat):
            return flat.view(-1, dist.get_world_size(self.group))[:, dist.get_rank(self.group)]

    class FlatParameter(flat.FlatParameter):
        def __init__(self, parameters, group=None):
            with mock.patch.object(flat, "FlatLayout", _Layout):
                super().__init__(parameters, group)


def flat_pads_each_parameter():
    """Pads every parameter to a multiple of the world size instead of padding their total.

    caught by: FlatParameter · layout
    """

    class _Layout(flat.FlatLayout):
        def _sizes(self):
            size = dist.get_world_size(self.group)
            return [-(-parameter.numel() // size) * size for parameter in self.parameters]

        def new_flat(self, dtype=None):
            return self.parameters[0].new_zeros(sum(self._sizes()), dtype=dtype)

        def views(self, flat):
            pairs = zip(flat.split(self._sizes()), self.parameters, strict=True)
            return [padded[: parameter.numel()].view(parameter.shape) for padded, parameter in pairs]

    class FlatParameter(flat.FlatParameter):
        def __init__(self, parameters, group=None):
            with mock.patch.object(flat, "FlatLayout", _Layout):
                super().__init__(parameters, group)


def flat_rounds_up_one_more():
    """Adds a whole extra shard of padding when none is needed.

    caught by: FlatParameter · layout
    """

    class _Layout(flat.FlatLayout):
        def new_flat(self, dtype=None):
            size = dist.get_world_size(self.group)
            return self.parameters[0].new_zeros((self.numel // size + 1) * size, dtype=dtype)

    class FlatParameter(flat.FlatParameter):
        def __init__(self, parameters, group=None):
            with mock.patch.object(flat, "FlatLayout", _Layout):
                super().__init__(parameters, group)


def flat_shard_is_a_copy():
    """Gives the optimizer a copy of the shard, so its updates never reach flat_param.

    caught by: FlatParameter · views
    """

    class FlatParameter(zero1.FlatParameter):
        def __init__(self, parameters, group=None):
            super().__init__(parameters, group)
            self.shard = nn.Parameter(self.layout.shard_of(self.flat_param).clone())


def flat_uninitialised():
    """Does not zero the flat tensor, so the padding holds arbitrary values.

    caught by: FlatParameter · layout
    """

    class _Layout(flat.FlatLayout):
        def new_flat(self, dtype=None):
            return super().new_flat(dtype).fill_(7)

    class FlatParameter(flat.FlatParameter):
        def __init__(self, parameters, group=None):
            with mock.patch.object(flat, "FlatLayout", _Layout):
                super().__init__(parameters, group)


def flat_waits_at_once():
    """Waits inside launch_all_gather() and returns a handle that has nothing left to wait for.

    caught by: FlatParameter · at once
    """

    class _Complete:
        def wait(self):
            pass

    class FlatParameter(zero1.FlatParameter):
        def launch_all_gather(self):
            super().launch_all_gather().wait()
            return _Complete()


def gradients_added_to_the_old_ones():
    """Adds a gradient to what its view contains from the step before, instead of copying it.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is not None and self.holds_gradients():
                return
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                if parameter.grad is not None and parameter.grad is not view:
                    view.add_(parameter.grad)
                    parameter.grad = view
            super().reduce()


def gradients_are_no_views_after_reduce():
    """Copies each gradient into its view, but drops .grad instead of making it the view.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            given = [parameter.grad for parameter in self.layout.parameters]
            super().reduce()
            for parameter, view, gradient in zip(self.layout.parameters, self.views, given, strict=True):
                parameter.grad = view if gradient is view else None


def gradients_by_all_reduce():
    """All-reduces the gradients and uses one shard of the result: twice the bytes.

    caught by: FlatGradients · wire
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is not None:
                return
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad is not view:
                    view.copy_(parameter.grad)
                parameter.grad = view
            dist.all_reduce(self.flat, group=self.layout.group)
            mean = self.layout.shard_of(self.flat).div_(dist.get_world_size(self.layout.group))
            self.flat_parameter.shard.grad = mean


def gradients_ignore_a_later_backward():
    """Returns from reduce() although backward() has added to the views since then: those gradients are lost.

    caught by: FlatGradients · late gradients
    """

    class FlatGradients(zero1.FlatGradients):
        def is_reduced(self):
            return self.flat_parameter.shard.grad is not None and self.holds_gradients()


def gradients_ignore_a_later_tensor():
    """Sees what backward() adds to the views, but not a gradient that it has put beside them.

    caught by: FlatGradients · late gradients
    """

    class FlatGradients(zero1.FlatGradients):
        def is_reduced(self):
            if self.flat_parameter.shard.grad is None or not self.holds_gradients():
                return False
            if self.views[0]._version != self.reduced_version:
                raise RuntimeError("backward() has run after the gradients were reduced")
            return True


def gradients_ignore_a_skipped_step():
    """Keeps the old mean although model.zero_grad() was called and there are new gradients.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                super().reduce()


def gradients_keep_the_last_mean():
    """Keeps the last mean in reset(), and the next reduce() uses it as the new one.

    caught by: FlatGradients · slices
    """

    class FlatGradients(zero1.FlatGradients):
        def reset(self):
            mean = self.flat_parameter.shard.grad
            super().reset()
            self.flat_parameter.shard.grad = mean


def gradients_none_is_what_backward_left():
    """Does not zero the slice of a gradient that is None, although backward() may have written into it before.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view
            super().reduce()


def gradients_of_other_tensors_lost():
    """Ignores gradients outside its flat tensor, which is where they are after model.zero_grad().

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                    parameter.grad = view
            super().reduce()


def gradients_one_by_one():
    """All-reduces the gradients one by one and then takes the rank's shard.

    caught by: FlatGradients · wire
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                    view.copy_(0 * view if parameter.grad is None else parameter.grad)
                    parameter.grad = view
                    dist.all_reduce(view, group=self.layout.group)
                mean = self.layout.shard_of(self.flat).div_(dist.get_world_size(self.layout.group))
                self.flat_parameter.shard.grad = mean


def gradients_plain_sum():
    """Forgets to divide by the number of ranks, which the plain loop shows first.

    caught by: FlatGradients · plain
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            super().reduce()
            self.flat_parameter.shard.grad *= dist.get_world_size(self.layout.group)


def gradients_plain_wrong_shard():
    """Takes the mean of the first shard on every rank.

    caught by: FlatGradients · plain
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            dist.all_reduce(self.flat, group=self.layout.group)
            size = dist.get_world_size(self.layout.group)
            self.flat_parameter.shard.grad = self.flat.view(size, -1)[0] / size


def gradients_reduced_if_one_is_no_view():
    """Reduces again if any .grad is not a view, although reduce() was already called.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def holds_gradients(self):
            pairs = zip(self.layout.parameters, self.views, strict=True)
            return all(parameter.grad is view for parameter, view in pairs)


def gradients_reduced_twice():
    """Reduces again when it is called again, although only the mean is left.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            self.flat_parameter.shard.grad = None
            super().reduce()


def gradients_reset_to_none():
    """Sets .grad to None in reset(), so backward allocates new memory for every gradient.

    caught by: FlatGradients · slices
    """

    class FlatGradients(zero1.FlatGradients):
        def reset(self):
            super().reset()
            for parameter in self.layout.parameters:
                parameter.grad = None


def gradients_skip_none():
    """Skips gradients that are None, so what was in their slices before is sent again.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reset(self):
            super().reset()
            self.flat += 1e-3  # what an earlier step may have left

        def reduce(self):
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view
            super().reduce()


def gradients_stay_where_they_are():
    """Copies gradients into the flat tensor but keeps the originals in .grad: two copies after model.zero_grad().

    caught by: FlatGradients · memory
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            before = [parameter.grad for parameter in self.layout.parameters]
            super().reduce()
            for parameter, gradient in zip(self.layout.parameters, before, strict=True):
                parameter.grad = gradient


def gradients_summed():
    """Returns the sum over the ranks instead of the mean.

    caught by: FlatGradients · values
    """

    class FlatGradients(zero1.FlatGradients):
        def reduce(self):
            was_reduced = self.flat_parameter.shard.grad is not None
            super().reduce()
            if not was_reduced:
                self.flat_parameter.shard.grad *= dist.get_world_size(self.layout.group)


def gradients_take_clipping_for_a_backward():
    """Counts every change of the flat tensor, so that clipping, which scales a shard of it, looks like a backward().

    caught by: FlatGradients · late gradients
    """

    class FlatGradients(zero1.FlatGradients):
        def __init__(self, flat_parameter):
            super().__init__(flat_parameter)
            self.views = self.layout.views(self.flat)
            self.reset()


def sharded_keeps_the_mean():
    """Leaves the mean gradient in shard.grad after a step.

    caught by: ShardedOptimizer · plain
    """

    class ShardedOptimizer(zero1.ShardedOptimizer):
        def update_parameters(self):
            means = [flat_parameter.shard.grad for flat_parameter in self.flat_parameters]
            super().update_parameters()
            for flat_parameter, mean in zip(self.flat_parameters, means, strict=True):
                flat_parameter.shard.grad = mean


def sharded_uses_the_defaults():
    """Gives the inner optimizer its defaults instead of the settings of the param group.

    caught by: ShardedOptimizer · settings
    """

    class ShardedOptimizer(zero1.ShardedOptimizer):
        def update_parameters(self):
            settings = [dict(group) for group in self.param_groups]
            for group in self.param_groups:
                group.update(self.defaults)
            super().update_parameters()
            for group, own in zip(self.param_groups, settings, strict=True):
                group.update(own)


def sharded_waits_for_nothing():
    """Launches all-gathers, but waits for none of them.

    caught by: ShardedOptimizer · plain
    """

    class _Done:
        def wait(self):
            pass

    class _NotAwaited:
        def __init__(self, flat_parameter):
            self.flat_parameter, self.shard = flat_parameter, flat_parameter.shard

        def launch_all_gather(self):
            self.flat_parameter.launch_all_gather()
            return _Done()

    class ShardedOptimizer(zero1.ShardedOptimizer):
        def update_parameters(self):
            flat_parameters = self.flat_parameters
            self.flat_parameters = [_NotAwaited(each) for each in flat_parameters]
            super().update_parameters()
            self.flat_parameters = flat_parameters


def clips_once_per_step():
    """Clips once per step() call: after a skipped step, new gradients are not clipped.

    caught by: ZeRO1 · skipped step
    """

    class ZeRO1(zero1.ZeRO1):
        norm = None

        def clip_grad_norm_(self, max_norm):
            if self.norm is None:
                self.norm = super().clip_grad_norm_(max_norm)
            return self.norm

        def step(self, closure=None):
            self.norm = None
            return super().step(closure)


def closure_forgotten():
    """Calls the closure but does not return its loss.

    caught by: ZeRO1 · loops
    """

    class ZeRO1(zero1.ZeRO1):
        def step(self, closure=None):
            super().step(closure)


def closure_without_gradients():
    """Calls the closure under no_grad(), so its backward() has no graph.

    caught by: ZeRO1 · loops
    """

    class ZeRO1(zero1.ZeRO1):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)


def divides_by_the_world():
    """Divides by the world size instead of the size of the group.

    caught by: ZeRO1 · group
    """

    class ZeRO1(zero1.ZeRO1):
        def reduce_gradients(self):
            super().reduce_gradients()
            for flat_parameter in self.flat_parameters:
                flat_parameter.shard.grad *= dist.get_world_size(self.group) / dist.get_world_size()


def gathers_into_a_second_tensor():
    """All-gathers into a new flat tensor and copies it: a second copy of all parameters in every step.

    caught by: ZeRO1 · memory
    """

    class _Copying(zero1.FlatParameter):
        def launch_all_gather(self):
            gathered = self.layout.new_flat()
            work = all_gather_single(gathered, self.shard.detach(), group=self.layout.group, async_op=True)
            work.wait()
            self.flat_param.copy_(gathered)
            return work

    class ZeRO1(zero1.ZeRO1):
        def _flatten(self, parameters):
            with mock.patch.object(zero1, "FlatParameter", _Copying):
                return super()._flatten(parameters)


def gradients_survive_a_skipped_step():
    """Uses the old mean for new gradients if a step was skipped and model.zero_grad() was called.

    caught by: ZeRO1 · skipped step
    """

    class _Gradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                super().reduce()

    class ZeRO1(zero1.ZeRO1):
        def _flatten(self, parameters):
            with mock.patch.object(zero1, "FlatGradients", _Gradients):
                return super()._flatten(parameters)


def keeps_a_copy_in_a_closure():
    """Keeps a full copy of the parameters in a closure, where no attribute shows it.

    caught by: ZeRO1 · memory
    """

    def _remember(tensors):
        return lambda: tensors

    class ZeRO1(zero1.ZeRO1):
        def step(self, closure=None):
            self.undo = _remember([each.flat_param.clone() for each in self.flat_parameters])
            return super().step(closure)


def keeps_a_copy_in_an_array():
    """Keeps a full copy of the parameters in NumPy arrays, inside a closure.

    caught by: ZeRO1 · memory
    """

    def _remember(arrays):
        return lambda: arrays

    class ZeRO1(zero1.ZeRO1):
        def step(self, closure=None):
            loss = super().step(closure)
            self.undo = _remember([each.flat_param.float().cpu().numpy().copy() for each in self.flat_parameters])
            return loss


def late_groups_are_deaf():
    """Ignores changed settings of groups that were added later, so these keep the ones they were added with.

    caught by: ZeRO1 · more parameters
    """

    class ZeRO1(zero1.ZeRO1):
        def __init__(self, *args, **defaults):
            super().__init__(*args, **defaults)
            self.first = len(self.param_groups)

        def step(self, closure=None):
            late = [dict(group) for group in self.param_groups[self.first :]]
            for group, inner in zip(
                self.param_groups[self.first :], self.inner.param_groups[self.first :], strict=True
            ):
                group.update({name: value for name, value in inner.items() if name != "params"})
            loss = super().step(closure)
            for group, now in zip(self.param_groups[self.first :], late, strict=True):
                group.update(now)
            return loss


def late_parameters_never_step():
    """Lists parameters added later in param_groups but does not give them to the inner optimizer.

    caught by: ZeRO1 · more parameters
    """

    class ZeRO1(zero1.ZeRO1):
        def add_param_group(self, param_group):
            if not self.inner.state:
                return super().add_param_group(param_group)
            torch.optim.Optimizer.add_param_group(self, param_group)
            self.inner.add_param_group({**self.param_groups[-1], "params": []})


def late_parameters_start_apart():
    """Flattens parameters added later but does not broadcast them.

    caught by: ZeRO1 · more parameters
    """

    class ZeRO1(zero1.ZeRO1):
        def _flatten(self, parameters):
            if not self.inner.state:
                return super()._flatten(parameters)
            flat_parameters = [zero1.FlatParameter(alike, self.group) for alike in zero1.group_by_kind(parameters)]
            self.gradients += [zero1.FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
            return flat_parameters


def loads_by_the_first_value():
    """Takes the dtype of an entry from the first parameter's value, which may be None.

    caught by: ZeRO1 · plain state
    """

    def _shard_entry(layout, name, values):
        first = values[0]
        if not optimizer_state.is_per_element(name, values, layout.parameters):
            return first.clone() if hasattr(first, "clone") else first
        flat = optimizer_state.new_entry(layout, name, first.dtype)
        for view, value in zip(layout.views(flat), values, strict=True):
            if value is not None:
                view.copy_(value)
        return layout.shard_of(flat).clone()

    class ZeRO1(zero1.ZeRO1):
        def load_state_dict(self, state_dict):
            with mock.patch.object(optimizer_state, "shard_entry", _shard_entry):
                super().load_state_dict(state_dict)


def loads_by_the_rank_of_the_world():
    """Loads the shard of its global rank instead of its rank in the group.

    caught by: ZeRO1 · another world size
    """

    class _Layout(FlatLayout):
        def shard_of(self, flat):
            size = dist.get_world_size(self.group)
            return flat.view(size, -1)[dist.get_rank() % size]

    class ZeRO1(zero1.ZeRO1):
        def load_state_dict(self, state_dict):
            for flat_parameter in self.flat_parameters:
                flat_parameter.layout.__class__ = _Layout
            super().load_state_dict(state_dict)
            for flat_parameter in self.flat_parameters:
                flat_parameter.layout.__class__ = FlatLayout


def loads_foreign_states():
    """Silently ignores a state that does not fit.

    caught by: ZeRO1 · foreign state
    """

    class ZeRO1(zero1.ZeRO1):
        def load_state_dict(self, state_dict):
            with contextlib.suppress(ValueError):
                super().load_state_dict(state_dict)


def loads_masters_that_require_grad():
    """Copies a missing master from its parameter while autograd records the copy.

    caught by: ZeRO1 · loaded masters
    """

    def _shard_entry(layout, name, values, shard_entry=optimizer_state.shard_entry):
        if name != "master":
            return shard_entry(layout, name, values)
        flat = layout.new_flat(torch.float32)
        for view, value, parameter in zip(layout.views(flat), values, layout.parameters, strict=True):
            view.copy_(parameter if value is None else value)
        return layout.shard_of(flat).clone()

    class ZeRO1(zero1.ZeRO1):
        def load_state_dict(self, state_dict):
            with mock.patch.object(optimizer_state, "shard_entry", _shard_entry):
                super().load_state_dict(state_dict)


def loads_settings_for_good():
    """Keeps using the loaded settings, whatever a scheduler sets later.

    caught by: ZeRO1 · plain state
    """

    class ZeRO1(zero1.ZeRO1):
        loaded = None

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.loaded = [dict(group) for group in self.param_groups]

        def step(self, closure=None):
            now = self.param_groups
            self.param_groups = self.loaded or now
            loss = super().step(closure)
            self.param_groups = now
            return loss


def never_recovers():
    """Rejects every step after a rejected one.

    caught by: ZeRO1 · stale gradients
    """

    class ZeRO1(zero1.ZeRO1):
        was_rejected = False

        def reduce_gradients(self):
            self.was_rejected = self.was_rejected or (
                self.used_up and any(each.holds_gradients() for each in self.gradients)
            )
            if self.was_rejected:
                raise RuntimeError("used up: call zero_grad()")
            super().reduce_gradients()


def puts_gradients_together_each_step():
    """Concatenates the gradients into a second copy in every step.

    caught by: ZeRO1 · memory
    """

    class _Gradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                parameters = self.layout.parameters
                gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                missing = self.flat.numel() - flat.numel()
                flat = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
                shard = reduce_scatter_(flat, self.layout.group).clone()
                self.flat_parameter.shard.grad = shard / (self.flat.numel() // shard.numel())

    class ZeRO1(zero1.ZeRO1):
        def _flatten(self, parameters):
            with mock.patch.object(zero1, "FlatGradients", _Gradients):
                return super()._flatten(parameters)


def sends_bf16_in_float32():
    """Reduces bf16 gradients in float32: more precise, at twice the bytes.

    caught by: ZeRO1 · bf16
    """

    class _Gradients(zero1.FlatGradients):
        def reduce(self):
            if self.flat_parameter.shard.grad is None:
                for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                    view.copy_(0 * view if parameter.grad is None else parameter.grad)
                    parameter.grad = view
                wide = self.flat.to(torch.promote_types(self.flat.dtype, torch.float32))
                mean = reduce_scatter_(wide, self.layout.group) / dist.get_world_size(self.layout.group)
                self.flat_parameter.shard.grad = mean.to(self.flat.dtype)

    class ZeRO1(zero1.ZeRO1):
        def _flatten(self, parameters):
            with mock.patch.object(zero1, "FlatGradients", _Gradients):
                return super()._flatten(parameters)


def sends_while_backward_computes():
    """Averages each gradient in a hook during backward, and again in the step.

    caught by: ZeRO1 · wire
    """

    class ZeRO1(zero1.ZeRO1):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            for parameter in self.param_groups[-1]["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._average)

        def _average(self, parameter):
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= dist.get_world_size(self.group)


def shards_nothing():
    """Cheats by running the whole optimizer on every rank after an all-reduce.

    caught by: ZeRO1 · memory
    """

    def ZeRO1(params, optimizer_cls, group=None, **defaults):  # noqa: N802
        class Everything(optimizer_cls):
            def step(self, closure=None):
                for parameter in (p for each in self.param_groups for p in each["params"]):
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad, group=group)
                        parameter.grad /= dist.get_world_size(group)
                return super().step(closure)

        return Everything(params, **defaults)


def state_for_everybody():
    """Returns the full state on all ranks and ignores `to`.

    caught by: ZeRO1 · to one rank
    """

    class ZeRO1(zero1.ZeRO1):
        def state_dict(self, to=None):
            return super().state_dict()


def state_gathered_by_all():
    """Gathers the full state on every rank and then drops it on all ranks but one.

    caught by: ZeRO1 · other ranks' memory
    """

    class ZeRO1(zero1.ZeRO1):
        def state_dict(self, to=None):
            gathered = super().state_dict()
            return gathered if to in (None, dist.get_rank(self.group)) else None


def state_rounds_masters():
    """Saves every entry in the parameters' precision, which rounds the masters.

    caught by: ZeRO1 · loaded masters
    """

    class ZeRO1(zero1.ZeRO1):
        stepped = False

        def step(self, closure=None):
            self.stepped = True
            return super().step(closure)

        def state_dict(self, to=None):
            gathered = super().state_dict(to)
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            for index, state in (gathered or {"state": {}})["state"].items() if self.stepped else ():
                for name, value in state.items():
                    if torch.is_tensor(value) and value.dim():
                        state[name] = value.to(parameters[index].dtype).to(value.dtype)
            return gathered


def state_to_a_rank_of_the_world():
    """Compares `to` with the global rank instead of the rank in the group.

    caught by: ZeRO1 · to one rank
    """

    class ZeRO1(zero1.ZeRO1):
        def state_dict(self, to=None):
            gathered = super().state_dict()
            return gathered if to in (None, dist.get_rank()) else None


def steps_on_every_rank():
    """Gives the whole flat_param to each rank's inner optimizer, so the state is not sharded, although only the rank's
    shard is all-gathered.

    caught by: ZeRO1 · memory
    """

    class ZeRO1(zero1.ZeRO1):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            self.full = [nn.Parameter(each.flat_param) for each in self.flat_parameters]
            self.inner.param_groups[-1]["params"] = self.full[-1:]

        def reduce_gradients(self):
            super().reduce_gradients()
            for full, gradients in zip(self.full, self.gradients, strict=True):
                full.grad = gradients.flat


def torch_inside():
    """Cheats by deriving from torch's ZeroRedundancyOptimizer, and averages the gradients first.

    caught by: ZeRO1 · values
    """

    class ZeRO1(ZeroRedundancyOptimizer):
        def __init__(self, params, optimizer_cls, group=None, **defaults):
            super().__init__(params, optimizer_cls, process_group=group, **defaults)

        def step(self, closure=None):
            for parameter in (p for each in self.param_groups for p in each["params"]):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.process_group)
                    parameter.grad /= dist.get_world_size(self.process_group)
            return super().step(closure)
