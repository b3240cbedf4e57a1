# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""ZeRO stage 1: each rank holds all parameters and gradients, and one N-th of the optimizer's state."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import all_gather_single, reduce_scatter_single

PIECE = 2**20  # elements that travel at a time: where sums are made, what arrives needs room


class Messages:
    """Messages under way; sends and receives are pairs of a tensor and the other rank of the group."""

    def __init__(self, sends: list[tuple], receives: list[tuple], group: dist.ProcessGroup | None):
        receives = [dist.P2POp(dist.irecv, each, group=group, group_peer=peer) for each, peer in receives]
        sends = [dist.P2POp(dist.isend, each, group=group, group_peer=peer) for each, peer in sends]
        self.handles = dist.batch_isend_irecv(receives + sends) if sends else []

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


def goes_by_hand(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "gloo" and not tensor.is_cuda


def begin_all_gather(flat: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None = None):
    """Begin to fill flat with every rank's own part, in rank order. → a handle with wait()

    Shapes: flat: [N · n], own: [n], which may be this rank's part of flat.
    Comm: an all_gather, by hand on gloo; (N−1)/N of flat's bytes sent per rank.
    """
    if not goes_by_hand(flat, group):
        return all_gather_single(flat, own, group=group, async_op=True)
    rank, parts = dist.get_rank(group), list(flat.view(dist.get_world_size(group), -1))
    if parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own)
    others = [peer for peer in range(len(parts)) if peer != rank]
    return Messages([(parts[rank], peer) for peer in others], [(parts[peer], peer) for peer in others], group)


def add_up(messages: Messages, arrived: torch.Tensor, mine: torch.Tensor) -> None:
    messages.wait()
    for part in arrived:
        mine += part


def reduce_scatter_(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Replace this rank's N-th of flat, in place, by its sum over the group's N ranks. → that N-th, a view

    Shapes: flat: [N · n] → [n]
    Comm: a reduce_scatter, by hand on gloo; (N−1)/N of flat's bytes sent per rank.
    """
    rank, parts = dist.get_rank(group), list(flat.view(dist.get_world_size(group), -1))
    if not goes_by_hand(flat, group):
        reduce_scatter_single(parts[rank], flat, group=group)
        return parts[rank]
    others, under_way = [peer for peer in range(len(parts)) if peer != rank], []
    for pieces in zip(*(part.split(PIECE // len(parts)) for part in parts), strict=True):
        arrived = pieces[rank].new_empty(len(others), pieces[rank].numel())
        sends = [(pieces[peer], peer) for peer in others]
        receives = list(zip(arrived, others, strict=True))
        under_way.append((Messages(sends, receives, group), arrived, pieces[rank]))
        if len(under_way) == 2:  # one piece travels while the one before is added up
            add_up(*under_way.pop(0))
    for each in under_way:
        add_up(*each)
    return parts[rank]


class Layout:
    """Where each parameter lies in a flat tensor, and which part of that is this rank's: rank r owns the r-th N-th.

    Shapes: flat [N · n], filled up with zeros at the end.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group

    def new_flat(self) -> torch.Tensor:
        """Allocate zeros for all parameters, up to a multiple of the group's size."""
        numel, world_size = sum(p.numel() for p in self.parameters), dist.get_world_size(self.group)
        return self.parameters[0].new_zeros(-(-numel // world_size) * world_size)

    def slices_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View each parameter's part of flat in the parameter's shape."""
        sizes = [each.numel() for each in self.parameters]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(each.shape) for piece, each in zip(pieces, self.parameters, strict=True)]

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's part of flat."""
        return flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]


class FlatParameters(Layout):
    """Parameters of one dtype and device, side by side in one flat tensor of which rank r owns the r-th N-th.

    Shapes: flat [N · n], filled up with zeros at the end; shard [n], an nn.Parameter and a view of flat.
    Comm: gather() is one all_gather to flat.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        super().__init__(parameters, group)
        self.flat = self.new_flat()
        for parameter, piece in zip(parameters, self.slices_of(self.flat), strict=True):
            piece.copy_(parameter.detach())
        self.shard = nn.Parameter(self.own(self.flat))
        self._move_in()

    def _move_in(self) -> None:
        for parameter, piece in zip(self.parameters, self.slices_of(self.flat), strict=True):
            parameter.data = piece

    def __setstate__(self, state: dict) -> None:
        # deepcopy comes here, with a copy of each tensor: they must share memory again
        self.__dict__.update(state)
        self.shard.data = self.own(self.flat)
        self._move_in()

    def gather(self):
        """Begin to collect all shards into flat. → the handle to wait on"""
        return begin_all_gather(self.flat, self.shard.detach(), self.group)


class FlatGradients:
    """The gradients of FlatParameters, side by side in the same layout: each .grad is a slice of one flat tensor.

    Comm: reduce() is one reduce_scatter.
    """

    def __init__(self, home: FlatParameters):
        self.home, self.flat = home, home.new_flat()
        self.slices = home.slices_of(self.flat)
        self.reset()

    def reset(self) -> None:
        """Begin anew, with zeros."""
        self.flat.zero_()
        self.home.shard.grad = None
        for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
            parameter.grad = piece

    def reduce(self) -> None:
        """Make the shard's gradient the mean over the ranks, once between two resets."""
        if self.home.shard.grad is not None and self.still_there():
            return
        for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
            if parameter.grad is None:
                piece.zero_()
            elif parameter.grad is not piece:
                piece.copy_(parameter.grad)
            parameter.grad = piece
        own = reduce_scatter_(self.flat, self.home.group)
        self.home.shard.grad = own.div_(dist.get_world_size(self.home.group))

    def still_there(self) -> bool:
        """Has nobody taken the gradients of the last reset() away?"""
        pairs = zip(self.home.parameters, self.slices, strict=True)
        return any(parameter.grad is piece for parameter, piece in pairs)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.slices = self.home.slices_of(self.flat)  # deepcopy, again: cut anew


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sort trainable parameters into lists of one dtype and device each."""
    kinds = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(kinds.values())


class ShardedGroups(torch.optim.Optimizer):
    """Param groups, and beside each one the inner optimizer's group of this rank's shards."""

    def __init__(self, params, optimizer_cls: type, group: dist.ProcessGroup | None = None, **defaults):
        self.group, self.gradients, self.used_up = group, [], False
        # On a group of nothing, for its defaults: the real groups come one by one.
        self.inner = optimizer_cls([{"params": [nn.Parameter(torch.empty(0))]}], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Begin to train more parameters. Comm: one broadcast per flat tensor and per frozen parameter."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        added = self._lay_out(group["params"])
        self.gradients += added
        self.inner.add_param_group({**group, "params": [each.home.shard for each in added]})

    def _lay_out(self, parameters: list[nn.Parameter]) -> list[FlatGradients]:
        homes = [FlatParameters(each, self.group) for each in alike(parameters)]
        frozen = [each.detach() for each in parameters if not each.requires_grad]
        for tensor in (*(home.flat for home in homes), *frozen):
            dist.broadcast(tensor, group=self.group, group_src=0)
        return [FlatGradients(home) for home in homes]

    def __getstate__(self) -> dict:
        return self.__dict__  # for deepcopy: torch's own leaves out what it does not know


class ShardedOptimizer(ShardedGroups):
    """Run optimizer_cls on one N-th of the parameters, and hand the updated ones around."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill gradients with zeros; they keep their memory either way, which the messages need."""
        self.used_up = False
        for each in self.gradients:
            each.reset()

    @torch.no_grad()
    def step(self, closure=None):
        """Average gradients, update this rank's part, collect the others'. → what closure() gives back"""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.reduce_gradients()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        for handle in [each.home.gather() for each in self.gradients]:
            handle.wait()
        for each in self.gradients:
            each.home.shard.grad = None
        self.used_up = True
        return loss

    def reduce_gradients(self) -> None:
        """Let this rank have the mean gradient of its own part. Comm: one reduce_scatter per flat tensor."""
        if self.used_up and any(each.still_there() for each in self.gradients):
            raise RuntimeError("these gradients are used up: call this optimizer's zero_grad() before backward()")
        self.used_up = False
        for each in self.gradients:
            each.reduce()


class ClipsGradients(ShardedOptimizer):
    """A sharded optimizer that can bound the norm of its gradients."""

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most max_norm. → the norm before

        Comm: one reduce_scatter per flat tensor, which step() need not do again; one all_reduce of one number.
        """
        self.reduce_gradients()
        return clip_norm_([each.home.shard.grad for each in self.gradients], max_norm, self.group)


def clip_norm_(parts: list[torch.Tensor], max_norm: float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Scale this rank's parts of a gradient so that the norm of the whole is at most max_norm. → the norm before

    Comm: one all_reduce of one number.
    """
    if not parts:
        return torch.zeros(())  # on all ranks: everything is frozen
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for part in parts:
        part *= (max_norm / (norm + 1e-6)).clamp(max=1)
    return norm


def collect(part: torch.Tensor, group: dist.ProcessGroup | None, to: int | None) -> torch.Tensor | None:
    """Put the parts of all ranks one after the other, on rank `to` of the group or, for None, on all."""
    if to not in (None, dist.get_rank(group)):
        dist.gather(part, group=group, group_dst=to)
        return None
    whole = part.new_empty(dist.get_world_size(group) * part.numel())
    if to is None:
        all_gather_single(whole, part, group=group)
    else:
        dist.gather(part, list(whole.chunk(dist.get_world_size(group))), group=group, group_dst=to)
    return whole


class SavesState(ClipsGradients):
    """A sharded optimizer that saves the state that optimizer_cls alone would have."""

    def state_dict(self, to: int | None = None) -> dict | None:
        """Collect the state that optimizer_cls alone would have. To be called by all ranks.

        to: the one rank of the group that gets it, while others get None; by default all do.
        Comm: one all_gather, or gather, per tensor of sharded state.
        """
        collected = super().state_dict()
        number_of = self._numbers(collected["param_groups"])
        for home in (each.home for each in self.gradients):
            for name, value in self.inner.state.get(home.shard, {}).items():
                for parameter, one in zip(*self._per_parameter(home, value, to), strict=True):
                    collected["state"].setdefault(number_of[parameter], {})[name] = one
        return collected if to in (None, dist.get_rank(self.group)) else None

    def _per_parameter(self, home: FlatParameters, value, to: int | None) -> tuple[list, list]:
        if not torch.is_tensor(value):
            return home.parameters, [value] * len(home.parameters)
        if value.shape != home.shard.shape:
            return home.parameters, [value.clone() for _ in home.parameters]
        whole = collect(value, self.group, to)
        return ([], []) if whole is None else (home.parameters, home.slices_of(whole))

    def _numbers(self, packed_groups: list[dict]) -> dict[nn.Parameter, int]:
        pairs = zip(self.param_groups, packed_groups, strict=True)
        return {p: n for group, packed in pairs for p, n in zip(group["params"], packed["params"], strict=True)}


def part_of(home: FlatParameters, name: str, states: list[dict]):
    """Take this rank's part of one entry of the parameters' states; what is not per number, from any of them.

    states: one for each parameter of home, in order; some may lack the entry.
    """
    values = [state.get(name) for state in states]
    pairs = zip(values, home.parameters, strict=True)
    known = [(value, parameter) for value, parameter in pairs if value is not None]
    if not known:
        return None  # as some versions of SGD save a momentum that they do not use
    first = known[0][0]
    misfits = [(v, p) for v, p in known if getattr(v, "shape", None) != p.shape]
    # A parameter may be a single number, of the same shape as its step: that is told by its name.
    if name == "step" or (misfits and not any(getattr(v, "ndim", 0) for v, _ in known)):
        return first.clone() if torch.is_tensor(first) else first
    if misfits:
        value, parameter = misfits[0]
        shapes = f"{list(getattr(value, 'shape', []))}, the parameter {list(parameter.shape)}"
        raise ValueError(f"this state belongs to other parameters: {name} has the shape {shapes}")
    flat = home.new_flat().to(first.dtype)
    for piece, value, parameter in zip(home.slices_of(flat), values, home.parameters, strict=True):
        if value is not None:
            piece.copy_(value)
        elif name == "master":  # never stepped: chapter 06's master is the parameter, all else begins with zeros
            piece.copy_(parameter.detach())
    return home.own(flat).clone()


class ZeRO1(SavesState):
    """ZeRO stage 1: an optimizer_cls whose state is shared out over the ranks of the group.

    Takes gradients as each rank's own backward() leaves them, averages them, and hands updated parameters around.
    For optimizers that treat each number by itself (SGD, Adam, AdamW, …). A gradient that is None counts as zeros.

    Memory: with Adam in fp32, 4Ψ + 4Ψ + 8Ψ/N bytes for Ψ parameters on N ranks.
    Comm: per step, one reduce_scatter and one all_gather per param group, dtype and device: 2(N−1)/N · 4Ψ bytes.
    Raises: RuntimeError in step(), when zero_grad() was not called since the last one.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.1 and §7.
    """

    def load_state_dict(self, state_dict: dict) -> None:
        """Take this rank's part of a whole state, which any number of ranks may have collected.

        Raises: ValueError for a state that belongs to other parameters.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        number_of = self._numbers(state_dict["param_groups"])
        for home in (each.home for each in self.gradients):
            states = [state_dict["state"].get(number_of[each], {}) for each in home.parameters]
            names = dict.fromkeys(name for state in states for name in state)
            self.inner.state[home.shard] = {name: part_of(home, name, states) for name in names}
