"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch

from solutions import memory_wall


def masters_are_not_saved():
    """Leaves the masters and momenta out of state_dict().

    caught by: MasterWeights · checkpoint
    """

    class MasterWeights(memory_wall.MasterWeights):
        def state_dict(self):
            return {**super().state_dict(), "state": {}}


def masters_are_rounded_when_loaded():
    """Uses torch's load_state_dict(), which rounds the masters to the dtype of their parameters.

    caught by: MasterWeights · checkpoint
    """

    class MasterWeights(memory_wall.MasterWeights):
        load_state_dict = torch.optim.Optimizer.load_state_dict


def masters_are_the_parameters():
    """Keeps no masters and updates the bfloat16 parameters directly.

    caught by: MasterWeights · values
    """

    class MasterWeights(torch.optim.Optimizer):
        def __init__(self, params, optimizer_cls, **defaults):
            self.inner = optimizer_cls(list(params), **defaults)
            super().__init__(self.inner.param_groups, self.inner.defaults)
            self.param_groups = self.inner.param_groups

        def add_param_group(self, param_group):
            if hasattr(self, "param_groups") and len(self.param_groups) < len(self.inner.param_groups):
                return super().add_param_group(dict(param_group))
            self.inner.add_param_group(param_group)

        def step(self, closure=None):
            return self.inner.step(closure)


def masters_back_up_in_a_closure():
    """Keeps a float32 copy of all parameters in a closure, where no attribute shows it.

    caught by: MasterWeights · memory
    """

    class MasterWeights(memory_wall.MasterWeights):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            copies = [parameter.detach().float().clone() for parameter in self.param_groups[-1]["params"]]
            self.hooks = [*getattr(self, "hooks", []), lambda: copies]


def masters_call_without_gradients():
    """Calls the closure under no_grad(), so its backward() has no graph.

    caught by: MasterWeights · closure
    """

    class MasterWeights(memory_wall.MasterWeights):
        @torch.no_grad()
        def step(self, closure=None):
            loss = closure() if closure else None
            super().step()
            return loss


def masters_in_the_first_groups_only():
    """Remembers the groups from construction: groups that replace them are never updated.

    caught by: MasterWeights · inside another
    """

    class MasterWeights(memory_wall.MasterWeights):
        def __init__(self, params, optimizer_cls, **defaults):
            super().__init__(params, optimizer_cls, **defaults)
            self.groups = list(self.param_groups)

        def step(self, closure=None):
            now, self.param_groups = self.param_groups, self.groups
            super().step(closure)
            self.param_groups = now


def masters_know_adam_and_sgd():
    """Keeps only the state that Adam and SGD use and drops that of any other optimizer.

    caught by: MasterWeights · values
    """

    KNOWN = ("master", "step", "exp_avg", "exp_avg_sq", "momentum_buffer")

    class MasterWeights(memory_wall.MasterWeights):
        def step_one(self, parameter, group):
            super().step_one(parameter, group)
            state = self.state[parameter]
            for name in [name for name in state if name not in KNOWN]:
                del state[name]


def masters_leave_gradients_off():
    """Disables gradients in step() and never enables them again, so the next backward() has no graph.

    caught by: MasterWeights · values
    """

    class MasterWeights(memory_wall.MasterWeights):
        def step(self, closure=None):
            loss = closure() if closure else None
            torch.set_grad_enabled(False)
            super().step()
            return loss


def masters_overlook_late_groups():
    """Updates only the parameters given at construction and ignores groups added later.

    caught by: MasterWeights · groups
    """

    class MasterWeights(memory_wall.MasterWeights):
        def __init__(self, params, optimizer_cls, **defaults):
            super().__init__(params, optimizer_cls, **defaults)
            self.known = {parameter for group in self.param_groups for parameter in group["params"]}

        def step_one(self, parameter, group):
            if parameter in self.known:
                super().step_one(parameter, group)


def masters_overlook_later_groups_settings():
    """Gives a group added later the settings of the first group.

    caught by: MasterWeights · groups
    """

    class MasterWeights(memory_wall.MasterWeights):
        def add_param_group(self, param_group):
            if self.param_groups and hasattr(self, "built"):
                param_group = {**self.param_groups[0], "params": param_group["params"]}
            super().add_param_group(param_group)

        def __init__(self, params, optimizer_cls, **defaults):
            super().__init__(params, optimizer_cls, **defaults)
            self.built = True


def masters_round_the_gradient_again():
    """Rounds the gradient of a float32 parameter to bfloat16.

    caught by: MasterWeights · values
    """

    class MasterWeights(memory_wall.MasterWeights):
        def step_one(self, parameter, group):
            given = parameter.grad
            parameter.grad = given.bfloat16().to(given.dtype)
            super().step_one(parameter, group)
            parameter.grad = given


def masters_skip_frozen_parameters():
    """Skips a parameter that was frozen after backward, although it has a gradient. torch's optimizers do not.

    caught by: MasterWeights · no gradient
    """

    class MasterWeights(memory_wall.MasterWeights):
        def step_one(self, parameter, group):
            if parameter.requires_grad:
                super().step_one(parameter, group)


def masters_stay_when_loaded():
    """Keeps the current masters when a checkpoint is loaded, so loading does not restore the parameters.

    caught by: MasterWeights · checkpoint
    """

    class MasterWeights(memory_wall.MasterWeights):
        def load_state_dict(self, state_dict):
            masters = {parameter: state["master"] for parameter, state in self.state.items() if "master" in state}
            super().load_state_dict(state_dict)
            for parameter, master in masters.items():
                self.state[parameter]["master"] = master


def masters_take_zeros_for_none():
    """Skips parameters whose gradient is all zeros: weight decay and momentum should still change them.

    caught by: MasterWeights · no gradient
    """

    class MasterWeights(memory_wall.MasterWeights):
        def step_one(self, parameter, group):
            if parameter.grad.any():
                super().step_one(parameter, group)


def recompute_copies_its_inputs():
    """Saves a copy of each input in addition to the input itself.

    caught by: Checkpointed · memory
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def forward(ctx, module, count, *tensors):
            output = memory_wall.Recompute.forward(ctx, module, count, *tensors)
            ctx.copies = [tensor.clone() for tensor in tensors[:count]]
            return output

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_keeps_on_ctx():
    """Stores tensors directly on ctx, so autograd does not detect that an input was changed in place.

    caught by: Checkpointed · changed inputs
    """

    class _Context:
        """Stands in for the ctx that memory_wall.Recompute expects."""

        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    class _Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, count, *tensors):
            ctx.own = _Context()
            return memory_wall.Recompute.forward(ctx.own, module, count, *tensors)

        @staticmethod
        def backward(ctx, gradient):
            return memory_wall.Recompute.backward(ctx.own, gradient)

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_keeps_parameters_on_ctx():
    """Saves the inputs for backward, but stores the parameters on ctx, so a changed parameter is not detected.

    caught by: Checkpointed · changed inputs
    """

    class _Context:
        """Stands in for the ctx that memory_wall.Recompute expects."""

        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    class _Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, count, *tensors):
            ctx.own, ctx.parameters = _Context(), tensors[count:]
            output = memory_wall.Recompute.forward(ctx.own, module, count, *tensors)
            ctx.save_for_backward(*tensors[:count])
            del ctx.own.saved_tensors
            return output

        @staticmethod
        def backward(ctx, gradient):
            ctx.own.saved_tensors = (*ctx.saved_tensors, *ctx.parameters)
            return memory_wall.Recompute.backward(ctx.own, gradient)

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_remembers_the_last_dice():
    """Stores the random state of the module's last forward only, not of each forward.

    caught by: Checkpointed · order
    """

    LAST = {}

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def forward(ctx, module, count, *tensors):
            LAST[module] = memory_wall.get_rng_states()
            return memory_wall.Recompute.forward(ctx, module, count, *tensors)

        @staticmethod
        def backward(ctx, gradient):
            ctx.rng_states = LAST[ctx.module]
            return memory_wall.Recompute.backward(ctx, gradient)

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_stacks_its_inputs():
    """Keeps its saved state on a stack, assuming that backward runs in the reverse order of forward.

    caught by: Checkpointed · order
    """

    STACK = []

    class _Context:
        """Stands in for the ctx that memory_wall.Recompute expects."""

        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    class _Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, module, count, *tensors):
            STACK.append(_Context())
            return memory_wall.Recompute.forward(STACK[-1], module, count, *tensors)

        @staticmethod
        def backward(ctx, gradient):
            return memory_wall.Recompute.backward(STACK.pop(), gradient)

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def place_gives_the_best_it_can():
    """Returns the best choice even if it does not meet the target, instead of raising.

    caught by: place_checkpoints · too little memory
    """

    def place_checkpoints(saved_bytes, input_bytes, target_bytes):
        while True:
            try:
                return memory_wall.place_checkpoints(saved_bytes, input_bytes, target_bytes)
            except ValueError:
                target_bytes += 1


def place_refuses_with_the_peak_of_all():
    """Reports the peak with all blocks checkpointed, which is not the lowest possible peak.

    caught by: place_checkpoints · too little memory
    """

    def place_checkpoints(saved_bytes, input_bytes, target_bytes):
        try:
            return memory_wall.place_checkpoints(saved_bytes, input_bytes, target_bytes)
        except ValueError:
            every = tuple(range(len(saved_bytes)))
            lowest = memory_wall.activation_peak_bytes(saved_bytes, input_bytes, every)
            raise ValueError(f"the peak can get as low as {lowest}") from None


def place_refuses_without_a_number():
    """Raises an error that does not say how low the peak can get.

    caught by: place_checkpoints · too little memory
    """

    def place_checkpoints(saved_bytes, input_bytes, target_bytes):
        try:
            return memory_wall.place_checkpoints(saved_bytes, input_bytes, target_bytes)
        except ValueError:
            raise ValueError(f"no choice brings the peak down to {target_bytes}") from None


def masters_drop_the_value():
    """Calls the closure but does not return its value.

    caught by: MasterWeights · closure
    """

    class MasterWeights(memory_wall.MasterWeights):
        def step(self, closure=None):
            super().step(closure)


def recompute_drops_others():
    """Does not restore the random state in backward, so dropout drops different elements.

    caught by: Checkpointed · dropout
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def backward(ctx, gradient):
            ctx.rng_states = memory_wall.get_rng_states()
            return memory_wall.Recompute.backward(ctx, gradient)

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_first_input_only():
    """Returns a gradient for the first input and None for all others.

    caught by: Checkpointed · values
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def backward(ctx, gradient):
            found = memory_wall.Recompute.backward(ctx, gradient)
            others = 2 + ctx.num_inputs
            return *found[:3], *[None] * (others - 3), *found[others:]

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_forgets_the_gradient():
    """Differentiates the sum of the output and ignores the incoming gradient.

    caught by: Checkpointed · values
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def backward(ctx, gradient):
            return memory_wall.Recompute.backward(ctx, torch.ones_like(gradient))

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_once_only():
    """Deletes its saved state in the first backward, even with retain_graph=True.

    caught by: Checkpointed · order
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def backward(ctx, gradient):
            found = memory_wall.Recompute.backward(ctx, gradient)
            del ctx.module
            return found

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())


def recompute_turns_time_back():
    """Leaves the random state in backward as it was in forward, so the next step drops the same elements.

    caught by: Checkpointed · dropout
    """

    class _Recompute(memory_wall.Recompute):
        @staticmethod
        def backward(ctx, gradient):
            found = memory_wall.Recompute.backward(ctx, gradient)
            memory_wall.set_rng_states(ctx.rng_states)
            return found

    class Checkpointed(memory_wall.Checkpointed):
        def forward(self, *inputs):
            return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
