"""Ranks that share sequences or experts take what one process takes, and reject the rest on every rank, in a sentence.

The functions without `test_` run on the ranks.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from shared import ranks
from shared.ranks import CellFailed
from solutions.context_parallel import all_to_all_attention, ring_attention, shard_sequence, unshard_sequence
from solutions.expert_parallel import ExpertParallelMoE, MoE
from solutions.train import Settings, train

pytestmark = pytest.mark.slow

context = pytest.mark.chapter("context_parallel")
experts = pytest.mark.chapter("expert_parallel")
WAYS = {"ring": ring_attention, "all-to-all": all_to_all_attention}


@pytest.fixture(params=[2, 4])
def world(request, four_ranks):
    with ranks.world(request.param):
        yield request.param


def shards(batch=2, heads=4, tokens=8, width=3, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = batch, heads, tokens, width
    return [torch.randn(sizes, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


# -- rejected: how this rank calls attention, and what its error says. "first" is true on one of the ranks.

REJECTED = {
    "other lengths": (lambda attend, first: attend(*shards(tokens=8 + 2 * first)), "the ranks' shards of a sequence"),
    "other batches": (lambda attend, first: attend(*shards(batch=1 + first)), "the ranks' shards of a sequence"),
    "other dtypes": (
        lambda attend, first: attend(*shards(dtype=torch.float64 if first else torch.float32)),
        "the ranks' shards of a sequence differ",
    ),
    "another mask": (lambda attend, first: attend(*shards(), causal=first), "causal=True"),
    "keys in bf16": (
        lambda attend, first: attend(*(t.bfloat16() if index == 1 else t for index, t in enumerate(shards()))),
        "q, k and v must have the same shape and dtype, got q: [2, 4, 8, 3] in float32, k: [2, 4, 8, 3] in bfloat16",
    ),
    "three dimensions": (
        lambda attend, first: attend(*(t[0] for t in shards())),
        "attention needs floating-point tensors [B, H, T, D], got q: [4, 8, 3] in float32",
    ),
    "integers": (
        lambda attend, first: attend(*(t.long() for t in shards())),
        "attention needs floating-point tensors [B, H, T, D], got q: [2, 4, 8, 3] in int64",
    ),
    "gradients on one rank": (
        lambda attend, first: attend(*(t.detach().requires_grad_(first) for t in shards())),
        "in float32 with gradients",
    ),
    "no_grad on one rank": (
        lambda attend, first: torch.set_grad_enabled(first).__enter__() or attend(*shards()),
        "with gradients on all ranks or none",
    ),
    "other gradients": (
        lambda attend, first: attend(*(t.detach().requires_grad_(first == (i == 0)) for i, t in enumerate(shards()))),
        "in float32 with gradients",
    ),
}
ONLY = {
    "ring": {
        "another order": (lambda attend, first: attend(*shards(), balanced=first), "balanced=True"),
        "half a chunk": (
            lambda attend, first: attend(*shards(tokens=5)),
            "cannot split a shard of the sequence into chunks evenly: 5 is not divisible by 2",
        ),
    },
    "all-to-all": {
        "too few heads": (
            lambda attend, first: attend(*shards(heads=3)),
            "cannot split the heads over the ranks evenly: 3 is not divisible by",
        ),
    },
}


def error_of(way: str, case: str) -> str:
    call, _ = (REJECTED | ONLY[way])[case]
    with torch.enable_grad():
        try:
            call(WAYS[way], dist.get_rank() == 0)
        except ValueError as error:
            return str(error)
    return ""


@context
@pytest.mark.parametrize(("way", "case"), [(way, case) for way in WAYS for case in REJECTED | ONLY[way]])
def test_attention_rejects_it_on_every_rank(world, way, case):
    _, words = (REJECTED | ONLY[way])[case]
    for message in ranks.run(error_of, way, case):
        assert words in message and "\n" not in message


# -- accepted: the same as one process


def difference(way: str, change: str) -> float:
    """Return the largest difference from one process, of this rank's outputs and gradients."""
    attend, balanced = WAYS[way], way == "ring"
    heads, length = 4, 4 * dist.get_world_size()
    torch.manual_seed(0)
    dtype = torch.float32 if change == "autocast" else torch.float64  # which autocast would leave as it is
    joined = torch.randn(3, 0 if change == "no batch" else 2, heads, length, 3, dtype=dtype)
    whole = [each.clone().requires_grad_(not (change == "not the keys" and i == 1)) for i, each in enumerate(joined)]
    own = [shard_sequence(each.detach(), 2, None, balanced) for each in whole]
    if change == "strided":
        own = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in own]
        assert not own[0].is_contiguous()
    own = [each.requires_grad_(old.requires_grad) for each, old in zip(own, whole, strict=True)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    with torch.set_grad_enabled(change != "no_grad"), torch.autocast("cpu", torch.bfloat16, change == "autocast"):
        output = attend(*own)
    pairs = [(output.detach(), shard_sequence(expected.detach(), 2, None, balanced))]
    assert output.requires_grad == (change != "no_grad")
    if output.requires_grad:
        output.transpose(1, 2).to(dtype).square().sum().backward()  # a gradient that is not contiguous, either
        expected.square().sum().backward()
        for mine, full in zip(own, whole, strict=True):
            assert (mine.grad is None) == (full.grad is None)
            if full.grad is not None:
                pairs.append((mine.grad, shard_sequence(full.grad, 2, None, balanced)))
    return max((mine - theirs).abs().max().item() if mine.numel() else 0.0 for mine, theirs in pairs)


@context
@pytest.mark.parametrize("change", ["nothing", "strided", "not the keys", "no_grad", "no batch", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_attention_equals_one_process(world, way, change):
    """Under autocast, torch's fused attention computes in bf16, and the ring in the dtype of what it gets."""
    autocast = {"ring": 1e-5, "all-to-all": 0.1}
    tolerance = autocast[way] if change == "autocast" else 1e-9
    assert max(ranks.run(difference, way, change)) < tolerance


def differentiate_twice(what: str) -> str:
    if what == "experts":
        inputs = [torch.randn(3, 6, requires_grad=True)]
        output = build_experts()(*inputs)
    else:
        inputs = shards()
        output = WAYS[what](*inputs)
    (gradient,) = torch.autograd.grad(output.square().sum(), inputs[:1], create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@context
@pytest.mark.parametrize("what", [*WAYS, "experts"])
def test_a_second_derivative_is_an_error(world, what):
    for message in ranks.run(differentiate_twice, what):
        assert "differentiate twice" in message


def cut(what: str) -> str:
    size, rank = dist.get_world_size(), dist.get_rank()
    calls = {
        "a token too many": lambda: shard_sequence(torch.arange(2 * size + 1), 0),
        "no token": lambda: shard_sequence(torch.arange(0), 0),
        "other shards": lambda: unshard_sequence(torch.arange(8 + 2 * rank), 0),
        "an odd shard": lambda: unshard_sequence(torch.arange(3), 0),
        "no such dimension": lambda: unshard_sequence(torch.arange(8), 1),
        "a scalar": lambda: unshard_sequence(torch.tensor(1.0), 0),
        "the last dimension": lambda: unshard_sequence(shard_sequence(torch.arange(8 * size).view(2, -1), -1), -1),
    }
    try:
        return repr(list(calls[what]().shape))
    except ValueError as error:
        return str(error)


@context
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a token too many", "cannot split the sequence evenly"),
        ("no token", "[0]"),
        ("other shards", "the ranks' shards of a sequence differ"),
        ("an odd shard", "cannot split a shard of the sequence into chunks evenly: 3 is not divisible by 2"),
        ("no such dimension", "dimension 1 cannot be that of the sequence: a shard has 1 dimensions"),
        ("a scalar", "dimension 0 cannot be that of the sequence: a shard has 0 dimensions"),
        ("the last dimension", "[2, "),
    ],
)
def test_sequences_are_cut_or_rejected_on_every_rank(world, what, words):
    assert all(words in message for message in ranks.run(cut, what))


# -- experts


def build_experts(dtype=torch.float32, **changes) -> ExpertParallelMoE:
    torch.manual_seed(0)
    sizes = {"dim": 6, "hidden": 8, "experts": 8, "top_k": 2} | changes
    return ExpertParallelMoE.from_moe(MoE(**sizes).to(dtype))


LAYERS = {
    "other numbers of experts": (lambda first: build_experts(experts=8 if first else 4), "the ranks' models differ"),
    "other widths": (lambda first: build_experts(hidden=8 + first), "the ranks' models differ"),
    "other dtypes": (
        lambda first: build_experts(torch.float64 if first else torch.float32),
        "router.weight: [8, 6] in float64",
    ),
    "another top_k": (lambda first: build_experts(top_k=1 + first), "top_k=2"),
    "a capacity on one rank": (lambda first: build_experts(capacity_factor=1.0 if first else None), "capacity_factor="),
}


def error_of_layer(case: str) -> str:
    try:
        LAYERS[case][0](dist.get_rank() == 0)
    except ValueError as error:
        return str(error)
    return ""


@experts
@pytest.mark.parametrize("case", LAYERS)
def test_layers_of_experts_are_rejected_on_every_rank(world, case):
    for message in ranks.run(error_of_layer, case):
        assert LAYERS[case][1] in message and "\n" not in message


def use(case: str) -> float:
    """Return how many of this rank's outputs are not 0, after backward."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer = build_experts(capacity_factor=1e-9 if case == "one row per expert" else None)
    if case == "strided":
        x = x.T.contiguous().T
    x = x[: 0 if case == "no tokens" else None].requires_grad_(case != "no gradient")
    with torch.autocast("cpu", torch.bfloat16, case == "autocast"):
        output = layer(x)
    (output.sum() + layer.aux_loss).backward()
    assert output.dtype == x.dtype and layer.router.weight.grad is not None
    return (output.abs().sum(-1) > 0).sum().item()


@experts
@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        ("strided", 16, 16),
        ("autocast", 16, 16),
        ("no gradient", 16, 16),
        ("no tokens", 0, 0),
        ("one row per expert", 1, 8),  # ⌈c · T · k / E⌉ is at least 1, however small c is
    ],
)
def test_experts_take_what_one_process_takes(world, case, least, most):
    assert all(least <= count <= most for count in ranks.run(use, case))


def call_with(width_on_first: int, dtype_on_first: torch.dtype) -> None:
    first = dist.get_rank() == 0
    layer = build_experts()
    layer(torch.randn(3, width_on_first if first else 6, dtype=dtype_on_first if first else torch.float32))


@experts
@pytest.mark.parametrize(
    ("width", "dtype", "words"), [(5, torch.float32, "shapes cannot be multiplied"), (6, torch.float64, "same dtype")]
)
def test_tokens_that_one_ranks_router_cannot_take_end_the_cell_with_its_error(world, width, dtype, words):
    """The ranks do not compare their tokens in every forward. The one that raises ends the wait of the others."""
    with pytest.raises(CellFailed, match=words):
        ranks.run(call_with, width, dtype, timeout_s=60)


# -- the training script


def error_of_training(settings: Settings) -> str:
    try:
        train(settings)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "settings", "words"),
    [
        (2, Settings("cp", "mlp"), "strategy cp splits a GPT's layers"),
        (2, Settings("cp", "rotary-gpt", cp=3), "dp (1) times cp (3) must be the number of ranks, which is 2"),
        (3, Settings("cp", "rotary-gpt"), "cannot split the sequence evenly: 64 is not divisible by 6"),
        (3, Settings("ep", "moe"), "cannot divide 8 experts evenly among 3 ranks"),
        (2, Settings("ep", "moe", cp=2), "cp is for strategy cp, not for ep"),
    ],
)
def test_training_is_rejected_on_every_rank(four_ranks, size, settings, words):
    with ranks.world(size):
        for message in ranks.run(error_of_training, settings):
            assert words in message and "\n" not in message


@pytest.mark.parametrize(("strategy", "model"), [("cp", "rotary-gpt"), ("ep", "moe")])
def test_training_in_bf16_follows_one_process(four_ranks, strategy, model):
    losses = []
    for size, name in ((1, "manual_ddp"), (2, strategy)):
        with ranks.world(size):
            losses.append(ranks.run(train, Settings(name, model, steps=6, global_batch=8, bf16=True))[0].losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
