"""Sentences about what will and will not work on a machine, derived from facts about it.

All functions are pure. They take `Facts` (see `facts.py`), so a test can ask about a machine that nobody has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.ranks import mps, nccl
from shared.ranks.facts import Facts

GIB, MIB = 2**30, 2**20
SIZES = (1, 2, 4)  # the world sizes in lessons and labs
LITTLE_SHM_BYTES = 512 * MIB
IN_USE_BYTES = 2 * GIB  # CUDA itself takes less
IN_USE_SHARE = 0.1
SIMULATE = '`ranks.start(4, backend="gloo:cpu", simulate="nccl")`'
_ALLOW_SHARING = "`sudo nvidia-smi -c DEFAULT` changes that."
OVERRIDES = ("RANKS_BACKEND", "RANKS_SIMULATE")  # environment variables (see devices.py)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    found: str
    advice: str = ""  # what to do; empty if all is well
    required: bool = False  # whether the course needs this in order to run

    @property
    def blocks(self) -> bool:
        """Whether the course cannot run until the advice is followed."""
        return self.required and bool(self.advice)


# -- what was found


def findings(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for everything about GPUs that is worth a line."""
    yield _gpus(facts)
    if facts.driver or facts.driver_cuda:
        yield _driver(facts)
    yield from _memory(facts)
    if facts.mig:
        others = "share it" if shares(facts) else "use the CPU"
        yield Finding("MIG", "enabled", f"Nothing to do: 1 rank uses an instance, and more ranks {others}.")
    if facts.exclusive and facts.gpus:
        yield Finding("compute mode", "exclusive", "" if facts.mps else f"Ranks cannot share a GPU. {_ALLOW_SHARING}")
    if len(facts.gpus) > 1:
        yield _peers(facts)
    yield _nccl(facts)
    if facts.gpus and facts.nccl:
        yield _sharing(facts)
    if facts.shm_bytes is not None:
        yield _shm(facts, facts.shm_bytes)


def _gpus(facts: Facts) -> Finding:
    if facts.gpus:
        names = sorted({f"{gpu.name} ({_gib(gpu.total_bytes)})" for gpu in facts.gpus})
        broken = [index for index, gpu in enumerate(facts.gpus) if gpu.problem]
        advice = f"{_name(broken)} failed a small computation: {facts.gpus[broken[0]].problem}" if broken else ""
        return Finding("GPUs", f"{len(facts.gpus)} × {', '.join(names)}", advice)
    if not facts.torch:
        return Finding("GPUs", "unknown", _as_sentence(facts.problem))
    if not facts.listed:
        return Finding("GPUs", "none", "Nothing to do: the ranks use the CPU.")
    found = f"{len(facts.listed)} × {', '.join(sorted(set(facts.listed)))}, but PyTorch sees none"
    if not facts.cuda_build:
        advice = "Install PyTorch's CUDA build: this one is for the CPU only."
    elif driver_is_too_old(facts):
        advice = "Update the driver, or install a build of PyTorch for an older CUDA."
    elif facts.visible is not None:
        advice = f"Unset CUDA_VISIBLE_DEVICES, which is {facts.visible!r}."
    else:
        advice = _as_sentence(facts.problem or "PyTorch gives no reason")
    return Finding("GPUs", found, advice)


def _driver(facts: Facts) -> Finding:
    supports = f", supports CUDA {facts.driver_cuda}" if facts.driver_cuda else ""
    advice = ""
    if driver_is_too_old(facts):
        advice = f"PyTorch was built for CUDA {facts.cuda_build}, which needs a newer driver."
    return Finding("NVIDIA driver", f"{facts.driver or 'unknown version'}{supports}", advice)


def driver_is_too_old(facts: Facts) -> bool:
    """Return whether PyTorch sees no GPU because the driver is older than its build of CUDA."""
    if facts.gpus or not facts.cuda_build or not facts.driver_cuda:
        return False
    return "too old" in facts.problem or _version(facts.driver_cuda) < _version(facts.cuda_build)[:1]


def _memory(facts: Facts) -> Iterator[Finding]:
    """Yield a finding if other programs use some of the GPUs' memory."""
    if busy := in_use(facts):
        sizes = ", ".join(f"{_gib(facts.gpus[i].free_bytes)} of {_gib(facts.gpus[i].total_bytes)} free" for i in busy)
        advice = "End the programs that `nvidia-smi` lists."
        if free := [str(index) for index in range(len(facts.gpus)) if index not in busy]:
            advice = f"Use only the other GPUs: CUDA_VISIBLE_DEVICES={','.join(free)}"
        yield Finding("GPU memory", f"{_name(busy)}: {sizes}", advice)


def in_use(facts: Facts) -> list[int]:
    """Return the indices of the GPUs on which other programs use much of the memory."""
    taken = [gpu.total_bytes - gpu.free_bytes for gpu in facts.gpus]
    return [i for i, gpu in enumerate(facts.gpus) if taken[i] > max(IN_USE_BYTES, IN_USE_SHARE * gpu.total_bytes)]


def _peers(facts: Facts) -> Finding:
    links = ", ".join(f"{'NVLink' if kind.startswith('NV') else 'PCIe'} ({kind})" for kind in facts.links) or "unknown"
    if not facts.unconnected:
        return Finding("GPU links", links)
    pairs = len(facts.gpus) * (len(facts.gpus) - 1) // 2
    some = "the GPUs" if pairs == 1 else f"{len(facts.unconnected)} of {pairs} pairs"
    found = f"{links}, and {some} cannot read each other's memory"
    return Finding("GPU links", found, "Nothing to do: NCCL sends through the host's memory instead.")


def _nccl(facts: Facts) -> Finding:
    if not facts.torch:
        return Finding("NCCL", "unknown", "PyTorch could not be queried, for the same reason.")
    if facts.nccl:
        where = f" in {facts.nccl_path}" if facts.nccl_path else " in PyTorch"
        return Finding("NCCL", f"{facts.nccl}{where}", _newer_nccl(facts))
    advice = "Install PyTorch's CUDA build." if facts.gpus or facts.listed else "Nothing to do: only GPUs need it."
    return Finding("NCCL", "not in this build of PyTorch", advice)


def _newer_nccl(facts: Facts) -> str:
    """Return the command that installs an NCCL with which ranks can share a GPU, or "" if this one is new enough."""
    if not facts.gpus or nccl.as_version(facts.nccl) >= nccl.SHARES_SINCE:
        return ""
    return f"`make lab COURSE_TORCH={nccl.TORCH_THAT_SHARES}` installs one with which ranks can share a GPU."


def _sharing(facts: Facts) -> Finding:
    """Say how many ranks can use NCCL on this machine's GPUs."""
    most = most_ranks(facts)
    found = f"up to {most}" if most > 1 else "1"
    if not shares(facts):
        return Finding("ranks on NCCL", f"{found}, with one GPU per rank", "")
    if facts.mps:
        return Finding("ranks on NCCL", f"{found}, sharing GPUs through MPS")
    advice = f"Their times do not count. With `{mps.PROGRAM}`, a part of NVIDIA's driver, they would."
    return Finding("ranks on NCCL", f"{found}, sharing GPUs in turns", advice)


def _shm(facts: Facts, shm_bytes: int) -> Finding:
    found = _mib(shm_bytes)
    if shm_bytes >= LITTLE_SHM_BYTES:
        return Finding("/dev/shm", found)
    if most_ranks(facts) > 1:
        return Finding("/dev/shm", found, "Start the container with `docker run --shm-size=1g`.")
    return Finding("/dev/shm", found, "Nothing to do: gloo does not use it.")


# -- what that means


def outlook(facts: Facts) -> list[str]:
    """Return sentences on what will and what will not work on this machine."""
    if facts.torch:
        return [*_runs(facts), *_limits(facts)]
    return [
        f"{_as_sentence(facts.problem)} So we do not know what will work on GPUs here. With RANKS_BACKEND=gloo:cpu in "
        "the environment, ranks use only the CPU."
    ]


def overridden(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each environment variable that changes which backend and devices ranks use."""
    names = [name for name in OVERRIDES if environment.get(name)]
    return [f"{name}={environment[name]} is set. It takes precedence over what is said above." for name in names]


def shares(facts: Facts) -> bool:
    """Return whether several ranks can share a GPU over NCCL."""
    return most_ranks(facts) > len(facts.gpus)


def most_ranks(facts: Facts) -> int:
    """Return how many ranks can use NCCL."""
    one_process_per_gpu = facts.exclusive and not facts.mps
    return nccl.most_ranks(len(facts.gpus), nccl.as_version(facts.nccl), one_process_per_gpu) if facts.nccl else 0


def uses_nccl(facts: Facts, world_size: int) -> bool:
    """Return whether `devices.place` chooses NCCL for this many ranks. Otherwise it chooses gloo on the CPU."""
    return world_size <= most_ranks(facts)


def _runs(facts: Facts) -> Iterator[str]:
    """Yield how ranks will run, and what can be measured there."""
    sizes = sorted({*SIZES, max(SIZES[-1], len(facts.gpus))})
    with_nccl = [size for size in sizes if uses_nccl(facts, size)]
    on_cpu = [size for size in sizes if size > 1 and size not in with_nccl]
    own = [size for size in with_nccl if size <= len(facts.gpus)]
    shared = [size for size in with_nccl if size not in own]
    if own == [1]:
        yield "1 rank will use NCCL. It has no other rank to send to, so its times say nothing about communication."
    elif own:
        yield f"{_ranks(own)} will use NCCL, with one GPU per rank. You can trust values, bytes, memory and times."
    if shared:
        yield _on_shared_gpus(facts, shared)
    if on_cpu:
        reason = _why_not_nccl(facts) if facts.gpus and facts.nccl else ""
        yield (
            f"{_ranks(on_cpu)} will run on the CPU with gloo, the backend for CPUs{reason}. You can trust values, "
            "bytes and memory."
        )
        few = f", and 4 ranks share {_cores(facts.cores)} here" if facts.cores < SIZES[-1] else ""
        yield f"Times on the CPU say little about times on GPUs{few}: compare them only within one run."
        if facts.gpus and not shares(facts):
            yield _on_request(facts)


def _on_shared_gpus(facts: Facts, sizes: list[int]) -> str:
    gpus = "the GPU" if len(facts.gpus) == 1 else "GPUs"
    if facts.mps:
        return f"{_ranks(sizes)} will share {gpus} over NCCL. Compare their times only within one run."
    return (
        f"{_ranks(sizes)} will share {gpus} over NCCL. You can trust values, bytes and memory there, but no times, "
        "because without MPS, ranks use a GPU in turns."
    )


def _why_not_nccl(facts: Facts) -> str:
    if shares(facts):
        return f", because at most {nccl.MOST_RANKS_PER_GPU} ranks can share a GPU"
    if nccl.as_version(facts.nccl) >= nccl.SHARES_SINCE:
        return ", because the compute mode lets only one process at a time use a GPU"
    return f", because NCCL before {nccl.named(nccl.SHARES_SINCE)} needs one GPU per rank"


def _on_request(facts: Facts) -> str:
    """Say whether ranks can share the GPUs over gloo, which they do only on request."""
    if facts.exclusive:
        return (
            "Ranks cannot share a GPU here, because the compute mode lets only one process at a time use a GPU. "
            f"{_ALLOW_SHARING}"
        )
    gpus = "the GPU" if len(facts.gpus) == 1 else "the GPUs"
    return (
        f'With `ranks.start(4, backend="gloo")`, ranks share {gpus}. Only collectives work there, not send and '
        "receive. Their times cannot be trusted, because gloo copies every tensor through the CPU."
    )


def _limits(facts: Facts) -> Iterator[str]:
    """Yield what will not work, and what to do about it."""
    if not facts.gpus:
        yield f"NCCL, the backend for GPUs, will not run here. {SIMULATE} reports code that would fail on it."
    elif not facts.nccl:
        yield "No rank can use NCCL, the backend for GPUs, because this build of PyTorch does not contain it."
    elif facts.mig and len(facts.gpus) == 1 and not shares(facts):
        yield (
            "A process can use only one MIG instance, and this NCCL cannot connect instances. So 2 or more ranks "
            "cannot use NCCL until an administrator disables MIG (`sudo nvidia-smi -mig 0`)."
        )
    yield from _no_gpu_seen(facts)
    yield from _obstacles(facts)


def _no_gpu_seen(facts: Facts) -> Iterator[str]:
    """Yield why PyTorch does not see the GPUs that are there, or why none are expected."""
    if facts.gpus:
        return
    if not facts.listed:
        if facts.cuda_build:
            yield (
                f"PyTorch's build for CUDA {facts.cuda_build} works without a GPU too. The CPU build is smaller, and "
                "docs/running.md explains how to install it."
            )
        return
    there = "a GPU" if len(facts.listed) == 1 else f"{len(facts.listed)} GPUs"
    if not facts.cuda_build:
        yield f"This machine has {there}, but PyTorch's CPU build is installed. The CUDA build would use {_it(facts)}."
    elif driver_is_too_old(facts):
        yield (
            f"This machine has {there}, but PyTorch cannot use {_it(facts)}: it was built for CUDA {facts.cuda_build}, "
            f"and driver {facts.driver or 'here'} supports CUDA up to {facts.driver_cuda}."
        )
    elif facts.visible is not None:
        yield f"This machine has {there}, but CUDA_VISIBLE_DEVICES={facts.visible!r} hides {_it(facts)}."
    else:
        yield f"This machine has {there}, but PyTorch cannot use {_it(facts)}. {_as_sentence(facts.problem)}".rstrip()


def _obstacles(facts: Facts) -> Iterator[str]:
    """Yield what will make the GPUs that PyTorch sees slow, or make ranks on them fail."""
    if broken := [index for index, gpu in enumerate(facts.gpus) if gpu.problem]:
        usable = ",".join(str(index) for index in range(len(facts.gpus)) if index not in broken)
        remedy = f"Leave it out with CUDA_VISIBLE_DEVICES={usable}" if usable else "Use RANKS_BACKEND=gloo:cpu"
        yield f"Ranks on {_name(broken)} will fail: {facts.gpus[broken[0]].problem.rstrip('.')}. {remedy}."
    if busy := in_use(facts):
        yield f"Other programs use {_name(busy)}. Large models may not fit there, and times there cannot be trusted."
    if len(facts.gpus) > 1 and facts.unconnected:
        which = "The GPUs" if len(facts.gpus) == 2 else "Some GPUs"
        yield (
            f"{which} cannot read each other's memory, so NCCL sends through the host's memory. Its times are real, "
            "but much longer than on GPUs with NVLink. If NCCL hangs at the start, set NCCL_P2P_DISABLE=1."
        )
    if facts.shm_bytes is not None and facts.shm_bytes < LITTLE_SHM_BYTES:
        yield from _little_shm(facts, _mib(facts.shm_bytes))


def _little_shm(facts: Facts, size: str) -> Iterator[str]:
    if most_ranks(facts) > 1:
        yield (
            f"/dev/shm has only {size}. NCCL keeps about 10 MB there for each connection between ranks, and fails with "
            '"No space left on device" or "unhandled system error" when it is full. Docker gives a container 64 MiB '
            "unless you start it with `--shm-size=1g`."
        )
    else:
        yield (
            f"/dev/shm has only {size}, which is enough for the course. If your own code uses a DataLoader with "
            'workers, it may crash with "Bus error". Docker\'s `--shm-size=1g` prevents that.'
        )


# -- words


def _ranks(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"{listed} rank" + ("s" if sizes != [1] else "")


def _name(indices: list[int]) -> str:
    *most, last = map(str, indices)
    return f"GPUs {', '.join(most)} and {last}" if most else f"GPU {last}"


def _cores(count: int) -> str:
    return f"{count} core" + ("s" if count != 1 else "")


def _it(facts: Facts) -> str:
    return "it" if len(facts.listed) == 1 else "them"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.0f} GiB"


def _mib(size_bytes: int) -> str:
    return _gib(size_bytes) if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
