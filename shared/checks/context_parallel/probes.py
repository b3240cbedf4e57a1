"""Run attention on shards of a sequence, and record and judge what each rank computes, sends and waits for."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.context_parallel import probes
from shared.checks.context_parallel.attention import judge_results, try_it
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import describe_calls
from shared.checks.engine.failures import Wrong
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.steps import Event, EventLog
from shared.checks.engine.subgroups import join_subgroup
from shared.wire import completion, instrumentation, sent_bytes_of

FORWARD, RING, ALL_TO_ALL = "ring_forward", "ring_attention", "all_to_all_attention"
COMPUTE = "compute"
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm")


@dataclass(frozen=True)
class Setting:
    """How attention is called. A rank has `tokens` tokens of every sequence."""

    piece: str
    tokens: int = 4
    batch: int = 2
    heads: int = 2
    width: int = 3
    causal: bool = True
    balanced: bool = True
    dtype: torch.dtype = torch.float64
    in_subgroup: bool = False
    watched: bool = False  # whether to record the order of launches, products and waits
    counts: bool = False  # whether to count multiplications

    @property
    def differentiates(self) -> bool:
        return self.piece != FORWARD

    @property
    def zigzag(self) -> bool:
        """Whether the shards are in zigzag order. The all-to-all takes contiguous ones."""
        return self.balanced and self.piece != ALL_TO_ALL

    def __str__(self) -> str:
        order = "" if self.piece == ALL_TO_ALL else f"{'balanced' if self.balanced else 'not balanced'}, "
        shape = [self.batch, self.heads, self.tokens, self.width]
        dtype = "" if self.dtype == torch.float64 else f", {str(self.dtype).removeprefix('torch.')}"
        return f"{order}{'causal' if self.causal else 'no mask'}, shards of {shape}{dtype}"


class Products(TorchDispatchMode):
    """Adds an event to the log for each product of matrices."""

    def __init__(self, log: EventLog):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").split(".")[0]
        if name in PRODUCTS or "dot_product" in name:
            self.log.events.append(Event(COMPUTE))
        return function(*args, **(kwargs or {}))


class Phase:
    """Records one direction: its calls, and on demand its events or its multiplications."""

    def __init__(self, setting: Setting):
        self.setting, self.log, self.counter = setting, EventLog(), FlopCounterMode(display=False)

    def run(self, compute):
        """Call a function, and record what it does."""
        with instrumentation.listening(self.log.launched) as self.calls:
            if self.setting.watched:
                with completion.watching(self.log), Products(self.log):
                    result = compute()
            elif self.setting.counts:
                with self.counter:
                    result = compute()
            else:
                result = compute()
            instrumentation.synchronize()
        return result

    def found(self) -> dict:
        flops = self.counter.get_total_flops() if self.setting.counts else 0
        return {"calls": self.calls, "events": self.log.events, "flops": flops}


def call(piece, setting: Setting, group, tensors: list[torch.Tensor]):
    """Call the student's function, with a group only if there is one."""
    if setting.piece == FORWARD:
        return piece(*tensors, group, setting.causal, setting.balanced)
    options = {} if group is None else {"group": group}
    options |= {} if setting.causal else {"causal": False}
    if setting.piece == RING and not setting.balanced:
        options["balanced"] = False
    return piece(*tensors, **options)


def attention(piece, setting: Setting, *shards: torch.Tensor) -> dict:
    """Run forward, and backward if the function is differentiable.

    Args:
        piece: The student's function.
        setting: How to call it.
        shards: This rank's queries, keys, values, and the gradient of its output.
    """
    group, member = join_subgroup(setting.in_subgroup)
    if not member:
        return {}
    *tensors, gradient = (each.to(device_here()) for each in shards)
    tensors = [each.requires_grad_(setting.differentiates) for each in tensors]
    before = [each.detach().clone() for each in tensors]
    forward, backward = Phase(setting), Phase(setting)
    result = forward.run(lambda: call(piece, setting, group, tensors))
    dist.barrier(group)
    found = {"forward": forward.found()}
    if setting.piece == FORWARD:
        if not isinstance(result, tuple) or len(result) != 2:
            raise AssertionError(f"ring_forward returned a {type(result).__name__}; expected a tuple of two tensors")
        found |= {"output": result[0].cpu(), "log_sum": result[1].cpu()}
    else:
        if not isinstance(result, torch.Tensor):
            raise AssertionError(f"{setting.piece} returned a {type(result).__name__}; expected a tensor")
        found["output"] = result.detach().cpu().clone()
        if not result.requires_grad:
            raise AssertionError("the output does not require a gradient, although q, k and v do")
        backward.run(lambda: result.backward(gradient))
        dist.barrier(group)
        found["backward"] = backward.found()
        found["gradients"] = [None if each.grad is None else each.grad.cpu() for each in tensors]
    found["kept"] = all(torch.equal(a, b.detach()) for a, b in zip(before, tensors, strict=True))
    return found


def kept(ring_attention, most_bytes: int, *shards: torch.Tensor) -> int:
    """Return how many bytes a forward leaves for backward, besides its arguments."""
    tensors = [each.to(device_here()).requires_grad_() for each in shards]
    arguments = {each.untyped_storage().data_ptr() for each in tensors}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    before_bytes = living_bytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = ring_attention(*tensors)
    held_bytes = settled_bytes(most_bytes, before_bytes)
    saved_bytes = sum(nbytes for pointer, nbytes in saved.items() if pointer not in arguments)
    output.sum().backward()
    return max(held_bytes, saved_bytes)


MOST_BLOCKS = 2.5  # an output, a more precise copy of it, and a few numbers per query
HINT_ON_LAUNCH = "Hint: when does the transfer start, and what does this rank compute before it waits?"
HINT_ON_WORK = "Hint: which pairs of chunks does the mask hide entirely, and are they computed anyway?"


def phases_of(setting: Setting) -> tuple[str, ...]:
    return ("forward", "backward") if setting.differentiates else ("forward",)


def neighbors_send_few_bytes(attempt: Attempt) -> None:
    """A ring: each rank sends to one rank only, and as many bytes as the formula says."""
    size = attempt.world_size
    for balanced in (True, False):
        setting = Setting(attempt.piece, tokens=2 * attempt.random.randint(2, 5), balanced=balanced)
        whole, found = try_it(attempt, setting)
        judge_results(setting, whole, found)
        block = 2 * whole.tensors[1].nbytes // size  # keys and values of one rank
        most = {"forward": (size - 1) * block, "backward": (2 * size - 1) * block if size > 1 else 0}
        for rank, each in found.items():
            for phase in phases_of(setting):
                _judge_ring(rank, each[phase]["calls"], most[phase], f"{setting}: {phase}")


def _judge_ring(rank: int, calls: list, most_bytes: int, context: str) -> None:
    if others := [call for call in calls if call.op not in ("send", "recv")]:
        message = f"{context} has {describe_calls(others)}; expected only transfers between neighbors"
        raise Wrong({rank: message}, "Hint: how many ranks' keys does a rank hold at a time in the ring?")
    for op, preposition in (("send", "to"), ("recv", "from")):
        partners = sorted({call.partner for call in calls if call.op == op})
        if len(partners) > 1:
            message = f"{context} has messages {preposition} ranks {partners}; expected one neighbor"
            raise Wrong({rank: message}, "Hint: which rank is this rank's neighbor on each side of the ring?")
    sent_bytes = sum(call.payload_bytes for call in calls if call.op == "send")
    if sent_bytes > most_bytes:
        message = f"{context} sends {sent_bytes:,} bytes; expected at most {most_bytes:,}"
        raise Wrong({rank: message}, "Hint: how many hops do keys and values need, and how many do gradients?")


def swaps_send_few_bytes(attempt: Attempt) -> None:
    """Each rank sends (N − 1)/N of its queries, keys, values and outputs."""
    size = attempt.world_size
    setting = Setting(ALL_TO_ALL, tokens=attempt.random.randint(3, 9), heads=2 * size)
    whole, found = try_it(attempt, setting)
    judge_results(setting, whole, found)
    own_bytes = whole.tensors[0].nbytes / size
    most_bytes = 4 * own_bytes * (size - 1) / size
    for rank, each in found.items():
        for phase in phases_of(setting):
            calls = each[phase]["calls"]
            sent_bytes = sum(sent_bytes_of(call, rank) for call in calls)
            if sent_bytes > most_bytes + 1:
                message = f"{setting}: {phase} sends {sent_bytes:,.0f} bytes; expected at most {most_bytes:,.0f}"
                raise Wrong(
                    {rank: message}, "Hint: which part of its tokens does each rank need from every other rank?"
                )


def transfers_overlap(attempt: Attempt) -> None:
    """Between the launch of a transfer and the wait for it, there is a product of matrices."""
    setting = Setting(attempt.piece, causal=False, watched=True)
    _whole, found = try_it(attempt, setting)
    for rank, each in found.items():
        for phase in phases_of(setting):
            if message := _exposed(each[phase]["events"], exempts_last=phase == "backward"):
                raise Wrong({rank: f"{setting}: {phase}: {message}"}, HINT_ON_LAUNCH)


def _exposed(events: list, exempts_last: bool) -> str:
    """Describe the first transfer during which nothing is computed, or return ""."""
    kinds = [event.kind for event in events]
    launches = [position for position, kind in enumerate(kinds) if kind in ("send", "recv")]
    if not launches:
        return "no transfer was launched with isend, irecv or batch_isend_irecv"
    last_product = max((position for position, kind in enumerate(kinds) if kind == COMPUTE), default=-1)
    for number, launched in enumerate(launches):
        waits = (
            position
            for position in range(launched + 1, len(events))
            if kinds[position] == "wait" and events[position].launched in (None, number)
        )
        waited = next(waits, len(events))
        if COMPUTE not in kinds[launched:waited] and not (exempts_last and launched > last_product):
            return f"transfer {number + 1} of {len(launches)} is waited for before anything else is computed"
    return ""


def hidden_pairs_are_skipped(attempt: Attempt) -> None:
    """With the mask, a rank computes only a part of what it computes without it."""
    size = attempt.world_size
    for balanced in (True, False):
        multiplications = {}
        for causal in (True, False):
            setting = Setting(attempt.piece, causal=causal, balanced=balanced, counts=True)
            _whole, found = try_it(attempt, setting)
            multiplications[causal] = [each[phase]["flops"] for each in found.values() for phase in phases_of(setting)]
        phases = len(phases_of(setting))
        for number, (masked, every) in enumerate(zip(multiplications[True], multiplications[False], strict=True)):
            index, phase = divmod(number, phases)
            share = (2 * size + 2) / (4 * size) if balanced else (index + 1) / size
            if masked > (share + 0.01) * every:
                context = f"{setting}: with the mask, {phases_of(setting)[phase]} computes {masked / every:.0%}"
                message = f"{context} of what it computes without; expected at most {share:.0%}"
                raise Wrong({list(found)[index]: message}, HINT_ON_WORK)


def only_own_blocks_are_kept(attempt: Attempt) -> None:
    """Between forward and backward, a rank keeps its output and two numbers per query, but no keys of other ranks."""
    generator = torch.Generator().manual_seed(attempt.draw_seed())
    own = [
        tuple(torch.randn(2, 2, 32, 16, generator=generator, dtype=torch.float64) for _ in range(3))
        for _ in range(attempt.world_size)
    ]
    block_bytes = own[0][0].nbytes
    most_bytes = int(MOST_BLOCKS * block_bytes)
    for rank, kept_bytes in enumerate(attempt.run(probes.kept, most_bytes, per_rank=own)):
        if kept_bytes > most_bytes:
            message = f"forward leaves {kept_bytes:,} bytes for backward, besides q, k and v; expected at most"
            message += f" {most_bytes:,}, for the output and the log-sum-exp"
            raise Wrong({rank: message}, "Hint: whose keys does backward need, and do they come around again?")
