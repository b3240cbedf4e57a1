"""The models of the course, small enough for a laptop and structured like large ones, and a stand-in for a GPU.

Shape legend: B batch, T tokens, D model width, H heads, V vocabulary.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import nn

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of query, key and value


class MLP(nn.Module):
    """A stack of linear layers with GELU in between, for digits or other flat inputs."""

    def __init__(self, sizes: tuple[int, ...] = (64, 128, 128, 10), seed: int = 0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # our seed must not change the student's random numbers
            torch.manual_seed(seed)
            layers = []
            for inputs, outputs in pairwise(sizes):
                layers += [nn.Linear(inputs, outputs), nn.GELU()]
            self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # (B, sizes[0]) → (B, sizes[-1])


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 96
    context: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, attend: Attend = causal_attention) -> torch.Tensor:  # (B, T, D)
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        mixed = attend(query, key, value)  # (B, H, T, D/H)
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))  # (B, T, D)


class GroupedAttention(nn.Module):
    """Causal self-attention in which H heads of queries share K heads of keys and values, as in Llama-2 70B."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * kv_heads * width // heads, bias=False)  # all keys, then all values
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D/H)
        key, value = self.key_value(x).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    """An MLP whose inner elements are multiplied by a gate, as in Llama. One matrix computes gate and elements."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)  # the rows of the gate, then the others
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then a two-layer MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, **attending) -> torch.Tensor:  # (B, T, D)
        x = x + self.attention(self.norm_1(x), **attending)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """A GPT with its output layer tied to its embedding, as in GPT-2 (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig | None = None, seed: int = 0):
        super().__init__()
        self.config = config = config or GPTConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            self.position_embedding = nn.Embedding(config.context, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.output = nn.Linear(config.width, config.vocab_size, bias=False)
            self.output.weight = self.token_embedding.weight  # tied: one parameter that gets two gradients
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        **attending,
    ):
        """Predict the next token. Returns logits (B, T, V), or the mean loss if targets are given.

        Args:
            positions: Where in their sequences the tokens are. By default, they are the first ones.
            attending: With `attend`, a function of query, key and value that knows the other tokens.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        return self.predict(x, targets, **attending)

    def predict(self, x: torch.Tensor, targets: torch.Tensor | None, **attending):
        """Compute what forward returns from the embedded tokens."""
        for block in self.blocks:
            x = block(x, **attending)
        logits = self.output(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of elements of a query or key by an angle that grows with the token's position.

    So the product of a query and a key depends on how far apart the two tokens are.

    Args:
        x: (B, H, T, D/H), with an even last dimension.
        positions: (T,), counted from the beginning of the sequence.

    Source: Su et al. 2021, "RoFormer", §3.4.
    """
    pairs = x.shape[-1] // 2
    speeds = 10_000.0 ** -(torch.arange(pairs, dtype=x.dtype, device=x.device) / pairs)
    angles = positions[:, None].to(x.dtype) * speeds  # (T, D/2H)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class RotaryGPT(TinyGPT):
    """A TinyGPT that rotates queries and keys (RoPE) instead of adding a position embedding. No length is too long."""

    def __init__(self, config: GPTConfig | None = None, seed: int = 0):
        super().__init__(config, seed)
        del self.position_embedding

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        attend: Attend = causal_attention,
    ):
        """Do what TinyGPT's forward does."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)

        def attend_rotated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(rotate(query, positions), rotate(key, positions), value)

        return self.predict(self.token_embedding(tokens), targets, attend=attend_rotated)


class ExpertBlock(nn.Module):
    """A block of a TinyGPT in which another layer, such as a mixture of experts, takes the place of the MLP."""

    def __init__(self, block, experts: nn.Module):
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = block.norm_1, block.attention, block.norm_2
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        x = x + self.attention(self.norm_1(x))
        return x + self.experts(self.norm_2(x))


def with_experts(gpt: TinyGPT, build: Callable[[int], nn.Module], seed: int = 0) -> TinyGPT:
    """Replace the MLPs of a TinyGPT, in place. build(width) returns the layer for one block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for index, block in enumerate(gpt.blocks):
            gpt.blocks[index] = ExpertBlock(block, build(gpt.config.width))
    return gpt


class Embed(nn.Module):
    """The first layer of a GPT: tokens become vectors."""

    def __init__(self, gpt: TinyGPT):
        super().__init__()
        self.token_embedding, self.position_embedding = gpt.token_embedding, gpt.position_embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) → (B, T, D)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)


class Unembed(nn.Module):
    """The last layer of a GPT: vectors become logits."""

    def __init__(self, gpt: TinyGPT):
        super().__init__()
        self.norm, self.output = gpt.norm, gpt.output

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) → (B, T, V)
        return self.output(self.norm(x))


def gpt_layers(gpt: TinyGPT | GPTConfig | None = None) -> nn.Sequential:
    """Return a TinyGPT as a chain of layers that each take one tensor: embedding, blocks, output."""
    gpt = gpt if isinstance(gpt, TinyGPT) else TinyGPT(gpt)
    return nn.Sequential(Embed(gpt), *gpt.blocks, Unembed(gpt))


class _Sleep(torch.autograd.Function):
    """Returns its input unchanged, and takes time in forward and backward."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        time.sleep(ctx.backward_ms / 1e3)
        return gradient, None, None


def sleeping_layers(layers: int, width: int, forward_ms: float, backward_ms: float) -> nn.Sequential:
    """Build linear layers of width² weights without bias, the same ones in each call, that sleep like stand-ins."""
    torch.manual_seed(0)
    built = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    stand_in_for_gpu(built, forward_ms, backward_ms)
    return built


def stand_in_for_gpu(blocks: Iterable[nn.Module], forward_ms: float = 8.0, backward_ms: float = 16.0) -> list:
    """Let each block sleep in forward and backward, in addition to what it computes: a stand-in for a GPU.

    On a machine whose ranks share few cores, real computation would take the cores that sending needs. On a GPU, it
    does not. While a rank sleeps, time passes and no core is used.

    Args:
        blocks: Modules that return one tensor.

    Returns:
        The handles of the hooks. Their remove() ends the sleep.
    """

    def sleep(_block, _inputs, output: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(output, forward_ms, backward_ms)

    return [block.register_forward_hook(sleep) for block in blocks]
