"""For any model, world and buckets, data parallelism computes the gradients of one process with all the data.

The functions without `test_` run on the ranks.
"""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import formulas, wire
from solutions.bucketed_ddp import BucketedDDP, assign_buckets
from solutions.manual_ddp import ManualDDP, ShardedSampler, average_gradients_weighted
from solutions.overlapped_ddp import OverlappedDDP
from solutions.strategies import STRATEGIES
from tests.drawn import caps_mb, nets, seeds, shapes, trainings, tried, worlds
from tests.drawn_trainings import DDP, SAMPLES, Model, Rank, Training, alone

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("manual_ddp", "gradient_bucketing", "overlap")]

TOLERANCE = 1e-12  # for sums of float64 values around 1 in another order
MB = 2**20


# -- samples


@tried(200)
@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), seeds, st.integers(0, 5))
def test_ranks_divide_all_samples_and_repeat_the_first_ones(length, world_size, shuffle, seed, epoch):
    samplers = [ShardedSampler(length, rank, world_size, shuffle, seed) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    dealt = [number for turn in zip(*shares, strict=True) for number in turn]
    order, again = dealt[:length], dealt[length:]
    assert sorted(order) == list(range(length)) and (shuffle or order == sorted(order))
    assert again == (order * world_size)[: len(again)] and len(again) < world_size
    assert shares == [list(sampler) for sampler in samplers], "iterating again gives another order"


@tried(50)
@given(st.integers(20, 60), st.sets(st.integers(0, 50), min_size=2, max_size=2), seeds)
def test_each_epoch_has_its_own_order(length, epochs, seed):
    sampler, orders = ShardedSampler(length, 0, 1, seed=seed), []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]


# -- buckets

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
parameters = st.builds(
    lambda shape, dtype, trained: nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained),
    shapes,
    st.sampled_from(FLOATS),
    st.sampled_from([True, True, True, False]),
)


@tried(200)
@given(st.lists(parameters, max_size=12), caps_mb, caps_mb)
def test_buckets_hold_every_trained_parameter_once_in_reverse_within_their_caps(given_, cap_mb, first_mb):
    buckets = assign_buckets(iter(given_), cap_mb, first_mb)
    assert all(buckets)
    for dtype in FLOATS:
        expected = [id(each) for each in reversed(given_) if each.requires_grad and each.dtype is dtype]
        own = [bucket for bucket in buckets if bucket[0].dtype is dtype]
        assert [id(each) for bucket in own for each in bucket] == expected, "wrong order, or dtypes mixed in a bucket"
        for number, bucket in enumerate(own):
            cap_bytes = MB * (cap_mb if number else min(cap_mb, first_mb))
            nbytes = sum(each.nbytes for each in bucket)
            assert nbytes <= cap_bytes or len(bucket) == 1
            if number + 1 < len(own):
                assert nbytes + own[number + 1][0].nbytes > cap_bytes, "the next parameter would have fit"


# -- gradients, exact in every dtype


class Sum(nn.Module):
    """A module in which each parameter's gradient equals its factor exactly, or is None without a factor."""

    def __init__(self, parameters: list[nn.Parameter]):
        super().__init__()
        self.each = nn.ParameterList(parameters)

    def forward(self, factors: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = [(each, factor) for each, factor in zip(self.each, factors, strict=True) if factor is not None]
        used = sum((each * factor).sum(dtype=torch.float64) for each, factor in pairs)
        return used + torch.zeros((), dtype=torch.float64, requires_grad=True)


def factors_of(kinds: list[tuple], rank: int, number: int, world_size: int) -> list[torch.Tensor | None]:
    """Draw the factors of a rank in a micro-batch: integers whose means are exact, or None."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    found = []
    for shape, dtype, used in kinds:
        factor = world_size**2 * torch.randint(-3, 4, shape, generator=draw).to(dtype)
        skips = torch.rand((), generator=draw) > {"all": 1.0, "some": 0.5, "none": 0.0}[used]
        found.append(None if skips else factor)
    return found


def summed_by(group, wrapper: str, kinds: list[tuple], frozen: list[bool], cap_mb: float, micro_batches: int) -> list:
    """Return this rank's gradients after one step."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype, _ in kinds]
    for each, is_frozen in zip(parameters, frozen, strict=True):
        each.requires_grad_(not is_frozen)
    caps = {} if wrapper == "ManualDDP" else {"bucket_cap_mb": cap_mb}
    model = {"ManualDDP": ManualDDP, "BucketedDDP": BucketedDDP, "OverlappedDDP": OverlappedDDP}[wrapper](
        Sum(parameters), group=group, **caps
    )
    for number in range(micro_batches):
        model(factors_of(kinds, dist.get_rank(group), number, dist.get_world_size(group))).backward()
        model.finish_gradient_sync()
    return [each.grad for each in parameters]


kinds = st.tuples(shapes, st.sampled_from((*FLOATS, torch.float16)), st.sampled_from(["all", "some", "none"]))


@tried(45)
@given(
    worlds(),
    st.sampled_from(["ManualDDP", "BucketedDDP", "OverlappedDDP"]),
    st.lists(st.tuples(kinds, st.booleans()), min_size=1, max_size=6),
    caps_mb,
    st.integers(1, 2),
)
def test_gradients_of_every_dtype_are_exact_means(four_ranks, world, wrapper, drawn, cap_mb, micro_batches):
    kinds, frozen = map(list, zip(*drawn, strict=True))
    size = len(world.ranks)
    all_factors = [factors_of(kinds, rank, number, size) for rank in range(size) for number in range(micro_batches)]
    for gradients in world.run(summed_by, wrapper, kinds, frozen, cap_mb, micro_batches):
        for index, (shape, dtype, _) in enumerate(kinds):
            if frozen[index]:
                assert gradients[index] is None
                continue
            known = [factors[index].double() for factors in all_factors if factors[index] is not None]
            if not known and gradients[index] is None:  # no rank has used it, as in one process
                continue
            mean = sum(known, torch.zeros(shape)) / size
            torch.testing.assert_close(gradients[index], mean.to(dtype), rtol=0, atol=0)


# -- training


def trained(group, training: Training) -> tuple[list, dict, list, list[float]]:
    """Return the gradients of the last step, the whole state after it, the norms, and the bytes sent in each step."""
    rank, sent_bytes = Rank(group, training), []
    for step in range(len(training.rates)):
        with wire.ledger() as log:
            rank.backward(step)
            gradients = [None if each.grad is None else each.grad.clone() for each in rank.module.parameters()]
            rank.step(step)
        sent_bytes.append(log.sent_bytes)
    return gradients, rank.whole_state(), rank.norms, sent_bytes


@tried(45)
@given(worlds(), trainings(DDP))
def test_a_model_trains_as_in_one_process_and_sends_what_the_formula_says(four_ranks, world, training):
    module, _, norms = alone(training)
    numel = sum(each.numel() for each in module.parameters() if each.requires_grad)
    for gradients, state, its_norms, sent_bytes in world.run(trained, training):
        torch.testing.assert_close(state, dict(module.state_dict()), rtol=0, atol=TOLERANCE)
        if not training.max_norm:  # one process clips in place, but the ranks' gradients are taken before clipping
            own = [each.grad for each in module.parameters()]
            torch.testing.assert_close(gradients, own, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(its_norms, norms, rtol=1e-9, atol=TOLERANCE)
        sends_once = training.no_sync or STRATEGIES[training.wrapper].shards_experts
        times = 1 if sends_once else training.accumulate
        expected = times * formulas.step_sent_bytes(numel, len(world.ranks), stage=0, bytes_each=8)
        torch.testing.assert_close(sent_bytes, [float(expected)] * len(sent_bytes), rtol=1e-12, atol=1e-6)


def weighted(group, net, shares: list[int]) -> list[torch.Tensor]:
    """Return the gradients when each rank has a different number of samples."""
    rank, model = dist.get_rank(group), Model(net)
    x, y = Training("", net, ()).micro_batch(0, 0)
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    if shares[rank]:
        (model(x[own]) - y[own]).square().mean().backward()
    average_gradients_weighted(model, shares[rank], group)
    return [each.grad for each in model.parameters()]


@tried(25)
@given(worlds(), nets(), st.data())
def test_unequal_shares_are_weighted(four_ranks, world, net, data):
    cuts = data.draw(st.lists(st.integers(0, SAMPLES), min_size=len(world.ranks) - 1, max_size=len(world.ranks) - 1))
    edges = [0, *sorted(cuts), SAMPLES]
    shares = [end - begin for begin, end in pairwise(edges)]
    module, x_y = Model(net), Training("", net, ()).micro_batch(0, 0)
    (module(x_y[0]) - x_y[1]).square().mean().backward()
    want = [torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad for p in module.parameters()]
    for gradients in world.run(weighted, net, shares):
        torch.testing.assert_close(gradients, want, rtol=0, atol=TOLERANCE)
