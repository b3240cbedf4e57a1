"""The GPU benchmark and `make gpu` without a GPU: what they measure, by which formulas, and that they report it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_training import DRY, Measurement, Training, parameters_of
from benchmarks.rungs import ALONE, FSDP2, ON_A_GPU
from shared import ranks
from shared.deadlines import scaled
from shared.models import GPTConfig
from tests.gpu import steps

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
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


class Stub:
    """Ranks on which one strategy fails, and the others take as long as their names."""

    def __init__(self, failing: str):
        self.failing, self.RanksError = failing, ranks.RanksError

    def start(self, world_size: int, **_) -> None:
        self.world_size = world_size

    def stop(self) -> None:
        pass

    def current(self) -> SimpleNamespace:
        placement = {"backend": "gloo", "devices": ("cpu",) * self.world_size, "valid": "They run on the CPU."}
        return SimpleNamespace(placement=SimpleNamespace(**placement))

    def run(self, fn, name: str, training: Training, timeout_s: float) -> list[Measurement]:
        if name == self.failing:
            raise ranks.RanksError("Rank 0 failed: out of memory\nYour variables are gone.")
        return [Measurement([float(len(name))] * 2, [1.0], 10, 20)] * self.world_size


@pytest.mark.parametrize("failing", [FSDP2, "ZeRO2", ALONE])
def test_a_strategy_that_fails_is_named_and_the_others_are_measured(monkeypatch, failing):
    monkeypatch.setattr(gpu, "ranks", Stub(failing))
    results, saved = gpu.Results({}, DRY), []
    gpu.measure(2, results, "CPU", lambda: saved.append(results.to_dict()))
    assert {(each.strategy, each.reason) for each in results.failed} == {
        (failing, "Rank 0 failed: out of memory Your variables are gone.")
    }
    measured = [row.strategy for row in results.rows]
    assert measured == [name for name in ON_A_GPU if name != failing] if failing != ALONE else measured == []
    assert len(saved) == len(ON_A_GPU), "a run that is killed later keeps what was measured"
    assert json.loads(json.dumps(saved))[0]["placements"] == {"2": "gloo on cpu, cpu"}


def test_a_large_model_is_not_trained_on_the_cpu(monkeypatch):
    """Ranks that fail to start on a shared GPU start on the CPU."""
    monkeypatch.setattr(gpu, "ranks", Stub(failing=""))
    results = gpu.Results({}, gpu.sized_for(80 * 10**9))
    gpu.measure(2, results, "NVIDIA H100", lambda: None)
    assert [(each.strategy, each.reason) for each in results.failed] == [("starting ranks", "They run on the CPU.")]
    assert results.rows == []


def test_an_aim_that_is_missed_is_in_the_report():
    rows = [gpu.Row(1, name, 10.0, 1.1, None, 1.0, 1.0, 2.0, 3.0) for name in ON_A_GPU]
    found = {aim["what"]: aim["met"] for aim in gpu.Results({}, DRY, rows).to_dict()["aims"]}
    assert found["1 rank: ZeRO3 / plain"] is False and found[f"1 rank: ZeRO3 / {FSDP2}"] is True


@pytest.mark.timeout(scaled(900))
def test_a_dry_run_of_make_gpu_runs_every_step_on_the_cpu(tmp_path):
    """Uses two ranks on the CPU. The benchmark uses one rank on each GPU if there are some."""
    command = (sys.executable, "-m", "tests.gpu", "--dry", "--folder", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    ran = {part["step"] for part in parts if part["outcome"] == "passed"}
    assert ran == set(steps.TITLES) - (set() if torch.cuda.is_available() else {"tests"})
    rows = parts[-1]["benchmark"]["rows"]
    assert {row["strategy"] for row in rows} == set(ON_A_GPU)
    for world_size in {row["ranks"] for row in rows}:
        by_strategy = {row["strategy"]: row for row in rows if row["ranks"] == world_size}
        losses = [row["loss"] for name, row in by_strategy.items() if name != ALONE]
        assert max(losses) - min(losses) < 0.02  # bf16, five steps
        for row in by_strategy.values():
            assert row["ms"] > 0 and row["peak_gb"] > row["held_gb"] > 0.99 * row["formula_gb"]
    assert all(f"| {name} |" in (tmp_path / "report.md").read_text() for name in ON_A_GPU)
    assert (tmp_path / "report.png").stat().st_size > 10_000
