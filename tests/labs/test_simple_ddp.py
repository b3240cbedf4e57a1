"""The torchrun script trains by hand and with DDP alike, and explains what is wrong with bad arguments."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared import mine

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "labs" / "simple_ddp.py"


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


def _script():
    spec = importlib.util.spec_from_file_location("simple_ddp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_trains_with_the_students_own_wrapper(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "simple_ddp_of_a_test.py").write_text("class ManualDDP:\n    own = True\n")
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    assert _script().manual_ddp().own


def test_without_any_wrapper_the_script_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(mine, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "solutions.manual_ddp", None)  # as in a student's bundle
    with pytest.raises(SystemExit, match="your ManualDDP, which is not in mine/ yet"):
        _script().manual_ddp()


def test_the_script_shows_no_exercise_of_the_lab():
    """It once had most of exercise 2.2, and the loop of exercise 2.3."""
    assert not re.search(r"broadcast\(|buffers\(\)|all_reduce\(parameter", SCRIPT.read_text())


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
