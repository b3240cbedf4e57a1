"""Build the awkward models by name, and compute with them what ranks should compute."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call

from shared.checks.models.awkward_models import INPUTS, MODELS, OUTPUTS

HAVE_MODES = ("Dropped", "Normed")  # these compute something different in eval mode


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """Build a model from its own seed. Floating-point buffers get the dtype, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy every parameter and buffer to the CPU, including buffers that state_dict() leaves out."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


class Replicas:
    """One model as several ranks hold it: the parameters are shared, but each rank has its own buffers."""

    def __init__(self, module: nn.Module, count: int):
        self.module = module
        self.buffers = [{name: buffer.clone() for name, buffer in module.named_buffers()} for _ in range(count)]

    def __iter__(self) -> Iterator[Callable]:
        """Yield, for each rank, a function that runs the module with the rank's buffers and updates them."""
        for buffers in self.buffers:
            yield lambda x, buffers=buffers: functional_call(self.module, buffers, (x,))

    def state_of(self, index: int) -> dict[str, torch.Tensor]:
        """Copy the parameters and this rank's buffers."""
        return state_of(self.module) | {name: buffer.clone() for name, buffer in self.buffers[index].items()}


def mixes_samples(module: nn.Module) -> bool:
    """Return whether a sample's output depends on the other samples of its batch."""
    return any(isinstance(layer, nn.BatchNorm1d) and layer.training for layer in module.modules())


HINT_ON_FORWARDS = (
    "BatchNorm updates it in each forward in train mode. "
    "Hint: how often does forward() run the module, and in which mode?"
)
HINT_ON_MODES = "Hint: in which mode does forward() run the module, and which line chooses the mode?"


def is_statistic(name: str) -> bool:
    """Return whether a buffer of this name is one of BatchNorm's running statistics."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def evaluate(module: nn.Module, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the output in eval mode, with this state instead of the module's own."""
    with torch.no_grad():
        return functional_call(module.eval(), state, (x,))


def twin_of(name: str, module) -> Any:
    """Build a new model with the state of an existing one. A copy would keep the hooks that a wrapper registered."""
    weight = module.first.weight
    twin = build(name, 0, weight.dtype).to(weight.device)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for key, tensor in {**dict(twin.named_parameters()), **dict(twin.named_buffers())}.items():
            tensor.copy_(held[key])
    return twin


def gradients_of(module: nn.Module, every_name: bool = False) -> dict[str, torch.Tensor | None]:
    """Copy every parameter's gradient to the CPU.

    Args:
        every_name: Whether to list a tied parameter's gradient under each of its names.
    """
    named = module.named_parameters(remove_duplicate=not every_name)
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in named}


def draw_batch(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch whose first third has x₀ < 0, so that some rank does not use the high layer of TwoBranches.

    Shape:
        x is [samples, 6], y is [samples, 3].
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs()
    x[: samples // 3, 0] *= -1
    return x, torch.randn(samples, OUTPUTS, generator=generator, dtype=torch.float64)


def other_branches(x: torch.Tensor) -> torch.Tensor:
    """Flip the sign of x₀, so that every sample uses the other layer of TwoBranches."""
    return torch.cat([-x[:, :1], x[:, 1:]], 1)


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = module(x)
    if output is None:
        raise AssertionError("forward() returned None: does it return the module's output?")
    return F.mse_loss(output, y)


def describe(name: str) -> str:
    """Describe a model to a student, who does not know its name."""
    return f"a model with {_SAID[name]}"


_SAID = {
    "Plain": "two layers",
    "Tied": "a parameter that two layers share",
    "Frozen": "frozen parameters",
    "Unused": "a layer that no rank uses",
    "TwoBranches": "a layer that only some ranks use",
    "Scalar": "a parameter without dimensions",
    "Buffered": "buffers",
    "Strided": "a parameter in channels_last",
    "Mixed": "parameters of two dtypes",
    "Crowd": "many small parameters of two dtypes",
    "Large": "a large layer",
    "Dropped": "dropout",
    "Normed": "two BatchNorm layers, one of them in eval mode",
}
