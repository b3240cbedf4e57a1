"""Uses nothing from the labs: torch's own collectives, its own queue of reductions, and its own unit records."""

import copy
import enum
import weakref
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from shared.c10d import all_gather_single, reduce_scatter_single


class Where(enum.Enum):
    AWAY, COMING, HERE, BACKWARD = range(4)


class Token:
    """Stands for a call that backward may still reach. It is freed together with the call's graph."""

    seen = False


class Shelf:
    """The parameters of one dtype: `whole` is the flat parameter, with or without memory; `own` is the shard."""

    def __init__(self, parameters, group, dtype):
        self.parameters, self.group = parameters, group
        self.sizes, self.shapes = [p.numel() for p in parameters], [p.shape for p in parameters]
        self.size = -(-sum(self.sizes) // dist.get_world_size(group))
        values = self.fresh(parameters[0].dtype)
        for p, piece in zip(parameters, self.cut(values), strict=True):
            piece.copy_(p.detach())
        dist.broadcast(values, group=group, group_src=0)
        self.own = nn.Parameter(self.mine(values).clone(), requires_grad=parameters[0].requires_grad)
        self.whole = self.fresh(dtype or values.dtype)
        self.settle()
        self.whole.untyped_storage().resize_(0)
        self.gradients, self.pieces, self.sending, self.missing = None, None, None, set(parameters)

    def fresh(self, dtype):
        numel = self.size * dist.get_world_size(self.group)
        return torch.zeros(numel, dtype=dtype, device=self.parameters[0].device)

    def mine(self, flat):
        first = dist.get_rank(self.group) * self.size
        return flat[first : first + self.size]

    def cut(self, flat):
        pieces = flat.split([*self.sizes, flat.numel() - sum(self.sizes)])[: len(self.sizes)]
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def settle(self):
        for p, piece in zip(self.parameters, self.cut(self.whole), strict=True):
            p.data = piece

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        part = self.own.detach().to(self.whole.dtype)
        return all_gather_single(self.whole, part, group=self.group, async_op=True), part

    def take(self, p):
        if self.gradients is None:
            self.gradients = self.fresh(self.whole.dtype)
            self.pieces = dict(zip(self.parameters, self.cut(self.gradients), strict=True))
        if p.grad is not None:
            self.pieces[p].copy_(p.grad)
            p.grad = None
        self.missing.discard(p)

    def send(self, group):
        part = torch.empty(self.size, dtype=self.gradients.dtype, device=self.gradients.device)
        self.sending = reduce_scatter_single(part, self.gradients, group=group, async_op=True), part

    def receive(self):
        if self.sending is not None:
            work, part = self.sending
            work.wait()
            mean = part.to(self.own.dtype) / dist.get_world_size(self.group)
            self.own.grad = mean if self.own.grad is None else self.own.grad + mean
            self.sending = self.gradients = self.pieces = None

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.settle()


class ZeRO3(nn.Module):
    def __init__(self, module, units=None, compute_dtype=None, prefetch=1, reshard_after_forward=True, group=None):
        super().__init__()
        self.module, self.group, self.prefetch, self.stays = module, group, prefetch, not reshard_after_forward
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        units = self._default_units() if units is None else list(units)
        self.places = []
        for unit, parameters in self._owned(units).items():
            kinds = {}
            for p in parameters:
                kinds.setdefault((p.dtype, p.requires_grad), []).append(p)
            shelves = [Shelf(each, group, compute_dtype) for each in kinds.values()]
            place = SimpleNamespace(
                shelves=shelves, where=Where.AWAY, works=[], is_root=unit is module, near=set(unit.modules())
            )
            place.unit, place.calls = unit, weakref.WeakSet()
            self.places.append(place)
            unit.register_forward_pre_hook(lambda *_, place=place: place.owner._enter(place))
            unit.register_forward_hook(lambda _m, _i, output, place=place: place.owner._leave(place, output))
        self.parts = nn.ParameterList(shelf.own for place in self.places for shelf in place.shelves)
        root = self.places.pop()
        self.queue = [s for place in (*self.places[::-1], root) for s in place.shelves if s.own.requires_grad]
        self.places.append(root)
        self.last_order, self.order, self.sent = [], [], 0
        self._connect()

    def _connect(self):
        for place in self.places:
            place.owner = self
            for shelf in place.shelves:
                for p in shelf.parameters:
                    if p.requires_grad:
                        p.register_post_accumulate_grad_hook(
                            lambda p, place=place, shelf=shelf: self._came(place, shelf, p)
                        )

    def _default_units(self):
        found, inside = [], set()
        for each in self.module.modules():
            if isinstance(each, nn.ModuleList | nn.Sequential) and each not in inside:
                found += [layer for layer in each if list(layer.parameters())]
                inside.update(each.modules())
        return list(dict.fromkeys(found))

    def _owned(self, units):
        places = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            chain = [self.module.get_submodule(".".join(name.split(".")[:n])) for n in range(name.count(".") + 1)]
            nearest = next((each for each in chain[::-1] if each in units), self.module)
            places.setdefault(p, set()).add(nearest)
        owned = {each: [] for each in (*units, self.module)}
        for p, around in places.items():
            owned[around.pop() if len(around) == 1 else self.module].append(p)
        return owned

    # -- unsharding

    def _begin(self, place):
        if place.where is Where.AWAY:
            place.works = [shelf.gather() for shelf in place.shelves]
            place.where = Where.COMING

    def _here(self, place):
        self._begin(place)
        if place.where is Where.COMING:
            for work, _ in place.works:
                work.wait()
            place.works, place.where = [], Where.HERE

    def _away(self, place):
        if place.where is Where.AWAY:
            return
        for work, _ in place.works:
            work.wait()
        for shelf in place.shelves:
            shelf.whole.untyped_storage().resize_(0)
        place.works, place.where = [], Where.AWAY

    def _enter(self, place):
        if place.where is Where.BACKWARD:
            return
        self._here(place)
        if not place.is_root:
            self.order.append(place)
            done = len(self.order)
            if [id(p) for p in self.order] == [id(p) for p in self.last_order[:done]]:
                for following in self.last_order[done : done + self.prefetch]:
                    self._begin(following)

    def _leave(self, place, output):
        if place.where is Where.BACKWARD:
            return
        if torch.is_grad_enabled():
            token, touched = Token(), []

            def reached(_gradient):
                if not token.seen:
                    token.seen = True
                    place.owner._before(place, token)

            def watch(tensor):
                if tensor.requires_grad:
                    tensor.register_hook(reached)
                    touched.append(tensor)

            tree_map_only(torch.Tensor, watch, output)
            place.calls |= {token} if touched else set()
        if not torch.is_grad_enabled() or not (place.is_root or self.stays):
            self._away(place)

    def _before(self, place, token):
        for other in self.places:
            near = other.unit in place.near or place.unit in other.near
            if other.where is Where.BACKWARD and not near and not other.calls:
                self._complete(other)
        place.calls.discard(token)
        if place.where is not Where.BACKWARD:
            self._here(place)
            place.where = Where.BACKWARD
        backwards = self.order[::-1]
        if any(each is place for each in backwards):
            following = backwards[[id(p) for p in backwards].index(id(place)) + 1 :]
            for each in [p for p in following if p.calls][: self.prefetch]:
                self._begin(each)

    def _complete(self, place):
        for shelf in place.shelves:
            for p in list(shelf.missing if shelf.own.requires_grad else ()):
                shelf.take(p)
        self._send()
        self._away(place)

    # -- gradients

    def _came(self, place, shelf, p):
        if p not in shelf.missing:
            raise RuntimeError("call finish_gradient_sync() before the next backward()")
        shelf.take(p)
        self._send()
        if not any(s.missing or not s.own.requires_grad for s in place.shelves):
            self._away(place)

    def _send(self):
        while self.sent < len(self.queue) and not self.queue[self.sent].missing:
            if self.sent:
                self.queue[self.sent - 1].receive()
            self.queue[self.sent].send(self.group)
            self.sent += 1

    def finish_gradient_sync(self):
        for shelf in self.queue:
            for p in list(shelf.missing):
                shelf.take(p)
        self._send()
        for shelf in self.queue:
            shelf.receive()
            shelf.missing = set(shelf.parameters)
        self.sent = 0
        for place in self.places:
            self._away(place)
            place.calls.clear()

    def forward(self, *inputs, **kwargs):
        if any(len(shelf.missing) < len(shelf.parameters) for shelf in self.queue) or self.sent:
            self.finish_gradient_sync()
        for place in self.places:
            self._away(place)
        self.last_order, self.order = self.order, []
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():
            for place in self.places:
                self._away(place)
        return output

    # -- the public interface

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self.parts.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *_, **__):
        state = {f"part.{number}": part.detach() for number, part in enumerate(self.parts)}
        return state | {f"buffer.{name}": buffer for name, buffer in self.module.named_buffers()}

    @torch.no_grad()
    def load_state_dict(self, state):
        for name, value in self.state_dict().items():
            value.copy_(state[name])

    def __deepcopy__(self, memo):
        memo[id(self.group)] = self.group
        for shelf in self._shelves():
            for p in shelf.parameters:
                memo[id(p)] = nn.Parameter(torch.empty(0, dtype=p.dtype), requires_grad=p.requires_grad)
        mine = self.__class__.__new__(self.__class__)
        memo[id(self)] = mine
        mine.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for each in mine.places:  # deepcopy does not copy functions, so hooks are registered again
            each.unit._forward_pre_hooks.clear()
            each.unit._forward_hooks.clear()
            each.unit.register_forward_pre_hook(lambda *_, place=each: place.owner._enter(place))
            each.unit.register_forward_hook(lambda _m, _i, output, place=each: place.owner._leave(place, output))
        mine._connect()
        return mine

    def _shelves(self):
        return [shelf for place in self.places for shelf in place.shelves]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        device = next(iter(self.parts)).device
        square = torch.zeros((), dtype=torch.float64, device=device)
        for part in self.parts:
            if part.grad is not None:
                square += part.grad.double().square().sum()
        dist.all_reduce(square, group=self.group)
        for part in self.parts:
            if part.grad is not None:
                part.grad *= torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
        return square.sqrt()

    @torch.no_grad()
    def full_state_dict(self):
        whole = {}
        for shelf in self._shelves():
            flat = shelf.fresh(shelf.own.dtype)
            all_gather_single(flat, shelf.own.detach(), group=self.group)
            whole.update(zip(shelf.parameters, shelf.cut(flat), strict=True))
        return {n: whole.get(v, v).detach().clone() for n, v in self.module.state_dict(keep_vars=True).items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict):
        own = self.module.state_dict(keep_vars=True)
        if own.keys() != state_dict.keys() or any(own[n].shape != state_dict[n].shape for n in own):
            raise ValueError("this state was not saved from such a module")
        for place in self.places:
            self._away(place)
        names = {value: name for name, value in own.items()}
        for shelf in self._shelves():
            flat = shelf.fresh(shelf.own.dtype)
            for p, piece in zip(shelf.parameters, shelf.cut(flat), strict=True):
                piece.copy_(state_dict[names.pop(p)])
            shelf.own.copy_(shelf.mine(flat))
        for buffer, name in names.items():
            buffer.copy_(state_dict[name])

    def sharded_state_dict(self, optimizer):
        state = {f"module.{name}": buffer for name, buffer in self.module.named_buffers()}
        for number, shelf in enumerate(self._shelves()):
            mesh = DeviceMesh.from_group(self.group or dist.group.WORLD, shelf.own.device.type)
            for name, value in {"": shelf.own, **optimizer.state.get(shelf.own, {})}.items():
                if torch.is_tensor(value) and value.shape == shelf.own.shape:
                    numel = sum(shelf.sizes)
                    left = min(shelf.size, max(0, numel - dist.get_rank(self.group) * shelf.size))
                    value = DTensor.from_local(
                        value.detach()[:left], mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
                    )
                state[f"shelves/{number}/{name}"] = value
        return state
