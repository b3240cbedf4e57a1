"""Run attention on shards of a sequence on one rank, and record what it computes, sends and waits for."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shared.checks.engine.candidate import device_here
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.steps import Event, EventLog
from shared.checks.engine.subgroups import join_subgroup
from shared.wire import completion, instrumentation

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


@dataclass
class Recorded:
    calls: list[instrumentation.Call]
    events: list[Event]
    flops: int


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

    def found(self) -> Recorded:
        flops = self.counter.get_total_flops() if self.setting.counts else 0
        return Recorded(self.calls, self.log.events, flops)


def call(piece, setting: Setting, group, tensors: list[torch.Tensor]):
    """Call the student's function, with a group only if there is one."""
    if setting.piece == FORWARD:
        return piece(*tensors, group, setting.causal, setting.balanced)
    options = {} if group is None else {"group": group}
    options |= {} if setting.causal else {"causal": False}
    if setting.piece == RING and not setting.balanced:
        options["balanced"] = False
    return piece(*tensors, **options)


@dataclass
class Attended:
    """What a rank computes. ring_forward has a log-sum-exp, and the others have gradients of q, k and v."""

    phases: dict[str, Recorded]  # "forward" and, if there are gradients, "backward"
    output: torch.Tensor
    log_sum: torch.Tensor | None
    gradients: list[torch.Tensor | None]
    kept: bool  # whether q, k and v are unchanged


def attention(piece, setting: Setting, *shards: torch.Tensor) -> Attended | None:
    """Run forward, and backward if the function is differentiable. Return None on a rank outside of the group.

    Args:
        piece: The student's function.
        setting: How to call it.
        shards: This rank's queries, keys, values, and the gradient of its output.
    """
    group, member = join_subgroup(setting.in_subgroup)
    if not member:
        return None
    *tensors, gradient = (each.to(device_here()) for each in shards)
    tensors = [each.requires_grad_(setting.differentiates) for each in tensors]
    before = [each.detach().clone() for each in tensors]
    forward, backward = Phase(setting), Phase(setting)
    result = forward.run(lambda: call(piece, setting, group, tensors))
    dist.barrier(group)
    phases, log_sum, gradients = {"forward": forward.found()}, None, []
    if setting.piece == FORWARD:
        if not isinstance(result, tuple) or len(result) != 2:
            raise AssertionError(f"ring_forward returned a {type(result).__name__}; expected a tuple of two tensors")
        output, log_sum = result[0].cpu(), result[1].cpu()
    else:
        if not isinstance(result, torch.Tensor):
            raise AssertionError(f"{setting.piece} returned a {type(result).__name__}; expected a tensor")
        output = result.detach().cpu().clone()
        if not result.requires_grad:
            raise AssertionError("the output does not require a gradient, although q, k and v do")
        backward.run(lambda: result.backward(gradient))
        dist.barrier(group)
        phases["backward"] = backward.found()
        gradients = [None if each.grad is None else each.grad.cpu() for each in tensors]
    unchanged = all(torch.equal(a, b.detach()) for a, b in zip(before, tensors, strict=True))
    return Attended(phases, output, log_sum, gradients, unchanged)


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
