"""A layer with sharded experts, and one process that has all of them and runs each rank's tokens, one after another."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import total_of
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.model_parallel.probe import join_one_of
from shared.checks.engine.subgroups import staying_inside
from shared.checks.models.small_gpts import seeded
from shared.wire import instrumentation

# -- reference
#
# The ranks import this module. The parameters have the names of the lab's MoE, so that a state dict fits both.


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


ELEMENT_BYTES = 8


@dataclass(frozen=True)
class Layer:
    """A layer, and the tokens of each rank of a group.

    Attributes:
        tokens: The shape of each rank's tokens, without their width, by index in the group; later ranks repeat them.
        experts_per_rank: E/N.
        top_k: k.
        capacity_factor: None keeps all assignments.
        favorite: An expert that gets every token; None routes as it comes.
        balancing: The factor of the balancing loss.
        calls: How many forwards come before the backward of all of them.
    """

    tokens: tuple[tuple[int, ...], ...] = ((6,),)
    experts_per_rank: int = 2
    top_k: int = 2
    capacity_factor: float | None = None
    favorite: int | None = None
    balancing: float = 0.0
    calls: int = 1
    dim: int = 4
    hidden: int = 6

    def __str__(self) -> str:
        parts = [f"{self.experts_per_rank} experts per rank, top_k={self.top_k}"]
        parts += [f"capacity_factor={self.capacity_factor:g}"] if self.capacity_factor is not None else []
        parts += [f"all tokens choose expert {self.favorite}"] if self.favorite is not None else []
        parts += ["with the balancing loss"] if self.balancing else []
        parts += [f"{self.calls} forwards, then one backward"] if self.calls > 1 else []
        return ", ".join(parts)

    def shape(self, index: int) -> tuple[int, ...]:
        return (*self.tokens[index % len(self.tokens)], self.dim)

    def sizes(self, world_size: int) -> tuple:
        return self.dim, self.hidden, self.experts_per_rank * world_size, self.top_k, self.capacity_factor

    def own_names(self, index: int) -> set[str]:
        """Return the names of the experts' parameters on a rank."""
        own = range(index * self.experts_per_rank, (index + 1) * self.experts_per_rank)
        return {f"experts.{expert}.{part}.weight" for expert in own for part in ("up", "down")}


@dataclass(frozen=True)
class Draw:
    """What the ranks of one group get: a seed of the parameters, and the inputs and slopes of each call and rank."""

    seed: int
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]]  # by rank, then by call

    @classmethod
    def of(cls, attempt: Attempt, layer: Layer, size: int) -> "Draw":
        generator = torch.Generator().manual_seed(attempt.draw_seed())

        def draw(index: int) -> torch.Tensor:
            return torch.randn(layer.shape(index), generator=generator, dtype=torch.float64)

        batches = [[(draw(index), draw(index)) for _ in range(layer.calls)] for index in range(size)]
        if layer.favorite is not None:
            for x in (x for own in batches for x, _ in own):
                x[..., 0] = x[..., 0].abs() + 0.5
        return cls(attempt.draw_seed(), batches)


@dataclass(frozen=True)
class Work:
    """What each expert makes of each token, `results` (T, E, D), and how the router weights it, `weights` (T, E)."""

    results: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What one process computes from one rank's tokens. `rows` has how many rows this rank has for each expert."""

    outputs: list[torch.Tensor]
    work: list[Work]
    balancing: list[torch.Tensor]
    input_gradients: list[torch.Tensor]
    router_gradient: Any  # a tensor, as each of the following
    expert_gradients: dict[str, Any]  # from this rank's loss alone
    rows: torch.Tensor


def one_process(layer: Layer, draw: Draw) -> list[Expected]:
    """Run each rank's tokens through the whole layer."""
    size, found = len(draw.batches), []
    for batches in draw.batches:
        whole = build_whole(layer.sizes(size), draw.seed, layer.favorite)
        outputs, work, balancing, inputs, losses, rows = [], [], [], [], [], []
        for x, slope in batches:
            inputs.append(x.clone().requires_grad_())
            outputs.append(whole(inputs[-1]))
            work.append(Work(whole.results.detach(), whole.weights.detach()))
            balancing.append(whole.aux_loss.detach())
            losses.append((outputs[-1] * slope).sum() + layer.balancing * whole.aux_loss)
            rows.append(whole.mask.sum(0).long())
        total_of(losses).backward()
        gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
        router = gradients.pop("router.weight")
        own_inputs = [x.grad for x in inputs]
        found.append(
            Expected([y.detach() for y in outputs], work, balancing, own_inputs, router, gradients, total_of(rows))
        )
    return found


# -- on the ranks


def build_layer(piece, layer: Layer, size: int, seed: int, group):
    """Build the student's layer from a MoE of the student's file, whose values come from the seed."""
    moe_class = next((each for each in piece.__mro__[1:] if each.__name__ == "MoE"), None)
    if moe_class is None:
        raise AssertionError(f"{piece.__name__} does not inherit from MoE")
    whole = moe_class(*layer.sizes(size)).double()
    whole.load_state_dict(build_whole(layer.sizes(size), seed, layer.favorite).state_dict())
    return piece.from_moe(whole.to(device_here()), group)


@dataclass
class Trained:
    """What a rank's layer computes, holds and sends in a forward of each batch and one backward."""

    outputs: list[torch.Tensor]
    balancing: list[torch.Tensor]
    input_gradients: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor | None]  # by the name of the parameter
    forward: list[instrumentation.Call]
    backward: list[instrumentation.Call]


def probe_layer(piece, layer: Layer, groups: list[list[int]], seed: int, batches: list) -> Trained:
    group, members = join_one_of(groups)
    with staying_inside(members if len(groups) > 1 else None), uninitialized_is_nan():
        split = build_layer(piece, layer, len(members), seed, group)
        outputs, balancing, inputs, losses = [], [], [], []
        with instrumentation.listening() as forward:
            for x, slope in batches:
                inputs.append(x.to(device_here()).requires_grad_())
                outputs.append(split(inputs[-1]))
                balancing.append(split.aux_loss.detach().clone())
                losses.append((outputs[-1] * slope.to(device_here())).sum() + layer.balancing * split.aux_loss)
            loss = total_of(losses)
        results = [output.detach().clone() for output in outputs]
        with instrumentation.listening() as backward:
            loss.backward()
    gradients = {name: parameter.grad for name, parameter in split.named_parameters()}
    return Trained(results, balancing, [x.grad for x in inputs], gradients, forward, backward)


def probe_memory(piece, layer: Layer, seed: int, most_bytes: int, batches: list) -> dict[str, int]:
    """Return the bytes that a rank holds once the whole layer is gone, before and after a step."""
    (x, slope), *_ = batches
    x, slope = x.to(device_here()), slope.to(device_here())
    before_bytes = living_bytes()
    split = build_layer(piece, layer, torch.distributed.get_world_size(), seed, None)
    found = {"after the split": settled_bytes(most_bytes, before_bytes)}
    (split(x) * slope).sum().backward()
    split.aux_loss = None  # it holds the graph
    found["after a step, with its gradients"] = settled_bytes(2 * most_bytes, before_bytes)
    return found


def probe_rejection(piece, experts: int, differ: bool) -> str:
    """Divide a layer. Returns what that raised, or ""."""
    layer = Layer(experts_per_rank=experts, top_k=1)
    rank = torch.distributed.get_rank()
    try:
        build_layer(piece, layer, 1, rank if differ else 0, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- what is sent


def sent_bytes(layer: Layer, expected: list[Expected], index: int) -> int:
    """Return the bytes of rows that a rank sends in each direction: its own rows, and results for the others."""
    per_rank = layer.experts_per_rank
    rows = torch.stack([each.rows for each in expected]).view(len(expected), len(expected), per_rank).sum(-1)
    kept = rows[index, index]
    return int(rows[index].sum() + rows[:, index].sum() - 2 * kept) * layer.dim * ELEMENT_BYTES


def measured_bytes(calls: list, rank: int) -> float:
    return sum(wire.sent_bytes_of(call, rank) for call in calls)
