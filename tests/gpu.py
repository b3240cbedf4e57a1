"""Run what needs GPUs, then measure: `python -m tests.gpu`, or `make gpu`. Writes its report into build/gpu/.

Tests marked gpu, every notebook, and the rungs through NCCL, on whatever GPUs there are. Notebooks are run laxly:
devices have other names there, and numbers other last digits. With fewer GPUs than the lessons' four ranks, ranks share
them through gloo. It cannot send from a GPU, and a DeviceMesh on a GPU wants NCCL: notebooks that do either stay on the
CPU then, and the summary says so.
"""

import sys
from pathlib import Path

from tests.run import PYTEST, ROOT, Phase, Result, run_phase, summary

LAX = ("--nbval-lax", "--nbval-cell-timeout=300", "-p", "no:cacheprovider")
NEEDS_A_GPU_PER_RANK = ("01_collectives", "09_zero3", "10_fsdp", "11_production")
LESSONS_RANKS = 4


def phases(gpus: int, notebooks: list[Path]) -> list[Phase]:
    """What there is to run on this many GPUs."""
    on_cpu = [each for each in notebooks if gpus < LESSONS_RANKS and each.stem in NEEDS_A_GPU_PER_RANK]
    on_gpus = [str(each) for each in notebooks if each not in on_cpu]
    found = [
        Phase("gpu", ((*PYTEST, "tests", "-m", "gpu", "-o", "faulthandler_timeout=300"),), 20 * 60, is_pytest=True)
    ]
    found.append(Phase("notebooks", ((*PYTEST, *LAX, *on_gpus),), 30 * 60, is_pytest=True))
    if on_cpu:
        command = ("env", "RANKS_BACKEND=gloo:cpu", *PYTEST, *LAX, *map(str, on_cpu))
        found.append(Phase("on the CPU", (command,), 20 * 60, is_pytest=True))
    report = (sys.executable, "-m", "benchmarks.gpu", "--folder", "build/gpu")
    return [*found, Phase("report", (report,), 60 * 60)]


def main() -> int:
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("There is no CUDA GPU here: `make test` runs all that needs none.")
        return 2
    notebooks = sorted(path.relative_to(ROOT) for path in ROOT.glob("[cs][ho]*s/*.ipynb"))
    results: list[Result] = [run_phase(phase) for phase in phases(gpus, notebooks)]
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
