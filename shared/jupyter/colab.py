"""Set up a Colab runtime for a notebook of the course.

    %run ~/distributed-training-course/shared/jupyter/colab.py labs

The notebooks that `make colab` writes begin with this line. Colab keeps its own packages, which its notebooks need, and
its torch, which fits its GPU. Only missing packages are installed, at the versions in constraints.txt.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = {  # package → the module to import
    "torch": "torch",
    "cloudpickle": "cloudpickle",
    "ipywidgets": "ipywidgets",
    "jax": "jax",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "psutil": "psutil",
    "scikit-learn": "sklearn",
}
TORCH_TESTED = "2.11", "2.14.1"  # the oldest and the newest version


def missing_pins() -> list[str]:
    """Return the pinned requirements that pip has to install."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower(): line for line in lines if "==" in line}
    return [pins[package] for package, module in MODULES.items() if importlib.util.find_spec(module) is None]


def install(pins: list[str]) -> None:
    """Install the pinned requirements. Installed packages that satisfy them are kept."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        sys.exit(f"pip could not install {', '.join(pins)}. The end of its output:\n{done.stderr[-1000:]}")
    importlib.invalidate_caches()


def torch_version_note() -> str:
    """Return the installed version of torch, with advice if it is older than the tested ones."""
    version = importlib.metadata.version("torch")
    oldest, newest = TORCH_TESTED
    if [int(part) for part in version.split(".")[:2]] >= [int(part) for part in oldest.split(".")]:
        return f"torch {version}"
    return (
        f"torch {version} is older than the versions that the course was tested with ({oldest} to {newest}). If a cell "
        f"fails, run `!pip install torch=={newest}`, choose Runtime > Restart session, and start again from the first "
        "cell"
    )


def main(folder: str) -> None:
    """Install what is missing, and change to the folder of the notebook."""
    pins = missing_pins()
    if pins:
        install(pins)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the ranks, and other processes that a cell starts
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    os.chdir(ROOT / folder)
    print(f"The course is in {ROOT}, with {torch_version_note()}.")


if __name__ == "__main__":
    main(sys.argv[1])
