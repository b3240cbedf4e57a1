"""A decoder of any published shape, to be built on the meta device.

Its parameters and activations take as many bytes as those of the published model. On meta, a router computes no values,
so each expert gets as many tokens as every other one.

Shape legend: B batch, T tokens, D model width, H heads, K heads of keys and values, V vocabulary.
"""

import contextlib
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.planner.shapes import ModelShape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _norm(shape: ModelShape) -> nn.Module:
    return nn.LayerNorm(shape.hidden) if shape.biases else nn.RMSNorm(shape.hidden)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention that never holds the scores (B, H, T, T).

    On meta, F.scaled_dot_product_attention knows no fused kernel and would compute the scores, so this calls the kernel
    that it uses on GPUs.
    """
    if query.is_meta:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True)[0]
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share one head of keys and values."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = shape.heads, shape.kv_heads, shape.hidden // shape.heads
        kv_width = self.kv_heads * self.head_width
        self.query = nn.Linear(shape.hidden, shape.hidden, shape.biases)
        self.key = nn.Linear(shape.hidden, kv_width, shape.biases)
        self.value = nn.Linear(shape.hidden, kv_width, shape.biases)
        self.project = nn.Linear(shape.hidden, shape.hidden, shape.biases)

    def forward(self, x: torch.Tensor, attend: Attend = causal_attention) -> torch.Tensor:  # (B, T, D)
        def by_head(linear: nn.Linear, heads: int) -> torch.Tensor:
            return linear(x).unflatten(-1, (heads, self.head_width)).transpose(1, 2)  # (B, heads, T, D/H)

        query, key, value = (
            by_head(self.query, self.heads),
            by_head(self.key, self.kv_heads),
            by_head(self.value, self.kv_heads),
        )
        if attend is not causal_attention and self.kv_heads < self.heads:  # a ring needs equal shapes
            key, value = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (key, value))
        # Rotary positions would rotate queries and keys here. They have no parameters and keep no activations.
        return self.project(attend(query, key, value).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two matrices with a GELU in between, or three matrices with a gate."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, shape.biases)
        self.down = nn.Linear(shape.ffn, shape.hidden, shape.biases)
        self.gate = nn.Linear(shape.hidden, shape.ffn, shape.biases) if shape.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(inner)


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, build_mlp: Callable[[ModelShape], nn.Module]):
        super().__init__()
        self.norm_1, self.attention = _norm(shape), Attention(shape)
        self.norm_2, self.mlp = _norm(shape), build_mlp(shape)

    def forward(self, x: torch.Tensor, attend: Attend = causal_attention) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x), attend)
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """A language model whose activations are kept or, with recompute=True, recomputed layer by layer in backward.

    Args:
        build_mlp: Returns the second half of a layer: an MLP, or a layer of experts.
    """

    def __init__(
        self,
        shape: ModelShape,
        recompute: bool = False,
        build_mlp: Callable[[ModelShape], nn.Module] = MLP,
    ):
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden) if shape.learned_positions else None
        self.layers = nn.ModuleList(Layer(shape, build_mlp) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.tokens.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        attend: Attend = causal_attention,
    ) -> torch.Tensor:
        """Return the mean loss, or without targets the logits."""
        x = self.tokens(tokens)  # (B, T, D)
        if self.positions is not None:
            everywhere = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.positions(everywhere if positions is None else positions)
        for layer in self.layers:
            x = checkpoint(layer, x, attend, use_reentrant=False) if self.recompute else layer(x, attend)
        logits = self.output(self.norm(x)).float()  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _First(nn.Module):
    def __init__(self, decoder: Decoder):
        super().__init__()
        self.tokens, self.positions = decoder.tokens, decoder.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) → (B, T, D)
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class _Inner(nn.Module):
    def __init__(self, layer: nn.Module, recompute: bool):
        super().__init__()
        self.layer, self.recompute = layer, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        return checkpoint(self.layer, x, use_reentrant=False) if self.recompute else self.layer(x)


class _Last(nn.Module):
    def __init__(self, decoder: Decoder):
        super().__init__()
        self.norm, self.output = decoder.norm, decoder.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) → (B, T, V)
        return self.output(self.norm(x)).float()


def decoder_layers(decoder: Decoder) -> nn.Sequential:
    """Return a decoder as a chain of layers that each take one tensor: embedding, layers, output."""
    inner = [_Inner(layer, decoder.recompute) for layer in decoder.layers]
    return nn.Sequential(_First(decoder), *inner, _Last(decoder))


@contextlib.contextmanager
def balanced_routing():
    """Answer what a layer of experts asks about the values of its counts on `meta`.

    A router counts its assignments with bincount(). All lists of counts that follow from these, by expert or by rank,
    have the same sum if all experts of all ranks get equally many. So tolist() divides this sum evenly, and
    repeat_interleave() with such counts returns a tensor of this length.

    The methods are replaced, because a mode of torch would be off while backward recomputes a layer.
    """
    bincount, tolist = torch.Tensor.bincount, torch.Tensor.tolist
    repeat_interleave = torch.Tensor.repeat_interleave
    assignments = 0

    def count(tensor: torch.Tensor, *args, minlength: int = 0, **kwargs):
        nonlocal assignments
        if not tensor.is_meta:
            return bincount(tensor, *args, minlength=minlength, **kwargs)
        assignments = tensor.numel()
        return tensor.new_empty(minlength)

    def divide(tensor: torch.Tensor):
        if not tensor.is_meta:
            return tolist(tensor)
        share, more = divmod(assignments, tensor.numel())
        return [share + (index < more) for index in range(tensor.numel())]

    def repeat(tensor: torch.Tensor, repeats, *args, **kwargs):
        if not (tensor.is_meta and isinstance(repeats, torch.Tensor)):
            return repeat_interleave(tensor, repeats, *args, **kwargs)
        return tensor.new_empty(assignments)

    methods = {"bincount": count, "tolist": divide, "repeat_interleave": repeat}
    with mock.patch.multiple(torch.Tensor, **methods):
        yield
