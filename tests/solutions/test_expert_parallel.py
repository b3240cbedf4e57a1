"""A mixture of experts with its experts on several ranks equals one process that gets all ranks' tokens.

The functions without `test_` run on the ranks.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import ranks
from shared.checks.expert_parallel.judges import _cause_of_tokens
from shared.checks.expert_parallel.layers import Work, build_whole
from solutions.expert_parallel import ExpertParallelMoE as Layer
from solutions.expert_parallel import MoE, average_gradients, clip_grad_norm_, route, sort_by_expert

pytestmark = [pytest.mark.chapter("expert_parallel"), pytest.mark.slow]

DIM, HIDDEN, EXPERTS = 6, 8, 12
TOLERANCE = 1e-9


def build_moe(seed: int = 0, top_k: int = 2, capacity_factor: float | None = None) -> MoE:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoE(DIM, HIDDEN, EXPERTS, top_k, capacity_factor).double()


def tokens_of(rank: int, tokens: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, slope = (torch.randn(tokens, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, slope


@pytest.fixture(params=[1, 2, 3, 4])
def world(request, four_ranks):
    with ranks.world(request.param):
        yield request.param


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("capacity_factor", [None, 0.4, 1.0])
@pytest.mark.parametrize("shape", [(9,), (2, 5), (0,), ()])
def test_the_layer_equals_all_experts_on_all_tokens(top_k, capacity_factor, shape):
    moe = build_moe(1, top_k, capacity_factor)
    whole = build_whole((DIM, HIDDEN, EXPERTS, top_k, capacity_factor), 0)
    whole.load_state_dict(moe.state_dict())
    x = torch.randn(*shape, DIM, dtype=torch.float64)
    outputs = []
    for layer in (moe, whole):
        outputs.append(layer(x))
        (outputs[-1].square().sum() + layer.aux_loss).backward()
    torch.testing.assert_close(*outputs, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(moe.aux_loss, whole.aux_loss, rtol=0, atol=TOLERANCE)
    for (name, ours), theirs in zip(moe.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE, msg=name)


def test_the_balancing_loss_is_one_if_balanced_and_e_if_one_expert_gets_everything():
    logits = 50.0 * torch.eye(4).repeat(3, 1)
    assert route(logits, 1)[2].item() == pytest.approx(1.0)
    logits = torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(8, 1)
    assert route(logits, 1)[2].item() == pytest.approx(4.0)


def test_the_example_of_the_lab_is_right():
    chosen = torch.tensor([[2, 0], [0, 1], [2, 1]])
    for capacity, expected in ((None, ([1, 2, 3, 5, 0, 4], [2, 2, 2, 0])), (1, ([1, 3, 0], [1, 1, 1, 0]))):
        order, counts = sort_by_expert(chosen, 4, capacity)
        assert (order.tolist(), counts.tolist()) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_k": EXPERTS + 1}, "top_k must be from 1 to 12, the number of experts, got 13"),
        ({"top_k": 0}, "top_k must be from 1 to 12"),
        ({"capacity_factor": 0.0}, "capacity_factor must be positive, or the experts would drop every token, got 0"),
        ({"capacity_factor": -1.0}, "capacity_factor must be positive"),
        ({"capacity_factor": float("nan")}, "capacity_factor must be positive"),
    ],
)
def test_bad_arguments_are_rejected_with_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words) as rejected:
        build_moe(**arguments)
    assert "\n" not in str(rejected.value)


def run_step(counts: list[int], capacity_factor: float | None) -> dict:
    """Run this rank's tokens. Returns its output, and its parameters' gradients by name."""
    layer = Layer.from_moe(build_moe(0, 2, capacity_factor))
    x, slope = tokens_of(dist.get_rank(), counts[dist.get_rank()])
    x.requires_grad_()
    output = layer(x)
    ((output * slope).sum() + 0.1 * layer.aux_loss).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "input": x.grad, "gradients": gradients}


@pytest.mark.parametrize("counts", [[5, 5, 5, 5], [7, 0, 3, 4], [0, 6, 0, 1], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_outputs_and_gradients_equal_one_process(world, counts, capacity_factor):
    found, summed = ranks.run(run_step, counts, capacity_factor), {}
    for rank, its in enumerate(found):
        moe = build_moe(0, 2, capacity_factor)
        x, slope = tokens_of(rank, counts[rank])
        x.requires_grad_()
        output = moe(x)
        ((output * slope).sum() + 0.1 * moe.aux_loss).backward()
        torch.testing.assert_close(its["output"], output.detach(), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(its["input"], x.grad, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(its["gradients"]["router.weight"], moe.router.weight.grad, rtol=0, atol=TOLERANCE)
        for name, parameter in moe.named_parameters():
            summed[name] = summed.get(name, 0) + parameter.grad
    names = [name for its in found for name in its["gradients"] if name.startswith("experts")]
    assert sorted(names) == sorted(name for name in summed if name.startswith("experts"))
    for name, gradient in ((name, g) for its in found for name, g in its["gradients"].items() if "experts" in name):
        torch.testing.assert_close(gradient, summed[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("world", [2, 3], indirect=True)
def test_a_dropless_layer_equals_one_call_with_all_tokens(world):
    counts = [5, 0, 7]
    found = ranks.run(run_step, counts, None)
    whole = build_moe()(torch.cat([tokens_of(rank, counts[rank])[0] for rank in range(world)]))
    torch.testing.assert_close(torch.cat([its["output"] for its in found]), whole.detach(), rtol=0, atol=TOLERANCE)


def train_on_ranks(steps: int, max_norm: float) -> tuple[list[float], dict]:
    layer = Layer.from_moe(build_moe())
    experts, others, norms = list(layer.experts.parameters()), list(layer.router.parameters()), []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, eps=1e-3)
    for step in range(steps):
        x, slope = tokens_of(dist.get_rank(), 8, step)
        optimizer.zero_grad()
        (layer(x) * slope).sum().backward()
        average_gradients(experts, others)
        norms.append(clip_grad_norm_(experts, others, max_norm).item())
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in layer.named_parameters()}


def test_training_with_clipping_equals_one_process(world):
    moe, norms = build_moe(), []
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2, eps=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        pairs = [tokens_of(rank, 8, step) for rank in range(world)]
        (sum((moe(x) * slope).sum() for x, slope in pairs) / world).backward()
        norms.append(nn.utils.clip_grad_norm_(moe.parameters(), 0.5).item())
        optimizer.step()
    whole = dict(moe.named_parameters())
    for found, parameters in ranks.run(train_on_ranks, 4, 0.5):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, whole[name].detach(), rtol=0, atol=1e-8, msg=name)


def reject(what: str) -> str:
    moe = build_moe(seed=dist.get_rank() if what == "different layers" else 0)
    if what == "experts":
        moe.experts = moe.experts[:7]
    try:
        Layer.from_moe(moe)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [2, 3, 4], indirect=True)
def test_what_cannot_be_divided_is_rejected_on_every_rank(world):
    for message in ranks.run(reject, "experts"):
        assert message.startswith(f"cannot divide 7 experts evenly among {world} ranks") and "\n" not in message
    for message in ranks.run(reject, "different layers"):
        assert "router.weight" in message


def use_around_it() -> str:
    """Copy a layer after a forward, autocast, clip with torch. Returns what torch's clipping says."""
    layer = Layer.from_moe(build_moe())
    moe = build_moe()
    moe(tokens_of(0, 4)[0])
    twin = copy.deepcopy(moe)
    assert twin.aux_loss is None and moe.aux_loss is not None
    single = Layer.from_moe(build_moe().float())
    x = tokens_of(dist.get_rank(), 4)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        output = single(x)
    assert output.dtype == torch.float32
    output.sum().backward()
    layer(tokens_of(0, 4)[0]).sum().backward()
    try:
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2], indirect=True)
def test_copies_autocast_and_torchs_clipping(world):
    for message in ranks.run(use_around_it):
        assert ("chapter 16" in message) == (world > 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda weights, results: (weights.roll(1, 1).unsqueeze(-1) * results).sum(1), "other experts than its own"),
        (lambda weights, results: (weights.unsqueeze(-1) * results.roll(1, 0)).sum(1), "each other's results"),
        (lambda weights, results: torch.rand(5, 3), "in which order do rows arrive"),
    ],
)
def test_a_hint_tells_wrong_experts_from_wrong_tokens(wrong, says):
    weights = torch.zeros(5, 4).double()
    weights[:, :2] = torch.tensor([0.7, 0.3])
    results = torch.rand(5, 4, 3, dtype=torch.float64)
    assert says in _cause_of_tokens(wrong(weights, results).double(), Work(results, weights))


def load_state_of_rank_0() -> str:
    layer = Layer.from_moe(build_moe())
    optimizer, resumed = (torch.optim.AdamW(layer.parameters(), lr=0.1) for _ in range(2))
    layer(tokens_of(0, 4)[0]).sum().backward()
    optimizer.step()
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states)
    resumed.load_state_dict(states[0])
    try:
        resumed.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [2], indirect=True)
def test_the_state_of_another_ranks_experts_is_refused(world):
    messages = ranks.run(load_state_of_rank_0)
    assert not messages[0] and "the state of rank 0 of 2, for rank 1 of 2" in messages[1]
