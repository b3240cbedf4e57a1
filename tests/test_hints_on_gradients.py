"""The hint of a failed check names the cause that the values show. No ranks are needed."""

import pytest
import torch

from shared.checks.bucketed_ddp import steps
from shared.checks.engine.compare import judge_gradients, judge_state
from shared.checks.engine.failures import Wrong

OWN = {rank: torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64) * (3 * rank + 1) for rank in range(3)}
MEAN = sum(OWN.values()) / 3


def hint_on(found: torch.Tensor, own: dict) -> str:
    gradients = {rank: {"weight": found} for rank in own}
    local = {rank: {"weight": gradient} for rank, gradient in own.items()}
    with pytest.raises(Wrong) as caught:
        judge_gradients(gradients, {"weight": MEAN}, local, "a model")
    return caught.value.hint


def test_division_by_the_wrong_number_of_ranks_is_recognized():
    assert "the sum over 3 ranks, divided by 4. Hint: over how many ranks" in hint_on(MEAN * 3 / 4, OWN)


def test_own_gradient_that_was_only_divided_is_recognized():
    assert "is .grad the tensor that holds the result?" in hint_on(OWN[0] / 3, OWN)


def test_division_by_the_ranks_that_have_the_gradient_is_recognized():
    own = OWN | {1: None}
    assert hint_on(MEAN * 3 / 2, own) == "Before, it was None on rank 1. Hint: over how many ranks is the mean?"


def test_a_factor_is_named():
    assert hint_on(MEAN * 1.25, OWN).startswith("It is 1.25 times what it should be.")


def test_a_gradient_that_no_rank_has_points_at_forward():
    with pytest.raises(Wrong, match="weight has the gradient None") as caught:
        judge_gradients({0: {"weight": None}}, {"weight": MEAN}, {0: {"weight": None}}, "a model")
    assert "which module does forward() run?" in caught.value.hint


def test_a_rank_that_keeps_its_own_state_is_recognized():
    states, before = {0: {"weight": OWN[0]}, 1: {"weight": OWN[1]}}, {rank: {"weight": OWN[rank]} for rank in (0, 1)}
    with pytest.raises(Wrong) as caught:
        judge_state(states, states[0], 0, before)
    assert "still this rank's own value" in caught.value.hint


def test_missing_gradient_is_named():
    own = OWN | {1: None}
    assert hint_on(torch.tensor([5.0, 7.0, 1.0], dtype=torch.float64), own).startswith(
        "This gradient is None on rank 1."
    )


@pytest.mark.parametrize(("missing", "hint"), [([1], "is the slice set to zero there?"), ([], "or added to it?")])
def test_old_value_of_a_slice_is_recognized(missing, hint):
    own = {rank: {"weight": None if rank in missing else OWN[rank]} for rank in OWN}
    held = torch.tensor([0.5, 0.25, 8.0], dtype=torch.float64)
    found = {"weight": MEAN + (len(missing) or len(OWN)) * held}
    before = {rank: {"weight": held} for rank in OWN}
    assert hint in steps._left_over(dict.fromkeys(OWN, found), {"weight": MEAN}, before, own)
