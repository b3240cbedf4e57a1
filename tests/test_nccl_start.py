"""How process groups of NCCL are started, tested without a GPU: device_id, and the environment.

The sources of torch say what each of them does: ProcessGroupNCCL.hpp is part of every build.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shared.deadlines import scaled
from shared.ranks import rankside

ROOT = Path(__file__).parent.parent
HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
SOURCES = [path for folder in ("shared", "solutions", "labs", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
WITHOUT_GPUS = ("gloo", "fake")


@pytest.mark.parametrize(
    ("backend", "device", "device_id"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:3", torch.device("cuda", 3)),
        ("gloo", "cuda:3", None),  # ranks that share GPUs
        ("gloo", "cpu", None),
    ],
)
def test_ranks_name_their_device_exactly_if_the_backend_is_nccl(monkeypatch, backend, device, device_id):
    monkeypatch.setattr(rankside.here, "rank", 0)
    monkeypatch.setattr(rankside.here, "device", device)
    monkeypatch.setattr(rankside.here, "store", dist.HashStore())
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with mock.patch.object(dist, "init_process_group") as init, mock.patch.object(rankside, "list_ranks") as listed:
        rankside.join(1, [0], backend, detect_mismatch=False, simulate=None)
    assert init.call_args.args == (backend,) and init.call_args.kwargs["device_id"] == device_id
    assert listed.called == (device_id is not None), "a mesh splits groups only from one that names its device"


SPLIT_IN_THE_SECOND_GENERATION = """
from datetime import timedelta

import torch.distributed as dist

from shared.ranks import rankside

for generation in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rankside.list_ranks(dist.group.WORLD)
    part = dist.group.WORLD.split_group([0], timeout=timedelta(seconds=20), group_name="part")
    print(part.size())
    dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_groups_can_be_split_in_every_generation():
    """As with gloo here, torch 2.13 would end the process in the second generation with NCCL, too."""
    command = [sys.executable, "-c", SPLIT_IN_THE_SECOND_GENERATION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60.0))
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr


def starts_of_groups(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith("init_process_group")]


def test_every_group_that_may_use_nccl_names_its_device():
    """Without device_id, NCCL creates communicators when a rank first needs them, where nothing can interrupt it."""
    unnamed = []
    for path in SOURCES:
        for call in starts_of_groups(path):
            backend = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if backend not in WITHOUT_GPUS and "device_id" not in {keyword.arg for keyword in call.keywords}:
                unnamed.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not unnamed
    assert any(starts_of_groups(path) for path in SOURCES)


def test_the_environment_that_ranks_set_is_one_that_torch_reads():
    header = HEADER.read_text()
    for name in (*rankside.NCCL_ENVIRONMENT, *rankside.BLOCKING_WAIT):
        assert f'"{name}"' in header, f"torch {torch.__version__} does not know {name}"


def test_waits_never_block_the_host(monkeypatch):
    """A student's shell may have set TORCH_NCCL_BLOCKING_WAIT, under its present name or its old one."""
    for name in rankside.BLOCKING_WAIT:
        monkeypatch.setenv(name, "1")
    for name in rankside.NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(rankside, "get_ipython", mock.Mock())
    monkeypatch.setattr(dist, "TCPStore", mock.Mock())
    for module, name in (
        (rankside.instrumentation, "install"),
        (rankside.instrumentation, "recorder"),
        (rankside.sizes, "Recorder"),
        (rankside.handles, "install"),
        (rankside.lines, "answer_calls"),
        (rankside.hosts, "enter"),
        (rankside.doctor, "listen"),
        (torch, "set_num_threads"),
    ):
        monkeypatch.setattr(module, name, mock.Mock())
    seen = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(os.environ))
    for attribute in ("rank", "device", "store"):
        monkeypatch.setattr(rankside.here, attribute, getattr(rankside.here, attribute))
    rankside.initialize_rank(0, "cuda:0", ("127.0.0.1", 1), "/sizes", (2, b"token"))
    assert not {name for name in rankside.BLOCKING_WAIT if name in seen}
    assert {name: seen[name] for name in rankside.NCCL_ENVIRONMENT} == rankside.NCCL_ENVIRONMENT


def test_nothing_else_mentions_blocking_waits():
    mentions = [path for path in SOURCES if "BLOCKING_WAIT" in path.read_text()]
    assert mentions == [ROOT / "shared" / "ranks" / "rankside.py"]
