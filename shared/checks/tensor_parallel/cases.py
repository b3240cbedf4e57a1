"""The layers and models that the checks of chapter 13 split, and what each rank must hold and send.

The ranks import this module. All sizes that are split are multiples of 12, so that 1 to 4 ranks divide them.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.c10d import all_gather_single, reduce_scatter_single
from shared.checks.engine.model_parallel.case import Case, Collective, Shard, split_bytes
from shared.checks.models.small_gpts import TOKENS, seeded

BATCH = 2


def own_part(length: int, group) -> range:
    """Return the indices of this rank's part of a length that the ranks of the group divide evenly."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    return range(index * length // size, (index + 1) * length // size)


def draw_normal(generator: torch.Generator, width: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.randn(BATCH, TOKENS, size, generator=generator, dtype=torch.float64) for size in (width, outputs))
    return x, y


def flattened(flat: bool, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the dimensions of samples and tokens, if asked to."""
    return (x.flatten(0, 1), y.flatten(0, 1)) if flat else (x, y)


def own_slice(tensor: torch.Tensor, dim: int, own: range) -> torch.Tensor:
    return tensor.detach().narrow(dim, own.start, len(own)).clone()


def mean_square(output: torch.Tensor, y: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return a loss that is the sum of the losses of parts of the output.

    Raises:
        AssertionError: If the output has the wrong shape.
    """
    if output.shape != y.shape:
        raise AssertionError(f"forward returned a tensor of shape {list(output.shape)}, expected {list(y.shape)}")
    return (output - y).square().sum() / outputs


def unchanged(before: torch.Tensor, after: torch.Tensor, what: str) -> None:
    """Check that the student's code has not overwritten a tensor.

    Raises:
        AssertionError: If it has.
    """
    if not torch.equal(before, after):
        raise AssertionError(f"{what} has been overwritten, but other computations may still need it")


# -- operators, each inside a layer that the check splits itself


class Scaffold(nn.Module):
    """A linear layer of which the rank keeps its part along one dimension, and which calls the student's operator."""

    def __init__(self, operator, linear: nn.Linear, group, dim: int):
        super().__init__()
        self.operator, self.group = operator, group
        self.own = own_part(linear.weight.shape[dim], group)
        self.weight = nn.Parameter(own_slice(linear.weight, dim, self.own))

    def shard(self, dim: int) -> dict[str, Shard]:
        return {"weight": Shard(self.weight, dim, self.own)}


@dataclass(frozen=True)
class Operator(Case):
    """A linear layer without bias around an operator."""

    width: int = 12
    outputs: int = 12
    differentiates_inputs: bool = False

    def build_model(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: nn.Linear(self.width, self.outputs, bias=False))

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_normal(generator, self.width, self.outputs)

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: True)

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y, self.outputs)


class Summing(Scaffold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = x[..., list(self.own)] @ self.weight.T
        before = partial.detach().clone()
        total = self.operator(partial, self.group)
        unchanged(before, partial, "the argument of sum_over_ranks")
        return total


@dataclass(frozen=True)
class SumsPartials(Operator):
    """Each rank has a part of the inputs. sum_over_ranks adds up the outputs."""

    def split(self, piece, module: Any, group):
        return Summing(piece, module, group, 1)

    def shards(self, split) -> dict[str, Shard]:
        return split.shard(1)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return {"forward": [Collective("all_reduce", x[..., 0].nbytes * self.outputs)], "backward": []}


class Copying(Scaffold):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copied = self.operator(x, self.group)
        if copied is x:
            raise AssertionError("copy_to_ranks returned its argument itself, so autograd records nothing")
        self.arrived = []
        if copied.requires_grad:
            copied.register_hook(lambda gradient: self.arrived.append((gradient, gradient.clone())))
        return copied @ self.weight.T


@dataclass(frozen=True)
class Copies(Operator):
    """Each rank computes a part of the outputs. copy_to_ranks adds up the gradient of the inputs."""

    differentiates_inputs: bool = True

    def split(self, piece, module: Any, group):
        return Copying(piece, module, group, 0)

    def train(self, split, x, y, phase):
        output, _ = super().train(split, x, y[..., list(split.own)], phase)
        for gradient, before in split.arrived:
            unchanged(before, gradient, "the gradient that backward of copy_to_ranks gets")
        return Shard(output, 2, split.own), None

    def shards(self, split) -> dict[str, Shard]:
        return split.shard(0)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return {"forward": [], "backward": [Collective("all_reduce", x.nbytes)]}


# -- layers between operators


def _gathered(shard: torch.Tensor, group) -> torch.Tensor:
    front = shard.transpose(0, 1).contiguous()
    whole = front.new_empty(dist.get_world_size(group) * len(front), *front.shape[1:])
    all_gather_single(whole, front, group=group)
    return whole.transpose(0, 1).contiguous()


def _scattered(partial: torch.Tensor, group) -> torch.Tensor:
    front = partial.transpose(0, 1).contiguous()
    own = front.new_empty(len(front) // dist.get_world_size(group), *front.shape[1:])
    reduce_scatter_single(own, front, group=group)
    return own.transpose(0, 1).contiguous()


class Exchange(torch.autograd.Function):
    """Gathers tokens in one direction, and scatters them in the other one."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.group), None, None, None


def gather(shard: torch.Tensor, group=None) -> torch.Tensor:
    return Exchange.apply(shard, group, _gathered, _scattered)


def scatter(partial: torch.Tensor, group=None) -> torch.Tensor:
    return Exchange.apply(partial, group, _scattered, _gathered)


@dataclass(frozen=True)
class Layer(Case):
    """A layer that gets its operators as arguments.

    Attributes:
        flat: Whether a batch is one long sequence, without a dimension for samples.
        by_tokens: Whether the layer gets operators of the check, so that each rank has its own tokens outside of it.
            Then what it sends tells whether it uses them.
    """

    OPERATORS = ("enter", "leave")  # those that this kind of layer takes

    flat: bool = field(default=False, kw_only=True)
    by_tokens: bool = field(default=False, kw_only=True)

    @property
    def differentiates_inputs(self) -> bool:
        return not self.by_tokens  # a rank has the gradient of its own tokens only

    @property
    def operators(self) -> dict:
        every = {"enter": gather, "leave": scatter} if self.by_tokens else {}
        return {name: operator for name, operator in every.items() if name in self.OPERATORS}

    @property
    def context(self) -> str:
        does = {"enter": "an `enter` that all-gathers tokens", "leave": "a `leave` that reduce-scatters tokens"}
        shape = "with inputs that have no dimension for samples, " if self.flat else ""
        return f"with {' and '.join(does[name] for name in self.operators)}, " if self.operators else shape

    def train(self, split, x, y, phase):
        if not self.by_tokens:
            return super().train(split, x, y, phase)
        own = own_part(TOKENS, self.group_of(split))
        if "enter" in self.operators:
            x = own_slice(x, 1, own).requires_grad_()
        if "leave" not in self.operators:
            return super().train(split, x, y, phase)
        output, _ = super().train(split, x, own_slice(y, 1, own), phase)
        return Shard(output, 1, own), None

    def group_of(self, split):
        return split.group

    def needs(self, entering: int, leaving: int) -> dict[str, list[Collective]]:
        """Return what the operators send in each direction, from the bytes of what enters and leaves the layer."""
        found = {"forward": [], "backward": []}
        if "enter" in self.OPERATORS:
            if self.by_tokens:
                found["forward"].append(Collective("all_gather", entering))
            found["backward"].append(Collective("reduce_scatter" if self.by_tokens else "all_reduce", entering))
        if "leave" in self.OPERATORS:
            if self.by_tokens:
                found["backward"].append(Collective("all_gather", leaving))
            found["forward"].append(Collective("reduce_scatter" if self.by_tokens else "all_reduce", leaving))
        return found


@dataclass(frozen=True)
class Linear(Layer):
    """A linear layer."""

    width: int = 12
    outputs: int = 24
    bias: bool = True

    def build_model(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: nn.Linear(self.width, self.outputs, self.bias))

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return flattened(self.flat, *draw_normal(generator, self.width, self.outputs))

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y, self.outputs)

    def larger(self) -> Case:
        return replace(self, width=240, outputs=240)


@dataclass(frozen=True)
class Columns(Linear):
    """Each rank computes a part of the outputs."""

    OPERATORS = ("enter",)

    gather_output: bool = False

    def split(self, piece, module: nn.Module, group):
        return piece.from_linear(module, group, gather_output=self.gather_output, **self.operators)

    def train(self, split, x, y, phase):
        if self.gather_output:
            return super().train(split, x, y, phase)
        own = own_part(self.outputs, split.group)
        output: Any = super().train(split, x, y[..., list(own)], phase)[0]
        return Shard(output, -1, own), None

    def shards(self, split) -> dict[str, Shard]:
        own = own_part(self.outputs, split.group)
        return {name: Shard(parameter, 0, own) for name, parameter in split.named_parameters()}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: True)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        found = self.needs(x.nbytes, 0)
        if self.gather_output:
            found["forward"].append(Collective("all_gather", x[..., 0].nbytes * self.outputs))
        return found


@dataclass(frozen=True)
class Rows(Linear):
    """Each rank has a part of the inputs."""

    OPERATORS = ("leave",)

    width: int = 24
    outputs: int = 12

    def split(self, piece, module: nn.Module, group):
        return piece.from_linear(module, group, **self.operators)

    def train(self, split, x, y, phase):
        found = super().train(split, x[..., list(own_part(self.width, split.group))], y, phase)
        if self.differentiates_inputs:
            # Each rank has the gradient of its own inputs, and zeros for the others.
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            dist.all_reduce(x.grad, group=split.group)
        return found

    def shards(self, split) -> dict[str, Shard]:
        own = own_part(self.width, split.group)
        return {name: Shard(p, 1, own) if name == "weight" else Shard(p) for name, p in split.named_parameters()}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: name == "weight")

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return self.needs(0, x[..., 0].nbytes * self.outputs)


@dataclass(frozen=True)
class Gated(Layer):
    """A gated MLP, of which each rank has a part of the inner elements."""

    hint_on_output = "Hint: which rows of the gate belong to a rank's rows of the other half?"

    width: int = 6
    inner: int = 12

    def build_model(self, seed: int) -> nn.Module:
        from shared.models import GatedMLP

        return seeded(seed, lambda: GatedMLP(self.width, self.inner))

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return flattened(self.flat, *draw_normal(generator, self.width, self.width))

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y, BATCH * TOKENS * self.width)

    def split(self, piece, module: nn.Module, group):
        mlp = piece.from_mlp(module, group, **self.operators)
        mlp.checked_group = group
        return mlp

    def group_of(self, split):
        return split.checked_group

    def shards(self, split) -> dict[str, Shard]:
        own = own_part(self.inner, split.checked_group)
        rows = [half * self.inner + index for half in range(2) for index in own]
        return {
            "gate_up.weight": Shard(split.gate_up.weight, 0, rows),
            "down.weight": Shard(split.down.weight, 1, own),
        }

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: True)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return self.needs(x.nbytes, x.nbytes)

    def larger(self) -> Case:
        return replace(self, width=60, inner=240)


# -- attention


@dataclass(frozen=True)
class AmongSharers(Collective):
    """A collective among the ranks that share a kv head."""

    sharers: int = 1

    def sent_bytes(self, size: int) -> float:
        return super().sent_bytes(self.sharers)


@dataclass(frozen=True)
class Grouped(Layer):
    """Grouped-query attention, of which each rank computes a part of the query heads."""

    hint_on_output = "Hint: which kv head do the queries of this rank read, and which rows compute it?"
    hint_on_gradient = "Hint: which ranks have a term of this gradient, and who adds them up?"

    heads: int = 12
    kv_heads: int = 1
    head_width: int = 2

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def context(self) -> str:
        return f"{self.heads} query heads and {self.kv_heads} kv heads, {super().context}"

    def build_model(self, seed: int) -> nn.Module:
        from shared.models import GroupedAttention

        return seeded(seed, lambda: GroupedAttention(self.width, self.heads, self.kv_heads))

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_normal(generator, self.width, self.width)

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y, BATCH * TOKENS * self.width)

    def split(self, piece, module: nn.Module, group):
        attention = piece.from_attention(module, group, **self.operators)
        attention.checked_group = group
        return attention

    def group_of(self, split):
        return split.checked_group

    def own_kv_heads(self, index: int, size: int) -> range:
        first = index * self.kv_heads // size
        return range(first, first + max(1, self.kv_heads // size))

    def shards(self, split) -> dict[str, Shard]:
        group, head_width = split.checked_group, self.head_width
        rows = [
            (half * self.kv_heads + head) * head_width + row
            for half in range(2)
            for head in self.own_kv_heads(dist.get_rank(group), dist.get_world_size(group))
            for row in range(head_width)
        ]
        own = own_part(self.width, group)
        return {
            "query.weight": Shard(split.query, 0, own),
            "key_value.weight": Shard(split.key_value, 0, rows),
            "project.weight": Shard(split.project.weight, 1, own),
        }

    def most_bytes(self, module: Any, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: "key_value" not in name) - (
            module.key_value.weight.nbytes - self._key_value_bytes(module, size)
        )

    def _key_value_bytes(self, module, size: int) -> int:
        return module.key_value.weight.nbytes * max(1, self.kv_heads // size) // self.kv_heads

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        found, sharers = self.needs(x.nbytes, x.nbytes), max(1, size // self.kv_heads)
        found["backward"].append(AmongSharers("all_reduce", self._key_value_bytes(module, size), sharers))
        return found

    def larger(self) -> Case:
        return replace(self, head_width=16)


def rows_of_heads(heads: int, width: int, group) -> list[int]:
    """Return the rows of query_key_value that compute a rank's heads."""
    head_width = width // heads
    return [
        part * width + head * head_width + row
        for part in range(3)
        for head in own_part(heads, group)
        for row in range(head_width)
    ]


def attention_shards(attention, heads: int, width: int, group) -> dict[str, Shard]:
    rows, columns = rows_of_heads(heads, width, group), own_part(width, group)
    found = {f"query_key_value.{name}": Shard(p, 0, rows) for name, p in attention.query_key_value.named_parameters()}
    for name, parameter in attention.project.named_parameters():
        found[f"project.{name}"] = Shard(parameter, 1, columns) if name == "weight" else Shard(parameter)
    return found


# -- the vocabulary


def own_tokens(vocabulary: int, group) -> range:
    """Return the tokens whose rows a rank has. The last ranks may have fewer, and padding."""
    rows, index = -(-vocabulary // dist.get_world_size(group)), dist.get_rank(group)
    return range(min(index * rows, vocabulary), min((index + 1) * rows, vocabulary))


@dataclass(frozen=True)
class Embedding(Layer):
    """An embedding of which each rank has a part of the rows."""

    OPERATORS = ("leave",)
    hint_on_output = "Hint: what does a rank return for a token of another rank?"
    hint_on_gradient = "Hint: which tokens may add to the gradient of a row, and on which rank?"

    vocabulary: int = 24
    width: int = 6
    padding_idx: int | None = None
    differentiates_inputs: bool = False

    @property
    def context(self) -> str:
        padding = "" if self.padding_idx is None else f"with padding_idx={self.padding_idx}, "
        return super().context + padding

    def build_model(self, seed: int) -> nn.Module:
        return seeded(seed, lambda: nn.Embedding(self.vocabulary, self.width, self.padding_idx))

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(self.vocabulary, (BATCH, TOKENS), generator=generator)
        tokens[0, :2] = torch.tensor([0, self.vocabulary - 1])  # the first and the last row
        if self.padding_idx is not None:
            tokens[1, :2] = self.padding_idx
        y = torch.randn(BATCH, TOKENS, self.width, generator=generator, dtype=torch.float64)
        return flattened(self.flat, tokens, y)

    def train(self, split, x, y, phase):
        before = x.clone()
        found = super().train(split, x, y, phase)
        unchanged(before, x, "the tensor of tokens")
        return found

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_square(output, y, BATCH * TOKENS * self.width)

    def split(self, piece, module: nn.Module, group):
        return piece.from_embedding(module, group, **self.operators)

    def shards(self, split) -> dict[str, Shard]:
        return {"weight": Shard(split.weight, 0, own_tokens(self.vocabulary, split.group))}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return -(-self.vocabulary // size) * self.width * 8

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return self.needs(0, x.numel() * self.width * 8)

    def larger(self) -> Case:
        return replace(self, vocabulary=600, width=60)


class Logits(Scaffold):
    def __init__(self, operator, linear: nn.Linear, group, tokens: int):
        super().__init__(operator, linear, group, 0)
        self.is_padding = torch.tensor([index >= tokens for index in self.own], device=linear.weight.device)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = (x @ self.weight.T).masked_fill(self.is_padding, -torch.inf)
        before = logits.detach().clone(), targets.clone()
        loss = self.operator(logits, targets, self.group)
        unchanged(before[0], logits, "the tensor of logits")
        unchanged(before[1], targets, "the tensor of targets")
        return loss


@dataclass(frozen=True)
class Loss(Operator):
    """The logits of an output layer, of which each rank computes a part.

    Attributes:
        outputs: How many logits a token has, with padding.
        scale: Of the inputs, and thereby of the logits.
        vocabulary: How many of the logits belong to tokens; 0 for all. The others are padding, and −∞.
        weight: What the loss is multiplied by before backward, as when gradients are accumulated.
        flat: Whether a batch is one long sequence, without a dimension for samples.
    """

    hint_on_loss = "Hint: do all ranks subtract the same m, and what does a rank add for a target of another rank?"

    outputs: int = 24
    scale: float = 1.0
    vocabulary: int = 0
    weight: float = 1.0
    flat: bool = False

    @property
    def context(self) -> str:
        shape = "with targets in one dimension, " if self.flat else ""
        return shape + (f"with {self.weight} times the loss, " if self.weight != 1 else "")

    @property
    def hint_on_gradient(self) -> str:
        hint = "does a gradient flow through the maximum m?"
        if self.weight != 1:
            hint = "which gradient arrives at the loss in backward, and is it always 1?"
        return f"The loss is right, but its gradient is not. Hint: {hint}"

    @property
    def tokens(self) -> int:
        return self.vocabulary or self.outputs

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = draw_normal(generator, self.width, self.outputs)
        targets = torch.randint(self.tokens, (BATCH, TOKENS), generator=generator)
        targets[0, :2] = torch.tensor([0, self.tokens - 1])
        return flattened(self.flat, self.scale * x, targets)

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.weight * F.cross_entropy(output[..., : self.tokens].reshape(-1, self.tokens), y.flatten())

    def split(self, piece, module: Any, group):
        return Logits(piece, module, group, self.tokens)

    def train(self, split, x, y, phase):
        with phase("forward"):
            loss = self.weight * split(x, y)
        with phase("backward"):
            loss.backward()
        return None, loss

    def shards(self, split) -> dict[str, Shard]:
        return split.shard(0)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return {"forward": loss_traffic(x[..., 0].numel(), 8), "backward": []}


def loss_traffic(targets: int, itemsize: int) -> list[Collective]:
    """Return what a loss may send: the maximum, the sum and the target's logit for each target."""
    return [Collective("all_reduce", targets * itemsize)] * 3
