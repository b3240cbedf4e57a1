"""An example that hangs or kills a rank fails in time, and the examples after it run on working ranks.

The functions without `test_` run on the ranks.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shared import ranks
from tests import drawn
from tests.drawn import World, tried

pytestmark = pytest.mark.exhaustive


def rank_and_size(group) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def waits_forever(group, number: int) -> int:
    if number > 2 and dist.get_rank(group) == 0:
        dist.recv(torch.zeros(1), group=group, group_src=dist.get_world_size(group) - 1)
    return number


def dies(group, number: int) -> int:
    if number > 2:
        os._exit(1)
    return number


def never_ends(group) -> None:
    time.sleep(100)


def test_a_group_has_the_ranks_that_it_is_drawn_with(four_ranks):
    assert World(3, None).run(rank_and_size) == [(0, 3), (1, 3), (2, 3)]
    assert World(4, (1, 3)).run(rank_and_size) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("goes_wrong", [waits_forever, dies])
def test_an_example_that_hangs_or_dies_is_shrunk_on_healed_ranks(four_ranks, goes_wrong):
    seen = []

    @tried(10)
    @given(st.integers(0, 4))
    def holds(number: int) -> None:
        seen.append(number)
        assert World(2, None).run(goes_wrong, number) == [number, number]

    with pytest.raises(ranks.CellFailed):
        holds()
    assert seen[-1] == 3, "the example was not shrunk to 3"
    assert World(4, None).run(rank_and_size) == [(rank, 4) for rank in range(4)]


def test_an_example_that_takes_too_long_is_stopped(four_ranks, monkeypatch):
    monkeypatch.setattr(drawn, "DEADLINE_S", 0.5)
    with pytest.raises(ranks.CellFailed, match=r"stopped after 0\.5 s"):
        World(2, None).run(never_ends)
    assert World(1, None).run(rank_and_size) == [(0, 1)]


def test_properties_multiplies_the_examples_and_draws_different_ones(monkeypatch):
    assert tried(3).max_examples == 3 * max(1, drawn.MORE)
    monkeypatch.setattr(drawn, "MORE", 5)
    assert (tried(3).max_examples, tried(3).derandomize) == (15, False)
