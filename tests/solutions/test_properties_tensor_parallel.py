"""For random widths, heads, vocabularies, batches and world sizes, a split model trains as one process does.

The functions without `test_` run on the ranks.
"""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import formulas, wire
from shared.models import GPTConfig, TinyGPT
from solutions.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    own_shard,
    parallelize,
    sharded_names,
    vocab_parallel_cross_entropy,
)
from tests.drawn import World, seeds, tried, worlds

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("tensor_parallel")]

TOLERANCE = 1e-9  # AdamW turns a rounding of 1e-16 in a gradient into 1e-16 / eps, a few times over
ADAMW = {"lr": 1e-2, "eps": 1e-3}
STEPS = 5


@dataclass(frozen=True)
class Drawn:
    """A GPT whose heads and tokens are multiples of N, and how it is trained."""

    heads_per_rank: int
    head_width: int
    layers: int
    vocabulary: int
    batch: int
    tokens_per_rank: int
    tied: bool
    biases: bool
    sequence_parallel: bool
    max_norm: float | None
    seed: int

    def model(self, size: int) -> TinyGPT:
        heads = self.heads_per_rank * size
        width, tokens = heads * self.head_width, self.tokens_per_rank * size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = TinyGPT(GPTConfig(self.vocabulary, tokens, self.layers, heads, width), self.seed)
            if self.biases:
                for block in model.blocks:
                    block.up, block.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
                    block.attention.query_key_value = nn.Linear(width, 3 * width)
                    block.attention.project = nn.Linear(width, width)
            if not self.tied:
                model.output = nn.Linear(width, self.vocabulary, bias=self.biases)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
        return model.double()

    def batches(self, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        shape = (2, self.batch, self.tokens_per_rank * size)
        return [tuple(torch.randint(self.vocabulary, shape, generator=draw)) for _ in range(STEPS)]


drawn = st.builds(
    Drawn,
    heads_per_rank=st.integers(1, 3),
    head_width=st.integers(1, 4),
    layers=st.integers(1, 3),
    vocabulary=st.integers(2, 40),
    batch=st.integers(1, 3),
    tokens_per_rank=st.integers(1, 4),
    tied=st.booleans(),
    biases=st.booleans(),
    sequence_parallel=st.booleans(),
    max_norm=st.none() | st.sampled_from([0.01, 1.0, 1000.0]),
    seed=seeds,
)


def trained(model: nn.Module, drawn: Drawn, size: int, clip) -> list[tuple[float, float]]:
    """Train with AdamW. Return the loss and the norm of each step."""
    optimizer, found = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for tokens, targets in drawn.batches(size):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        norm = clip(model, drawn.max_norm) if drawn.max_norm else torch.zeros(())
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def split_and_trained(group, drawn: Drawn) -> tuple[list, dict[str, torch.Tensor], torch.Tensor]:
    size = dist.get_world_size(group)
    model = parallelize(drawn.model(size), group, drawn.sequence_parallel)
    found = trained(model, drawn, size, lambda model, max_norm: model.clip_grad_norm_(max_norm))
    sharded = sharded_names(model)
    replicated = {name: p.detach() for name, p in model.named_parameters() if name not in sharded}
    with torch.no_grad():
        return found, replicated, model(drawn.batches(size)[0][0])


@tried(60)
@given(worlds(), drawn)
def test_a_gpt_trains_as_in_one_process(four_ranks, world, drawn):
    size = len(world.ranks)
    whole = drawn.model(size)
    expected = trained(whole, drawn, size, lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
    parameters = dict(whole.named_parameters())
    for found, replicated, logits in world.run(split_and_trained, drawn):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        for name, parameter in replicated.items():
            torch.testing.assert_close(parameter, parameters[name].detach(), rtol=TOLERANCE, atol=TOLERANCE)
        with torch.no_grad():
            whole_logits = whole(drawn.batches(size)[0][0])
        torch.testing.assert_close(logits, whole_logits, rtol=1e-8, atol=1e-8)


def sent_in_a_step(group, drawn: Drawn) -> float:
    size = dist.get_world_size(group)
    model = parallelize(drawn.model(size), group, drawn.sequence_parallel)
    with wire.ledger() as log:
        model(*drawn.batches(size)[0]).backward()
    return log.sent_bytes


@tried(30)
@given(worlds(), drawn)
def test_a_step_sends_what_the_formula_says(four_ranks, world, drawn):
    size = len(world.ranks)
    model = drawn.model(size)
    tokens = drawn.batch * drawn.tokens_per_rank * size
    activations = (4 * drawn.layers + 2) * tokens * model.config.width
    rows = ("down.bias", "project.bias")
    replicated = [p for n, p in model.named_parameters() if "norm" in n or "position" in n or n.endswith(rows)]
    elements = activations + 3 * tokens + drawn.sequence_parallel * sum(p.numel() for p in replicated)
    expected = formulas.all_reduce_sent_bytes(8 * elements, size)
    for sent_bytes in world.run(sent_in_a_step, drawn):
        assert sent_bytes == pytest.approx(expected)


# -- layers


@dataclass(frozen=True)
class Pair:
    """A column-parallel layer and a row-parallel one."""

    inputs: int
    inner_per_rank: int
    outputs: int
    bias: bool
    shape: tuple[int, ...]
    seed: int

    def layers(self, size: int) -> tuple[nn.Linear, nn.Linear, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            inner = self.inner_per_rank * size
            up, down = nn.Linear(self.inputs, inner, self.bias), nn.Linear(inner, self.outputs, self.bias)
            x = torch.randn(*self.shape, self.inputs, dtype=torch.float64)
        return up.double(), down.double(), x.requires_grad_()


pairs = st.builds(
    Pair,
    inputs=st.integers(1, 9),
    inner_per_rank=st.integers(1, 5),
    outputs=st.integers(1, 9),
    bias=st.booleans(),
    shape=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    seed=seeds,
)


def pair_of_layers(group, pair: Pair) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    up, down, x = pair.layers(dist.get_world_size(group))
    own_up, own_down = ColumnParallelLinear.from_linear(up, group), RowParallelLinear.from_linear(down, group)
    output = own_down(torch.tanh(own_up(x)))
    output.square().sum().backward()
    assert torch.equal(own_up.weight, own_shard(up.weight, 0, group, "rows"))
    return output.detach(), x.grad, own_down.weight.grad


@tried(60)
@given(worlds(), pairs)
def test_a_pair_of_layers_equals_the_whole_layers(four_ranks, world, pair):
    size = len(world.ranks)
    up, down, x = pair.layers(size)
    output = down(torch.tanh(up(x)))
    output.square().sum().backward()
    for index, (found, gradient, own_gradient) in enumerate(world.run(pair_of_layers, pair)):
        torch.testing.assert_close(found, output.detach())
        torch.testing.assert_close(gradient, x.grad)
        torch.testing.assert_close(own_gradient, down.weight.grad.chunk(size, 1)[index])


def looked_up(group, vocabulary: int, width: int, tokens: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(vocabulary)
    return VocabParallelEmbedding.from_embedding(nn.Embedding(vocabulary, width), group)(tokens).detach()


@tried(40)
@given(worlds(), st.integers(1, 30), st.integers(1, 5), st.lists(st.integers(0, 4), max_size=3), seeds)
def test_an_embedding_equals_the_whole_one(four_ranks, world, vocabulary, width, shape, seed):
    tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(vocabulary)
        expected = nn.Embedding(vocabulary, width)(tokens).detach()
    for found in world.run(looked_up, vocabulary, width, tokens):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def loss_of_shards(group, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = own_shard(logits, -1, group, "logits").requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, group)
    loss.backward()
    return loss.detach(), own.grad


@tried(60)
@given(worlds(), st.integers(1, 7), st.lists(st.integers(1, 4), max_size=3), st.sampled_from([1.0, 50.0, 1e4]), seeds)
def test_a_loss_equals_torchs(four_ranks, world, columns, shape, scale, seed):
    size, draw = len(world.ranks), torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, columns * size, generator=draw, dtype=torch.float64)
    targets = torch.randint(columns * size, shape, generator=draw)
    whole = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(whole.reshape(-1, columns * size), targets.flatten())
    expected.backward()
    for index, (loss, gradient) in enumerate(world.run(loss_of_shards, logits, targets)):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, whole.grad.chunk(size, -1)[index])


def rejected(group, drawn: Drawn) -> str:
    whole = drawn.model(1)
    try:
        parallelize(whole, group)
    except ValueError as error:
        assert type(whole) is TinyGPT and whole(*drawn.batches(1)[0]).isfinite(), "a rejected model is unchanged"
        return str(error)
    return ""


@tried(20)
@given(st.sampled_from([2, 3, 4]), drawn)
def test_heads_that_do_not_divide_are_rejected(four_ranks, size, drawn):
    drawn = replace(drawn, heads_per_rank=drawn.heads_per_rank * size + 1)
    for message in World(size, None).run(rejected, drawn):
        assert f"{drawn.heads_per_rank} is not divisible by {size}" in message


FROZEN = {"token_embedding.weight", "blocks.0.attention.query_key_value.weight", "blocks.0.up.weight", "norm.weight"}


def without_gradients(group, sequence_parallel: bool) -> tuple[set[str], set[str]]:
    """Return the parameters of a split model that are frozen, and those that backward gives no gradient."""
    model = TinyGPT(GPTConfig(vocab_size=7, context=4, layers=2, heads=2, width=8))
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    model = parallelize(model, group, sequence_parallel)
    tokens = torch.arange(4).view(1, 4)
    model(tokens, tokens).backward()
    parameters = dict(model.named_parameters()).items()
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return frozen, {name for name, parameter in parameters if parameter.grad is None}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_parameters_stay_frozen(four_ranks, sequence_parallel):
    for frozen, without in World(2, None).run(without_gradients, sequence_parallel):
        assert frozen == without == FROZEN
