"""Which NCCL the ranks load, and how several ranks share a GPU with it.

Until version 2.29, NCCL needed one GPU per rank. Since 2.30, several ranks can share a GPU if
NCCL_MULTI_RANK_GPU_ENABLE=1 is set (experimental; see "NCCL_MULTI_RANK_GPU_ENABLE" in NCCL's user guide). Each rank
takes a part of the GPU for each communicator. If the GPU is used up, NCCL hangs instead of failing, so the start of
such ranks has a deadline.

Torch's own version call reports the NCCL that it was built with, which need not be the one that is loaded.
"""

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

SHARES_SINCE = (2, 30)
MOST_RANKS_PER_GPU = 4
RANKS_PER_GPU = "RANKS_PER_GPU"  # an environment variable of ranks that share a GPU over NCCL
TORCH_THAT_SHARES = "2.14.1"  # the version of torch in constraints-gpu.txt, which brings NCCL 2.30.7
_CHANNELS = 8  # of all ranks on a GPU together
_MEMORY_SHARE = 0.9  # of the GPU's memory, for the tensors of all ranks; CUDA and NCCL need the rest
_ANSWER_S = 30.0
_SONAME = "libnccl.so.2"
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # of Linux, and of WSL
_ASK_VERSION = """import ctypes, sys
number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(number.value)"""

Version = tuple[int, ...]
UNKNOWN = (0,)
gave_up = ""  # why ranks did not start on shared GPUs, so that this process does not try it again


# -- the library


def version_for_ranks() -> Version:
    """Return the version of the NCCL that ranks load. The caller has imported torch."""
    if path := to_preload():
        return version_of(path)
    if (version := version_in_use()) != UNKNOWN:
        return version
    import torch.cuda.nccl

    # Torch contains its NCCL. Its version may end with a text.
    return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))


def to_preload() -> str:
    """Return the path of the NCCL that must be preloaded so that ranks can share a GPU, or "" if none has to be.

    Torch finds its own NCCL before any other, unless another one is preloaded.
    """
    own = _beside_torch()
    if not own or not any(map(os.path.exists, _DRIVERS)) or "libnccl" in os.environ.get("LD_PRELOAD", ""):
        return ""
    if version_of(own) >= SHARES_SINCE:
        return ""
    others = [str(path) for entry in sys.path if (path := _in_packages(entry)).exists() and str(path) != own]
    return next((path for path in [*others, _SONAME] if version_of(path) >= SHARES_SINCE), "")


def preloading() -> dict[str, str]:
    """Return the environment variable with which a new process loads the NCCL for ranks, or {} if it does so anyway."""
    if not (path := to_preload()):
        return {}
    return {"LD_PRELOAD": os.pathsep.join(filter(None, [path, os.environ.get("LD_PRELOAD")]))}


def _beside_torch() -> str:
    """Return the path of the NCCL that torch finds first, or "" if torch contains it or is missing."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return ""
    path = _in_packages(Path(found.submodule_search_locations[0]).parent)
    return str(path) if path.exists() else ""


def _in_packages(folder: str | Path) -> Path:
    return Path(folder) / "nvidia" / "nccl" / "lib" / _SONAME


def path_for_ranks() -> str:
    """Return the path of the NCCL that ranks load, or "" if torch contains it. The caller has imported torch."""
    preloaded = [path for path in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if "libnccl" in path]
    maps = Path("/proc/self/maps")
    mapped = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    loaded = [line.split(maxsplit=5)[-1] for line in mapped if "libnccl.so" in line]
    return next(iter([*filter(None, [to_preload()]), *preloaded, *loaded]), "")


@functools.cache
def version_of(path: str) -> Version:
    """Return a library's version, or UNKNOWN if it cannot be loaded. This process does not load it."""
    command = [sys.executable, "-S", "-P", "-c", _ASK_VERSION, path]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, encoding="utf-8", errors="replace"
        )
        return decoded(int(answer.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return UNKNOWN


def version_in_use() -> Version:
    """Return the version of the NCCL that this process has loaded. If it has loaded two, the first one is in use."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(_SONAME, mode=os.RTLD_LAZY | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return UNKNOWN
    return decoded(number.value)


def decoded(number: int) -> Version:
    """Return the version that NCCL writes as one number: 23007 is 2.30.7. (Before 2.9, 2804 was 2.8.4.)"""
    base = 10_000 if number >= 10_000 else 1_000
    return number // base, number % base // 100, number % 100


def named(version: Version) -> str:
    return ".".join(map(str, version))


# -- sharing


def most_ranks(gpus: int, version: Version, one_process_per_gpu: bool = False) -> int:
    """Return how many ranks can use a version of NCCL on a machine."""
    shares = version >= SHARES_SINCE and not one_process_per_gpu
    return gpus * (MOST_RANKS_PER_GPU if shares else 1)


def as_version(text: str) -> Version:
    return tuple(int(part) for part in text.split(".")) if text else UNKNOWN


def environment(ranks_per_gpu: int) -> dict[str, str]:
    """Return the environment variables of ranks that share a GPU."""
    channels = str(max(1, _CHANNELS // ranks_per_gpu))
    return {
        RANKS_PER_GPU: str(ranks_per_gpu),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",  # multicast over NVLink cannot be combined with sharing
        "NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", channels),
    }


def memory_fraction() -> float:
    """Return the fraction of its GPU's memory that this rank may use for tensors."""
    ranks_per_gpu = _ranks_per_gpu()
    return 1.0 if ranks_per_gpu == 1 else _MEMORY_SHARE / ranks_per_gpu


def _ranks_per_gpu() -> int:
    return int(os.environ.get(RANKS_PER_GPU, 1))


def where() -> str:
    """Say in a few words where this rank's NCCL communicates, for results that are measured."""
    if (ranks_per_gpu := _ranks_per_gpu()) == 1:
        return "over NCCL"
    how = "at the same time" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else "in turns, so these times do not count"
    return f"over NCCL, where {ranks_per_gpu} ranks use one GPU {how}"
