"""The checks of chapter 01 explain wrong results and count rounds and turns. These tests need no ranks."""

from types import SimpleNamespace

import pytest
import torch

from shared.checks.collectives import wire
from shared.checks.collectives.mixture import SPOILT, UNTOUCHED, Parts, Slot, cut, explain

RANKS = (0, 1, 2, 3)
OWN = [torch.randn(20, generator=torch.Generator().manual_seed(seed)) for seed in RANKS]
PARTS = Parts({rank: cut(own, 4) for rank, own in zip(RANKS, OWN, strict=True)})
EXPECTED = Slot(1, RANKS)  # rank 1's chunk of the sum


def _sum(*taken: tuple[int, int]) -> torch.Tensor:
    return sum(PARTS.by_rank[rank][chunk] for rank, chunk in taken)


@pytest.mark.parametrize(
    ("found", "explanation"),
    [
        (_sum(*((rank, 2) for rank in RANKS)), "chunk 2, added up over ranks 0–3, which belongs to another rank"),
        (
            _sum((0, 1), (1, 1), (3, 1)),
            "chunk 1, added up over ranks 0, 1, 3, but the contribution of rank 2 is missing",
        ),
        (_sum((0, 1), (1, 1), (1, 1), (2, 1), (3, 1)), "the contribution of rank 1 is in it twice"),
        (_sum((1, 1)), "only this rank's own chunk 1, without the other ranks'"),
        (_sum((3, 0)), "only rank 3's chunk 0, without the other ranks'"),
        (_sum((0, 3), (1, 0), (2, 1), (3, 2)), "chunk 3 of rank 0, chunk 0 of rank 1, chunk 1 of rank 2, chunk 2"),
        (PARTS.value(EXPECTED) / 4, "4 times too small: it is the mean"),
        (PARTS.value(EXPECTED).bfloat16(), "close, but not precise enough"),
        (torch.zeros(5), "all zeros"),
        (torch.full((5,), SPOILT), "after its call had returned"),
        (torch.full((5,), UNTOUCHED), "Nothing was written to it"),
        (torch.randn(5, generator=torch.Generator().manual_seed(99)), ""),
    ],
)
def test_a_wrong_result_is_explained(found, explanation):
    content, hint = explain(found, EXPECTED, PARTS, rank=1)
    assert explanation in content and bool(explanation) == bool(content)
    assert hint.startswith("Hint: ") and hint.endswith("?")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_any_order_stay_within_the_tolerance_and_a_lower_precision_does_not(dtype):
    own = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in RANKS]
    parts, slot = Parts({rank: [tensor] for rank, tensor in enumerate(own)}), Slot(0, RANKS)
    within = parts.tolerance(slot)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        total = sum((own[rank] for rank in order[1:]), own[order[0]])
        assert ((total.double() - parts.value(slot)).abs() <= within).all()
    lower = torch.bfloat16 if dtype == torch.float32 else torch.float8_e4m3fn
    assert not ((parts.value(slot).to(lower).double() - parts.value(slot)).abs() <= within).all()


def test_chunks_cover_a_tensor_and_are_padded():
    assert [chunk.tolist() for chunk in cut(torch.arange(5), 4)] == [[0, 1], [2, 3], [4, 0], [0, 0]]
    assert [chunk.numel() for chunk in cut(torch.arange(0), 3)] == [0, 0, 0]


def test_turns_are_counted_as_if_each_call_waited():
    def ring(size, send_first):
        send, recv = (lambda r: ("send", (r + 1) % size)), (lambda r: ("recv", (r - 1) % size))
        return [[send(r), recv(r)] if r in send_first else [recv(r), send(r)] for r in range(size)]

    assert wire.count_turns(ring(4, {0, 2})) == 2
    assert wire.count_turns(ring(3, {0, 2})) == 3
    assert wire.count_turns(ring(4, {0})) == 4
    assert wire.count_turns(ring(4, {0, 1, 2, 3})) is None and wire.count_turns(ring(2, set())) is None


def test_rounds_are_counted_as_if_a_rank_sent_one_message_in_each():
    def sends(**partners):
        return {r: [SimpleNamespace(partner=p) for p in partners.get(f"rank_{r}", [])] for r in range(4)}

    assert wire.count_rounds(sends(rank_0=[1, 2], rank_1=[3]), src=0) == 2
    assert wire.count_rounds(sends(rank_0=[1, 2, 3]), src=0) == 3
    assert wire.count_rounds(sends(rank_2=[3], rank_3=[0], rank_0=[1]), src=2) == 3
