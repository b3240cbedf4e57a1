"""Call a function of chapter 01 on a rank, and record its result, its messages and waits, and the memory it used.

As soon as a call returns, its argument is overwritten, so a call that returns too early gives wrong results.
"""

import contextlib
import inspect
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shared.checks.collectives.mixture import SPOILT, UNTOUCHED
from shared.checks.engine.candidate import device_here
from shared.checks.engine.late_ranks import launches_unasked
from shared.checks.engine.steps import Event, EventLog
from shared.checks.engine.subgroups import staying_inside
from shared.deadlines import scaled
from shared.wire import completion, instrumentation

# -- the functions of chapter 01 by kind


STEPS = ("ring_step", "ring_step_in_turns")
GIVE_BACK = ("ring_reduce_scatter", "ring_all_gather", "direct_reduce_scatter")
IN_PLACE = ("ring_all_reduce", "tree_broadcast")
COLLECTIVES = (*GIVE_BACK, *IN_PLACE)
RINGS = ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce")


LATE_S = scaled(0.2)  # how late one rank is in the checks named "waits"
TRANSPOSED, STRIDED = "transposed", "every other element of a larger tensor"
SLICED = "a slice from the middle of a larger tensor"
CALLED_WITH = "(Your function was called with"  # begins the note on an error
MARGIN = 3  # the number of elements on each side of that slice


@dataclass(frozen=True)
class Setting:
    """How a function is called."""

    members: tuple[int, ...] | None = None  # a group of these ranks; None: all ranks, without a group argument
    layout: str = ""  # the argument's memory layout: TRANSPOSED, STRIDED, SLICED, or "" for contiguous
    records: bool = False  # whether the argument requires a gradient
    late: int | None = None  # this rank makes the call LATE_S after the others
    takes_late: tuple[int, int] | None = None  # (rank, n): the rank waits LATE_S before it launches its n-th receive
    src: int | None = None  # the source of a broadcast

    def ranks(self, world_size: int) -> tuple[int, ...]:
        return self.members or tuple(range(world_size))


@dataclass
class Called:
    """One call, and the tensors after it. The fields after `tensor` are those of a collective."""

    calls: list[instrumentation.Call] = field(init=False)
    events: list[Event] = field(init=False)
    took_s: float = field(init=False)
    switched_off: bool = field(init=False)  # whether autograd is disabled after the call
    argument: torch.Tensor = field(init=False)
    tensor: torch.Tensor | None = None  # the result; in a step, the tensor that is received into
    kind: str = ""  # the result's type
    refused: str | None = None  # the message of a ValueError
    written: bool = False  # whether anything was written to the argument, even if its values are the same
    torn: bool = False  # whether anything was written beside the argument
    records: bool = False  # whether the result requires a gradient, or is an inference tensor
    shares_with: str | None = None  # what else is in the result's memory
    holds_bytes: int = 0  # of the result's memory
    changed_later: bool = False  # whether any result has changed after its call


def probe_step(step, setting: Setting, *mine: torch.Tensor) -> list[Called]:
    """Send each tensor to the right, into a tensor that holds other values."""
    options, takes_part = _join(setting)
    tries = []
    for values in mine:
        outgoing = values.to(device_here(), copy=True)
        incoming = torch.full_like(outgoing, UNTOUCHED)
        _come(setting)
        with _noting(values), _slow(setting), staying_inside(setting.members), _recorded() as found:
            if takes_part:
                step(outgoing, incoming, **options)
        found.tensor, found.argument = incoming.cpu().clone(), outgoing.cpu().clone()
        tries.append(found)
        outgoing.fill_(SPOILT)
        dist.barrier()  # no rank may free its tensors while a message is still in flight
    return tries


def probe_collective(collective, setting: Setting, *mine: torch.Tensor) -> list[Called]:
    """Call a collective with each tensor. As soon as a call returns, its argument and its result are overwritten."""
    options, takes_part = _join(setting)
    tries, storages, results, arguments = [], {}, [], []
    for values in mine:
        memory, argument = _laid_out(values.to(device_here(), copy=True), setting.layout)
        holds = argument.detach()  # the memory of the argument, even if its .data is replaced
        argument.requires_grad_(setting.records)
        version, result = argument._version, None
        _come(setting)
        with _noting(values), _slow(setting), staying_inside(setting.members), _recorded() as found:
            try:
                if takes_part:
                    result = collective(argument, **options)
            except ValueError as error:
                if argument.is_contiguous():
                    raise
                found.refused = str(error)
        found.kind = type(result).__name__
        if argument.shape != holds.shape:  # resized in place
            holds = argument.detach()
        found.argument, found.written = holds.cpu().clone(), argument._version != version
        found.torn = _torn(memory, setting.layout)
        if isinstance(result, torch.Tensor):
            found.tensor = result.detach().cpu().clone()
            found.records = result.requires_grad or result.is_inference()
            storage = result.untyped_storage()
            found.shares_with = storages.get(storage.data_ptr()) if result.numel() else None
            if result.numel() and storage.data_ptr() == memory.untyped_storage().data_ptr():
                found.shares_with = "argument"
            storages[storage.data_ptr()] = "last result"
            found.holds_bytes = storage.nbytes()
            with torch.inference_mode(result.is_inference()):
                results.append(result.detach().fill_(SPOILT))
        arguments.append(holds.fill_(SPOILT))
        tries.append(found)
        dist.barrier()
    for found in tries:
        found.changed_later = any(bool((result != SPOILT).any()) for result in results)
    for used in (*results, *arguments):  # a later call may allocate this memory and return it without writing to it
        with torch.inference_mode(used.is_inference()):
            used.fill_(UNTOUCHED)
    return tries


def probe_gather_around(all_gather, numels: list[int], own: torch.Tensor) -> torch.Tensor | None:
    """Call the gather_around() that is defined next to the student's all-gather, with chunks of these lengths.

    Returns:
        The memory of all chunks, or None if there is no function with this name.
    """
    gather_around = getattr(inspect.unwrap(all_gather), "__globals__", {}).get("gather_around")
    if gather_around is None:
        return None
    flat = torch.full((sum(numels),), UNTOUCHED, dtype=own.dtype, device=device_here())
    chunks = list(flat.split(numels))
    chunks[dist.get_rank()].copy_(own)
    gather_around(chunks)
    instrumentation.synchronize()
    dist.barrier()
    return flat.cpu()


@contextlib.contextmanager
def _recorded():
    """Record one call: what it launched and waited for, how long it took, and whether it disabled autograd."""
    found, log = Called(), EventLog()
    began_s = time.perf_counter()
    try:
        with completion.watching(log), instrumentation.listening(log.launched) as calls:
            yield found
            instrumentation.synchronize()  # over NCCL, a call returns before its messages are done
    finally:
        found.calls, found.events, found.took_s = calls, log.events, time.perf_counter() - began_s
        found.switched_off = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def _slow(setting: Setting):
    """Let one rank receive one of its messages late. A sender that does not wait returns long before that.

    If a rank makes the whole call late, the launches of the others must not wait for it.
    """
    slow_rank, number = setting.takes_late or (None, 0)
    launched = []

    def delay(call: instrumentation.Call) -> None:
        if call.op == "recv":
            launched.append(call)
            if len(launched) == number:
                time.sleep(LATE_S)

    hooks = [delay] if dist.get_rank() == slow_rank else []
    instrumentation.before_launch.extend(hooks)
    try:
        with launches_unasked() if setting.late is not None else contextlib.nullcontext():
            yield
    finally:
        for hook in hooks:
            instrumentation.before_launch.remove(hook)


@contextlib.contextmanager
def _noting(values: torch.Tensor):
    """Add a note to an error that says with which of several tensors the function was called."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{CALLED_WITH} {named(values)}.)")
        raise


def _join(setting: Setting) -> tuple[dict, bool]:
    """Return the keyword arguments of the call, and whether this rank makes it."""
    options = {} if setting.src is None else {"src": setting.src}
    if setting.members is None:
        return options, True
    group = dist.new_group(list(setting.members))
    return options | {"group": group}, dist.get_rank() in setting.members


def _come(setting: Setting) -> None:
    """Let all ranks start at the same time, or one of them late."""
    dist.barrier()
    if dist.get_rank() == setting.late:
        time.sleep(LATE_S)


def _laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate memory and return it, and a view of it with this layout that holds the values."""
    if layout == TRANSPOSED:
        memory = values.t().contiguous()
        return memory, memory.t()
    if layout in (STRIDED, SLICED):
        memory = torch.full((2 * values.numel() + 2 * MARGIN,), UNTOUCHED, dtype=values.dtype, device=values.device)
        view = memory[_places(layout, values.numel())]
        view.copy_(values)
        return memory, view
    return values, values[...]  # a view, so that a result that is not written in place is noticed


def _places(layout: str, elements: int) -> slice:
    return slice(0, 2 * elements, 2) if layout == STRIDED else slice(MARGIN, MARGIN + elements)


def _torn(memory: torch.Tensor, layout: str) -> bool:
    """Return whether anything was written outside the argument."""
    if layout not in (STRIDED, SLICED):
        return False
    beside = torch.ones_like(memory, dtype=torch.bool)
    beside[_places(layout, (memory.numel() - 2 * MARGIN) // 2)] = False
    return bool((memory[beside] != UNTOUCHED).any())


def named(tensor: torch.Tensor) -> str:
    many = f"{tensor.numel()} element{'s' if tensor.numel() != 1 else ''}"
    message = f"shape {list(tensor.shape)}" if tensor.dim() > 1 else many
    return message if tensor.dtype == torch.float32 else f"{message}, {short_name(tensor.dtype)}"


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
