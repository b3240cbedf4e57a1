"""The torchrun script trains by hand and with DDP alike, and explains what is wrong with bad arguments."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent.parent / "labs" / "simple_ddp.py"


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True)


def _torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    return _run(*launcher, str(SCRIPT), *arguments)


def test_by_hand_and_ddp_reach_the_same_falling_loss():
    done = _torchrun(3, "--steps", "30")
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) → ([\d.]+)", done.stdout)]
    assert len(losses) == 2, done.stdout
    by_hand, by_ddp = losses
    assert by_hand == pytest.approx(by_ddp, abs=2e-3)
    assert by_hand[1] < 0.8 * by_hand[0]


def test_without_torchrun_the_script_says_how_to_start_it():
    done = _run(str(SCRIPT))
    assert done.returncode == 2
    assert "torchrun --nproc_per_node=2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_a_bad_number_of_steps_is_rejected_with_a_reason():
    done = _torchrun(1, "--steps", "0")
    assert done.returncode != 0
    assert "--steps must be at least 2" in done.stderr
