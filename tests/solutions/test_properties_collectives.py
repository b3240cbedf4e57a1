"""For any tensor, world and group, collectives by hand return what one process computes with all the data.

The functions without `test_` run on the ranks.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from shared import formulas, wire
from solutions import collectives
from tests.drawn import seeds, tried, values, worlds

pytestmark = [pytest.mark.exhaustive, pytest.mark.chapter("collectives")]

REDUCE_SCATTERS = ("ring_reduce_scatter", "direct_reduce_scatter")


def called(group, name: str, drawn, *args) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the collective's result, or the tensor that it changed in place; its input afterwards; the bytes sent."""
    tensor = drawn.on(dist.get_rank())
    with wire.ledger() as log:
        result = getattr(collectives, name)(tensor, *args, group=group)
    if (
        result is not None
        and result.numel()
        and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    ):
        raise AssertionError("the result shares memory with the caller's tensor")
    return tensor if result is None else result, tensor, log.sent_bytes


def total_of(drawn, world) -> torch.Tensor:
    """Add up as integers, without rounding."""
    return sum(drawn.on(rank).to(torch.int64) for rank in world.ranks).to(drawn.dtype)


def chunk_numel(tensor: torch.Tensor, world) -> int:
    return -(-tensor.numel() // len(world.ranks))


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@tried(40)
@given(worlds(), values(), st.sampled_from(REDUCE_SCATTERS))
def test_reduce_scatter(four_ranks, world, drawn, name):
    total, size = total_of(drawn, world), len(world.ranks)
    n = chunk_numel(total, world)
    chunks = pad(total.flatten(), (0, size * n - total.numel())).view(size, n)
    for index, (result, tensor, sent_bytes) in enumerate(world.run(called, name, drawn)):
        assert_same_bits(result, chunks[index])
        assert_same_bits(tensor, drawn.on(world.ranks[index]))
        assert sent_bytes <= formulas.reduce_scatter_sent_bytes(chunks.nbytes, size) + 1e-6


@tried(30)
@given(worlds(), values(shapes=st.tuples(st.integers(0, 9))))
def test_all_gather(four_ranks, world, drawn):
    whole = torch.cat([drawn.on(rank) for rank in world.ranks])
    for result, _, sent_bytes in world.run(called, "ring_all_gather", drawn):
        assert_same_bits(result, whole)
        assert sent_bytes == formulas.all_gather_sent_bytes(whole.nbytes, len(world.ranks))


@tried(30)
@given(worlds(), values())
def test_all_reduce(four_ranks, world, drawn):
    total, size = total_of(drawn, world), len(world.ranks)
    padded_bytes = size * chunk_numel(total, world) * total.itemsize
    for result, _, sent_bytes in world.run(called, "ring_all_reduce", drawn):
        assert_same_bits(result, total)
        assert sent_bytes <= formulas.all_reduce_sent_bytes(padded_bytes, size) + 1e-6


def all_reduced(group, seed: int, numel: int) -> torch.Tensor:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
    collectives.ring_all_reduce(tensor, group)
    return tensor


@tried(15)
@given(worlds(), seeds, st.integers(0, 30))
def test_all_reduce_leaves_the_same_bits_on_every_rank(four_ranks, world, seed, numel):
    first, *others = world.run(all_reduced, seed, numel)
    for other in others:
        assert_same_bits(first, other)


@tried(30)
@given(worlds(), values(), st.data())
def test_broadcast(four_ranks, world, drawn, data):
    src = data.draw(st.sampled_from(world.ranks), label="src")
    found = world.run(called, "tree_broadcast", drawn, src)
    for result, _, _ in found:
        assert_same_bits(result, drawn.on(src))
    nbytes = drawn.on(src).nbytes
    assert sum(sent_bytes for *_, sent_bytes in found) == (len(world.ranks) - 1) * nbytes
