"""Set up a Colab runtime for a notebook of the course.

    %run ~/distributed-training-course/shared/jupyter/colab.py labs

The notebooks in .colab/ begin with it. Colab keeps its own packages, which its notebooks need, and its torch, which
fits its GPU. Only what is missing gets installed, at the version of constraints.txt.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {  # package: the module that it brings
    "torch": "torch",
    "ipyparallel": "ipyparallel",
    "ipywidgets": "ipywidgets",
    "matplotlib": "matplotlib",
    "psutil": "psutil",
    "scikit-learn": "sklearn",
}
TORCH_TESTED = (2, 11), (2, 13)  # the oldest and the newest


def missing_pins() -> list[str]:
    """→ what pip has to install"""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower(): line for line in lines if "==" in line}
    return [pins[package] for package, module in MODULES.items() if importlib.util.find_spec(module) is None]


def install(pins: list[str]) -> None:
    """Install pins, and leave what fits as it is."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip could not install {', '.join(pins)}. Its last words:\n{done.stderr[-1000:]}")
    importlib.invalidate_caches()


def word_on_torch() -> str:
    """Say which torch there is, and what to do when it is too old."""
    version = importlib.metadata.version("torch")
    oldest, newest = TORCH_TESTED
    if tuple(int(part) for part in version.split(".")[:2]) >= oldest:
        return f"torch {version}"
    return (
        f"torch {version} is older than what the course was tested with ({oldest[0]}.{oldest[1]} to "
        f"{newest[0]}.{newest[1]}): if a cell fails, run `!pip install torch=={newest[0]}.{newest[1]}.0`, then "
        "Runtime > Restart session, and begin with the first cell again"
    )


def main(folder: str) -> None:
    """Install what is missing, and go where the notebook's own place is."""
    pins = missing_pins()
    if pins:
        install(pins)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the ranks, and what else a cell starts
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    os.chdir(ROOT / folder)
    print(f"The course is in {ROOT}, with {word_on_torch()}.")


if __name__ == "__main__":
    main(sys.argv[1])
