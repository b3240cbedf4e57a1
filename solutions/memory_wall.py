# Built by `make notebooks` from source/06_memory_wall/lab.py: edit that, not this.
"""The memory of one rank: model state, mixed precision with master weights, and activation checkpointing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import torch
from torch import nn


def model_state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes of the model state that this rank holds.

    Returns:
        The bytes of "parameters", "gradients" and "optimizer".
    """
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state_values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": sum(value.nbytes for value in state_values if torch.is_tensor(value)),
    }


class HoldsMasters(torch.optim.Optimizer):
    """Keeps a float32 master of each parameter in its state, next to the state of optimizer_cls for this master."""

    # Given, keep it as it is.
    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **defaults):
        # A placeholder, because an optimizer needs a parameter. step_one() replaces it with one master at a time.
        self.inner = optimizer_cls([torch.empty(0)], **defaults)
        super().__init__(params, self.inner.defaults)

    # Given, keep it as it is. It reads the group's settings in each step, because a scheduler may change them.
    def step_inner(self, master: torch.Tensor, inner_state: dict, group: dict) -> None:
        """Let inner update this master alone, with the settings of the group. It reads and changes inner_state."""
        self.inner.param_groups = [{**group, "params": [master]}]
        self.inner.state = {master: inner_state}
        self.inner.step()

    def step_one(self, parameter: nn.Parameter, group: dict) -> None:
        """Update the master of one parameter in this group, and copy it to the parameter. Runs under no_grad()."""
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = state["master"]
        inner_state = {name: value for name, value in state.items() if name != "master"}
        master.grad = parameter.grad.float()
        self.step_inner(master, inner_state, group)
        state.update(inner_state)
        parameter.copy_(master)
        master.grad = None  # free it now, because inner keeps the master until the next step_one()


class MasterWeights(HoldsMasters):
    """Trains low-precision parameters by updating their float32 masters with optimizer_cls(masters, **defaults).

    Memory: with Adam, 12 bytes per parameter for master, momentum and variance.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", §3.1.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Returns the result of the closure, if there is one."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)
        return loss

    # Given, keep it as it is: torch's load_state_dict rounds the masters to the dtype of their parameters.
    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state that state_dict() returned, with masters in float32."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):  # keep the device that torch has chosen
                    device = self.state[parameter][name].device
                    self.state[parameter][name] = value.to(device, copy=True)


def get_rng_states() -> list[torch.Tensor]:
    """Return the states of the random generators of the CPU and, if it is in use, of the current GPU."""
    gpu_states = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *gpu_states]


def set_rng_states(states: list[torch.Tensor]) -> None:
    """Restore states that get_rng_states() returned."""
    cpu_state, *gpu_states = states
    torch.set_rng_state(cpu_state)
    for gpu_state in gpu_states:
        torch.cuda.set_rng_state(gpu_state)


@contextmanager
def restored(states: list[torch.Tensor]) -> Iterator[None]:
    """Restore random states for a with-block. After it, the generators continue from their states before it."""
    current_states = get_rng_states()
    set_rng_states(states)
    try:
        yield
    finally:
        set_rng_states(current_states)


class Recompute(torch.autograd.Function):
    """Computes module(*inputs), saves only inputs and parameters for backward, and recomputes activations there.

    Call it as Recompute.apply(module, len(inputs), *inputs, *parameters).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", §4.
    """

    @staticmethod
    def forward(ctx, module: Callable, num_inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.num_inputs, ctx.rng_states = module, num_inputs, get_rng_states()
        ctx.save_for_backward(*tensors)
        return module(*tensors[:num_inputs])  # autograd records nothing in a function's forward

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        # Given, keep it: gradients are enabled here only under create_graph=True, to differentiate them again.
        if torch.is_grad_enabled():
            raise RuntimeError("a checkpointed module cannot be differentiated twice: use create_graph=False")
        saved_inputs = ctx.saved_tensors[: ctx.num_inputs]
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in saved_inputs]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        with torch.enable_grad(), restored(ctx.rng_states):
            output = ctx.module(*inputs)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        grads = torch.autograd.grad(output, differentiable, gradient, allow_unused=True)
        # Given, keep it: module and num_inputs have no gradient, and neither has a tensor that requires none.
        remaining = iter(grads)
        return None, None, *(next(remaining) if each.requires_grad else None for each in tensors)


class Checkpointed(nn.Module):
    """Wraps a module so that it saves only its inputs for backward, and recomputes its activations there.

    It works inside and outside of autocast. backward(create_graph=True) raises a RuntimeError.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        device_type = inputs[0].device.type
        dtype = torch.get_autocast_dtype(device_type)
        enabled = torch.is_autocast_enabled(device_type)
        # Backward runs with other autocast settings, so wrap the module in those of forward. Do not cache casts: one
        # that was made under no_grad has no graph, so it must not be reused where gradients are needed.
        autocast = torch.autocast(device_type, dtype, enabled, cache_enabled=False)
        function = autocast(self.module)
        return Recompute.apply(function, len(inputs), *inputs, *self.module.parameters())


def activation_peak_bytes(saved_bytes: list[int], input_bytes: list[int], chosen: tuple[int, ...]) -> int:
    """Predict the peak of all activations during backward if the chosen blocks are checkpointed.

    Args:
        saved_bytes: For each block, the bytes that it keeps for backward (with its input) if it is
            not checkpointed.
        input_bytes: For each block, the bytes of its input, which it keeps if it is checkpointed.
        chosen: The indices of the blocks to checkpoint.
    """
    kept_bytes = peak_bytes = 0
    for block, block_bytes in enumerate(saved_bytes):
        is_checkpointed = block in chosen
        kept_bytes += input_bytes[block] if is_checkpointed else block_bytes
        recomputed_bytes = block_bytes if is_checkpointed else 0
        peak_bytes = max(peak_bytes, kept_bytes + recomputed_bytes)
    return peak_bytes


def place_checkpoints(saved_bytes: list[int], input_bytes: list[int], target_bytes: int) -> tuple[int, ...]:
    """Choose as few blocks to checkpoint as possible so that the peak is at most target_bytes.

    Raises:
        ValueError: If no choice of blocks reaches the target.
    """
    blocks = range(len(saved_bytes))
    choices = [chosen for count in range(len(blocks) + 1) for chosen in combinations(blocks, count)]
    peaks_bytes = {chosen: activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices}
    # A dict keeps the order of choices, so those with the fewest blocks come first.
    for chosen, peak_bytes in peaks_bytes.items():
        if peak_bytes <= target_bytes:
            return chosen
    lowest_bytes = min(peaks_bytes.values())
    # Given, keep it as it is.
    raise ValueError(
        f"no choice of checkpoints brings the peak down to {target_bytes:,} bytes: "
        f"the lowest possible peak is {lowest_bytes:,} bytes"
    )
