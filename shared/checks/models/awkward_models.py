"""Small models that break careless wrappers. Each exists because a real wrapper was wrong on it.

All of them take x [B, 6] and return [B, 3].
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

INPUTS, OUTPUTS = 6, 3
USUAL_WIDTH = 7
WIDTH = USUAL_WIDTH  # hidden units; `sizes.models_of` sets other numbers
built = False  # whether there is a model of this width


def calm(hidden: torch.Tensor) -> torch.Tensor:
    """Scale the hidden units so that a wide model can be trained with the learning rate of a narrow one."""
    return hidden * (USUAL_WIDTH / hidden.shape[-1]) ** 0.5


class Plain(nn.Module):
    """Two layers whose numbers of elements no world size divides."""

    def __init__(self):
        global built
        super().__init__()
        built = True
        self.first, self.second = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x):
        return self.second(calm(F.gelu(self.first(x))))


class Tied(Plain):
    """A parameter that two layers share. Its gradient is the sum of two."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(INPUTS, WIDTH)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.second(calm(F.gelu(self.first(x)) + self.again(x)))


class Frozen(Plain):
    """Two layers of which some parameters are frozen."""

    def __init__(self):
        super().__init__()
        self.first.bias.requires_grad_(False)
        self.second.weight.requires_grad_(False)


class Unused(Plain):
    """A layer that no sample uses, so its gradients stay None on every rank."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 5)


class TwoBranches(Plain):
    """Samples with x₀ > 0 use one layer and the others another one, so on some ranks a gradient stays None."""

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
    """Buffers of floats, of integers, a mask, and one that state_dict() leaves out; also a second input."""

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
            + self.get_buffer("count") % 7
            + self.mask
            + self.second.inner
        )


class Strided(Plain):
    """A parameter in channels_last, so its gradient is not in row-major order, either."""

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
    """Many small parameters of alternating dtypes, some without elements, and one larger than all others."""

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
            x: The model's inputs, which determine the mask. Every process must see the same bits.
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
        return self.second(calm(self.dropout(F.gelu(self.first(x)), x)))


class Normed(Plain):
    """A BatchNorm in train mode, and another one that stays in eval mode, as in fine-tuning."""

    def __init__(self):
        super().__init__()
        self.norm, self.fixed_norm = batch_norm(WIDTH), batch_norm(OUTPUTS).eval()

    def forward(self, x):
        return self.fixed_norm(self.second(calm(F.gelu(self.norm(self.first(x))))))


def batch_norm(width: int) -> nn.BatchNorm1d:
    """Build a BatchNorm whose running statistics are not the initial ones."""
    norm = nn.BatchNorm1d(width)
    mean, variance, count = norm.buffers()
    mean.normal_()
    variance.uniform_(0.5, 1.5)
    count += torch.randint(1, 99, ())
    return norm


MODELS = {
    cls.__name__: cls
    for cls in (
        Plain,
        Tied,
        Frozen,
        Unused,
        TwoBranches,
        Scalar,
        Buffered,
        Strided,
        Mixed,
        Crowd,
        Large,
        Dropped,
        Normed,
    )
}
