"""For any compressor, parameters and world, nothing is lost, ranks agree bit for bit, and formulas tell the bytes.

The functions without `test_` run on the ranks.
"""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared import formulas, wire
from solutions.compression import BLOCK, Int8, PowerSGD, TopK, dequantize, quantize
from solutions.overlapped_ddp import OverlappedDDP
from tests.drawn import caps_mb, seeds, tried, worlds

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("less_communication")]

COMPRESSORS = {"Int8": Int8, "TopK": TopK, "PowerSGD": PowerSGD}
FLOATS = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Run:
    """A compressor, parameters, and how they get gradients."""

    name: str
    arguments: tuple
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    cap_mb: float
    seed: int
    steps: int
    micro_batches: int

    def gradient(self, rank: int, step: int, micro: int, index: int) -> torch.Tensor | None:
        """Draw a gradient; one in eight is None."""
        generator = torch.Generator().manual_seed(hash((self.seed, rank, step, micro, index)) % 2**32)
        drawn = torch.randn(self.shapes[index], generator=generator, dtype=torch.float64).to(self.dtype)
        return None if torch.rand((), generator=generator) < 0.125 else drawn


dimensions = st.integers(1, 12)
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 700)),
    st.tuples(dimensions, dimensions),
    st.tuples(dimensions, dimensions, st.integers(1, 3)),
)
compressors = st.one_of(
    st.just(("Int8", ())),
    st.tuples(st.just("TopK"), st.tuples(st.sampled_from((0.01, 0.1, 0.5, 1.0)))),
    st.tuples(st.just("PowerSGD"), st.tuples(st.integers(1, 4))),
)
runs = st.builds(
    lambda compressor, *others: Run(*compressor, *others),
    compressors,
    st.lists(shapes, min_size=1, max_size=5),
    st.sampled_from(FLOATS),
    caps_mb,
    seeds,
    st.integers(1, 5),
    st.integers(1, 2),
)


class Given(nn.Module):
    """A module whose parameters get the gradients that they are given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        products = [(p * g).sum() for p, g in zip(self.each, gradients, strict=True) if g is not None]
        return sum(products, torch.zeros((), requires_grad=True))


def applied_by(group, run: Run) -> tuple[list, list, list[float], list[int]]:
    """Return the gradients after each step, what is unsent, the bytes sent in each step, and the sizes of buckets."""
    module = Given(run.shapes, run.dtype)
    model = OverlappedDDP(module, run.cap_mb, group, compressor=COMPRESSORS[run.name](*run.arguments))
    rank, results, sent_bytes = dist.get_rank(group), [], []
    for step in range(run.steps):
        model.zero_grad()
        batches = [
            [run.gradient(rank, step, micro, index) for index in range(len(run.shapes))]
            for micro in range(run.micro_batches)
        ]
        with model.no_sync():
            for gradients in batches[:-1]:
                model(gradients).backward()
        with wire.ledger() as log:
            model(batches[-1]).backward()
            model.finish_gradient_sync()
        results.append([parameter.grad.clone() for parameter in module.each])
        sent_bytes.append(log.sent_bytes)
    index_of = {id(parameter): index for index, parameter in enumerate(module.each)}
    unsent = [None] * len(run.shapes)
    for bucket in model.buckets:
        parts = bucket.unsent.split([parameter.numel() for parameter in bucket.parameters])
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            unsent[index_of[id(parameter)]] = part.view(parameter.shape)
    numels = [bucket.flat.numel() for bucket in model.buckets]
    return results, unsent, sent_bytes, numels


def expected_bytes(run: Run, numels: list[int], size: int) -> float:
    """Return what a rank sends in a step, from the sizes of the buckets."""
    if run.name == "Int8":
        blocks = [math.ceil(math.ceil(numel / BLOCK) / size) for numel in numels]
        return 2 * (size - 1) * (BLOCK + 4) * sum(blocks)
    if run.name == "TopK":
        counts = [max(1, round(run.arguments[0] * numel)) for numel in numels]
        return (size - 1) * (run.dtype.itemsize + 4) * sum(counts)
    (rank,), elements = run.arguments, 0
    for shape in run.shapes:
        numel = torch.Size(shape).numel()
        rows = shape[0] if len(shape) > 1 else 1
        elements += min(numel, rank * (rows + numel // rows))
    return formulas.all_reduce_sent_bytes(elements * run.dtype.itemsize, size)


@tried(90)
@given(worlds(), runs)
def test_nothing_is_lost_ranks_get_the_same_bits_and_formulas_tell_the_bytes(four_ranks, world, run):
    """What was applied and what is unsent add up to all gradients."""
    size, found = len(world.ranks), world.run(applied_by, run)
    first = found[0][0]
    for results, _, sent_bytes, numels in found:
        for here, there in zip(first, results, strict=True):
            assert all(map(torch.equal, here, there))
        assert sent_bytes == pytest.approx([expected_bytes(run, numels, size)] * run.steps, abs=1e-6)
    tolerance = 1e-4 if run.dtype == torch.float32 or run.name == "Int8" else 1e-11
    for index, shape in enumerate(run.shapes):
        drawn = [
            run.gradient(rank, step, micro, index)
            for rank in range(size)
            for step in range(run.steps)
            for micro in range(run.micro_batches)
        ]
        total = sum((each.double() for each in drawn if each is not None), torch.zeros(shape, dtype=torch.float64))
        unsent = sum(rank_unsent[index].double() for _, rank_unsent, _, _ in found)
        applied = sum(step[index].double() for step in first)
        torch.testing.assert_close(applied + unsent, total / size, rtol=0, atol=tolerance)


@tried(100)
@given(st.integers(1, 6), seeds, st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_rounding_changes_an_element_by_half_a_scale_at_most(blocks, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-30, 30, (blocks, 1), generator=generator)
    values = (sizes * torch.randn(blocks, BLOCK, generator=generator)).flatten().to(dtype)
    integers, scales = quantize(values)
    error = (dequantize(integers, scales).double() - values.double()).abs().view(blocks, BLOCK)
    assert bool((error <= 0.5001 * scales.double().unsqueeze(-1)).all())
    assert integers.abs().max() <= 127
