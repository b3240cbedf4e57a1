"""The run on GPUs, dry: what is measured, by which formula, and that a report comes of it. No GPU is needed here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_training import DRY, Training, parameters_of
from benchmarks.rungs import ALONE, FSDP2, ON_A_GPU
from shared.models import GPTConfig
from tests import gpu as run_on_gpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
GB = 1e9


def test_mfu_is_the_models_own_flops_over_the_cards_peak():
    config = GPTConfig(vocab_size=10, context=8, layers=2, heads=1, width=4)
    training = Training(config, micro_batch=3)
    per_token = 6 * parameters_of(config) + 12 * 2 * 4 * 8
    took_s = 24 * per_token / 989e12  # as many flops as the card does at its peak
    assert gpu.mfu(training, took_s, "NVIDIA H200") == pytest.approx(1.0)
    assert gpu.mfu(training, 2 * took_s, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert gpu.mfu(training, took_s, "an unknown card") is None


def test_peaks_are_found_by_the_whole_name():
    config = DRY.config
    of_l4, of_l40s = (gpu.mfu(Training(config, 1), 1.0, name) for name in ("NVIDIA L4", "NVIDIA L40S"))
    assert of_l4 / of_l40s == pytest.approx(362 / 121)


@pytest.mark.parametrize("card_gb", [16, 24, 40, 80, 141])
def test_the_model_fills_the_cards_share_with_its_state(card_gb):
    config = gpu.filling(int(card_gb * GB)).config
    share = gpu.BF16_ADAM.total * parameters_of(config) / (card_gb * GB)
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
    """Two ranks on the CPU, or one on the GPU there is."""
    command = (sys.executable, "-m", "benchmarks.gpu", "--dry", "--folder", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} == set(ON_A_GPU)
    for world_size in {row["ranks"] for row in rows}:
        of_all = {row["strategy"]: row for row in rows if row["ranks"] == world_size}
        losses = [row["loss"] for name, row in of_all.items() if name != ALONE]
        assert max(losses) - min(losses) < 0.02  # bf16, five steps
        for row in of_all.values():
            assert row["ms"] > 0 and row["peak_gb"] > row["held_gb"] > 0.99 * row["formula_gb"]
    assert all(f"| {name} |" in (tmp_path / "report.md").read_text() for name in ON_A_GPU)
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_with_few_gpus_notebooks_that_send_from_rank_to_rank_stay_on_the_cpu():
    notebooks = sorted(path.relative_to(ROOT) for path in (ROOT / "solutions").glob("*.ipynb"))
    of_one, of_four = (run_on_gpus.phases(gpus, notebooks) for gpus in (1, 4))
    assert [phase.name for phase in of_one] == ["gpu", "notebooks", "on the CPU", "report"]
    assert [phase.name for phase in of_four] == ["gpu", "notebooks", "report"]
    for found in (of_one, of_four):
        ran = [word for phase in found for command in phase.commands for word in command if word.endswith(".ipynb")]
        assert sorted(ran) == [str(each) for each in notebooks]
    assert "RANKS_BACKEND=gloo:cpu" in of_one[2].commands[0]
