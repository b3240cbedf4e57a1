"""Without a GPU: the wrappers create every tensor with more than one element on the model's device.

The model and the batch are on the meta device, and the process group is torch's fake one. A tensor that a wrapper
creates without a device is on the CPU, and the test names the line that created it. With a model on a GPU, such a
tensor would be copied in every step or raise an error.
"""

import functools
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared import dryrun
from shared.models import GPTConfig, TinyGPT
from solutions.async_collectives import exchanges_directly
from solutions.memory_wall import MasterWeights
from solutions.overlapped_ddp import OverlappedDDP
from solutions.strategies import STRATEGIES, Options

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parent.parent)
OURS = [name for name, strategy in STRATEGIES.items() if strategy.provider == "course"]


def is_course_file(filename: str) -> bool:
    return filename.startswith(ROOT) and "site-packages" not in filename  # .venv may be inside the folder


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


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("strategy", OURS)
def test_wrappers_create_every_tensor_on_the_model_s_device(fake_ranks, strategy, optimizer_cls):
    options = Options(optimizer_cls, {"lr": 0.01}, bucket_cap_mb=0.005, micro_batches=2)
    even = STRATEGIES[strategy].splits_layers
    assert take_two_steps(lambda module: STRATEGIES[strategy].build(module, options), even) == []


def test_master_weights_are_on_the_model_s_device(fake_ranks):
    def build(module):
        masters = functools.partial(MasterWeights, optimizer_cls=torch.optim.AdamW)
        return OverlappedDDP(module.bfloat16()), masters(module.parameters())

    assert take_two_steps(build) == []


@pytest.mark.parametrize(
    ("backend", "is_cuda", "directly"),
    [("gloo", False, True), ("gloo", True, False), ("nccl", True, False), ("cpu:gloo,cuda:nccl", True, False)],
)
def test_only_tensors_that_gloo_can_send_are_exchanged_directly(monkeypatch, backend, is_cuda, directly):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert exchanges_directly(SimpleNamespace(is_cuda=is_cuda), None) == directly


def test_a_tensor_created_without_a_device_is_found(fake_ranks):
    class Careless(OverlappedDDP):
        def finish_gradient_sync(self):
            self.flat = torch.zeros(3)
            super().finish_gradient_sync()

    lines = take_two_steps(lambda module: (Careless(module), torch.optim.SGD(module.parameters(), lr=0.1)))
    assert len(lines) == 2 and all("torch.zeros(3)" in line for line in lines)
