"""Run everything that needs GPUs, then the GPU benchmark: `python -m tests.gpu`, or `make gpu`.

This runs the tests marked gpu, every notebook, and every strategy through NCCL, on all GPUs of this machine. The report
is written to build/gpu/. Outputs of notebooks are not compared, because devices have other names on a GPU, and values
differ in their last digits. With fewer GPUs than the four ranks of the lessons, ranks share them through gloo. The
notebooks of chapters that then need NCCL (see needs_nccl.py) run on the CPU, which the summary shows.
"""

import sys
from pathlib import Path

from instructor.build import chapters
from tests.needs_nccl import needs_nccl
from tests.runner.execution import Result, run_phase
from tests.runner.phases import PYTHON, ROOT, Phase, pytest_command
from tests.runner.summary import summary

LAX = ("--nbval-lax", "--nbval-cell-timeout=300")
GPU_TEST_S = 600.0  # the first start of CUDA and NCCL takes minutes on some machines
LESSONS_RANKS = 4


def chapters_with_a_gpu_per_rank() -> set[str]:
    """Return the names of the chapters whose notebooks cannot run on GPUs that ranks share."""
    return {
        chapter.name
        for chapter in chapters()
        if any(needs_nccl((chapter.folder / f"{script}.py").read_text()) for script in ("lesson", "lab"))
    }


def phases(gpus: int, notebooks: list[Path]) -> list[Phase]:
    """Return the phases of a run on this many GPUs."""
    on_cpu = [path for path in notebooks if gpus < LESSONS_RANKS and path.stem in chapters_with_a_gpu_per_rank()]
    on_gpus = [str(path) for path in notebooks if path not in on_cpu]
    lax = pytest_command(*LAX, test_s=GPU_TEST_S)
    found = [Phase("gpu", (pytest_command("tests", "-m", "gpu", test_s=GPU_TEST_S),), is_pytest=True)]
    share = ("env", "RANKS_BACKEND=gloo") if gpus < LESSONS_RANKS else ()
    found.append(Phase("notebooks", ((*share, *lax, *on_gpus),), is_pytest=True))
    if on_cpu:
        command = ("env", "RANKS_BACKEND=gloo:cpu", *lax, *map(str, on_cpu))
        found.append(Phase("on the CPU", (command,), is_pytest=True))
    return [*found, Phase("report", ((*PYTHON, "benchmarks.gpu", "--folder", "build/gpu"),))]


def main() -> int:
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("This machine has no CUDA GPU. `make test` runs everything that needs none.")
        return 2
    notebooks = sorted(path.relative_to(ROOT) for path in ROOT.glob("[cs][ho]*s/*.ipynb"))
    results: list[Result] = [run_phase(phase) for phase in phases(gpus, notebooks)]
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
