"""Models that break careless wrappers, small enough that a step costs nothing.

All take x [B, 6] and give [B, 3]. Each exists because some wrapper in the wild was wrong on it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call

INPUTS, OUTPUTS = 6, 3


class Plain(nn.Module):
    """Two layers whose sizes no world size divides."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, 7), nn.Linear(7, OUTPUTS)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Tied(Plain):
    """One parameter used twice: it is one parameter, and its gradient is the sum of two."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(INPUTS, 7)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.second(F.gelu(self.first(x)) + self.again(x))


class Frozen(Plain):
    """Some parameters that take no gradient."""

    def __init__(self):
        super().__init__()
        self.first.bias.requires_grad_(False)
        self.second.weight.requires_grad_(False)


class Unused(Plain):
    """A layer that no sample passes through: its gradients stay None on every rank."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 5)


class TwoRoads(Plain):
    """Samples with x₀ > 0 take one layer, the others another: on some ranks a gradient stays None."""

    def __init__(self):
        super().__init__()
        self.high, self.low = nn.Linear(OUTPUTS, OUTPUTS), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x):
        y, is_high = super().forward(x), x[:, 0] > 0
        out = torch.zeros_like(y)
        if is_high.any():
            out[is_high] = self.high(y[is_high])
        if (~is_high).any():
            out[~is_high] = self.low(y[~is_high])
        return out


class Scalar(Plain):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(()) + 1)

    def forward(self, x):
        return super().forward(x) * self.temperature


class Buffered(Plain):
    """Buffers of floats, of integers, and one that state_dict leaves out; and a second input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(OUTPUTS) + 0.5)
        self.register_buffer("seen", torch.randint(1, 9, (1,)))
        self.register_buffer("shift", torch.rand(OUTPUTS), persistent=False)
        self.register_buffer("absent", None)
        self.register_buffer("count", torch.randint(2**53, 2**62, (1,)))  # more digits than a float64 has
        self.register_buffer("mask", torch.rand(OUTPUTS) > 0.5)
        self.second.register_buffer("inner", torch.rand(OUTPUTS))

    def forward(self, x, times: float = 1.0):
        return (
            super().forward(x) * self.scale * self.seen * times
            + self.shift
            + self.count % 7
            + self.mask
            + self.second.inner
        )


class Strided(Plain):
    """A parameter in channels_last: its gradient's elements do not lie in row order either."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.rand(OUTPUTS, INPUTS, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        return super().forward(x) + x @ self.kernel.sum((2, 3)).t()


class Mixed(Plain):
    """A float32 parameter before float64 ones."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(INPUTS) + 1)

    def to(self, dtype):
        super().to(dtype)
        self.gain.data = self.gain.data.float()
        return self

    def forward(self, x):
        return super().forward(x * self.gain.to(x.dtype))


class Crowd(Plain):
    """Many small parameters, no two neighbors of one dtype, some of no element, one larger than all the others."""

    def __init__(self):
        super().__init__()
        shapes = [(INPUTS,), (), (0,), (1, INPUTS), (INPUTS,), (9, INPUTS), (), (1,), (INPUTS,), (2, 0)]
        self.gains = nn.ParameterList(nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes)

    def to(self, dtype):
        super().to(dtype)
        for gain in list(self.gains)[::2]:
            gain.data = gain.data.float()
        return self

    def forward(self, x):
        for gain in self.gains:
            x = x * gain.to(x.dtype).mean(0) if gain.dim() and gain.numel() else x * (gain.to(x.dtype).sum() + 1)
        return super().forward(x)


class Large(Plain):
    """2.2 MB in float32, most of it in matrices of 0.2 MB."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(INPUTS, 8000) for _ in range(10))

    def forward(self, x):
        return super().forward(x) + sum(layer(x).mean(1, keepdim=True) for layer in self.wide)


class SampleDropout(nn.Module):
    """Dropout whose mask depends only on the sample, so that ranks and one process drop the same elements."""

    def forward(self, hidden, x):
        """Zero about half of hidden's elements in train mode.

        Args:
            hidden: The elements to drop, [samples, width].
            x: The model's inputs, which choose the mask. Every process must see the same bits.
        """
        if not self.training:
            return hidden
        factors = 997.0 * torch.arange(1, hidden.shape[1] + 1, dtype=x.dtype, device=x.device)
        return 2 * hidden * ((x[:, -1:] * factors).frac().abs() < 0.5)


class Dropped(Plain):
    """Dropout, which does nothing in eval mode."""

    def __init__(self):
        super().__init__()
        self.dropout = SampleDropout()

    def forward(self, x):
        return self.second(self.dropout(F.gelu(self.first(x)), x))


class Normed(Plain):
    """BatchNorm in train mode, and another one whose module stays in eval mode, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.norm, self.fixed_norm = batch_norm(7), batch_norm(OUTPUTS).eval()

    def forward(self, x):
        return self.fixed_norm(self.second(F.gelu(self.norm(self.first(x)))))


def batch_norm(width: int) -> nn.BatchNorm1d:
    """Build a BatchNorm that has seen batches already: its running statistics are not the initial ones."""
    norm = nn.BatchNorm1d(width)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 1.5)
    norm.num_batches_tracked += torch.randint(1, 99, ())
    return norm


MODELS = {
    cls.__name__: cls
    for cls in (Plain, Tied, Frozen, Unused, TwoRoads, Scalar, Buffered, Strided, Mixed, Crowd, Large, Dropped, Normed)
}


HAVE_MODES = ("Dropped", "Normed")  # they compute something else in eval mode


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model from its own seed; floating-point buffers take the dtype too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name]().to(dtype)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy every parameter and buffer, the ones outside state_dict too, to the CPU."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


class Replicas:
    """One model as several ranks hold it: they share the parameters, but each has its own buffers."""

    def __init__(self, module: nn.Module, count: int):
        self.module = module
        self.buffers = [{name: buffer.clone() for name, buffer in module.named_buffers()} for _ in range(count)]

    def __iter__(self) -> Iterator[Callable]:
        """Yield, for each rank, a function that computes what its module computes and updates its buffers."""
        for buffers in self.buffers:
            yield lambda x, buffers=buffers: functional_call(self.module, buffers, (x,))

    def state_of(self, index: int) -> dict[str, torch.Tensor]:
        """Copy the parameters and this rank's buffers."""
        return state_of(self.module) | {name: buffer.clone() for name, buffer in self.buffers[index].items()}


def mixes_samples(module: nn.Module) -> bool:
    """Return whether a sample's output depends on the other samples of its batch."""
    return any(isinstance(each, nn.BatchNorm1d) and each.training for each in module.modules())


HINT_ON_FORWARDS = (
    "BatchNorm updates it in each forward in train mode. Hint: how often does forward run the module, and how?"
)
HINT_ON_MODES = "Hint: in which mode does forward run the module, and who chooses the mode?"


def is_statistic(name: str) -> bool:
    """Return whether a buffer of this name is one of BatchNorm's running statistics."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def evaluate(module: nn.Module, state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the output in eval mode, with this state in place of the module's own."""
    with torch.no_grad():
        return functional_call(module.eval(), state, (x,))


def twin_of(name: str, module: nn.Module) -> nn.Module:
    """Build a model anew with the state of one that lives: a copy would keep the hooks that a wrapper has put on it."""
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
        module: The module.
        every_name: Whether a tied parameter's gradient is there under each of its names.
    """
    named = module.named_parameters(remove_duplicate=not every_name)
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in named}


def draw_batch(seed: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch whose first third has x₀ < 0, so that TwoRoads leaves a rank without its high road.

    Shapes: → x [samples, 6], y [samples, 3]
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs()
    x[: samples // 3, 0] *= -1
    return x, torch.randn(samples, OUTPUTS, generator=generator, dtype=torch.float64)


def other_roads(x: torch.Tensor) -> torch.Tensor:
    """Turn x₀ round, so that every sample takes TwoRoads' other road."""
    return torch.cat([-x[:, :1], x[:, 1:]], 1)


def loss_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = module(x)
    if output is None:
        raise AssertionError("forward() gave back None: does it return what the module returns?")
    return F.mse_loss(output, y)


def said(name: str) -> str:
    """Name a model to a student: what it is, since its name appears nowhere else."""
    return f"a model with {_SAID[name]}"


_SAID = {
    "Plain": "two layers",
    "Tied": "a parameter used twice",
    "Frozen": "frozen parameters",
    "Unused": "a layer nobody uses",
    "TwoRoads": "a layer that only some ranks use",
    "Scalar": "a parameter of no dimension",
    "Buffered": "buffers",
    "Strided": "a parameter in channels_last",
    "Mixed": "parameters of two dtypes",
    "Crowd": "many small parameters of two dtypes",
    "Large": "2 MB of parameters",
    "Dropped": "dropout",
    "Normed": "BatchNorm layers, of which one is in eval mode",
}
