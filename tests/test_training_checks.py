"""The checks of wrappers pass options to the constructor, and also work for a wrapper that sends in backward()."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared import ranks
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.engine.training import Training, train_and_judge
from shared.checks.engine.wrapping import judge_wrapping
from shared.checks.manual_ddp.sampler import every_sample_once_and_equal_shares

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
SAMPLER = """
from solutions import manual_ddp as right


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        whole = right.ShardedSampler(self.length, 0, 1, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        order += order[: len(self) * self.world_size - self.length]
        return iter(order[self.rank :: self.world_size])
"""


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


def test_a_collective_over_all_ranks_instead_of_the_group_is_hinted_at(attempt):
    Path(attempt.path).write_text(SENDS_IN_BACKWARD.replace("tensor.detach(), group=group, group_src", "tensor, src"))
    with pytest.raises(Wrong, match="wait in broadcast #1") as caught:
        train_and_judge(attempt, Training("Plain", options=CAP, overlaps=True, in_subgroup=True))
    assert "Which call in your code leaves out the group?" in caught.value.hint


def test_the_hint_on_unequal_shares_names_the_case(attempt):
    Path(attempt.path).write_text(SAMPLER)
    sampler = replace(attempt, piece="ShardedSampler")
    with pytest.raises(Wrong, match=r"^for 1 sample, the ranks yield \[1, 1, 0\] indices; expected 1 each$") as caught:
        every_sample_once_and_equal_shares(sampler)
    assert "fewer samples than ranks" in caught.value.hint
