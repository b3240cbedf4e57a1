"""The GPU benchmark without a GPU: what it measures, by which formulas, and that it writes a report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_training import DRY, Training, parameters_of
from benchmarks.rungs import ALONE, FSDP2, ON_A_GPU
from instructor.build import chapters
from shared.models import GPTConfig
from tests import gpu as run_on_gpus
from tests.needs_nccl import needs_nccl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GB = 1e9


def test_mfu_is_the_models_own_flops_over_the_gpus_peak():
    config = GPTConfig(vocab_size=10, context=8, layers=2, heads=1, width=4)
    training = Training(config, micro_batch=3)
    flops_per_token = 6 * parameters_of(config) + 12 * 2 * 4 * 8
    took_s = 24 * flops_per_token / 989e12  # as many FLOPs as the GPU does at its peak
    assert gpu.mfu(training, took_s, "NVIDIA H200") == pytest.approx(1.0)
    assert gpu.mfu(training, 2 * took_s, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert gpu.mfu(training, took_s, "an unknown GPU") is None


def test_peaks_are_found_by_the_whole_name():
    config = DRY.config
    of_l4, of_l40s = (gpu.mfu(Training(config, 1), 1.0, name) for name in ("NVIDIA L4", "NVIDIA L40S"))
    assert of_l4 / of_l40s == pytest.approx(362 / 121)


@pytest.mark.parametrize("gpu_gb", [16, 24, 40, 80, 141])
def test_the_models_state_takes_its_share_of_the_gpus_memory(gpu_gb):
    config = gpu.sized_for(int(gpu_gb * GB)).config
    share = gpu.BF16_ADAM.total * parameters_of(config) / (gpu_gb * GB)
    assert 0.3 < share <= gpu.STATE_SHARE


def test_every_strategy_has_a_stage():
    assert {name: gpu.STAGES[name] for name in ON_A_GPU} == {
        ALONE: 0,
        "DDP, bucket view": 0,
        "ManualDDP": 0,
        "BucketedDDP": 0,
        "OverlappedDDP": 0,
        "ZeroRedundancyOptimizer": 1,
        "ZeRO1": 1,
        "ZeRO2": 2,
        FSDP2: 3,
        "ZeRO3": 3,
    }


def test_a_dry_run_writes_the_report(tmp_path):
    """Uses two ranks on the CPU, or one on the GPU."""
    command = (sys.executable, "-m", "benchmarks.gpu", "--dry", "--folder", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} == set(ON_A_GPU)
    for world_size in {row["ranks"] for row in rows}:
        by_strategy = {row["strategy"]: row for row in rows if row["ranks"] == world_size}
        losses = [row["loss"] for name, row in by_strategy.items() if name != ALONE]
        assert max(losses) - min(losses) < 0.02  # bf16, five steps
        for row in by_strategy.values():
            assert row["ms"] > 0 and row["peak_gb"] > row["held_gb"] > 0.99 * row["formula_gb"]
    assert all(f"| {name} |" in (tmp_path / "report.md").read_text() for name in ON_A_GPU)
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_with_few_gpus_notebooks_that_need_nccl_stay_on_the_cpu():
    folders = (ROOT / "chapters", ROOT / "solutions")
    notebooks = sorted(path.relative_to(ROOT) for folder in folders for path in folder.glob("*.ipynb"))
    one_gpu, four_gpus = (run_on_gpus.phases(gpus, notebooks) for gpus in (1, 4))
    assert [phase.name for phase in one_gpu] == ["gpu", "notebooks", "on the CPU", "report"]
    assert [phase.name for phase in four_gpus] == ["gpu", "notebooks", "report"]
    for phases in (one_gpu, four_gpus):
        ran = [word for phase in phases for command in phase.commands for word in command if word.endswith(".ipynb")]
        assert sorted(ran) == [str(path) for path in notebooks]
    assert "RANKS_BACKEND=gloo:cpu" in one_gpu[2].commands[0]
    shared = one_gpu[1].commands[0]
    assert "RANKS_BACKEND=gloo" in shared
    for chapter in chapters():
        scripts = {"chapters": chapter.folder / "lesson.py", "solutions": chapter.folder / "lab.py"}
        for folder, script in scripts.items():
            assert not (f"{folder}/{chapter.name}.ipynb" in shared and needs_nccl(script.read_text())), script
