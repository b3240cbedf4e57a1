# Built by `make notebooks` from source/06_memory_wall/lab.py: edit that, not this.
"""The memory of one rank: counted, kept in mixed precision, and saved by computing activations again."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import nn


def model_state_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count what stays on this rank from step to step. → bytes of "parameters", "gradients" and "optimizer" """
    parameters = list(module.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
    }


class HoldsMasters(torch.optim.Optimizer):
    """Keeps a float32 master of each parameter in its state, beside what optimizer_cls remembers of it."""

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **defaults):
        self.inner = optimizer_cls([torch.empty(0)], **defaults)  # has one master at a time
        super().__init__(params, self.inner.defaults)

    def step_one(self, parameter: nn.Parameter, group: dict) -> None:
        """Update a parameter of that group by way of its master."""
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        master = nn.Parameter(state["master"])
        master.grad = parameter.grad.float()
        remembered = {name: value for name, value in state.items() if name != "master"}
        self.inner.param_groups = [{**group, "params": [master]}]
        self.inner.state = {master: remembered}
        self.inner.step()
        state.update(remembered)
        master.grad = None  # inner still has the master
        parameter.copy_(master)


class MasterWeights(HoldsMasters):
    """Step parameters of low precision by way of float32 masters, with optimizer_cls(masters, **defaults).

    Memory: with Adam, 12 bytes per parameter: master, momentum and variance.
    Source: Micikevicius et al. 2018, "Mixed Precision Training", §3.1.
    """

    @torch.no_grad()
    def step(self, closure=None):
        """Update masters, then parameters. → what closure() returns, if there is one"""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, group)
        return loss

    # given, keep: torch's own rounds masters to the dtype of their parameters
    def load_state_dict(self, state_dict: dict) -> None:
        """Take over what state_dict() gave."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value):  # on the device where torch's own has put it
                    device = self.state[parameter][name].device
                    self.state[parameter][name] = value.to(device, copy=True)


def randomness() -> list[torch.Tensor]:
    """Remember where the random generators of the CPU and the GPU are."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def replay(seen: list[torch.Tensor]) -> None:
    """Set the generators back to where they were."""
    torch.set_rng_state(seen[0])
    if len(seen) > 1:
        torch.cuda.set_rng_state(seen[1])


class Recompute(torch.autograd.Function):
    """module(*inputs), of which only the inputs are kept: Recompute.apply(module, len(inputs), *inputs, *parameters).

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", §4.
    """

    @staticmethod
    def forward(ctx, module: Callable, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.count, ctx.random = module, count, randomness()
        ctx.save_for_backward(*tensors)
        return module(*tensors[:count])  # autograd records nothing inside a function's forward

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        # given, keep: create_graph=True enables gradients here, for gradients of these gradients
        if torch.is_grad_enabled():
            raise RuntimeError("a checkpointed module can be differentiated once only")
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors[: ctx.count]]
        tensors = [*inputs, *ctx.saved_tensors[ctx.count :]]
        now = randomness()
        replay(ctx.random)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        replay(now)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


class Checkpointed(nn.Module):
    """Wrap a module so that it keeps its inputs for backward, and computes its activations again, autocast or not.

    Raises: RuntimeError in backward under create_graph=True.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        kind = inputs[0].device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # In backward autocast is off, or another. A cast that no_grad made must not be used again where gradients pass.
        as_now = torch.autocast(kind, dtype, enabled, cache_enabled=False)
        return Recompute.apply(as_now(self.module), len(inputs), *inputs, *self.module.parameters())


def activation_peak_bytes(saved_bytes: list[int], input_bytes: list[int], chosen: tuple[int, ...]) -> int:
    """Predict the most that blocks keep during backward, if the chosen ones are checkpointed."""
    kept_bytes = peak_bytes = 0
    for block, (saved, given) in enumerate(zip(saved_bytes, input_bytes, strict=True)):
        kept_bytes += given if block in chosen else saved
        again_bytes = saved if block in chosen else 0
        peak_bytes = max(peak_bytes, kept_bytes + again_bytes)
    return peak_bytes


def place_checkpoints(saved_bytes: list[int], input_bytes: list[int], target_bytes: int) -> tuple[int, ...]:
    """Choose the fewest blocks to checkpoint so that the peak is at most target_bytes.

    Raises: ValueError when no choice is enough.
    """
    blocks = range(len(saved_bytes))
    choices = [chosen for count in range(len(blocks) + 1) for chosen in combinations(blocks, count)]
    peaks_bytes = {chosen: activation_peak_bytes(saved_bytes, input_bytes, chosen) for chosen in choices}
    for chosen, peak_bytes in peaks_bytes.items():  # few before many
        if peak_bytes <= target_bytes:
            return chosen
    lowest_bytes = min(peaks_bytes.values())
    raise ValueError(f"{target_bytes:,} bytes are too few: checkpoints bring the peak to {lowest_bytes:,} at best")
