"""Facts about this machine's GPUs and about the libraries that use them.

    python -P shared/ranks/facts.py       # prints them as JSON

They are gathered in a separate process, for two reasons: a process that has queried a GPU keeps holding memory on it
until the process ends, and a broken driver may never answer. This file needs nothing from the course, so it also runs
where the course's packages are missing. `outlook.py` turns facts into sentences.
"""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ANSWER_S = 120.0  # CUDA may take a minute to start on a machine with many GPUs
_SMI_ANSWER_S = 30.0
_SHM = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees, or the MIG instance of one."""

    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""  # why a small computation failed on it


@dataclass(frozen=True)
class Facts:
    """What is known about a machine. A text is empty if there is nothing to say, or if the answer is unknown."""

    cores: int = 1
    shm_bytes: int | None = None  # the size of /dev/shm; None if there is no such folder
    torch: str = ""  # its version
    cuda_build: str = ""  # the version of CUDA that PyTorch was built for; empty for a CPU build
    nccl: str = ""  # the version of NCCL that ranks load; empty if this build of PyTorch has none
    nccl_path: str = ""  # where that library is; empty if it is a part of PyTorch
    mps: bool = False  # whether the program that starts NVIDIA's Multi-Process Service is installed
    driver: str = ""  # the version of NVIDIA's driver
    driver_cuda: str = ""  # the newest version of CUDA that the driver supports
    listed: tuple[str, ...] = ()  # the names of the GPUs that `nvidia-smi` lists
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    gpus: tuple[Gpu, ...] = ()  # those that PyTorch sees
    problem: str = ""  # why PyTorch sees no GPU, or why these facts are not complete
    unconnected: tuple[tuple[int, int], ...] = ()  # pairs of GPUs that cannot read each other's memory
    links: tuple[str, ...] = ()  # the kinds of links between GPUs, as in `nvidia-smi topo -m`: NV18, PIX, SYS
    mig: bool = False  # whether a GPU is divided into instances
    exclusive: bool = False  # whether only one process at a time can use a GPU

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        values = json.loads(text)
        values["gpus"] = tuple(Gpu(**gpu) for gpu in values["gpus"])
        values["unconnected"] = tuple(tuple(pair) for pair in values["unconnected"])
        return cls(**values | {name: tuple(values[name]) for name in ("listed", "links")})


def ask(timeout_s: float = ANSWER_S) -> Facts:
    """Gather the facts in another process. If that fails, `problem` says why, and few other facts are known."""
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return _without_torch(f"PyTorch and the GPU's driver gave no answer within {timeout_s:g} s")
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        reason = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        return _without_torch(f"PyTorch could not be queried about GPUs ({reason})")
    return Facts.from_json(lines[-1])


def _without_torch(problem: str) -> Facts:
    return Facts(
        cores=_cores(), shm_bytes=_shm_bytes(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), problem=problem
    )


def gather() -> Facts:
    """Gather the facts in this process."""
    import torch
    import torch.distributed as dist

    listed, driver, mig, exclusive = parse_smi(
        _nvidia_smi(f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader")
    )
    problem = ""
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except Exception as error:  # on a broken machine, it may be any exception
        count, problem = 0, (str(error).strip() or type(error).__name__).splitlines()[0]
    gpus = tuple(_gpu(index) for index in range(count))
    pairs = [(one, other) for other in range(count) for one in range(other)]
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl = _beside("nccl")
    return Facts(
        cores=_cores(),
        shm_bytes=_shm_bytes(),
        torch=torch.__version__,
        cuda_build=torch.version.cuda or "",
        nccl=nccl.named(nccl.version_for_ranks()) if has_nccl else "",
        nccl_path=nccl.path_for_ranks() if has_nccl else "",
        mps=shutil.which("nvidia-cuda-mps-control") is not None,
        driver=driver,
        driver_cuda=_driver_cuda(),
        listed=listed,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus,
        problem=problem,
        unconnected=tuple(pair for pair in pairs if not _connected(*pair)),
        links=parse_topology(_nvidia_smi("topo", "-m")) if count > 1 else (),
        mig=mig or any(" MIG " in gpu.name for gpu in gpus),
        exclusive=exclusive,
    )


def _beside(name: str):
    """Load another file of this folder without its package, which needs more than Python."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None  # None stands for a file that is no Python
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _gpu(index: int) -> Gpu:
    """Describe one GPU, and try a small computation on it."""
    import torch

    name, problem, free_bytes, total_bytes = f"GPU {index}", "", 0, 0
    try:
        name = torch.cuda.get_device_name(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        if torch.ones(2, device=f"cuda:{index}").sum().item() != 2.0:
            problem = "1 + 1 was not 2"
    except RuntimeError as error:
        problem = str(error).strip().splitlines()[0]
    return Gpu(name, total_bytes, free_bytes, problem)


def _connected(one: int, other: int) -> bool:
    """Return whether two GPUs can read each other's memory."""
    import torch

    try:
        return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
    except (RuntimeError, AssertionError):
        return False


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shm_bytes() -> int | None:
    return shutil.disk_usage(_SHM).total if Path(_SHM).is_dir() else None


# -- the driver

SMI_FIELDS = ("name", "driver_version", "mig.mode.current", "compute_mode")


def _nvidia_smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints, or nothing if it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_SMI_ANSWER_S,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_smi(printed: str) -> tuple[tuple[str, ...], str, bool, bool]:
    """Read a line of SMI_FIELDS per GPU.

    Returns the GPUs' names, the driver's version, whether a GPU has MIG enabled, and whether one is in exclusive mode.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines()]
    lines = [line for line in lines if len(line) == len(SMI_FIELDS)]
    driver = lines[0][1] if lines else ""
    mig = any(line[2] == "Enabled" for line in lines)
    exclusive = any(line[3].startswith("Exclusive") for line in lines)
    return tuple(line[0] for line in lines), driver, mig, exclusive


def parse_topology(printed: str) -> tuple[str, ...]:
    """Read the kinds of links between GPUs from the matrix that `nvidia-smi topo -m` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)  # escape codes underline its heading
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return tuple(sorted({cell for row in rows for cell in row[: len(rows)] if cell != "X"}))


def _driver_cuda() -> str:
    """Return the newest version of CUDA that the driver supports, or nothing if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int()
    return as_version(version.value) if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else ""


def as_version(number: int) -> str:
    """Return CUDA's version for the number that the driver uses: 13.0 for 13000, 12.4 for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


if __name__ == "__main__":
    print(gather().to_json())
