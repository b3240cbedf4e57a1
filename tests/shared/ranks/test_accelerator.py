"""Ranks on the CPU leave GPUs alone: torch may report CUDA as its accelerator, and everything still runs on the CPU.

The functions without `test_` run on the ranks. There, sitecustomize.py in cuda_build/ has patched torch.
"""

import ast
import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shared import ranks
from shared.checks.__main__ import exercises_of, run_file
from solutions.checkpoints import load_checkpoint, save_checkpoint
from solutions.production import fully_sharded
from solutions.strategies import STRATEGIES
from solutions.train import Settings, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FOLDERS = ("source", "solutions", "shared", "labs", "instructor", "benchmarks", "tests")
CHOOSES_A_DEVICE = {"fully_shard": "mesh", "FullyShardedDataParallel": "device_id"}  # unless it gets this argument


# -- every call passes a device


def calls_without_a_device(source: str) -> Iterator[str]:
    """Yield the calls for which torch chooses the device, in Python code and in the strings in it, such as cells."""
    without_magics = "\n".join(line for line in source.strip().splitlines() if not line.startswith("%"))
    for node in ast.walk(ast.parse(without_magics)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError, ValueError):  # most strings are not Python code
                yield from calls_without_a_device(node.value)
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            passed = [each.arg for each in node.keywords if ast.unparse(each.value) != "None"]
            if called in CHOOSES_A_DEVICE and CHOOSES_A_DEVICE[called] not in passed:
                yield ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_sharded_module_gets_its_device(folder):
    """Otherwise, torch would choose a GPU wherever there is one, even if the ranks compute on the CPU."""
    sources = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    mentioning = {path: text for path, text in sources.items() if any(name in text for name in CHOOSES_A_DEVICE)}
    found = {str(path): list(calls_without_a_device(text)) for path, text in mentioning.items()}
    assert not {path: calls for path, calls in found.items() if calls}


@pytest.mark.parametrize(("name", "argument"), CHOOSES_A_DEVICE.items())
def test_a_call_without_a_device_is_found(name, argument):
    for arguments in ("module", "module, **options", f"module, {argument}=None"):
        call = f"{name}({arguments})"
        assert list(calls_without_a_device(f"def shard(module):\n    return {call}")) == [call]
        assert list(calls_without_a_device(f"CELL = '''%%ranks\nmodel = {call}\n'''")) == [call]
    assert list(calls_without_a_device(f"{name}(module, {argument}=chosen)")) == []


# -- everything runs on the CPU where torch reports CUDA


@pytest.fixture(scope="module")
def beside_gpus():
    """Let every Python process that starts from here believe that its accelerator is CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "cuda_build"), prepend=os.pathsep)
        yield


@pytest.fixture
def cpu_ranks(beside_gpus, ranks_end_with_the_module):
    """Two ranks on the CPU whose torch reports CUDA."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2, backend="gloo:cpu")
    return ranks


def accelerators() -> list[str]:
    return [torch._C._get_accelerator().type, torch.accelerator.current_accelerator().type]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))


def train_with(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train on the same samples on every rank, so that every way of training has the same losses."""
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(model: nn.Module) -> list[float]:
    return train_with(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def in_fsdp2(with_mesh: bool) -> list[float]:
    model, mesh = layers(), init_device_mesh("cpu", (dist.get_world_size(),)) if with_mesh else None
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    return losses_of(model)


def exchanged_objects() -> list:
    rank, everyones = dist.get_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(everyones, rank)
    of_rank_0 = [{"rank": rank}]
    dist.broadcast_object_list(of_rank_0)
    dist.barrier()
    return everyones + of_rank_0


def saved_and_loaded(folder: str) -> tuple[list[float], list[float]]:
    """Train, save, and train on. Return the losses after saving, and those after loading."""
    model = fully_sharded(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_with(model, optimizer)
    save_checkpoint(Path(folder), 3, model, optimizer)
    continued = train_with(model, optimizer)
    load_checkpoint(Path(folder) / "step_3", model, optimizer)
    return continued, train_with(model, optimizer)


def assembled_from_shards() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).full_tensor().tolist()


def test_ranks_on_the_cpu_start_and_see_no_gpu(cpu_ranks):
    assert ranks.run(accelerators) == [["cuda", "cuda"]] * 2
    assert ranks.pull("device") == [torch.device("cpu")] * 2
    assert ranks.run(os.getenv, "CUDA_VISIBLE_DEVICES") == ["", ""]


def test_objects_and_barriers_go_through_the_cpu(cpu_ranks):
    assert ranks.run(exchanged_objects) == [[0, 1, {"rank": 0}]] * 2


def test_ddp_and_fsdp2_train_on_the_cpu(cpu_ranks):
    expected = losses_of(layers())
    for found in ranks.run(lambda: losses_of(DistributedDataParallel(layers()))) + ranks.run(in_fsdp2, True):
        assert found == pytest.approx(expected)


def test_fsdp2_without_a_mesh_leaves_the_cpu(cpu_ranks):
    """This is why every call gets a mesh, and it proves that torch is patched in a way that matters."""
    with pytest.raises(ranks.CellFailed, match=r"CUDA|NVIDIA driver"):
        ranks.run(in_fsdp2, False)


def test_dtensors_stay_on_the_cpu(cpu_ranks):
    assert ranks.run(assembled_from_shards) == [[0, 1, 2, 3, 4, 5]] * 2


def test_checkpoints_are_saved_and_loaded(cpu_ranks, tmp_path):
    for continued, resumed in ranks.run(saved_and_loaded, str(tmp_path)):
        assert resumed == continued


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [name for name, each in STRATEGIES.items() if each.why_not() is None])
def test_every_strategy_trains_on_the_cpu(cpu_ranks, strategy):
    model = "gpt" if STRATEGIES[strategy].splits_layers else "mlp"
    for summary in ranks.run(train, Settings(strategy=strategy, model=model, steps=6)):
        assert (summary.device, summary.backend) == ("cpu", "gloo")
        assert summary.loss_last < summary.loss_first


@pytest.mark.exhaustive
def test_torchrun_trains_on_the_cpu(beside_gpus):
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "solutions.train"]
    done = subprocess.run(
        [sys.executable, *options, "--strategy", "fsdp2", "--steps", "6"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def on_few_ranks(module: str) -> Iterator[None]:
    """Run each check of a module only on the fewest ranks that communicate: no device depends on their number."""
    with contextlib.ExitStack() as changes:
        for exercise in exercises_of(module):
            fewest = [min([size for size in check.world_sizes if size > 1] or [1]) for check in exercise.checks]
            checks = [replace(check, world_sizes=(size,)) for check, size in zip(exercise.checks, fewest, strict=True)]
            changes.enter_context(mock.patch.object(exercise, "checks", checks))
        yield


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", ["production", "checkpoints"])
def test_the_checks_of_sharded_models_pass_on_the_cpu(beside_gpus, ranks_end_with_the_module, module):
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(4, backend="gloo:cpu", detect_mismatch=False)
    with on_few_ranks(module):
        verdicts = run_file(module, str(ROOT / "solutions" / f"{module}.py"))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join(f"{each.exercise} · {each.check}: {each.evidence}" for each in failed)
