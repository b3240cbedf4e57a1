"""The checks of wrappers pass options to the constructor, and also work for a wrapper that sends in backward()."""

import random

import pytest
import torch

from shared import ranks
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Training, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping

pytestmark = pytest.mark.slow

SENDS_IN_BACKWARD = """
import copy

import torch
import torch.distributed as dist
from torch import nn


class Wrapper(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        if bucket_cap_mb != 0.001:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}")
        self.module, self.cap, self.group, self.sent = module, bucket_cap_mb, group, set()
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average)

    def __deepcopy__(self, memo):
        return Wrapper(copy.deepcopy(self.module, memo), self.cap, self.group)

    def _average(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)
        parameter.grad /= dist.get_world_size(self.group)
        self.sent.add(parameter)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter not in self.sent:
                parameter.grad = torch.zeros_like(parameter)
                self._average(parameter)
        self.sent.clear()
"""
CAP = {"bucket_cap_mb": 0.001}


@pytest.fixture(scope="module", autouse=True)
def three_ranks():
    ranks.start(world_size=3, detect_mismatch=False)
    yield
    ranks.stop()


@pytest.fixture
def attempt(tmp_path) -> Attempt:
    path = tmp_path / "candidate.py"
    path.write_text(SENDS_IN_BACKWARD)
    return Attempt("Wrapper", str(path), 3, random.Random(5))


@pytest.mark.parametrize(
    "how",
    [
        Training("Tied", options=CAP, overlaps=True),
        Training("Unused", options=CAP, overlaps=True),
        Training("Plain", options=CAP, overlaps=True, in_subgroup=True),
        Training("Plain", options=CAP, overlaps=True, dtype=torch.bfloat16),
    ],
    ids=["tied", "unused", "subgroup", "bf16"],
)
def test_a_wrapper_that_sends_in_backward_is_right(attempt, how):
    for step in train_and_judge(attempt, how)[-1]["steps"]:
        assert step["working"], "nothing was sent in backward()"


def test_a_wrapper_that_sends_in_backward_behaves_like_its_module(attempt):
    judge_wrapping(attempt, CAP, overlaps=True)


def test_options_reach_the_constructor(attempt):
    with pytest.raises(Wrong, match="bucket_cap_mb is 7"):
        train_and_judge(attempt, Training("Plain", options={"bucket_cap_mb": 7}))
