"""Call a piece of chapter 01 on a rank: what it gave back, sent and waited for, and whose memory it used.

As soon as a call returns, what it was given is overwritten: whoever left too early is found out.
"""

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shared.checks.collectives.mixture import SPOILT, UNTOUCHED
from shared.checks.engine.candidate import device_here
from shared.checks.engine.steps import EventLog
from shared.deadlines import scaled
from shared.wire import completion, instrumentation

LATE_S = scaled(0.2)  # how late one rank comes where waiting is checked
TRANSPOSED, STRIDED = "transposed", "every other element of a larger one"
SLICED = "a piece from the middle of a larger one"
MARGIN = 3  # elements on each side of that piece


@dataclass(frozen=True)
class Setting:
    """How a piece is called."""

    members: tuple[int, ...] | None = None  # a group of these ranks; None: all of them, and no group is named
    layout: str = ""  # how the argument lies in memory: alone and contiguous, or TRANSPOSED, STRIDED or SLICED
    records: bool = False  # the argument requires a gradient
    late: int | None = None  # this rank comes LATE_S after the others
    takes_late: tuple[int, int] | None = None  # (rank, n): LATE_S pass before it launches its n-th receive
    src: int | None = None  # of a broadcast

    def ranks(self, world_size: int) -> tuple[int, ...]:
        return self.members or tuple(range(world_size))


def probe_step(step, setting: Setting, *mine: torch.Tensor) -> list[dict]:
    """Send each tensor to the right, into a place that holds something else."""
    options, takes_part = _join(setting)
    tries = []
    for values in mine:
        outgoing = values.to(device_here(), copy=True)
        incoming = torch.full_like(outgoing, UNTOUCHED)
        _come(setting)
        with _told_with(values), _slow(setting), _heard() as found:
            if takes_part:
                step(outgoing, incoming, **options)
        tries.append(found | {"tensor": incoming.cpu().clone(), "argument": outgoing.cpu().clone()})
        outgoing.fill_(SPOILT)
        dist.barrier()  # nobody leaves, and frees its tensors, while a message may still be under way
    return tries


def probe_collective(collective, setting: Setting, *mine: torch.Tensor) -> list[dict]:
    """Call collective with each tensor. As soon as a call returns, its argument and its result are overwritten.

    → per tensor: the result, the argument afterwards, the calls, and whether memory is shared that may not be
    """
    options, takes_part = _join(setting)
    tries, storages, results = [], {}, []
    for values in mine:
        memory, argument = _laid_out(values.to(device_here(), copy=True), setting.layout)
        holds = argument.detach()  # the memory that was given, whatever the name `argument` stands for later
        argument.requires_grad_(setting.records)
        version, result, refused = argument._version, None, None
        _come(setting)
        with _told_with(values), _slow(setting), _heard() as found:
            try:
                if takes_part:
                    result = collective(argument, **options)
            except ValueError as error:
                if argument.is_contiguous():
                    raise
                refused = str(error)
        found |= {"kind": type(result).__name__, "tensor": None, "refused": refused, "records": False}
        if argument.shape != holds.shape:  # resized in place
            holds = argument.detach()
        found |= {"argument": holds.cpu().clone(), "written": argument._version != version}
        found["torn"] = _torn(memory, setting.layout)
        if isinstance(result, torch.Tensor):
            found["tensor"] = result.detach().cpu().clone()
            found["records"] = result.requires_grad or result.is_inference()
            storage = result.untyped_storage()
            found["shares with"] = storages.get(storage.data_ptr()) if result.numel() else None
            if result.numel() and storage.data_ptr() == memory.untyped_storage().data_ptr():
                found["shares with"] = "argument"
            storages[storage.data_ptr()] = "last result"
            found["holds_bytes"] = storage.nbytes()
            with torch.inference_mode(result.is_inference()):
                results.append(result.detach().fill_(SPOILT))
        holds.fill_(SPOILT)
        tries.append(found)
        dist.barrier()
    for found in tries:
        found["changed_later"] = any(bool((result != SPOILT).any()) for result in results)
    return tries


@contextlib.contextmanager
def _heard():
    """Listen to one call. → what it launched and waited for, how long it took, and whether it switched autograd off"""
    found, log = {}, EventLog()
    began_s = time.perf_counter()
    try:
        with completion.watching(log), instrumentation.listening(log.launched) as calls:
            yield found
    finally:
        found |= {"calls": calls, "events": log.events, "took_s": time.perf_counter() - began_s}
        found["switched_off"] = not torch.is_grad_enabled()
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def _slow(setting: Setting):
    """Let one rank take one of its messages late, so that whoever sent it without waiting has long gone on."""
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
        yield
    finally:
        for hook in hooks:
            instrumentation.before_launch.remove(hook)


@contextlib.contextmanager
def _told_with(values: torch.Tensor):
    """Let an error say with which of several tensors it came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(It was called with {named(values)}.)")
        raise


def _join(setting: Setting) -> tuple[dict, bool]:
    """→ the keywords of the call, and whether this rank makes it"""
    options = {} if setting.src is None else {"src": setting.src}
    if setting.members is None:
        return options, True
    group = dist.new_group(list(setting.members))
    return options | {"group": group}, dist.get_rank() in setting.members


def _come(setting: Setting) -> None:
    """All come at the same time, or one of them late."""
    dist.barrier()
    if dist.get_rank() == setting.late:
        time.sleep(LATE_S)


def _laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """→ memory, and a view of it that holds values"""
    if layout == TRANSPOSED:
        memory = values.t().contiguous()
        return memory, memory.t()
    if layout in (STRIDED, SLICED):
        memory = torch.full((2 * values.numel() + 2 * MARGIN,), UNTOUCHED, dtype=values.dtype, device=values.device)
        view = memory[_places(layout, values.numel())]
        view.copy_(values)
        return memory, view
    return values, values[...]  # in place: whoever else looks at this memory sees it too


def _places(layout: str, elements: int) -> slice:
    return slice(0, 2 * elements, 2) if layout == STRIDED else slice(MARGIN, MARGIN + elements)


def _torn(memory: torch.Tensor, layout: str) -> bool:
    """Was anything written beside the argument?"""
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
