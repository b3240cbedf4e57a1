"""The functions that run inside a rank: join a process group, run a cell, call a function.

The kernel sends these functions to the ranks (see `rankset.py`). Students never call them.
"""

import ast
import contextlib
import io
import logging
import os
import pickle
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from IPython import get_ipython
from IPython.display import display
from IPython.utils.capture import capture_output

from shared import hosts
from shared.deadlines import scaled
from shared.ranks import doctor, folders, nccl
from shared.ranks.output import Output, ended, log
from shared.ranks.pickles import CpuPickler
from shared.wire import handles, instrumentation, mismatch, sizes

GROUP_TIMEOUT = timedelta(hours=1)  # a cell's own deadline is shorter; this one applies if the kernel is gone
_LEAVES_WITHIN_S = scaled(20.0)  # leaving an NCCL group with nothing in flight takes about a second
# These switch off what NCCL does by itself when a collective fails or takes long. The kernel has its own deadlines and
# explains a hang. NCCL would end the process, or keep it waiting for a dump that nobody reads.
NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # the second is its old name


@dataclass
class Outcome:
    """The result of one cell or one call on one rank."""

    rank: int
    value: object = None
    text: str = ""
    displays: list = field(default_factory=list)  # mime bundles: figures, tables
    error: dict | None = None  # see doctor.describe_error
    ended_s: float = 0.0

    def __getstate__(self) -> dict:
        packed = io.BytesIO()
        CpuPickler(packed, pickle.HIGHEST_PROTOCOL).dump(self.value)
        return self.__dict__ | {"value": packed.getvalue()}

    def __setstate__(self, state: dict) -> None:
        # Calls `pickle.loads` by this name, because a judge of others' code replaces it with one that loads only data.
        self.__dict__.update(state, value=pickle.loads(state["value"]))


@dataclass
class _Here:
    """What this process knows about itself.

    `rank` is its rank in the whole set. `rank` and `world_size` in the student's namespace belong to the current
    process group, which may be smaller.
    """

    rank: int = -1
    store: Any = None  # the ranks' TCPStore, once they have met
    device: str = "cpu"


here = _Here()


def initialize_rank(rank: int, device: str, store_address: tuple[str, int], sizes_path: str) -> None:
    """Set this process up once: connect to the kernel's store, select a device and a host, start the doctor."""
    here.rank, here.device = rank, device
    host, port = store_address
    here.store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    warnings.filterwarnings("ignore", "To exit: use")  # IPython's comment on sys.exit; the doctor reports it instead
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # torch 2.14 logs advice on DTensor
    torch.set_num_threads(1)  # one thread per rank, so that all ranks compute at comparable speed
    if device.startswith("cuda"):
        prepare_nccl()
        torch.cuda.set_device(device)
        if (fraction := nccl.memory_fraction()) < 1:
            torch.cuda.set_per_process_memory_fraction(fraction)
    else:
        # Otherwise, torch would initialize CUDA in Adam's first step, and fully_shard would choose a GPU by default.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    log.attach()
    instrumentation.install()
    instrumentation.recorder = sizes.Recorder(sizes_path)
    handles.install()
    doctors_store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    use_loopback()
    hosts.enter()
    doctor.listen(doctors_store, rank)
    if folder := os.environ.pop("RANKS_FOLDER", ""):  # There is none in a sandbox.
        with contextlib.suppress(OSError):  # It may have been removed.
            os.chdir(folder)
            sys.path.append("")
            folders.search_last()


def use_loopback() -> None:
    """Let the ranks of this machine reach each other over loopback, whatever a cluster's environment says.

    Without an interface's name, gloo resolves the machine's own name for each group, which takes seconds or fails where
    no server answers. NCCL looks for an interface by itself.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    os.environ.pop("NCCL_SOCKET_IFNAME", None)


def prepare_nccl() -> None:
    """Set the environment that NCCL reads when this process forms its first group."""
    os.environ.update(NCCL_ENVIRONMENT)
    for name in BLOCKING_WAIT:  # with it, every wait() would stop the host until the GPU is done
        os.environ.pop(name, None)


def join(
    generation: int,
    members: list[int],
    backend: str,
    detect_mismatch: bool,
    simulate: str | None,
    tries_first: bool = False,
) -> None:
    """Leave the process group of the last generation, and form a new one of `members`.

    A broken group cannot be repaired, only replaced. Each generation has its own keys in the store.

    Args:
        simulate: "nccl" to simulate NCCL over gloo.
        tries_first: Whether to run a collective at once. On a shared GPU, NCCL may hang in the first one, and if it
            hangs here, the kernel can still choose another placement.

    Raises:
        RuntimeError: If this rank cannot leave or join. Its process must then be replaced.
    """
    leave()
    if here.rank not in members:
        return
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"generation{generation}", here.store),
        rank=members.index(here.rank),
        world_size=len(members),
        timeout=GROUP_TIMEOUT,
        # NCCL then creates the communicator of all ranks here. Without device_id, the first send to each rank would
        # create one for these two ranks, and wait for the other one in a way that nothing can interrupt.
        device_id=torch.device(here.device) if dist.Backend.NCCL in backend else None,
    )
    if dist.Backend.NCCL in backend:
        list_ranks(dist.group.WORLD)  # pyright: ignore[reportArgumentType] (it has just been formed)
    if tries_first:
        _try_a_collective()
    mismatch.watch() if detect_mismatch else mismatch.ignore()
    instrumentation.reset()
    handles.reset()
    instrumentation.simulate_nccl(simulate == "nccl")
    _define_names(dist.get_rank(), dist.get_world_size())


def _try_a_collective() -> None:
    """All-reduce a 1 from every rank, and wait for the sum.

    Raises:
        RuntimeError: If the sum is not the number of ranks.
    """
    total = torch.ones(1, device=here.device)
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise RuntimeError(f"an all-reduce of {dist.get_world_size()} ones returned {total.item():g}")


def list_ranks(group: dist.ProcessGroup) -> None:
    """Tell each backend of the group of all ranks which ranks it has, because torch 2.13 does not.

    torch assumes that they are 0 to N − 1, but only in the first group that a process forms. In a later generation, a
    mesh with two dimensions would split its groups from an empty list, and crash every rank with a segmentation fault.
    Source: pull request 192109 of PyTorch.
    """
    for device in group._device_types:
        group._get_backend(device).options.global_ranks_in_group = list(range(group.size()))


def leave() -> None:
    """Leave the process group, if there is one.

    Raises:
        RuntimeError: If NCCL does not end its communicators.
    """
    instrumentation.simulate_nccl(False)
    if dist.is_initialized():
        # An operation on which nobody called wait() would block this rank here forever.
        if not doctor.abort_communication(_LEAVES_WITHIN_S):
            raise RuntimeError(f"NCCL has not ended its communicators within {_LEAVES_WITHIN_S:g} s")
        with contextlib.suppress(RuntimeError):  # destroying a broken group may raise
            dist.destroy_process_group()


def _define_names(rank: int, world_size: int) -> None:
    """Put the names that every cell can use into the student's namespace."""
    shell = get_ipython()
    if shell is not None:
        names = {"torch": torch, "dist": dist, "rank": rank, "world_size": world_size}
        shell.user_ns.update(names, device=torch.device(here.device))


def run_cell(source: str) -> Outcome:
    """Run a cell's source in this rank's namespace, as the notebook would."""

    def body():
        shell = get_ipython()
        result = _execute(source)
        if result is not None and not shell.displayhook.semicolon_at_end_of_expression(source):
            display(result)  # the value of the last line

    return _watched(body)


def _execute(source: str):
    """Run a cell's source in this rank's namespace. Returns the value of its last line, or raises its error."""
    shell = get_ipython()
    # Rendering a traceback would take IPython a second, and the errors of `%run` are reported only by these methods.
    errors: list = []
    shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: errors.append(sys.exc_info()[1])
    result = shell.run_cell(source, store_history=False)
    error = result.error_before_exec or result.error_in_exec or next(iter(errors), None)
    if error is not None:
        raise error
    return result.result


class _Only(ast.NodeTransformer):
    """Removes all statements of a cell except those with these indices."""

    def __init__(self, indices: list[int]):
        self.indices = indices

    def visit_Module(self, module: ast.Module) -> ast.Module:
        module.body = [module.body[index] for index in self.indices]
        return module


def define(cells: list[tuple[str, list[int]]]) -> Outcome:
    """Run some statements of each cell, given by their indices. Their line numbers stay those of the cell.

    A cell that fails is tried again after the others, because a definition may need one from a later cell.

    Returns:
        An Outcome with the messages of the errors that remain, by the index of the cell.
    """

    def body() -> dict[int, str]:
        left, errors = list(range(len(cells))), {}
        while left:
            errors = {index: why for index in left if (why := _error_in(*cells[index]))}
            if len(errors) == len(left):
                break
            left = list(errors)
        return errors

    return _watched(body)


def _error_in(source: str, indices: list[int]) -> str:
    """Run some statements of a cell. Returns the message of their error, or ""."""
    transformers = get_ipython().ast_transformers
    transformers.append(_Only(indices))
    try:
        _execute(source)
    except Exception as error:
        return doctor.describe_error(error)["message"]
    finally:
        transformers.pop()
    return ""


def call(fn, args: tuple, kwargs: dict) -> Outcome:
    """Call fn(*args, **kwargs) on this rank."""
    return _watched(lambda: fn(*args, **kwargs))


def lookup(name: str):
    """Return the value of a variable in this rank's namespace."""
    namespace = get_ipython().user_ns
    # The doctor names the ranks. A message without them is the same on all ranks, so it is shown once.
    if name not in namespace:
        raise NameError(f"there is no variable {name!r}: define it in a %%ranks cell first")
    return namespace[name]


def _watched(body) -> Outcome:
    """Run body with its output captured, so that it can be interrupted and the doctor can see where it is."""
    outcome = Outcome(here.rank)
    output = Output()
    log.cell_begins()
    doctor.work_begins(output)
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            capture_output(stdout=False, stderr=False, display=True) as output.captured,
        ):
            value = body()
            doctor.cell_synchronizes()
            instrumentation.synchronize()
        if doctor.was_cut():
            raise RuntimeError(f"{doctor.CUT}, so what it computed afterwards may be wrong")
        outcome.value = value
    except BaseException as error:  # including SystemExit and KeyboardInterrupt: a rank outlives its cells
        outcome.error = doctor.describe_error(error)
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        doctor.work_ends()
    outcome.text = output.getvalue()
    if outside_python := log.cell_ends():
        outcome.text = ended(outcome.text) + outside_python
    for display_data in output.displays():
        _add_display(outcome, display_data)
    outcome.ended_s = time.time()
    return outcome


def _add_display(outcome: Outcome, bundle: dict) -> None:
    """Append plain text to the printed text, so that equal ranks merge. Figures and tables are kept as they are."""
    if set(bundle) <= {"text/plain"}:
        outcome.text += bundle.get("text/plain", "") + "\n"
    else:
        outcome.displays.append(bundle)
