"""A mixture of experts as one process would compute it: every expert sees every token, and weights of 0 do the rest.

The ranks import this module. The parameters have the names of the lab's MoE, so that a state dict fits both.
"""

import contextlib
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.models.small_gpts import seeded


def routed(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights (T, E), the mask of the chosen experts (T, E), and the balancing loss."""
    tokens, experts = logits.shape
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    rank_of = logits.detach().argsort(-1, descending=True).argsort(-1)
    mask = (rank_of < top_k).to(logits.dtype)
    weights = probabilities * mask / (probabilities * mask).sum(-1, keepdim=True)
    if not tokens:
        return weights, mask, (logits * 0).sum()
    return weights, mask, experts * (mask.mean(0) / top_k * probabilities.mean(0)).sum()


def within(mask: torch.Tensor, capacity: int) -> torch.Tensor:
    """Keep the first tokens of each expert."""
    return mask * (mask.cumsum(0) <= capacity)


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class WholeMoE(nn.Module):
    """Computes all experts on all tokens.

    Of the last forward, it keeps `results` (T, E, D), the `mask` (T, E) of those that were used, and their `weights`.
    """

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int, capacity_factor: float | None):
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, self.mask, self.aux_loss = routed(self.router(tokens), self.top_k)
        if self.capacity_factor is not None:
            rows, experts = len(tokens) * self.top_k, len(self.experts)
            self.mask = within(self.mask, math.ceil(self.capacity_factor * rows / experts))
        self.weights = weights * self.mask
        self.results = torch.stack([expert(tokens) for expert in self.experts], 1)
        return (self.weights.unsqueeze(-1) * self.results).sum(1).view(x.shape)


def build_whole(sizes: tuple, seed: int, favorite: int | None = None) -> WholeMoE:
    """Build the whole layer in float64.

    Args:
        sizes: The arguments of WholeMoE.
        seed: The seed of its parameters.
        favorite: An expert that the router gives every token with a positive first element.
    """
    whole = seeded(seed, lambda: WholeMoE(*sizes))
    if favorite is not None:
        with torch.no_grad():
            whole.router.weight *= 0.1
            whole.router.weight[favorite, 0] = 20.0
    return whole


@contextlib.contextmanager
def uninitialized_is_nan():
    """Fill the memory of torch.empty with nan, so that a result that uses it is always wrong."""
    was_on, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warns)
