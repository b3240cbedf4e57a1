"""The registry of strategies: correct metadata, clear errors, and every tensor on the model's device."""

import functools
import importlib.util
import re
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instructor import build
from shared import dryrun
from shared.models import GPTConfig, TinyGPT
from solutions.async_collectives import exchanges_directly
from solutions.memory_wall import MasterWeights
from solutions.overlapped_ddp import OverlappedDDP
from solutions.strategies import STRATEGIES, Options

ROOT = Path(__file__).parents[2]
OF_LABS = [strategy for strategy in STRATEGIES.values() if strategy.needs]
OURS = [name for name, strategy in STRATEGIES.items() if strategy.provider == "course"]


@pytest.mark.parametrize("strategy", OF_LABS, ids=lambda strategy: strategy.name)
def test_the_chapter_that_a_strategy_names_exports_what_it_needs(strategy):
    (chapter,) = [chapter for chapter in build.chapters() if int(chapter.name[:2]) == strategy.chapter]
    assert strategy.needs in [f"solutions.{module}" for module in build.module_names(chapter)]


def test_keys_are_names_and_counterparts_come_from_another_provider_at_the_same_stage():
    assert [strategy.name for strategy in STRATEGIES.values()] == list(STRATEGIES)
    for strategy in STRATEGIES.values():
        if strategy.counterpart:
            counterpart = STRATEGIES[strategy.counterpart]
            assert strategy.provider == "course" != counterpart.provider and strategy.stage == counterpart.stage


def test_the_registry_can_be_imported_before_any_lab_is_solved():
    listed = "import sys, solutions.strategies; print(*sorted(n for n in sys.modules if n.startswith('solutions.')))"
    done = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "solutions.course_strategies solutions.strategies solutions.strategy", done.stderr


@pytest.mark.parametrize("strategy", OF_LABS, ids=lambda strategy: strategy.name)
def test_a_strategy_whose_lab_is_not_solved_says_so(monkeypatch, strategy):
    assert strategy.why_not() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f"the finished module of lab {strategy.chapter:02d}" in strategy.why_not()
    with pytest.raises(RuntimeError, match=re.escape(f"strategy {strategy.name} needs {strategy.needs}")):
        strategy.build(nn.Linear(1, 1))


def test_an_option_that_a_strategy_does_not_support_is_rejected():
    with pytest.raises(ValueError, match="strategy zero2 does not support the option compute_dtype"):
        STRATEGIES["zero2"].build(nn.Linear(1, 1), Options(compute_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="strategy ddp does not support the option param_groups"):
        STRATEGIES["ddp"].build(nn.Linear(1, 1), replace(Options(), param_groups=lambda module: []))


# -- devices: The model and the batch are on the meta device, and the process group is torch's fake one. A tensor that a
# wrapper creates without a device is on the CPU, and the test names the line that created it. With a model on a GPU,
# such a tensor would be copied in every step or raise an error.


def is_course_file(filename: str) -> bool:
    return filename.startswith(str(ROOT)) and "site-packages" not in filename  # .venv may be inside the folder


class CpuTensorLines(TorchDispatchMode):
    """Lists the lines of this course that created a CPU tensor with more than one element."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel() > 1:
                stack = traceback.extract_stack()
                if any(frame.filename == device_mesh.__file__ for frame in stack):
                    continue  # a DeviceMesh keeps the numbers of its ranks on the CPU
                frames = [frame for frame in stack if is_course_file(frame.filename)][:-1]
                self.lines.append(f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}")
        return results


@pytest.fixture(params=[2, 3])
def fake_ranks(request):
    dryrun.join_fake_group(rank=0, world_size=request.param)
    yield
    dist.destroy_process_group()


def gpt_on_meta(even: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """Build a GPT whose sizes are not divisible by 3, except, if `even`, those that tensor parallelism splits."""
    width, heads, tokens = (12, 6, 12) if even else (10, 2, 8)
    with torch.device("meta"):
        gpt = TinyGPT(GPTConfig(vocab_size=11, context=12, width=width, heads=heads, layers=2))
        return gpt, torch.zeros(2, tokens, dtype=torch.long)


def take_two_steps(build, even: bool = False) -> list[str]:
    """Return the lines that created a tensor on the CPU."""
    module, tokens = gpt_on_meta(even)
    with CpuTensorLines() as recorder:
        model, optimizer = build(module)
        for _ in range(2):
            dryrun.take_step(model, optimizer, tokens)
    return recorder.lines


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("strategy", OURS)
def test_wrappers_create_every_tensor_on_the_model_s_device(fake_ranks, strategy, optimizer_cls):
    options = Options(optimizer_cls, {"lr": 0.01}, bucket_cap_mb=0.005, micro_batches=2)
    even = STRATEGIES[strategy].splits_layers
    assert take_two_steps(lambda module: STRATEGIES[strategy].build(module, options), even) == []


@pytest.mark.slow
def test_master_weights_are_on_the_model_s_device(fake_ranks):
    def build(module):
        masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW)
        return OverlappedDDP(module.bfloat16()), masters(module.parameters())

    assert take_two_steps(build) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "is_cuda", "directly"),
    [("gloo", False, True), ("gloo", True, False), ("nccl", True, False), ("cpu:gloo,cuda:nccl", True, False)],
)
def test_only_tensors_that_gloo_can_send_are_exchanged_directly(monkeypatch, backend, is_cuda, directly):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert exchanges_directly(SimpleNamespace(is_cuda=is_cuda), None) == directly


@pytest.mark.slow
def test_a_tensor_created_without_a_device_is_found(fake_ranks):
    class Careless(OverlappedDDP):
        def finish_gradient_sync(self):
            self.flat = torch.zeros(3)
            super().finish_gradient_sync()

    lines = take_two_steps(lambda module: (Careless(module), torch.optim.SGD(module.parameters(), lr=0.1)))
    assert len(lines) == 2 and all("torch.zeros(3)" in line for line in lines)
