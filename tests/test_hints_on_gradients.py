"""The hint of a failed check names the cause that the values show. No ranks are needed."""

import pytest
import torch

from shared.checks.bucketed_ddp import steps
from shared.checks.engine.compare import judge_gradients
from shared.checks.engine.framework import Wrong

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
