"""Machines that nobody has at hand, as facts for tests of `make doctor` and `make gpu`."""

from shared.ranks.facts import Facts, Gpu
from shared.ranks.outlook import GIB, MIB

H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB)
L4 = Gpu("NVIDIA L4", 22 * GIB, 22 * GIB)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"


def with_gpus(*gpus: Gpu, **others) -> Facts:
    """Return the facts about a machine that has these GPUs and PyTorch's CUDA build."""
    usual = {"cores": 16, "shm_bytes": 32 * GIB, "torch": "2.13.0+cu130", "cuda_build": "13.0", "nccl": "2.28.9"}
    driver = {"driver": "580.65", "driver_cuda": "13.0", "listed": tuple(gpu.name for gpu in gpus), "gpus": gpus}
    return Facts(**usual | driver | others)


CPU_ONLY = Facts(cores=2, shm_bytes=16 * GIB, torch="2.13.0+cpu", problem="Torch not compiled with CUDA enabled")
CUDA_BUILD_WITHOUT_GPU = with_gpus(driver="", driver_cuda="", problem=NO_DRIVER)
CPU_BUILD_WITH_GPU = with_gpus(torch="2.13.0+cpu", cuda_build="", nccl="", listed=("NVIDIA L4",), problem="no CUDA")
OLD_DRIVER = with_gpus(driver="550.54", driver_cuda="12.4", listed=("NVIDIA L4",), problem=TOO_OLD)
HIDDEN = with_gpus(visible="", listed=("NVIDIA L4", "NVIDIA L4"), problem="No CUDA GPUs are available")
ONE_GPU = with_gpus(H200)
ONE_GPU_SHARED = with_gpus(H200, nccl="2.30.7", nccl_path="/venv/libnccl.so.2", mps=True)
ONE_GPU_IN_TURNS = with_gpus(L4, nccl="2.30.7")
TWO_GPUS_SHARED = with_gpus(L4, L4, nccl="2.31.2", mps=True, links=("PHB",))
TWO_WITHOUT_PEER_ACCESS = with_gpus(L4, L4, unconnected=((0, 1),), links=("PHB",))
EIGHT_GPUS = with_gpus(*[H200] * 8, cores=192, links=("NV18",))
SMALL_SHM = Facts(cores=4, shm_bytes=64 * MIB, torch="2.13.0+cpu")
SMALL_SHM_FOUR_GPUS = with_gpus(*[H200] * 4, shm_bytes=64 * MIB, links=("NV18",))
MIG = with_gpus(Gpu("NVIDIA H200 MIG 1g.18gb", 16 * GIB, 16 * GIB), listed=("NVIDIA H200",), mig=True)
BUSY = with_gpus(H200, Gpu("NVIDIA H200", 140 * GIB, 5 * GIB), H200, links=("NV18",))
MIG_SHARED = with_gpus(
    Gpu("NVIDIA H200 MIG 1g.18gb", 16 * GIB, 16 * GIB), listed=("NVIDIA H200",), mig=True, nccl="2.30.7", mps=True
)
EXCLUSIVE = with_gpus(L4, exclusive=True)
EXCLUSIVE_WITH_MPS = with_gpus(L4, exclusive=True, nccl="2.30.7", mps=True)
EXCLUSIVE_WITHOUT_MPS = with_gpus(L4, exclusive=True, nccl="2.30.7")
BROKEN = with_gpus(L4, Gpu("NVIDIA L4", 22 * GIB, 22 * GIB, "CUDA error: uncorrectable ECC error"), links=("PHB",))
NO_ANSWER = Facts(cores=4, shm_bytes=GIB, problem="PyTorch and the GPU's driver gave no answer within 120 s")

ALL = {name.lower(): machine for name, machine in dict(globals()).items() if isinstance(machine, Facts)}
